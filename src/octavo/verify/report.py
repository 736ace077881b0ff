"""Report: the certificate of one verification: what was compared with what, on what, and what came of it.

Plain data with its JSON form and its digest. The digest is over everything but times and the description of the machine, so that
two people can compare; `logits_digest`, over the baseline's raw logits, is the same wherever the promise of equal bits holds (same
model file, same instruction-set level, same settings). Prompts are in it by length and hash only.
Not here: making it (run.py), printing it (cli/verify.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["holds", "differs", "did not fire", "failed", "does not apply"]
FORMAT = 1


@dataclass(slots=True)
class FirstDifference:
    """Positions count from 0 in the whole sequence. token_id: the baseline's token at that position, where there is one."""

    prompt: int
    choice: int
    position: int
    kind: Literal["prompt", "generated"]
    what: str
    detail: str
    token_id: int | None
    layer: str


@dataclass(slots=True)
class RowReport:
    name: str
    about: str
    #: What was promised: "bitwise", or a tolerance in words.
    promise: str
    status: Status
    #: Why a row did not apply, or failed.
    why: str = ""
    positions: int = 0
    logits: int = 0
    tokens: int = 0
    texts: int = 0
    largest_difference: float = 0.0
    bitwise: bool = False
    counters: dict[str, int | float] = field(default_factory=dict)
    #: Everything that differed, counted; the first in full.
    num_differences: int = 0
    first: FirstDifference | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    model: dict[str, Any]
    engine: dict[str, Any]
    settings: dict[str, Any]
    prompts: list[dict[str, Any]]
    logits_digest: str
    baseline: dict[str, Any]
    rows: list[RowReport]
    machine: dict[str, Any]
    seconds: float
    #: A fault was planted to test the verifier itself; None in real life.
    planted: str | None = None

    @property
    def holds(self) -> bool:
        """No row that applies failed, and at least one applied."""
        statuses = {row.status for row in self.rows}
        return "holds" in statuses and statuses <= {"holds", "does not apply"}

    @property
    def first(self) -> tuple[RowReport, FirstDifference] | None:
        """The first difference of the first row that has one."""
        return next(((row, row.first) for row in self.rows if row.first is not None), None)

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON without times and machine."""
        content = _without_times(self._content())
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The certificate."""
        return {**self._content(), "machine": self.machine, "seconds": round(self.seconds, 3), "digest": self.digest}

    def _content(self) -> dict[str, Any]:
        return {
            "certificate": FORMAT,
            "holds": self.holds,
            "model": self.model,
            "engine": self.engine,
            "settings": self.settings,
            "prompts": self.prompts,
            "logits_digest": self.logits_digest,
            "baseline": self.baseline,
            "rows": [asdict(row) for row in self.rows],
            "planted": self.planted,
        }


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(inner) for name, inner in value.items() if name != "seconds"}
    return [_without_times(inner) for inner in value] if isinstance(value, list) else value
