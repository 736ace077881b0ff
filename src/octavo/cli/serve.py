"""`octavo serve`: the OpenAI-compatible server.

Stateless. Not here: the server (server/run.py), its settings (server_config.py).
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Annotated

import typer

from octavo.cli.loading_bar import LoadingBar
from octavo.cli.options import chosen_model, server_options
from octavo.config import EngineConfig
from octavo.server_config import ServerConfig

EXAMPLES = """\b
Examples:
  octavo serve
  octavo serve smollm2 --port 9000
  OCTAVO_API_KEY=secret octavo serve --host 0.0.0.0
  octavo serve --config octavo.yaml
"""


@server_options
def command(
    config: EngineConfig,
    server: ServerConfig,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", show_default=False, help="what to serve [smollm2]")] = None,
) -> int:
    """Serve a model over HTTP, to programs that talk to OpenAI's API and, at /, to people.

    Until Ctrl-C or SIGTERM; then running requests may finish.
    """
    from octavo.server.run import Console, serve  # takes a moment, which `octavo --help` need not

    _log_requests()
    with LoadingBar() as bar:
        serve(chosen_model(config, model), server, Console(say, bar.report, bar.close))
    return 0


def say(text: str) -> None:
    with suppress(OSError):  # a full disk, a reader that is gone: clients that wait for an answer have no part in that
        print(text, file=sys.stderr, flush=True)


def _log_requests() -> None:
    """One line a request, with the time."""
    logger = logging.getLogger("octavo")
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    server = logging.getLogger("octavo.server")
    server.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
