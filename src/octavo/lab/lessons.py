"""Which lessons there are, and what each offers: settings, a run, a report and a figure.

Stateless; a lesson's module is imported when it is used. Not here: the lessons, each a folder beside this file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

#: Called with (what is being measured, steps done, steps in all).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Lesson:
    """`module` has: Settings, a dataclass; METHOD, how it measures; run(settings, progress) -> plain data;
    failure(results) -> why it counts as failed, or None; report(results) -> text for a terminal; figure(results) -> an SVG."""

    name: str
    title: str
    package: str

    @property
    def module(self) -> Any:
        return importlib.import_module(f"{self.package}.experiment")

    @property
    def text(self) -> Path:
        """lesson.md."""
        return Path(__file__).parent / self.name / "lesson.md"


LESSONS: Mapping[str, Lesson] = MappingProxyType(
    {
        "attention": Lesson("attention", "attention: naive, memory-lean, tiled, paged", "octavo.lab.attention"),
        "standard": Lesson("standard", "decoding: naive, KV cache, native kernels, streaming", "octavo.lab.standard"),
    }
)


def no_progress(what: str, done: int, total: int) -> None:
    """For callers who do not want to know."""
