"""CoreChild: one core's process as its parent sees it: the process, the socket to it, and what is known of its state.

Owner: the supervisor's thread (process_core.py), the only one that calls it; `pulse` may be read by any.
Not here: what becomes of a loss (process_core.py), the child's own code (core_process.py).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from time import monotonic
from typing import cast

import msgspec
import zmq

from octavo.engine.core_link import Pulse
from octavo.engine.core_messages import Close, Failed, Ready, Report, StepOutput, decode_report, encode
from octavo.engine.core_setup import EXIT_REPORTED, CoreSetup, encode_setup
from octavo.engine.metrics import EngineStats

logger = logging.getLogger("octavo")

#: Milliseconds to wait for what a dead process has sent: if it has promised a Failed, and if not.
_PROMISED = 2000
_UNPROMISED = 20
#: Seconds too many in a wait that tell that this process did not run.
_OVERSLEPT = 1.0
#: Reports taken from the socket at once.
_MOST_REPORTS = 256


class CoreChild:
    """Starts the process; `end` (or leaving the `with`) leaves nothing of it. Raises OSError if it cannot be started."""

    def __init__(self, setup: CoreSetup, generation: int, step_timeout: float) -> None:
        self.generation = generation
        self.pulse = Pulse(step_timeout)
        self._ready_at: float | None = None
        self._stats = EngineStats()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        try:
            self._socket.bind(setup.address)
            # -P: no module is taken from the current directory
            command = [sys.executable, "-P", "-m", "octavo.core_process"]
            self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except BaseException:
            self._context.destroy(0)
            raise
        self._exit_fd = os.pidfd_open(self._process.pid)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead already, which is found out in its turn
            self._process.stdin.write(encode_setup(setup))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._exit_fd, zmq.POLLIN)

    def __enter__(self) -> CoreChild:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        return self._ready_at is not None

    @property
    def seconds_ready(self) -> float:
        return 0.0 if self._ready_at is None else monotonic() - self._ready_at

    def wait(self, wake_fd: int) -> bool:
        """Until a report comes, the process ends, an answer is overdue, or `wake_fd` can be read: whether it can."""
        left = self.pulse.seconds_left
        if wake_fd not in self._poller:
            self._poller.register(wake_fd, zmq.POLLIN)
        begin = monotonic()
        ready = self._poller.poll(None if left is None else int(max(0.0, left) * 1000) + 1)
        if left is not None and monotonic() - begin > max(0.0, left) + _OVERSLEPT:
            self.pulse.excuse()  # this process was stopped itself (Ctrl-Z, a machine that was paused), and the core most likely with it
        return any(source == wake_fd for source, _ in ready)

    def send(self, command: bytes) -> None:
        with suppress(zmq.Again):  # nobody at the other end any more
            self._socket.send(command, zmq.NOBLOCK)
            self.pulse.sent()

    def receive(self) -> tuple[list[Report], Failed | None]:
        """The reports that are here, and why the core is lost if it is: it said so, it is dead, or it hangs."""
        reports, failed = self._take_reports()
        if failed is None and self._process.poll() is not None:
            more, failed = self._last_words(self._process.returncode)
            reports += more
        left = self.pulse.seconds_left
        if failed is None and left is not None and left <= 0:
            failed = self._describe_hang()
        return reports, failed

    def close(self, timeout: float) -> None:
        """Ask it to end, if it can listen, and give it `timeout` seconds."""
        if self.is_ready:
            self.send(encode(Close()))
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)

    def end(self) -> None:
        """Whatever state it is in: kill it, and let go of everything. Twice is nothing."""
        if self._context.closed:
            return
        self._process.kill()  # nothing if it is dead
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._exit_fd)
        self._socket.close()
        self._context.term()

    def _take_reports(self) -> tuple[list[Report], Failed | None]:
        reports: list[Report] = []
        while len(reports) < _MOST_REPORTS and cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            try:
                report = decode_report(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                return reports, Failed(f"the engine core's process sent what is no report ({error})", final=False)
            match report:
                case Failed():
                    return reports, report
                case StepOutput():
                    self.pulse.heard(report)
                    self._stats = report.stats or self._stats
                case Ready():
                    self._ready_at = monotonic()
            reports.append(report)
        return reports, None

    def _last_words(self, status: int) -> tuple[list[Report], Failed]:
        reports: list[Report] = []
        failed: Failed | None = None
        while failed is None and self._socket.poll(_PROMISED if status == EXIT_REPORTED else _UNPROMISED):
            more, failed = self._take_reports()
            reports += more
        if failed is None:
            how = f"was ended by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"has exited with status {status}"
            failed = Failed(f"the engine core's process {how}", final=False)
        return reports, failed

    def _describe_hang(self) -> Failed:
        stats = self._stats
        return Failed(
            f"the engine core hangs: nothing for {self.pulse.silence:.1f} s (step_timeout) after step {stats.steps} with "
            f"{stats.running} running, {stats.waiting} waiting, {stats.blocks_used} of {stats.blocks_total} blocks used",
            final=False,
        )
