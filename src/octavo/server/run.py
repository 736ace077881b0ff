"""The beginning of `octavo serve`: settings, socket, engine, input processes, and only then the rest of the program.

Order matters. The socket comes first, so that a taken port costs nobody a model's loading time. What takes a second to
import is imported while the model loads. And this thread is niced last: the engine core's supervisor, a thread of its own
by then, goes on starting cores that are as urgent as any program, while what only serves them steps back.
Owner of the socket, the engine and the input processes, from `serve` to its return.
Not here: serving and ending (service.py), flags and the terminal (cli/serve.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.process_core import ProcessCore
from octavo.errors import OctavoError
from octavo.server.auth import Keys, read_keys
from octavo.server.input_pool import InputPool
from octavo.server.origins import is_loopback
from octavo.server_config import ServerConfig

_log = logging.getLogger("octavo.server")

BACKLOG = 2048
#: Of the thread that serves HTTP: just behind the engine. An event of a stream costs it 0.15 ms, some 5 % of a processor at 300 tokens
#: a second, and more niceness takes that time later, not less of it: no throughput was gained by 10 or 19, while /health took up to
#: 0.5 s where it takes less than 0.1 s now (500 streams on two cores, docs/performance.md).
NICENESS = 1


@dataclass(frozen=True, slots=True)
class Console:
    """Where the server talks to whoever started it."""

    say: Callable[[str], None]
    #: ("download" or "load", bytes done, bytes in all), while the model is loading.
    progress: Callable[[str, int, int], None]
    #: Loading is over, in whatever way.
    loaded: Callable[[], None]


class Signals:
    """SIGTERM and SIGINT while the event loop runs: how many have come, and an event to wait for the next one."""

    def __init__(self) -> None:
        self.count = 0
        self.came = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self.count += 1
        self.came.set()


def serve(config: EngineConfig, server_config: ServerConfig, console: Console) -> None:
    """Serve until SIGTERM or SIGINT. Raises OctavoError if it cannot begin."""
    begin = time.monotonic()
    keys = Keys(read_keys(server_config))
    with contextlib.closing(listen(server_config)) as listener:
        if not is_loopback(server_config.host) and not keys:
            _log.warning("listening on %s without an API key: whoever reaches this port can use the model", server_config.host)
        raise_file_limit()
        core = ProcessCore(config, step_timeout=server_config.step_timeout)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, server_config, console, keys, listener, core, begin))


async def _serve(
    config: EngineConfig,
    server_config: ServerConfig,
    console: Console,
    keys: Keys,
    listener: socket.socket,
    core: ProcessCore,
    begin: float,
) -> None:
    signals = Signals()
    names = tuple(server_config.served_model_name) or (config.model,)
    inputs = InputPool(config, server_config, names)
    async with AsyncEngine(core) as engine:
        try:
            console.say(f"loading {names[0]}, listening on {url_of(listener)}")
            await inputs.start()
            from octavo.server.service import Service  # slow to import, while two other processes load the model

            await Service(server_config, names, keys, engine, inputs, listener, console, signals).run(begin)
        finally:
            await inputs.close()


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises OctavoError."""
    where = f"{config.host} port {config.port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OctavoError(f"{where} is in use; choose another with --port (0: a free one)") from None
        raise OctavoError(f"cannot listen on {where}: {error.strerror}") from None
    # A peer that takes nothing and says nothing is let go, also where no write waits for it. Connections inherit this.
    with contextlib.suppress(OSError, AttributeError):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.send_timeout * 1000))
    return listener


def url_of(listener: socket.socket) -> str:
    """Where this machine itself reaches it."""
    host, port = listener.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{local}]' if ':' in local else local}:{port}"


def step_back() -> None:
    """Be less urgent than the engine core. On Linux this is about this thread, and what it starts from now on."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


def raise_file_limit() -> None:
    """Every open stream is a file; the usual soft limit of 1024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft != resource.RLIM_INFINITY else soft, hard))
