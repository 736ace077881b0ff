"""ProcessCore: a CoreLink to a core in a process of its own, and the supervisor that starts another when one is lost.

Owner: one thread, there from construction, owns the child and the directory of its socket. A child inherits the niceness
of the thread that starts it, so whoever made a ProcessCore may nice itself afterwards, and no core is any slower.
Not here: the child as such (core_child.py), who is told of a loss (async_engine.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import tempfile
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.engine.core_child import CoreChild
from octavo.engine.core_link import Post
from octavo.engine.core_messages import Command, Failed, encode
from octavo.engine.core_setup import CoreSetup

logger = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before another core is started, seconds: `first`, then twice as long each time up to `most`."""

    first: float = 0.5
    most: float = 30.0
    #: A core that was ready for so long counts as healthy: after it the waits begin anew.
    healthy: float = 60.0
    #: Cores lost before the first was ever ready, until it is given up.
    attempts: int = 3

    def seconds(self, losses: int) -> float:
        return float(min(self.most, self.first * 2 ** min(losses - 1, 30)))


class ProcessCore:
    def __init__(
        self,
        config: EngineConfig,
        *,
        step_timeout: float = 180.0,
        close_timeout: float = 5.0,
        backoff: Backoff | None = None,
        parts_factory: str | None = None,
    ) -> None:
        """`step_timeout`: seconds without a report, while one is due, until the core is killed. `close_timeout`: seconds
        a core may take to end by itself. `parts_factory`: see CoreSetup."""
        self._config = config
        self._step_timeout = step_timeout
        self._close_timeout = close_timeout
        self._backoff = backoff or Backoff()
        self._parts_factory = parts_factory
        #: Commands to send, each with the generation of the core it is for.
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._wake = _Wake()
        self._post: Post | None = None
        self._closing = False
        self._child: CoreChild | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-core", daemon=True)
        self._thread.start()

    def start(self, post: Post) -> None:
        self._post = post
        self._wake.set()

    def send(self, command: Command, generation: int) -> None:
        self._outbox.append((generation, encode(command)))
        self._wake.set()

    def is_stalled(self) -> bool:
        child = self._child
        return child is not None and child.pulse.is_stalled

    @property
    def pid(self) -> int | None:
        """Of the core's process; None while there is none."""
        child = self._child
        return None if child is None else child.pid

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            while self._post is None and not self._closing:
                self._wake.wait()
            if self._post is not None and not self._closing:
                with _private_folder() as folder:
                    self._supervise(Path(folder), self._post)
        except Exception as error:
            logger.exception("the engine's supervisor has failed")
            if self._post is not None:  # nobody may wait for a thread that is gone
                self._post([Failed(f"the engine's supervisor has failed ({error!r})", final=True)])
        finally:
            self._wake.close()

    def _supervise(self, folder: Path, post: Post) -> None:
        """One core after the other, until the end."""
        generation, losses, ever_ready = 0, 0, False
        while True:
            healthy = False
            try:
                with CoreChild(self._setup(folder, generation), generation, self._step_timeout) as child:
                    self._child = child
                    failed = self._serve(child, post)
                    healthy, ever_ready = child.seconds_ready >= self._backoff.healthy, ever_ready or child.is_ready
            except (OSError, zmq.ZMQError) as error:
                failed = Failed(f"the engine core's process could not be started ({error})", final=False)
            finally:
                self._child = None
            if failed is None:
                return
            losses = 1 if healthy else losses + 1
            # What worked once may work again; only a core that never did is given up.
            final = not ever_ready and (failed.final or losses >= self._backoff.attempts)
            post([msgspec.structs.replace(failed, final=final)])
            if final:
                return
            wait = self._backoff.seconds(losses)
            logger.error("%s; the next one starts in %.1f s", failed.reason, wait)
            if not self._sleep(wait):
                return
            generation += 1

    def _setup(self, folder: Path, generation: int) -> CoreSetup:
        search_path = [] if self._parts_factory is None else [path or os.getcwd() for path in sys.path]
        return CoreSetup(f"ipc://{folder}/{generation}", self._config, self._parts_factory, search_path)

    def _serve(self, child: CoreChild, post: Post) -> Failed | None:
        """Carry commands and reports until the core is lost; why it is, or None after `close`."""
        while not self._closing:
            if child.wait(self._wake.fd):
                self._wake.clear()
            while self._outbox:
                generation, command = self._outbox.popleft()
                if generation == child.generation:
                    child.send(command)
            reports, failed = child.receive()
            if reports:
                post(reports)
            if failed is not None:
                return failed
        child.close(self._close_timeout)
        return None

    def _sleep(self, seconds: float) -> bool:
        """False if it is to close instead."""
        end = monotonic() + seconds
        while not self._closing and (left := end - monotonic()) > 0:
            self._wake.wait(left)
        return not self._closing


class _Wake:
    """Lets any thread wake the one that waits for `fd`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def set(self) -> None:
        with self._lock:  # the number may belong to another file once it is closed
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def wait(self, seconds: float | None = None) -> None:
        poll = select.poll()  # not select.select, which knows no number above 1023
        poll.register(self.fd, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)
        self.clear()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fd)


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """Mode 0700. Close to the root where the usual place lies too deep for the address of a socket."""
    deep = len(tempfile.gettempdir()) > zmq.IPC_PATH_MAX_LEN - 40
    return tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp" if deep else None, ignore_cleanup_errors=True)
