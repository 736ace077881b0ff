"""CoreLink: the wire between an AsyncEngine and a core that runs somewhere else, in a thread or in a process.

`Pulse` tells, for both kinds, whether the core owes an answer and for how long it has been silent.
Owner: the AsyncEngine owns its link; a link owns its Pulse. Not here: the links (thread_core.py, process_core.py), the
core's side (core_loop.py).
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Protocol

from octavo.engine.core_messages import Command, Report, StepOutput

#: Takes reports in the order they were made; called from the link's own thread.
Post = Callable[[list[Report]], None]


class CoreLink(Protocol):
    """What it posts: Loading while a core starts, Ready, StepOutput and the other answers, and Failed when that core is
    gone. After a Failed that is not final another core starts, and a Ready will follow."""

    def start(self, post: Post) -> None:
        """Once, before anything is sent."""
        ...

    def send(self, command: Command, generation: int) -> None:
        """Hand a command over; never waits. `generation`: how many Failed the sender has seen. What was meant for a core
        that is gone is dropped."""
        ...

    def is_stalled(self) -> bool:
        """The core has owed an answer for suspiciously long."""
        ...

    def close(self) -> None:
        """End the core and wait for its end. From any thread; twice is nothing."""
        ...


class Pulse:
    """One core's signs of life. Written by whoever sends and by whoever receives, read by any thread."""

    def __init__(self, step_timeout: float) -> None:
        self._step_timeout = step_timeout
        self._sent = 0
        self._handled = 0
        self._resting = True
        self._last = monotonic()

    def sent(self) -> None:
        if not self.owes:
            self._last = monotonic()
        self._sent += 1

    def heard(self, output: StepOutput) -> None:
        self._handled, self._resting = output.handled, output.resting
        self._last = monotonic()

    def excuse(self) -> None:
        """The silence so far is not the core's fault."""
        self._last = monotonic()

    @property
    def owes(self) -> bool:
        """It has work, or a command it has not answered."""
        return not self._resting or self._handled < self._sent

    @property
    def silence(self) -> float:
        """Seconds without a report while it owes one, else 0."""
        return monotonic() - self._last if self.owes else 0.0

    @property
    def is_stalled(self) -> bool:
        return self.silence > self._step_timeout / 2

    @property
    def seconds_left(self) -> float | None:
        """Until the core must count as hung (0 or less: it is); None while it owes nothing."""
        return self._step_timeout - self.silence if self.owes else None
