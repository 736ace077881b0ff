"""Fair: the policy that serves tenants by what they have got, with a virtual token counter for each.

Owner of the waiting requests, by tenant, and of the counters. Not here: the other policies, what the scheduler asks of one
(policies.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

from octavo.engine.request import Request
from octavo.engine.request_queue import RequestHeap

#: What a tenant's counter counts: a prompt token that had to be computed, and a generated token.
PROMPT_WEIGHT, GENERATED_WEIGHT = 1, 2
#: Counters kept of tenants that have nothing waiting.
MOST_TENANTS = 4096
#: Outdated turns that may always stand among the valid ones.
FEW_TURNS = 64


class _Tenant:
    __slots__ = ("counter", "turn", "waiting")

    def __init__(self) -> None:
        self.counter = 0
        self.waiting = RequestHeap()
        #: Which entry of the heap of tenants is the valid one; -1 where nothing waits.
        self.turn = -1


class Fair:
    """The tenant that has got least first (Sheng et al. 2024, "Fairness in Serving Large Language Models").

    A counter grows by 1 for each prompt token that is computed and by 2 for each generated token. A tenant that begins to wait
    is lifted to the smallest counter of those waiting (the last one that waited, if none does), so that time without
    requests earns nothing. Within a tenant requests go by arrival.
    Bound (theorem 4.4 of the paper): while two tenants wait all the time, what they get differs by at most
    2 * max(tokens of the longest prompt, 2 * tokens the KV pool holds), whoever else comes.
    """

    def __init__(self) -> None:
        self._tenants: dict[str | None, _Tenant] = {}
        #: Tenants with waiting requests: (counter when it was put here, number, tenant's key); outdated ones are skipped.
        self._turns: list[tuple[int, int, str | None]] = []
        #: Length at which the outdated ones are thrown out.
        self._most_turns = FEW_TURNS
        self._numbers = count()
        self._num_waiting = 0
        #: Smallest counter when the queue was last asked or left.
        self._floor = 0

    def push(self, request: Request, step: int) -> None:
        key = request.origin.tenant
        tenant = self._tenant(key)
        if not tenant.waiting:
            self._least()
            tenant.counter = max(tenant.counter, self._floor)
            self._queue(key, tenant)
        tenant.waiting.push(request, request.order)
        self._num_waiting += 1

    def peek(self, step: int) -> Request | None:
        tenant = self._least()
        return None if tenant is None else tenant.waiting.peek()

    def remove(self, request: Request, step: int) -> None:
        tenant = self._tenants[request.origin.tenant]
        tenant.waiting.remove(request)
        self._num_waiting -= 1
        if not tenant.waiting:
            tenant.turn = -1
            if not self._num_waiting:
                self._floor = tenant.counter

    def __contains__(self, request: Request) -> bool:
        tenant = self._tenants.get(request.origin.tenant)
        return tenant is not None and request in tenant.waiting

    def __len__(self) -> int:
        return self._num_waiting

    def rank(self, request: Request) -> tuple[int, int]:
        return request.order

    def level(self, request: Request) -> float:
        return self._tenant(request.origin.tenant).counter

    def less_urgent(self, waiting: Request, running: Iterable[Request]) -> list[Request]:
        return []

    def admitted(self, request: Request) -> None:
        if request.parent is None:
            self._tenant(request.origin.tenant).counter += PROMPT_WEIGHT * (request.num_target_tokens - request.num_computed_tokens)

    def generated(self, request: Request) -> None:
        self._tenant(request.origin.tenant).counter += GENERATED_WEIGHT

    def _tenant(self, key: str | None) -> _Tenant:
        tenant = self._tenants.get(key)
        if tenant is None:
            if len(self._tenants) >= MOST_TENANTS + len(self._turns):
                self._forget_some()
            tenant = self._tenants[key] = _Tenant()
        return tenant

    def _forget_some(self) -> None:
        """Of those with nothing waiting, the half with the smallest counters: they would be lifted anyway."""
        idle = sorted((tenant.counter, number, key) for number, (key, tenant) in enumerate(self._tenants.items()) if not tenant.waiting)
        for _, _, key in idle[: max(1, len(idle) // 2)]:
            del self._tenants[key]

    def _queue(self, key: str | None, tenant: _Tenant) -> None:
        tenant.turn = next(self._numbers)
        heapq.heappush(self._turns, (tenant.counter, tenant.turn, key))
        if len(self._turns) > self._most_turns:
            self._turns = [turn for turn in self._turns if self._is_valid(turn)]
            heapq.heapify(self._turns)
            self._most_turns = 2 * len(self._turns) + FEW_TURNS

    def _is_valid(self, turn: tuple[int, int, str | None]) -> bool:
        tenant = self._tenants.get(turn[2])
        return tenant is not None and tenant.turn == turn[1]

    def _least(self) -> _Tenant | None:
        """Of the tenants with waiting requests the one with the smallest counter; counters only grow, so entries are late, never early."""
        while self._turns:
            counter, _, key = self._turns[0]
            if not self._is_valid(self._turns[0]):
                heapq.heappop(self._turns)
                continue
            tenant = self._tenants[key]
            if tenant.counter <= counter:
                self._floor = counter
                return tenant
            heapq.heappop(self._turns)
            self._queue(key, tenant)
        return None
