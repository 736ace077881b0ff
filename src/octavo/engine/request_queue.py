"""RequestHeap: waiting requests under keys that do not change, smallest first; WaitingCounts: how many wait.

Owner of a heap: a policy (policies.py), which may hold several; of the counts: the scheduler. Adding, taking and removing cost
O(log n) amortised; nothing walks the heap. Not here: what the keys are (policies.py), whether a request fits (scheduler.py).
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any

from octavo.engine.request import Request


class RequestHeap:
    """Keys of one heap are tuples that compare with each other; two requests never have equal ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Any, ...], Request]] = []
        #: The entry of each request that is really here; another one in the heap was removed and is skipped.
        self._live: dict[str, tuple[tuple[Any, ...], Request]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        entry = self._live.get(request.request_id)
        return entry is not None and entry[1] is request

    def push(self, request: Request, key: tuple[Any, ...]) -> None:
        assert request.request_id not in self._live
        self._live[request.request_id] = entry = (key, request)
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request | None:
        while self._heap:
            entry = self._heap[0]
            if self._live.get(entry[1].request_id) is entry:
                return entry[1]
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Raises KeyError if it is not here."""
        del self._live[request.request_id]
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._live.get(entry[1].request_id) is entry]
            heapq.heapify(self._heap)


class WaitingCounts:
    """Of all sequences that wait, whether in the queue or as followers; what the limits of the queue are about."""

    def __init__(self) -> None:
        #: Prompt and generated tokens. A fork counts none: its parent has computed them.
        self.num_tokens = 0
        #: Sequences, by the id of the request they came from; no zeros.
        self._sequences: Counter[str] = Counter()

    @property
    def num_requests(self) -> int:
        """As clients count: a prompt is one request, however many of its choices wait."""
        return len(self._sequences)

    @property
    def num_sequences(self) -> int:
        return self._sequences.total()

    def add(self, request: Request) -> None:
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """It runs, or is gone. Call before `was_admitted` changes."""
        self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        self.num_tokens += 0 if request.is_fork else sign * request.num_tokens
        name = request.origin.request_id
        self._sequences[name] += sign
        if not self._sequences[name]:
            del self._sequences[name]
