"""EngineStats: counters of one engine core since its start, and gauges of the moment, as plain numbers.

Owner: the engine core; the scheduler and the KV manager add to the counters. Cheap enough to be always on.
Not here: exposition (server), the record of single steps (events.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class EngineStats:
    #: Counters.
    steps: int = 0
    #: Forward passes replayed by one native call, and those whose operations were called one by one.
    steps_replayed: int = 0
    steps_eager: int = 0
    requests_added: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    #: Refused with code queue_full.
    requests_refused: int = 0
    #: Waiting requests that had been overtaken for promote_after_steps and went first.
    requests_promoted: int = 0
    prompt_tokens_computed: int = 0
    generated_tokens_computed: int = 0
    tokens_sampled: int = 0
    preemptions: int = 0
    #: Tokens computed again after a preemption; those found in the prefix cache are not.
    tokens_recomputed: int = 0
    #: Times a request waited for another one to compute the beginning that both share.
    prefix_waits: int = 0
    #: Children started on the blocks of their parent.
    forks: int = 0
    #: Blocks copied because a request had to write into a shared or findable one.
    blocks_copied: int = 0
    #: Blocks a request got without computing them.
    blocks_shared: int = 0
    blocks_taken: int = 0
    #: Blocks that requests gave up because no later token of theirs sees them.
    blocks_freed_behind_window: int = 0
    blocks_evicted: int = 0
    #: Blocks whose last holder let go of them.
    blocks_freed: int = 0
    #: Tokens looked up in the prefix cache when requests were admitted, and those found.
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    #: Seconds spent choosing what to compute, computing it, and making text and endings of it.
    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    update_seconds: float = 0.0
    #: Steps by how many requests got exactly one token in them (the decode batch; 0 left out), and any tokens.
    decode_batch_sizes: dict[int, int] = field(default_factory=dict)
    batch_sizes: dict[int, int] = field(default_factory=dict)
    #: Gauges.
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    #: Parents that keep their blocks for children not started yet.
    holding: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0

    def copy(self) -> EngineStats:
        """The figures of this moment, which nobody changes."""
        return replace(self, decode_batch_sizes=dict(self.decode_batch_sizes), batch_sizes=dict(self.batch_sizes))

    def count_batch(self, tokens_per_request: list[int]) -> None:
        """Add one step to the histograms."""
        for sizes, size in ((self.decode_batch_sizes, tokens_per_request.count(1)), (self.batch_sizes, len(tokens_per_request))):
            if size:
                sizes[size] = sizes.get(size, 0) + 1

    @property
    def kv_usage(self) -> float:
        """Share of the pool that is held, 0 to 1."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0

    @property
    def blocks_free(self) -> int:
        """Blocks nobody holds, with or without a cached prefix in them."""
        return self.blocks_total - self.blocks_used
