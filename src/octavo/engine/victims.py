"""Victims: who gives up its blocks when memory is short.

Owner: the scheduler, which then preempts. Of those the policy puts last it is the one with the least to recompute.
Not here: when somebody must (scheduler.py), the orders (policies.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.policies import Policy
from octavo.engine.request import Request


class Victims:
    def __init__(self, kv: KVCacheManager, policy: Policy) -> None:
        self._kv = kv
        self._policy = policy

    def for_running(self, running: Iterable[Request], holding: Iterable[Request]) -> Request:
        """Who makes room for a running request: somebody who only holds blocks, else not the most urgent, unless it is alone."""
        if (holder := self.latest(holding)) is not None:
            return holder
        candidates = list(running)
        if len(candidates) > 1:
            candidates.remove(min(candidates, key=self._policy.rank))
        return self._cheapest(candidates)

    def for_waiting(self, request: Request, running: Collection[Request], holding: Iterable[Request]) -> Request | None:
        """Whom a waiting request pushes out next, if anybody: of those the policy says first one who only holds blocks, if that frees
        any; where nothing runs at all, anybody who only holds blocks."""
        if not running:
            return self.latest(holding)
        less_urgent = self._policy.less_urgent(request, holding)
        if (holder := self.latest(other for other in less_urgent if self._kv.tokens_at_risk(other) >= 0)) is not None:
            return holder
        less_urgent = self._policy.less_urgent(request, running)
        return self._cheapest(less_urgent) if less_urgent else None

    def latest(self, requests: Iterable[Request]) -> Request | None:
        return max(requests, key=self._policy.rank, default=None)

    def _cheapest(self, requests: Collection[Request]) -> Request:
        """Of those the policy puts last the one with the least to recompute, that frees a block at all; the latest of equal ones."""
        level = max(map(self._policy.level, requests))
        costs = [(self._kv.tokens_at_risk(r), r) for r in requests if self._policy.level(r) == level]
        least = min(costs, key=lambda cost: (cost[0] < 0, cost[0]))[0]
        return max((r for risk, r in costs if risk == least), key=self._policy.rank)
