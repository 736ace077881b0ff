"""ServerState: what the endpoints of one server share.

Owner of whether the server still takes requests. Everything else in it owns itself.
Not here: starting and stopping its parts (run.py).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from octavo.engine.async_engine import AsyncEngine
from octavo.server.auth import Keys
from octavo.server.errors import ApiError
from octavo.server.input_pool import MAX_WAITING_BYTES, InputPool
from octavo.server.limits import Budget
from octavo.server.metrics import EngineView, ServerMetrics
from octavo.server.request_record import RequestRecord
from octavo.server_config import ServerConfig

_log = logging.getLogger("octavo.server")

#: Seconds after which it makes sense to ask again.
RETRY_LOADING = 5
RETRY_RESTARTING = 2


@dataclass(slots=True)
class ServerState:
    config: ServerConfig
    #: Names of the model in the API, the first is the one reported.
    model_names: tuple[str, ...]
    keys: Keys
    engine: AsyncEngine
    inputs: InputPool
    metrics: ServerMetrics = field(init=False)
    #: Of bodies that are being read; those that wait for an input process have a bound of their own.
    bodies: Budget = field(init=False)
    #: Unix time.
    created: int = field(default_factory=lambda: int(time.time()))
    #: The input processes have read the tokenizer: before that requests are taken, but wait.
    inputs_loaded: bool = False
    #: SIGTERM has come: what runs may finish, nothing new begins.
    draining: bool = False

    def __post_init__(self) -> None:
        engine = self.engine
        self.bodies = Budget(max(MAX_WAITING_BYTES, 4 * int(self.config.max_body)))
        self.metrics = ServerMetrics(self.model_names[0], EngineView(engine.stats, lambda: engine.restarts, engine.is_healthy))

    @property
    def status(self) -> str:
        """One word: loading, ready, restarting, draining or closed."""
        if self.draining:
            return "draining"
        return "loading" if self.engine.state == "ready" and not self.inputs_loaded else self.engine.state

    @property
    def is_ready(self) -> bool:
        return self.status == "ready"

    @property
    def retry_after(self) -> int:
        """Seconds after which the engine may be there again."""
        return RETRY_LOADING if self.engine.state == "loading" else RETRY_RESTARTING

    def check_accepting(self) -> None:
        """Raise the 503 that says why no request can begin now."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=self.retry_after, close=True)
        state = self.engine.state
        if state != "ready":
            reason = {"loading": "the model is loading", "restarting": "the engine is restarting"}.get(state, "the engine is closed")
            raise ApiError(503, f"{reason}, try again soon", code=f"engine_{state}", retry_after=self.retry_after)

    def finished(self, record: RequestRecord) -> None:
        """Count and log a request that has ended, in whatever way."""
        self.metrics.add(record)
        _log.info("%s", record.line())
