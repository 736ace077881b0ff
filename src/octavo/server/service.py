"""A running server: HTTP, signals, the engine's ups and downs, and an orderly end.

Owner of the uvicorn server and of the state the endpoints share. Engine and input processes are started by run.py; they
are closed here, at the moment that is right for whoever still waits for an answer.
Not here: the application (app.py), how it all begins (run.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import shlex
import socket
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn

import octavo
from octavo.engine.async_engine import AsyncEngine
from octavo.errors import OctavoError
from octavo.server.app import CHAT, COMPLETIONS, build_app
from octavo.server.auth import Keys
from octavo.server.http_protocol import HttpProtocol
from octavo.server.input_pool import InputPool
from octavo.server.prepared import Job, Prepared, Refused
from octavo.server.run import BACKLOG, Console, Signals, step_back, url_of
from octavo.server.state import ServerState
from octavo.server_config import ServerConfig

_log = logging.getLogger("octavo.server")

#: Seconds to let aborted requests send their last event, once the time for finishing is over.
LAST_WORDS = 3.0
#: Seconds between two looks at the engine's state.
_POLL = 0.1


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    def __init__(
        self,
        config: ServerConfig,
        names: tuple[str, ...],
        keys: Keys,
        engine: AsyncEngine,
        inputs: InputPool,
        listener: socket.socket,
        console: Console,
        signals: Signals,
    ) -> None:
        self._signals = signals
        self._takes_chat = True
        self._console = console
        self._listener = listener
        self._engine = engine
        self._inputs = inputs
        self._state = ServerState(config, names, keys, engine, inputs)
        self._http = _Server(
            uvicorn.Config(
                build_app(self._state), http=HttpProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, date_header=False, proxy_headers=False, backlog=BACKLOG, timeout_keep_alive=30,
            )
        )  # fmt: skip
        for name in ("uvicorn", "uvicorn.error"):  # what it would say of a request, envelope.py says with less of it
            logging.getLogger(name).setLevel(logging.CRITICAL)

    async def run(self, begin: float) -> None:
        """Until a signal. `begin`: time.monotonic() of the program's start."""
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        try:
            if await self._load(begin):
                await self._unless_signalled(self._follow(serving))
            self._state.draining = True
            await self._drain(serving)
        finally:
            await self._close()
            self._http.should_exit = self._http.force_exit = True
            await asyncio.wait((serving,), timeout=LAST_WORDS)
            serving.cancel()

    async def _load(self, begin: float) -> bool:
        """Whether the engine became ready (False: a signal came first). Raises what makes it impossible."""
        progress = asyncio.create_task(self._show_progress())
        try:
            ready = await self._unless_signalled(self._become_ready())
        finally:
            progress.cancel()
            self._console.loaded()
        if ready:
            step_back()
            gc.collect()
            gc.freeze()  # what is loaded stays: a collection while hundreds of streams are open need not walk over it
            self._console.say(ready_text(self._state, url_of(self._listener), self._takes_chat, time.monotonic() - begin))
        return ready

    async def _become_ready(self) -> None:
        """The engine is there when it says so; the input processes are when one has answered a first request."""
        await self._engine.wait_ready()
        self._share_info()
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
        outcome = await self._inputs.prepare(Job("chat", body, "first", None, time.perf_counter()))
        if isinstance(outcome, Refused) and outcome.status >= 500:
            raise OctavoError(outcome.message)
        self._takes_chat = isinstance(outcome, Prepared)
        self._state.inputs_loaded = True

    async def _show_progress(self) -> None:
        while True:
            if (loading := self._engine.loading) is not None:
                self._console.progress(loading.phase, loading.done, loading.total)
            await asyncio.sleep(_POLL)

    async def _follow(self, serving: asyncio.Task[None]) -> None:
        """Until HTTP ends, which it should not. Tell the input processes about each new core; say when one is lost and
        when the next is there."""
        state = self._engine.state
        while not serving.done():
            await asyncio.sleep(_POLL)
            if self._engine.state != state:
                state = self._engine.state
                if state == "ready":
                    self._share_info()
                _log.warning("the engine is %s%s", state, f": {self._engine.failure}" if self._engine.failure else "")

    def _share_info(self) -> None:
        if self._engine.info is not None:
            self._inputs.set_info(self._engine.info)

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """No new connections; what runs may finish within drain_timeout, or until a second signal."""
        seconds = self._state.config.drain_timeout
        running = len(self._http.server_state.tasks)
        self._console.say(f"stopping; {running} running, up to {seconds:g} s for them (a second signal stops at once)")
        self._http.should_exit = True
        if self._signals.count < 2:
            self._signals.came.clear()
            again = asyncio.create_task(self._signals.came.wait())
            await asyncio.wait((serving, again), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            again.cancel()
        if not serving.done():
            await self._close()  # whoever still waits gets an error
            if self._signals.count < 2:
                await asyncio.wait((serving,), timeout=LAST_WORDS)

    async def _close(self) -> None:
        await asyncio.gather(self._engine.close(), self._inputs.close())

    async def _unless_signalled(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` ended before a signal came. Raises what it raises."""
        task = asyncio.create_task(work)
        signalled = asyncio.create_task(self._signals.came.wait())
        try:
            await asyncio.wait((task, signalled), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            task.cancel()
            signalled.cancel()
            await asyncio.gather(task, signalled, return_exceptions=True)


def ready_text(state: ServerState, url: str, takes_chat: bool, seconds: float) -> str:
    """What a person needs to begin: where, with what, and a line to try."""
    ask = {"messages": [{"role": "user", "content": "What is the capital of France?"}]} if takes_chat else {"prompt": "Deep learning is"}
    body = json.dumps({"model": state.model_names[0]} | ask | ({} if takes_chat else {"max_tokens": 20}))
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if state.keys else ""
    return (
        f"Octavo {octavo.__version__} is ready after {seconds:.1f} s: {url}\n"
        f"  chat page  {url}/\n"
        f"  API key    {'needed' if state.keys else 'none'}\n"
        f'  try        curl {url}{CHAT if takes_chat else COMPLETIONS} -H "Content-Type: application/json"{key} -d {shlex.quote(body)}'
    )
