"""Followers: requests that wait for a running one to compute the beginning that both share, instead of computing it too.

Owner: the scheduler, which takes a request out of the queue when it begins to follow and queues it again when it is done.
A follower holds no blocks: the shared ones become findable, and it hits them like any cached prefix.
It follows until the shared blocks are computed, the leader stops running (ended, aborted, preempted), or it has followed
for MOST_FOLLOWING_STEPS steps in all; so it never waits for something that does not come. Meanwhile the leader goes as early
as its most urgent follower would, so the beginning is there no later than if the follower computed it.
Not here: what counts as shared (kv_cache_manager.py), the queue (policies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.policies import Key
from octavo.engine.request import Request, RequestStatus


@dataclass(slots=True)
class _Following:
    request: Request
    leader: Request
    #: Tokens that the leader has to compute.
    num_tokens: int
    since: int


class Followers:
    def __init__(self, kv: KVCacheManager, most: int) -> None:
        """`most` at a time."""
        self._kv = kv
        self._most = most
        self._following: dict[str, _Following] = {}

    def __len__(self) -> int:
        return len(self._following)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._following

    def add(self, request: Request, prefills: Iterable[Request], step: int) -> bool:
        """Have a waiting request follow the one of the running prefills it shares most with, if that is more than is cached."""
        is_fork = request.is_fork and request.parent is not None and request.parent.status is RequestStatus.HOLDING
        if is_fork or request.follow_steps_left == 0 or len(self._following) >= self._most:
            return False
        shared, leader = 0, None
        for other in prefills:
            tokens = self._kv.shared_beginning(request, other)
            if tokens > shared:
                shared, leader = tokens, other
        if leader is None or len(self._kv.prefixes.match(request)[0][0]) * self._kv.block_size >= shared:
            return False
        self._following[request.request_id] = _Following(request, leader, shared, step)
        return True

    def by_urgency(self, prefills: Iterable[Request], rank: Callable[[Request], Key]) -> list[Request]:
        """Running prefills, smallest rank first; one that others follow has the smallest of theirs, if that is less than its own."""
        ranks = {request.request_id: (rank(request), request) for request in prefills}
        for wait in self._following.values():
            name = wait.leader.request_id
            if name in ranks:
                ranks[name] = (min(ranks[name][0], rank(wait.request)), wait.leader)
        return [request for _, request in sorted(ranks.values(), key=lambda pair: pair[0])]

    def remove(self, request: Request) -> None:
        del self._following[request.request_id]

    def take_done(self, step: int) -> list[Request]:
        """Those that need not follow any longer."""
        found = []
        for wait in list(self._following.values()):
            steps = step - wait.since
            computed = wait.leader.num_computed_tokens >= wait.num_tokens
            if computed or wait.leader.status is not RequestStatus.RUNNING or steps >= wait.request.follow_steps_left:
                wait.request.follow_steps_left = max(0, wait.request.follow_steps_left - steps)
                wait.request.followed.append((wait.since, step))
                self.remove(wait.request)
                found.append(wait.request)
        return found
