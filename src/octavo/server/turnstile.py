"""So many requests begin between two looks at the sockets, and no more: the rest wait their turn, in order.

When hundreds arrive in the same moment, beginning them all takes longer than anybody waits for /health, and while they
begin nothing else is read or sent. The outermost layer, plain ASGI.
Owner of the queue of those who wait. Not here: how many may be computed at once (the engine's queue, limits.py).
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.auth import OPEN_PATHS

#: Beginning one takes about 0.3 ms.
MOST = 16


class TurnstileMiddleware:
    def __init__(self, app: ASGIApp, most: int = MOST) -> None:
        self._app = app
        self._most = most
        #: Let in since the loop last looked at its sockets.
        self._let_in = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:  # those are answered at once
            if self._waiting or self._let_in >= self._most:
                turn = asyncio.get_running_loop().create_future()
                self._waiting.append(turn)
                await turn
            else:
                self._count()
        await self._app(scope, receive, send)

    def _count(self) -> None:
        if self._let_in == 0:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._let_in += 1

    def _next_round(self) -> None:
        self._let_in = 0
        while self._waiting and self._let_in < self._most:
            turn = self._waiting.popleft()
            if not turn.done():  # else whoever waited was cancelled
                turn.set_result(None)
                self._count()
