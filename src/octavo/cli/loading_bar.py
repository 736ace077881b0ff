"""A progress bar for what makes a user wait before the first answer: fetching a model, loading its weights.

On standard error, only on a terminal, and only for what takes longer than DELAY; it is gone when the work is done.
Owner of its bar. Not here: what is counted (loading/hub.py, loading/weights.py).
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from octavo.cli import terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Seconds. Below this, a bar is a flicker, and importing rich for it a part of the wait.
DELAY = 0.5
WORDS = {"download": "fetching the model", "load": "loading the model"}


class LoadingBar:
    """`report` is what LLM takes as load_progress; it may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown = terminal.is_terminal(sys.stderr)
        self._stage = ""
        self._begin = 0.0
        self._bar: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """It is gone; twice is nothing."""
        with self._lock:
            self._end()

    def report(self, stage: str, done: int, total: int) -> None:
        if not self._shown:
            return
        with self._lock:
            if stage != self._stage:
                self._end()
                self._stage, self._begin = stage, time.monotonic()
            if done >= total:
                self._end()  # before anybody else writes to the terminal
            elif self._bar is None and time.monotonic() - self._begin >= DELAY:
                self._bar = _start(WORDS[stage])
            if self._bar is not None:
                bar, task = self._bar
                bar.update(task, completed=done, total=total)

    def _end(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


def _start(words: str) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(file=sys.stderr), transient=True)
    task = bar.add_task(words)
    bar.start()
    return bar, task
