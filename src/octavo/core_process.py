"""`python -m octavo.core_process`: the engine core's process. Started by ProcessCore, of no use by hand.

It reads its CoreSetup from standard input, loads the model, and serves commands until it is told to close, its engine
fails, or its parent is gone: then standard input ends, and the process with it, whatever it is doing.
Not here: starting and restarting it (engine/process_core.py), the loop (engine/core_loop.py).
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # before anything slow: Ctrl-C at a terminal goes to all processes, and the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

import logging
import os
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import cast

import zmq

from octavo.engine.core_loop import CoreLoop
from octavo.engine.core_messages import Command, Failed, Loading, Ready, Report, decode_command, encode
from octavo.engine.core_setup import EXIT_REPORTED, CoreSetup, decode_setup
from octavo.errors import ConfigError, EngineDeadError, ModelLoadError
from octavo.wiring import EngineParts, LoadProgress

logger = logging.getLogger("octavo")

#: Seconds between two reports of how far loading is.
_LOADING_INTERVAL = 0.1
#: Milliseconds that the last report may take to leave.
_LINGER = 2000


def main() -> int:
    """The exit status: 0 after Close, EXIT_REPORTED after a Failed."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s (engine core): %(message)s")
    setup = decode_setup(_first_line())
    threading.Thread(target=_exit_with_parent, args=(setup.address,), name="octavo-parent", daemon=True).start()
    context = zmq.Context()
    channel = ZmqChannel(context, setup.address)
    try:
        failed = serve(setup, channel)
        if failed is not None:
            channel.send(failed)
    finally:
        channel.close()
        context.term()
    return 0 if failed is None else EXIT_REPORTED


def serve(setup: CoreSetup, channel: ZmqChannel) -> Failed | None:
    """Load and run; why it ended, or None after a Close."""
    parts: EngineParts | None = None
    try:
        parts = make_parts(setup, LoadingReporter(channel))
        ops = getattr(parts.executor, "ops", None)
        core = parts.core()
        channel.send(Ready(parts.executor.info, {} if ops is None else ops.describe(), core.stats))
        CoreLoop(core, channel).run()
        core.close()
    except ModelLoadError as error:
        return Failed(str(error), final=True, kind="model")
    except ConfigError as error:
        return Failed(str(error), final=True, kind="config")
    except EngineDeadError as error:  # logged where it happened
        return Failed(str(error), final=False)
    except Exception as error:
        logger.exception("the engine core's process has failed")
        return Failed(f"the engine core's process has failed ({type(error).__name__}: {error})", final=False)
    return None


def make_parts(setup: CoreSetup, progress: LoadProgress) -> EngineParts:
    if setup.parts_factory is None:
        return EngineParts.load(setup.config, progress)
    sys.path += setup.search_path
    module, _, name = setup.parts_factory.partition(":")
    return cast(EngineParts, getattr(import_module(module), name)(setup.config, progress))


class LoadingReporter:
    """A LoadProgress that reports now and then. Called from several threads while a model is fetched."""

    def __init__(self, channel: ZmqChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._sent = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        with self._lock:
            if monotonic() - self._sent >= _LOADING_INTERVAL or done == total:
                self._sent = monotonic()
                self._channel.send(Loading(phase, done, total))


class ZmqChannel:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = _LINGER
        self._socket.connect(address)

    def receive(self, wait: bool) -> Command | None:
        try:
            return decode_command(self._socket.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None

    def send(self, report: Report) -> None:
        self._socket.send(encode(report))

    def close(self) -> None:
        self._socket.close()


def _first_line() -> bytes:
    """Byte by byte: what follows must stay for the thread that waits for the end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("octavo.core_process is started by octavo itself")
        line += byte
    return bytes(line)


def _exit_with_parent(address: str) -> None:
    """Standard input ends when the parent has died, however it died. Nobody is left to remove the socket's directory."""
    while os.read(0, 4096):
        pass
    listening = Path(address.removeprefix("ipc://"))
    with suppress(OSError):
        listening.unlink(missing_ok=True)
        listening.parent.rmdir()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
