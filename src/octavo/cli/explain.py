"""`octavo explain`: where the time of one recorded request went, in numbers that add up, and what would have helped.

Stateless. Not here: recording (trace.py), the arithmetic (trace/explain.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import terminal
from octavo.cli.bench_options import Json

EXAMPLES = """\b
Examples:
  octavo trace run "Name three rivers." "What is rain?" --output run.octrace.json
  octavo explain run.octrace.json
  octavo explain run.octrace.json request-1 --json
"""


def command(
    file: Annotated[str, typer.Argument(metavar="FILE.octrace.json", help="what octavo trace wrote with --output")],
    request: Annotated[str | None, typer.Argument(metavar="REQUEST", help="its id; default: the last one that was admitted")] = None,
    as_json: Json = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> int:
    """Say where the time of one request went, and what would have helped.

    The parts add up to all of the time from its arrival to its last token. Estimates of what would have helped come from the
    record itself: docs/trace.md says how.
    """
    from octavo.trace import explain, read, report

    explanation = explain(read(Path(file)), request)
    if as_json:
        terminal.write(terminal.as_json(report.as_object(explanation)))
    else:
        terminal.write("\n".join(report.lines(explanation)) + "\n")
    return 0
