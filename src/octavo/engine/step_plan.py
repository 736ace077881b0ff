"""StepPlan: the entries chosen for one step so far, and what is left of its limits.

Owner: the scheduler makes one a step, fills it, and reads it again when the result is back. A preemption may take an
entry out again, which gives its tokens and its place back. Not here: the choice itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.events import Why
from octavo.engine.request import Request
from octavo.engine.scheduler_output import TokenKind


@dataclass(slots=True)
class PlannedEntry:
    """Tokens [start, start + num_tokens) of a request, all of one kind."""

    request: Request
    start: int
    num_tokens: int
    kind: TokenKind
    why: Why

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def completes(self) -> bool:
        """Nothing of the request is missing after this entry."""
        return self.end == self.request.num_target_tokens

    @property
    def sample(self) -> bool:
        return self.completes and not self.request.prefill_only


@dataclass(slots=True)
class StepPlan:
    #: Tokens that may still be added.
    budget: int
    #: Requests that may still get more than one token, or exactly one.
    prefill_places: int
    decode_places: int
    entries: dict[str, PlannedEntry] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)

    def fit(self, wanted: int) -> int:
        """How many of the wanted tokens of one more request this step can take; 0 when it has no place for it."""
        count = min(wanted, self.budget)
        places = self.prefill_places if count > 1 else self.decode_places
        return count if places > 0 else 0

    def add(self, request: Request, num_tokens: int, why: Why) -> None:
        entry = PlannedEntry(request, request.num_computed_tokens, num_tokens, request.next_kind, why)
        self.entries[request.request_id] = entry
        self._count(entry, -1)

    def remove(self, request: Request) -> None:
        """Take a request out again, if it is in."""
        entry = self.entries.pop(request.request_id, None)
        if entry is not None:
            self._count(entry, 1)

    def _count(self, entry: PlannedEntry, sign: int) -> None:
        self.budget += sign * entry.num_tokens
        if entry.num_tokens > 1:
            self.prefill_places += sign
        else:
            self.decode_places += sign
