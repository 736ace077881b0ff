"""RecomputeDebt: recomputed tokens that first-time ones have not made up for yet.

A request that comes back after a preemption owes the tokens it recomputes. Every token that any request computes for the first
time, prompt or generated, pays for one, the oldest debts first. Until then so much room stays free when others are admitted,
which is why the request is not put out again for as many tokens. What is owed goes when the request ends or loses its blocks
again: so nothing is owed where nothing runs or holds, and never more than the pool holds.

Owner: the scheduler. Not here: who is admitted (scheduler.py), how much of a pool a reserve may take (kv_cache_manager.py).
"""

from __future__ import annotations

from octavo.engine.request import Request


class RecomputeDebt:
    def __init__(self) -> None:
        #: Tokens by request id, the oldest debt first; no zeros.
        self._owed: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._owed)

    @property
    def num_tokens(self) -> int:
        return sum(self._owed.values())

    @property
    def debtors(self) -> frozenset[str]:
        return frozenset(self._owed)

    def owe(self, request: Request) -> None:
        """It has been admitted, and will compute again what it lost and the cache has not kept."""
        lost = min(request.num_lost_tokens, request.num_target_tokens) - request.num_computed_tokens
        if lost > 0:
            self._owed[request.request_id] = lost

    def pay(self, num_tokens: int) -> None:
        """So many tokens were computed for the first time."""
        while num_tokens > 0 and self._owed:
            name, owed = next(iter(self._owed.items()))
            if owed > num_tokens:
                self._owed[name] = owed - num_tokens
                return
            del self._owed[name]
            num_tokens -= owed

    def forgive(self, request: Request) -> None:
        """It has ended, or lost its blocks."""
        self._owed.pop(request.request_id, None)
