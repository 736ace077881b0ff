"""Comparison: what a row of the matrix computed, held against the baseline as it comes.

Owner of one row's counts. Bit for bit where that is promised; else a row of logits may differ by `tolerance` of its largest
value, and what follows a token that differs is another prefix, which nobody compares.
Not here: what is run (rows.py, run.py), which layer was first (layers.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.engine.scheduler_output import SchedulerOutput
from octavo.verify.baseline import Baseline
from octavo.verify.recorder import FloatArray


@dataclass(frozen=True, slots=True)
class Difference:
    """Where something differs first: a prompt, one of its choices, a position."""

    case: int
    choice: int
    position: int
    #: logits: after this position; token: at it; text: at the end; missing: never computed.
    what: str
    detail: str
    request_id: str = ""
    occurrence: int = 0

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The earliest position of the first prompt; there logits before tokens, and text last."""
        return self.case, self.position, self.choice, ("logits", "token", "missing", "text").index(self.what)


@dataclass(slots=True)
class _Seen:
    position: int
    difference: float
    bitwise: bool
    within: bool
    largest: float
    occurrence: int


@dataclass(slots=True)
class Comparison:
    baseline: Baseline
    #: None: bit for bit. Else the share of a row's largest logit by which a logit may differ.
    tolerance: float | None = None
    #: Whether a prompt's beginning may never be computed (a prefix hit).
    hits_allowed: bool = False
    #: Worker's id of a request or its parent -> number of the case; others are not looked at.
    names: dict[str, int] = field(default_factory=dict)
    positions: int = 0
    logits_compared: int = 0
    tokens_compared: int = 0
    texts_compared: int = 0
    largest_difference: float = 0.0
    bitwise: bool = True
    differences: list[Difference] = field(default_factory=list)
    #: Choices whose tokens part from the baseline's where two tokens are as good as equal (never where bits are promised).
    parted: int = 0
    _seen: dict[str, list[_Seen]] = field(default_factory=dict)
    _counted: set[str] = field(default_factory=set)

    # A Watch

    def tap(self, output: SchedulerOutput) -> None:
        return None

    def logits(self, request_id: str, position: int, rows: FloatArray) -> None:
        top, _, choice = request_id.partition("#")
        case = self.names.get(top)
        if case is None:
            return
        seen = self._seen.setdefault(request_id, [])
        for offset, row in enumerate(rows):
            at = position + offset
            if self.baseline.has(case, int(choice or 0), at):
                occurrence = sum(s.position == at for s in seen)
                seen.append(self._compare(row, self.baseline.logits(case, int(choice or 0), at), at, occurrence))

    def _compare(self, row: FloatArray, expected: FloatArray, position: int, occurrence: int) -> _Seen:
        bitwise = bool((row.view(np.uint32) == expected.view(np.uint32)).all())
        largest = float(np.abs(expected).max())
        difference = 0.0 if bitwise else float(np.abs(row - expected).max())
        within = bitwise or (self.tolerance is not None and difference <= self.tolerance * largest)
        return _Seen(position, difference, bitwise, within, largest, occurrence)

    # The end of a request

    def finish(self, request_id: str, choice: int, token_ids: list[int], count: int | None = None) -> None:
        """One choice is complete: compare its tokens, and count its logits as far as its prefix is the baseline's.

        count: how many of the baseline's tokens it should have (all, unless a stop string ends it before).
        """
        case = self.names[request_id]
        expected = self.baseline.tokens[case, choice][:count]
        length = self.baseline.prompt_length(case)
        parts = next((k for k, (a, b) in enumerate(zip(token_ids, expected, strict=False)) if a != b), min(len(token_ids), len(expected)))
        end = length + parts  # positions before it have the baseline's prefix
        worker_id = f"{request_id}#{choice}" if f"{request_id}#{choice}" in self._seen else request_id
        for name in dict.fromkeys((request_id, worker_id)):
            self._count(name, case, choice, end)
        self.tokens_compared += min(parts + 1, len(expected))
        if parts < len(expected) or len(token_ids) != len(expected):
            self._token_differs(worker_id, case, choice, end, token_ids[parts : parts + 1], expected[parts : parts + 1])
        self._check_complete(request_id, worker_id, case, choice, min(end, length + len(expected) - 1))

    def _count(self, name: str, case: int, choice: int, end: int) -> None:
        if name in self._counted:  # the parent of several choices
            return
        self._counted.add(name)
        kept = []
        for seen in self._seen.get(name, ()):
            if seen.position >= end:
                continue
            kept.append(seen)
            self.positions += 1
            self.logits_compared += self.baseline.logits(case, choice, seen.position).size
            self.largest_difference = max(self.largest_difference, seen.difference)
            self.bitwise = self.bitwise and seen.bitwise
            if not seen.within:
                self.differences.append(
                    Difference(
                        case, choice, seen.position, "logits", f"logits differ by up to {seen.difference:.3g}", name, seen.occurrence
                    )
                )
        self._seen[name] = kept

    def _token_differs(self, name: str, case: int, choice: int, position: int, token: list[int], expected: list[int]) -> None:
        if self.tolerance is not None and token and expected:
            # Logits within the tolerance may draw another token where two are nearly equal, or where a draw falls between two.
            self.parted += 1
            return
        words = f"token {token[0] if token else 'missing'} instead of {expected[0] if expected else 'none'}"
        self.bitwise = False
        self.differences.append(Difference(case, choice, position, "token", words, name))

    def _check_complete(self, request_id: str, worker_id: str, case: int, choice: int, end: int) -> None:
        """Every position up to `end` must have been seen: what was not computed proves nothing."""
        if not self._seen.get(request_id) and not self._seen.get(worker_id):
            have: set[int] = set()
        else:
            have = {seen.position for name in (request_id, worker_id) for seen in self._seen.get(name, ())}
        first = self.baseline.prompt_length(case) - 1 if self.hits_allowed else 0
        missing = next((p for p in range(first, end) if p not in have), None)
        if missing is not None:
            self.differences.append(Difference(case, choice, missing, "missing", "its logits were never computed", worker_id))

    def text(self, request_id: str, case: int, got: str, expected: str, what: str, ends: list[int]) -> None:
        """A whole text; `what` says which. ends[k]: characters of the baseline's text after k + 1 tokens."""
        self.texts_compared += 1
        if got != expected:
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
            position = self.baseline.prompt_length(case) + sum(end <= at for end in ends[:-1])
            detail = f"{what}: the texts part at character {at} ({len(got)} characters instead of {len(expected)})"
            self.bitwise = False
            self.differences.append(Difference(case, 0, position, "text", detail, request_id))

    @property
    def first(self) -> Difference | None:
        return min(self.differences, key=lambda difference: difference.order, default=None)
