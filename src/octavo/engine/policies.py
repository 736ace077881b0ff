"""Policies: in which order waiting requests are admitted, and who gives up blocks first.

Owner: the scheduler makes one policy from the configuration; a policy owns the waiting requests. Adding, taking and looking
cost O(log n) amortised, and no step walks the queue: 10,000 waiting requests cost a step as much as ten.
Not here: fair (fair.py), whether a request fits and who runs (scheduler.py), the bounds of the queue (engine_core.py).

Promotion, the bound on being overtaken. Under priority, shortest-prefill and longest-prefix a request that has been queued
for W = promote_after_steps steps is promoted: from then on nobody is admitted before it but those promoted earlier, and no
waiting request may push it out. So with k requests promoted before it, every one of at most T tokens, R running and S the
bound on stalled steps (starvation.py), it is admitted after at most W + (k + R + 1) * T * (S + 1) steps. fcfs needs no
promotion: k are those that came before it. Under fair the counters are the bound (fair.py).
A request that follows another one (followers.py) is not queued meanwhile: steps in which it follows do not count, and R is then
who runs when it is queued again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from octavo.config import EngineConfig
from octavo.engine.fair import Fair
from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.request import Request
from octavo.engine.request_queue import RequestHeap

Key = tuple[Any, ...]


class Policy(Protocol):
    """What the scheduler asks. `step` is the number of the step being planned."""

    def push(self, request: Request, step: int) -> None:
        """Queue a request, or queue it again."""

    def peek(self, step: int) -> Request | None:
        """Who is to be admitted next."""

    def remove(self, request: Request, step: int) -> None:
        """Take one out, wherever it stands: admitted or gone. KeyError if it does not wait."""

    def __contains__(self, request: Request) -> bool: ...

    def __len__(self) -> int: ...

    def rank(self, request: Request) -> Key:
        """Smaller is more urgent; of the running requests the most urgent one is never preempted."""

    def level(self, request: Request) -> float:
        """Only running requests of the highest level are preempted, while there are any."""

    def less_urgent(self, waiting: Request, running: Iterable[Request]) -> list[Request]:
        """Those whose place the waiting one may take."""

    def admitted(self, request: Request) -> None:
        """For the first time; its num_computed_tokens were found in the cache."""

    def generated(self, request: Request) -> None:
        """One token more."""


def make_policy(config: EngineConfig, kv: KVCacheManager) -> Policy:
    makers: dict[str, Callable[[], Policy]] = {
        "fcfs": Fcfs,
        "priority": lambda: Priority(config.promote_after_steps),
        "shortest-prefill": lambda: ShortestPrefill(config.promote_after_steps),
        "longest-prefix": lambda: LongestPrefix(config.promote_after_steps, kv),
        "fair": Fair,
    }
    return makers[config.policy]()


class Fcfs:
    """First come, first served; the `priority` of requests means nothing. Also the base of the policies with a fixed key."""

    def __init__(self) -> None:
        self._heap = RequestHeap()

    def key(self, request: Request) -> Key:
        return request.order

    def push(self, request: Request, step: int) -> None:
        self._heap.push(request, self.key(request))

    def peek(self, step: int) -> Request | None:
        return self._heap.peek()

    def remove(self, request: Request, step: int) -> None:
        self._heap.remove(request)

    def __contains__(self, request: Request) -> bool:
        return request in self._heap

    def __len__(self) -> int:
        return len(self._heap)

    def rank(self, request: Request) -> Key:
        return request.order

    def level(self, request: Request) -> float:
        return 0

    def less_urgent(self, waiting: Request, running: Iterable[Request]) -> list[Request]:
        return []

    def admitted(self, request: Request) -> None:
        pass

    def generated(self, request: Request) -> None:
        pass


class ShortestPrefill(Fcfs):
    """The fewest tokens to compute first, equal ones by arrival. Choices of a prompt that is computed come before all others."""

    def __init__(self, promote_after: int) -> None:
        super().__init__()
        self._promote_after = promote_after
        self._due = RequestHeap()

    def key(self, request: Request) -> Key:
        return (1 if request.is_fork else request.num_target_tokens, *request.order)

    def push(self, request: Request, step: int) -> None:
        super().push(request, step)
        if request.patience != 0:  # one that is promoted stays so, and keeps its place among the promoted
            request.due_step = step + (self._promote_after if request.patience is None else request.patience)
        self._due.push(request, (request.due_step, *request.order))

    def peek(self, step: int) -> Request | None:
        due = self._due.peek()
        if due is not None and due.due_step is not None and due.due_step <= step:
            return due
        return self._next(step)

    def _next(self, step: int) -> Request | None:
        """Where nobody is promoted."""
        return self._heap.peek()

    def remove(self, request: Request, step: int) -> None:
        super().remove(request, step)
        self._due.remove(request)
        assert request.due_step is not None
        request.patience = request.due_step - step + 1 if request.due_step > step else 0  # this step it has not waited


class Priority(ShortestPrefill):
    """The smallest `priority` first, equal ones by arrival; the more urgent pushes out the less urgent.

    While all are equal this is fcfs, and promotion changes nothing.
    """

    def key(self, request: Request) -> Key:
        return (request.origin.priority, *request.order)

    def rank(self, request: Request) -> Key:
        return (request.patience != 0, request.origin.priority, *request.order)

    def level(self, request: Request) -> float:
        return float("-inf") if request.patience == 0 else request.origin.priority

    def less_urgent(self, waiting: Request, running: Iterable[Request]) -> list[Request]:
        priority = waiting.origin.priority
        return [other for other in running if other.origin.priority > priority and other.patience != 0]


#: Waiting requests whose cached prefix is known, and blocks looked up in a step to keep it known.
PREFIX_WINDOW, PREFIX_LOOKUPS = 64, 128


class LongestPrefix(ShortestPrefill):
    """Most cached tokens first, equal ones by arrival: what the cache holds is used before it is evicted.

    Looks at the first PREFIX_WINDOW of those that wait, in order of arrival, and brings what it knows of them up to date with at
    most PREFIX_LOOKUPS lookups a step, so that its cost is bounded; a figure may therefore be a few steps old. Requests that
    were preempted, and choices of a prompt that is computed, come first: their blocks are in the cache.
    """

    def __init__(self, promote_after: int, kv: KVCacheManager) -> None:
        super().__init__(promote_after)
        self._kv = kv
        #: The window: a request and the serials of its cached prefix. In the order in which they are brought up to date.
        self._window: dict[str, tuple[Request, list[int]]] = {}
        self._refreshed = -1
        self._best: Request | None = None

    def key(self, request: Request) -> Key:
        return (not self._comes_first(request), *request.order)

    @staticmethod
    def _comes_first(request: Request) -> bool:
        return request.parent is not None or request.was_admitted

    def _next(self, step: int) -> Request | None:
        first = self._heap.peek()
        if first is not None and self._comes_first(first):
            return first
        if step != self._refreshed:
            self._refreshed, self._best = step, None
            self._fill()
            self._refresh()
        if self._best is None:
            self._best = min((r for r, _ in self._window.values()), key=self._rank_in_window, default=None)
        return self._best

    def _rank_in_window(self, request: Request) -> Key:
        return (-len(self._window[request.request_id][1]), *request.order)

    def _fill(self) -> None:
        while len(self._window) < PREFIX_WINDOW and (request := self._heap.peek()) is not None and not self._comes_first(request):
            self._heap.remove(request)
            self._window[request.request_id] = (request, [])

    def _refresh(self) -> None:
        left = PREFIX_LOOKUPS
        for name in list(self._window):
            if left <= 0:
                return
            request, serials = self._window.pop(name)
            self._window[name] = (request, serials)  # behind the others, for the next step
            left -= self._kv.prefixes.follow(request, serials, left)

    def remove(self, request: Request, step: int) -> None:
        if self._window.pop(request.request_id, None) is not None:
            self._heap.push(request, self.key(request))  # only to be taken out below
        if request is self._best:
            self._best = None
        super().remove(request, step)

    def __contains__(self, request: Request) -> bool:
        return super().__contains__(request) or self._window.get(request.request_id, (None,))[0] is request

    def __len__(self) -> int:
        return len(self._heap) + len(self._window)
