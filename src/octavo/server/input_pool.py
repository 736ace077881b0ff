"""InputPool: the HTTP process's side of the input processes.

Two lanes with a process each, one for short bodies and one for long ones, so that a prompt of a megabyte delays no short
one. A lane works on one job at a time. A job that takes longer than input_timeout costs its process the life and is
refused; those behind it go to the next process. A process that dies under a job gets that job's second try started.
Owner of the processes and of the jobs that wait. Not here: what a process does (input_process.py, prepare.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import msgspec

from octavo.config import EngineConfig
from octavo.engine.executor import ExecutorInfo
from octavo.server.prepared import LENGTH, Answer, Broken, Job, Order, Outcome, Prepared, Refused, SetInfo, Start, framed
from octavo.server_config import ServerConfig

_log = logging.getLogger("octavo.server")

#: Longer bodies go to the long lane.
SHORT_BODY = 64 * 1024
#: The engine's threads come first; a short job costs about a millisecond that its caller waits for, a long one may take a while.
SHORT_NICE, LONG_NICE = 10, 15
#: Jobs that may wait in one lane, and the bytes of their bodies.
MAX_WAITING = 2048
MAX_WAITING_BYTES = 64 * 2**20
#: Loading may include a download.
LOAD_SECONDS = 3600.0
#: A process that cannot be started is tried again after this long, at first and at most.
RETRY_SECONDS = (0.5, 10.0)
#: An input process ends itself this long after the moment at which we would have ended it.
_GRACE = 2.0


class InputPool:
    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig, served_names: Sequence[str], *, factory: str = "") -> None:
        """`served_names`: what `model` in a request may be. `factory`: "module:function" that makes FrontParts from an
        EngineConfig instead of FrontParts.load; for tests with fakes."""
        max_body = server_config.max_body
        assert isinstance(max_body, int) and served_names
        start = Start(
            engine_config,
            tuple(served_names),
            server_config.max_json_depth,
            server_config.max_prompts,
            server_config.max_choices,
            job_seconds=server_config.input_timeout + _GRACE,
            memory=2**30 + 32 * max_body,
            niceness=SHORT_NICE,
            factory=factory,
        )
        environment = _environment(factory)
        waiting_bytes = max(MAX_WAITING_BYTES, 4 * max_body)
        self.short = Lane("short", start, environment, server_config.input_timeout, waiting_bytes)
        long = msgspec.structs.replace(start, niceness=LONG_NICE)
        self.long = Lane("long", long, environment, server_config.input_timeout, waiting_bytes)
        self._info: ExecutorInfo | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the children; they load tokenizer and template at once, and this does not wait for that."""
        self.short.start()
        self.long.start()

    def set_info(self, info: ExecutorInfo) -> None:
        """What the engine's model can do: known once the engine is ready, and again after each of its restarts."""
        self._info = self.short.info = self.long.info = info

    async def prepare(self, job: Job) -> Outcome:
        """The outcome of one job. Never raises but for cancellation, which drops a job that still waits.

        Refused with 429 (too many waiting), 503 (no info yet, not loadable, or closed), 400 code input_timeout, 500 (it
        crashed two processes).
        """
        if self._closed:
            return _CLOSED
        if self._info is None:
            return Refused(503, "the model is still loading: try again in a moment", code="model_loading")
        return await (self.short if len(job.body) <= SHORT_BODY else self.long).outcome(job)

    async def close(self) -> None:
        """End the children; jobs that wait are refused with 503."""
        self._closed = True
        await asyncio.gather(self.short.close(), self.long.close())


_CLOSED = Refused(503, "the server is shutting down", code="shutting_down")


