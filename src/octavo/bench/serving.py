"""One measurement of a server: warm it up, load it, and ask a server of ours what happened inside.

Owner of the connections while it runs. Not here: starting a server (own_server.py), what is printed (cli/bench.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import uvloop

from octavo.bench import report, server_metrics
from octavo.bench.client import Client, Endpoint, Prompt, RequestRecord, RequestSettings
from octavo.bench.load import Done, Load, run_load, warm_up
from octavo.bench.prompts import QUESTIONS, WARM_UP

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is to be measured."""

    load: Load = field(default_factory=Load)
    prompts: Sequence[Prompt] = QUESTIONS
    #: None: the model the server lists first.
    model: str | None = None
    endpoint: Endpoint = "chat"
    max_tokens: int = 128
    temperature: float = 0.0
    #: None: only where the server is ours, which is known to understand it.
    ignore_eos: bool | None = None
    timeout: float = 600.0
    warm_up: int = 2


@dataclass(slots=True)
class Measured:
    #: report.figures, with "server" for a server of ours, and what was asked under "asked".
    figures: dict[str, Any]
    records: list[RequestRecord]

    @property
    def batches(self) -> Mapping[str, int] | None:
        found: Mapping[str, int] | None = (self.figures["server"] or {}).get("batch_size_steps")
        return found


def api_key(url: str, environment: Mapping[str, str] | None = None) -> str | None:
    """The key to send: the first in OCTAVO_API_KEY, else OPENAI_API_KEY. That one may be for another service: it does not go
    in the clear to another machine."""
    variables = os.environ if environment is None else environment
    if own := variables.get("OCTAVO_API_KEY", "").split(",")[0].strip():
        return own
    parts = urlsplit(url)
    is_private = parts.scheme == "https" or parts.hostname in _LOOPBACK
    return variables.get("OPENAI_API_KEY", "").strip() or None if is_private else None


def measure(url: str, what: Measurement, done: Done | None = None, begin: Callable[[], object] | None = None) -> Measured:
    """Run one load on the server at `url`; `begin` is called after the warm-up, `done` after each request."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # half of asyncio's own time for a piece
        return runner.run(measure_async(url, what, done, begin))


async def measure_async(url: str, what: Measurement, done: Done | None = None, begin: Callable[[], object] | None = None) -> Measured:
    async with Client(url, api_key(url)) as client:
        model = what.model or await client.first_model()
        before = await server_metrics.scrape(client)
        ignore_eos = before is not None if what.ignore_eos is None else what.ignore_eos
        settings = RequestSettings(model, what.endpoint, what.max_tokens, what.temperature, ignore_eos, what.timeout)
        await warm_up(client, WARM_UP, replace(settings, max_tokens=min(16, what.max_tokens)), what.warm_up)
        before = await server_metrics.scrape(client)
        if begin is not None:
            begin()
        result = await run_load(client, what.prompts, settings, what.load, done)
        server = await _server(client, before)
    return Measured(report.figures(result) | {"server": server, "asked": _asked(settings, what)}, result.records)


async def _server(client: Client, before: server_metrics.Samples | None) -> dict[str, Any] | None:
    """What a server of ours did since `before`; None for another's."""
    if before is None:
        return None
    # the engine's counters reach the HTTP process with its messages: let the last one come
    await asyncio.sleep(0.2)
    after = await server_metrics.scrape(client)
    changes = server_metrics.between(before, after) if after is not None else {}
    return {"version": await server_metrics.version(client), **changes}


def _asked(settings: RequestSettings, what: Measurement) -> dict[str, Any]:
    return {
        "model": settings.model,
        "endpoint": settings.endpoint,
        "prompts": len(what.prompts),
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
        "concurrency": what.load.concurrency,
        "rate": what.load.rate,
        "seed": what.load.seed,
        "warm_up": what.warm_up,
    }
