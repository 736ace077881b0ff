"""Mailbox: what came for one stream and was not read yet, and Route: the way of one request's deltas to it.

Owner: the AsyncEngine, in its event loop. Not here: whose turn a route is (async_engine.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.errors import OctavoError
from octavo.outputs import CompletionDelta


@dataclass(slots=True, eq=False)
class Route:
    """Where the deltas of one request go: to a mailbox, or nowhere once its reader has left."""

    unfinished: int
    siblings: Mapping[str, Route]
    mailbox: Mailbox | None


class Mailbox:
    """What one stream has not read yet."""

    def __init__(self, choices: Mapping[str, int], interval: int = 1) -> None:
        """`choices`: how many each of its requests will end. `interval`: deltas a choice to wait for before the reader is
        woken; the first ones, an ending and an error are there at once."""
        self.routes: dict[str, Route] = {}
        self._interval = interval
        self._unfinished = sum(choices.values())
        #: Deltas that must be here before the reader is woken.
        self._enough = 1
        for request_id, n in choices.items():
            self.routes[request_id] = Route(n, self.routes, self)
        self._deltas: list[CompletionDelta] = []
        self._error: OctavoError | None = None
        #: Of the reader, while it waits.
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: CompletionDelta) -> None:
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self._enough = 1
        if len(self._deltas) >= self._enough:
            self._wake()

    def fail(self, error: OctavoError) -> None:
        self._error = error
        self._wake()

    @property
    def is_open(self) -> bool:
        """Something is there, or will come."""
        if self._deltas or self._error is not None:
            return True
        return any(route.unfinished for route in self.routes.values())

    async def take(self) -> list[CompletionDelta]:
        """Everything that is there, at least one delta; raises the error after the deltas before it."""
        if len(self._deltas) < self._enough and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not self._deltas:
            raise self._error
        batch, self._deltas = self._deltas, []
        self._enough = self._interval * max(1, self._unfinished)
        return batch

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
