"""RequestQueue: requests that wait for admission, most urgent first.

Owner: the scheduler. Order is (priority, arrival, choice), so a preempted request comes back in front of everything
that arrived later. Adding, taking and removing cost O(log n) amortised; nothing walks the queue.
Not here: whether a request fits (scheduler.py).
"""

from __future__ import annotations

import heapq

from octavo.engine.request import Request

_Order = tuple[int, int, int]


class RequestQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[_Order, Request]] = []
        #: The requests really waiting; a heap entry that is not here was removed and is skipped.
        self._live: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._live)

    def push(self, request: Request) -> None:
        assert request.request_id not in self._live
        self._live[request.request_id] = request
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        while self._heap:
            request = self._heap[0][1]
            if self._live.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take the most urgent one. Raises IndexError when empty."""
        request = self.peek()
        if request is None:
            raise IndexError("the queue is empty")
        heapq.heappop(self._heap)
        del self._live[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands; it never comes back under the same order."""
        del self._live[request.request_id]
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [item for item in self._heap if self._live.get(item[1].request_id) is item[1]]
            heapq.heapify(self._heap)

    def __contains__(self, request: Request) -> bool:
        return self._live.get(request.request_id) is request
