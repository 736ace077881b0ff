"""StepPlan: the entries chosen for one step so far, and what is left of its limits.

Owner: the scheduler makes one a step, fills it, and reads it again when the result is back. A preemption may take an
entry out again, which gives its tokens and its place back. Not here: the choice itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.events import Admission, Why
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
    end: int
    #: Nothing of the request is missing after this entry.
    completes: bool
    #: The last of the tokens gives the next one.
    sample: bool
    #: Per group: blocks appended to its table before the step; () for none.
    blocks: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class StepPlan:
    #: Tokens that may still be added.
    budget: int
    #: Requests that may still get more than one token, or exactly one.
    prefill_places: int
    decode_places: int
    entries: dict[str, PlannedEntry] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)

    def fit(self, wanted: int) -> int:
        """How many of the wanted tokens of one more request this step can take; 0 when it has no place for it."""
        count = min(wanted, self.budget)
        places = self.prefill_places if count > 1 else self.decode_places
        return count if places > 0 else 0

    def add(self, request: Request, num_tokens: int, why: Why) -> None:
        start = request.num_computed_tokens
        end = start + num_tokens
        completes = end == request.num_target_tokens
        kind = TokenKind.PROMPT if start < request.num_prompt_tokens else TokenKind.GENERATED
        sample = completes and not request.prefill_only
        self.entries[request.request_id] = PlannedEntry(request, start, num_tokens, kind, why, end, completes, sample)
        self._count(num_tokens, -1)

    def remove(self, request: Request) -> None:
        """Take a request out again, if it is in."""
        entry = self.entries.pop(request.request_id, None)
        if entry is not None:
            self._count(entry.num_tokens, 1)

    def _count(self, num_tokens: int, sign: int) -> None:
        self.budget += sign * num_tokens
        if num_tokens > 1:
            self.prefill_places += sign
        else:
            self.decode_places += sign
