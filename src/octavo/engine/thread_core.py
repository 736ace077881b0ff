"""ThreadCore: a CoreLink to a core in a thread of this process.

Owner: the thread owns the core from `start` to its end. There is no way to end a step that hangs, and no second core:
the first failure is final. Not here: the loop itself (core_loop.py).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

from octavo.engine.core_link import Post, Pulse
from octavo.engine.core_loop import CoreLoop
from octavo.engine.core_messages import Close, Command, Failed, Ready, Report, StepOutput
from octavo.engine.engine_core import EngineCore
from octavo.errors import EngineDeadError


class ThreadCore:
    def __init__(self, core: EngineCore, backend: Mapping[str, Any] | None = None, *, step_timeout: float = 180.0) -> None:
        """`backend`: what Ready says of who computes."""
        self._core = core
        self._backend = backend or {}
        self._pulse = Pulse(step_timeout)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, post: Post) -> None:
        self._thread = threading.Thread(target=self._run, args=(post,), name="octavo-engine", daemon=True)
        self._thread.start()

    def send(self, command: Command, generation: int) -> None:
        self._pulse.sent()
        self._commands.put(command)

    def is_stalled(self) -> bool:
        return self._pulse.is_stalled

    def close(self) -> None:
        if self._thread is None:
            self._core.close()
        else:
            self._commands.put(Close())
            self._thread.join()

    def _run(self, post: Post) -> None:
        core = self._core
        try:
            post([Ready(core.executor.info, self._backend, core.stats.copy())])
            CoreLoop(core, _QueueChannel(self._commands, self._pulse, post)).run()
        except Exception as error:
            reason = str(error) if isinstance(error, EngineDeadError) else f"the engine's thread has failed ({error!r})"
            post([Failed(reason, final=True)])
        finally:
            core.close()


class _QueueChannel:
    def __init__(self, commands: queue.SimpleQueue[Command], pulse: Pulse, post: Post) -> None:
        self._commands = commands
        self._pulse = pulse
        self._post = post

    def receive(self, wait: bool) -> Command | None:
        try:
            return self._commands.get(block=wait)
        except queue.Empty:
            return None

    def send(self, report: Report) -> None:
        if isinstance(report, StepOutput):
            self._pulse.heard(report)
        self._post([report])