def _environment(factory: str) -> dict[str, str]:
    """This process's own without keys, and with one thread for everything that would take more."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_API_KEY")}
    found |= {"TOKENIZERS_PARALLELISM": "false"}
    found |= {name: "1" for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    if factory:
        found["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return found


@dataclass(eq=False, slots=True)
class _Waiting:
    job: Job
    future: asyncio.Future[Outcome]


class Lane:
    """One process and the jobs for it, in order of arrival."""

    def __init__(self, name: str, start: Start, environment: Mapping[str, str], seconds: float, max_bytes: int) -> None:
        self.name = name
        self.info: ExecutorInfo | None = None
        #: Processes that were started, for tests and metrics.
        self.started = 0
        self._start, self._environment, self._seconds, self._max_bytes = start, environment, seconds, max_bytes
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._current: _Waiting | None = None
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        #: Why the last start failed, and when the next may be tried.
        self._fault, self._retry_at, self._delay = "", 0.0, RETRY_SECONDS[0]

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"input lane {self.name}")

    async def outcome(self, job: Job) -> Outcome:
        if len(self._waiting) >= MAX_WAITING or self._waiting_bytes + len(job.body) > self._max_bytes:
            return Refused(429, "too many requests wait to be read: try again in a moment", code="input_queue_full")
        entry = _Waiting(job, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._waiting_bytes += len(job.body)
        self._wake.set()
        try:
            return await entry.future
        finally:
            if entry in self._waiting:  # cancelled: its caller is gone
                self._remove(entry)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end_child()
        for entry in [*self._waiting, *([self._current] if self._current else [])]:
            if not entry.future.done():
                entry.future.set_result(_CLOSED)

    def _remove(self, entry: _Waiting) -> None:
        self._waiting.remove(entry)
        self._waiting_bytes -= len(entry.job.body)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(_CannotStart):
                await self._ready_child()  # so that the next job finds it loaded
            self._wake.clear()
            if not self._waiting:
                await self._wake.wait()
                continue
            entry = self._current = self._waiting[0]
            self._remove(entry)
            try:
                outcome = await self._outcome(entry.job)
            except Exception as error:  # a fault of ours must not stop the lane
                _log.error("input lane %s: internal error: %s", self.name, type(error).__name__)
                await self._end_child()
                outcome = Refused(500, "internal error while reading the request", code="internal_error")
            self._current = None
            if not entry.future.done():
                entry.future.set_result(outcome)

    async def _outcome(self, job: Job) -> Outcome:
        for _ in range(2):
            try:
                child = await self._ready_child()
            except _CannotStart as error:
                return Refused(503, f"requests cannot be read: {error}", code="input_unavailable")
            try:
                async with asyncio.timeout(self._seconds):
                    answer = await child.ask(job)
            except TimeoutError:
                _log.warning("input lane %s: a request was given up after %g s", self.name, self._seconds)
                await self._end_child()
                message = f"reading, rendering and tokenising the request took longer than {self._seconds:g} s: shorten it"
                return Refused(400, message, code="input_timeout")
            except _ChildDied as error:
                _log.warning("input lane %s: %s", self.name, error)
                await self._end_child()
                continue
            assert isinstance(answer, Prepared | Refused)
            return answer
        return Refused(500, "the process that reads requests died twice over this one", code="input_crashed")

    async def _ready_child(self) -> Child:
        """A process that has loaded the model's tokenizer and knows what the engine can do. Raises _CannotStart."""
        if self._child is not None and not self._child.alive:
            await self._end_child()
        if self._child is None:
            if monotonic() < self._retry_at:
                raise _CannotStart(self._fault)
            try:
                self.started += 1
                self._child = await Child.start(self._environment)
                await self._tell(self._child, self._start)
            except (_CannotStart, OSError) as error:
                await self._end_child()
                self._fault, self._retry_at = " ".join(str(error).split()), monotonic() + self._delay
                self._delay = min(2 * self._delay, RETRY_SECONDS[1])
                _log.error("input lane %s: %s", self.name, self._fault)
                raise _CannotStart(self._fault) from error
            self._delay = RETRY_SECONDS[0]
        if self.info is not None and self._child.info is not self.info:
            info = self.info
            try:
                await self._tell(self._child, SetInfo(info))
            except _CannotStart:
                await self._end_child()
                raise
            self._child.info = info
        return self._child

    async def _tell(self, child: Child, order: Start | SetInfo) -> None:
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                answer = await child.ask(order)
        except TimeoutError:
            raise _CannotStart(f"an input process took longer than {LOAD_SECONDS:g} s to load") from None
        except _ChildDied as error:
            raise _CannotStart(str(error)) from None
        if isinstance(answer, Broken):
            raise _CannotStart(answer.reason)

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.kill()


class _CannotStart(Exception):
    pass


class _ChildDied(Exception):
    pass


_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Child:
    """One input process; it is asked one thing at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.info: ExecutorInfo | None = None

    @classmethod
    async def start(cls, environment: Mapping[str, str]) -> Child:
        # -P: modules are never taken from the current folder.
        command = (sys.executable, "-P", "-m", "octavo.server.input_process")
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment, limit=2**20))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, order: Order) -> Answer:
        """Raises _ChildDied."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(framed(order))
            await self._process.stdin.drain()
            (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
            return _answers.decode(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError) as error:
            raise _ChildDied(f"an input process died ({type(error).__name__})") from None

    async def kill(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.stdin.close()
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.wait_closed()
        await self._process.stdout.read()  # to its end, so that nothing is left to do when the loop is closed
        await self._process.wait()
