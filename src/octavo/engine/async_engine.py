"""AsyncEngine: many asyncio tasks share one engine core, which runs in a thread or a process of its own.

Owners: the core owns the requests; this side owns the streams that read them, and knows the core only through a
CoreLink: commands go out, reports come in. All deltas of a step arrive in one callback, and a reader that is slow finds
everything that has come since in one batch.
Not here: the links (thread_core.py, process_core.py), making requests of prompts (input_processor.py), HTTP (server/).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import msgspec

from octavo.engine.core_link import CoreLink
from octavo.engine.core_messages import (
    Abort,
    AddRequests,
    Events,
    Failed,
    GetEvents,
    Loading,
    Ready,
    Rejected,
    Report,
    ResetPrefixCache,
    StepOutput,
    encode_request,
)
from octavo.engine.events import StepEvent
from octavo.engine.mailbox import Mailbox, Route
from octavo.engine.metrics import EngineStats
from octavo.engine.request import EngineRequest
from octavo.engine.scheduler_output import ExecutorInfo
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError, OctavoError
from octavo.outputs import CompletionDelta

State = Literal["loading", "ready", "restarting", "closed"]

_LOADING = "the engine is still loading its model: try again in a moment"
_RESTARTING = "the engine has failed and is being restarted: try again in a moment"
_CLOSED = "the engine was closed"
_ERRORS: dict[str, type[OctavoError]] = {"model": ModelLoadError, "config": ConfigError, "engine": EngineDeadError}


class Submission(NamedTuple):
    """One prompt for `AsyncEngine.stream`."""

    request_id: str
    #: Choices it was made for (sampling_params.n of `request`): so many deltas with a finish_reason will come.
    n: int
    #: An EngineRequest of the same id, or one as `core_messages.encode_request` made it, which is passed on unread.
    request: EngineRequest | bytes | msgspec.Raw


class AsyncEngine:
    """The client of one core. All methods belong to one event loop, that of the first call; use it as `async with`, or
    call `close`. The core starts with the first of `async with`, `wait_ready` and `stream`."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state: State = "loading"
        self._failure: str | None = None
        self._final: OctavoError | None = None
        #: Set while there is nothing to wait for: the core is ready, or never will be.
        self._settled = asyncio.Event()
        self._stats = EngineStats()
        self._info: ExecutorInfo | None = None
        self._backend: Mapping[str, Any] = {}
        self._loading: Loading | None = None
        #: Who gets the deltas of an id: the first route, until its last choice has ended. A second one is behind it only
        #: while the core has not confirmed the end of a request that was given up and whose id is used again.
        self._routes: dict[str, deque[Route]] = {}
        self._event_readers: deque[asyncio.Future[list[StepEvent]]] = deque()
        #: How often a core was lost and another one started.
        self.restarts = 0

    # The engine as a whole

    @property
    def state(self) -> State:
        """ "closed" also when it failed for good; `failure` says why."""
        return self._state

    @property
    def failure(self) -> str | None:
        """Why it cannot run now, for the operator (clients get less); None while it can."""
        return self._failure

    @property
    def info(self) -> ExecutorInfo | None:
        """Of the model and the pool; None before the first core is ready."""
        return self._info

    @property
    def backend(self) -> Mapping[str, Any]:
        """Who computes, for people; empty before the first core is ready."""
        return self._backend

    @property
    def loading(self) -> Loading | None:
        """How far loading is, or None."""
        return self._loading

    def stats(self) -> EngineStats:
        """The counters and gauges last reported, a copy. A core that was restarted counts from zero."""
        return self._stats.copy()

    def is_healthy(self) -> bool:
        """Ready, and making progress if there is work."""
        return self._state == "ready" and not self._link.is_stalled()

    async def wait_ready(self) -> None:
        """Until requests can run. Raises ModelLoadError, ConfigError or EngineDeadError if they never will."""
        self._start()
        while self._state != "ready":
            if self._final is not None:
                raise type(self._final)(str(self._final))  # a new one: whoever raises it adds to its traceback
            await self._settled.wait()

    async def events(self, count: int | None = None, after: int | None = None) -> list[StepEvent]:
        """What the last `count` steps did, oldest first; with `after`, the first `count` steps later than that one.
        Raises EngineDeadError when there is no core to ask."""
        if self._loop is None:
            return []
        self._check_ready()
        reader: asyncio.Future[list[StepEvent]] = self._loop.create_future()
        self._event_readers.append(reader)
        self._link.send(GetEvents(count, after), self.restarts)
        return await reader

    async def reset_prefix_cache(self) -> None:
        """Soon, between two steps: no later request shares a block computed before."""
        if self._state == "ready":  # else the next core begins with an empty cache
            self._link.send(ResetPrefixCache(), self.restarts)

    async def close(self) -> None:
        """End the core; streams that wait get EngineDeadError. Closing twice is nothing."""
        self._end(EngineDeadError(_CLOSED))
        await asyncio.to_thread(self._link.close)

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # Requests

    async def stream(self, submissions: Sequence[Submission], interval: int = 1) -> AsyncGenerator[list[CompletionDelta], None]:
        """The deltas of all of them as they come, in batches; it ends when every choice of each has its finish_reason.
        With an `interval` about so many tokens a choice are gathered before the next batch; the first ones, an ending and
        an error come at once.

        Closing it, or cancelling its reader, aborts what is unfinished. The first step raises InvalidRequestError if one
        is refused (code queue_full, duplicate_request_id, ...; then none of them runs), or EngineDeadError if the engine
        is not ready; any step raises EngineDeadError as soon as the core has died.
        """
        self._start()
        self._check_ready()
        requests = self._encode(submissions)
        mailbox = Mailbox({one.request_id: one.n for one in submissions}, interval)
        for request_id, route in mailbox.routes.items():
            self._routes.setdefault(request_id, deque()).append(route)
        try:
            if requests:
                self._link.send(AddRequests(requests), self.restarts)
            while mailbox.is_open:
                yield await mailbox.take()
        finally:
            self._leave(mailbox)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets its last deltas. Unknown and finished ids are passed over in silence."""
        if self._is_read(request_id):
            self._link.send(Abort([request_id]), self.restarts)

    def _encode(self, submissions: Sequence[Submission]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name, _, request in submissions:
            if name in found or self._is_read(name):
                raise InvalidRequestError(f"request id {name!r} is in use", param="request_id", code="duplicate_request_id")
            try:
                found[name] = encode_request(request) if isinstance(request, EngineRequest) else bytes(request)
            except UnicodeEncodeError:
                raise InvalidRequestError("the request holds text that is not Unicode (a lone surrogate)") from None
        return found

    def _is_read(self, request_id: str) -> bool:
        routes = self._routes.get(request_id)
        return routes is not None and routes[-1].mailbox is not None

    def _leave(self, mailbox: Mailbox) -> None:
        """The reader goes; what comes for it from now on is for nobody."""
        unfinished = []
        for request_id, route in mailbox.routes.items():
            route.mailbox = None
            if route.unfinished:
                unfinished.append(request_id)
        if unfinished:
            self._link.send(Abort(unfinished), self.restarts)

    # Reports

    def _start(self) -> None:
        """Tie the engine to this event loop and start its core, the first time."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            raise EngineDeadError("an engine belongs to the event loop of its first request: make one per loop")
        self._loop = loop
        if self._final is None:
            self._link.start(self._post)

    def _check_ready(self) -> None:
        if self._final is not None:
            raise EngineDeadError(str(self._final))
        if self._state != "ready":
            raise EngineDeadError(_LOADING if self._state == "loading" else _RESTARTING)

    def _post(self, reports: list[Report]) -> None:
        """In the link's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._receive, reports)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            if not self._loop.is_closed():
                raise

    def _receive(self, reports: list[Report]) -> None:
        for report in reports:
            if self._final is not None:
                return
            match report:
                case StepOutput():
                    self._stats = report.stats or self._stats
                    for delta in report.deltas:
                        self._deliver(delta)
                case Rejected():
                    self._reject(report)
                case Events():
                    reader = self._event_readers.popleft()
                    if not reader.done():
                        reader.set_result(report.events)
                case Loading():
                    self._loading = report
                case Ready():
                    self._info, self._backend, self._stats = report.info, report.backend, report.stats
                    self._state, self._failure, self._loading = "ready", None, None
                    self._settled.set()
                case Failed():
                    self._lose(report)

    def _deliver(self, delta: CompletionDelta) -> None:
        routes = self._routes.get(delta.request_id)
        if routes is None:
            return
        route = routes[0]
        if delta.finish_reason is not None:
            route.unfinished -= 1
            if not route.unfinished:
                routes.popleft()
                if not routes:
                    del self._routes[delta.request_id]
        if route.mailbox is not None:
            route.mailbox.put(delta)

    def _reject(self, report: Rejected) -> None:
        """A message's requests were refused: it is the first route of that id, for whatever was before has ended."""
        routes = self._routes.get(report.request_id)
        if routes is None:
            return
        for request_id, route in routes[0].siblings.items():
            queue = self._routes[request_id]
            queue.remove(route)
            if not queue:
                del self._routes[request_id]
            route.unfinished = 0
            if route.mailbox is not None:
                route.mailbox.fail(InvalidRequestError(report.message, param=report.param, code=report.code))

    def _lose(self, report: Failed) -> None:
        if report.final:
            self._end(_ERRORS[report.kind](report.reason))
            return
        self.restarts += 1
        self._state, self._failure, self._loading = "restarting" if self._info else "loading", report.reason, None
        self._stats = EngineStats()
        self._settled.clear()
        self._drop_all(_RESTARTING)

    def _end(self, error: OctavoError) -> None:
        """For good. The first reason counts."""
        if self._final is None:
            self._final, self._failure, self._state = error, str(error), "closed"
            self._settled.set()
            self._drop_all(str(error))

    def _drop_all(self, reason: str) -> None:
        """No core knows these requests any more; whoever reads one gets an error at once."""
        for routes in self._routes.values():
            for route in routes:
                route.unfinished = 0
                if route.mailbox is not None:
                    route.mailbox.fail(EngineDeadError(reason))
        self._routes.clear()
        for reader in self._event_readers:
            if not reader.done():
                reader.set_exception(EngineDeadError(reason))
        self._event_readers.clear()
