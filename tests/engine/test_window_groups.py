"""KV groups with a sliding window: what is held, given up, found again, and that work ends; with a fake model that sees no more."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.executor import KVGroup
from octavo.engine.kv_cache_manager import NO_BLOCK, KVCacheManager
from octavo.engine.metrics import EngineStats
from octavo.engine.request import Request
from tests.engine.fake import Collector, FakeExecutor, check_against_reference, finish, make_core, request

WINDOW = 6


def manager(num_blocks: int = 16, window_blocks: int = 16, *, full: bool = True, max_chunk: int = 4) -> KVCacheManager:
    """Blocks of 4; a row at position p sees 6 tokens."""
    groups = (*([KVGroup(num_blocks, 4)] if full else []), KVGroup(window_blocks, 4, WINDOW))
    return KVCacheManager(groups, True, EngineStats(), max_chunk=max_chunk)


def make(name: str, prompt, **fields) -> Request:
    return Request(request(name, prompt, **fields), 1)


def compute(kv: KVCacheManager, made: Request, count: int) -> int:
    """One chunk of a request that has started."""
    count = kv.allocate_chunk(made, count, 0)
    kv.take_copies()
    made.num_computed_tokens += count
    kv.commit(made)
    kv.release_copies()
    return count


def computed(kv: KVCacheManager, name: str, prompt, **fields) -> Request:
    made = make(name, prompt, **fields)
    assert kv.admit(made)
    while made.num_missing_tokens:
        assert compute(kv, made, min(4, made.num_missing_tokens)) > 0
    return made


@pytest.mark.parametrize("full", [True, False])
def test_blocks_behind_the_window_are_given_up_and_no_others(full):
    kv = manager(full=full)
    made = make("a", range(40))
    assert kv.admit(made)
    table = kv.block_tables(made)[-1]
    assert table == []  # promised, not taken
    for done in range(1, 41):
        assert compute(kv, made, 1) == 1
        first = max(0, done - WINDOW + 1) // 4  # of the next row, at position `done`
        assert [block == NO_BLOCK for block in table] == [index < first for index in range(-(-done // 4))]
        kv.check_invariants([made])
    assert kv.stats.blocks_freed_behind_window == 8 and kv.pools[-1].num_free == 16 - 2
    kv.free(made)
    kv.check_invariants([])


@pytest.mark.parametrize("others, hit", [(24, 40), (28, 0)])
def test_a_hit_needs_the_window_of_its_end_only(others, hit):
    """The full group has all of it. A row at 40 sees blocks 8 and 9 of the other: with one of them taken there is no hit."""
    kv = manager(num_blocks=32, window_blocks=8)
    kv.free(computed(kv, "a", range(41)))
    other = computed(kv, "o", range(100, 100 + others))  # takes the oldest blocks of the window's pool
    kv.free(other)
    kept = {view.block_id for view in kv.snapshot() if view.group == 1 and view.cached}
    again = make("b", range(41))
    assert kv.admit(again)
    assert again.num_computed_tokens == hit
    if hit:
        table = kv.block_tables(again)[1]
        assert table[:8] == [NO_BLOCK] * 8 and set(table[8:]) <= kept and len(table) == 10
    kv.check_invariants([again])


@pytest.mark.parametrize("full", [True, False])
def test_a_hit_is_found_though_its_beginning_has_been_evicted(full):
    """Of 41 tokens the window's pool keeps the last ones; a longer prompt with that beginning hits all of them."""
    kv = manager(num_blocks=32, window_blocks=6, full=full)
    kv.free(computed(kv, "a", range(41)))
    assert kv.stats.blocks_evicted > 0
    longer = make("b", range(50))
    assert kv.admit(longer) and longer.num_computed_tokens == 40
    kv.check_invariants([longer])
    shorter = make("c", range(14))  # its end is long gone from the window's pool: a hit would read what is not there
    assert kv.prefixes.match(shorter) == ([[]] * len(kv.pools), [])
    kv.free(longer)
    assert kv.admit(shorter) and shorter.num_computed_tokens == 0
    kv.check_invariants([shorter])


def test_a_fully_cached_prompt_whose_last_block_cannot_be_copied():
    kv = manager(num_blocks=8, window_blocks=3)
    first = computed(kv, "a", range(16))
    kv.free(first)
    second = make("b", range(16))
    assert kv.admit(second)
    assert second.num_computed_tokens == 12  # the whole last block again
    kv.check_invariants([second])


def test_forks_share_holes():
    kv = manager(num_blocks=40)
    parent = computed(kv, "p", range(19), n=2)
    first, last = parent.make_children()
    before = list(kv.block_tables(parent)[1])
    assert before[:3] == [NO_BLOCK] * 3
    assert kv.fork(parent, first, last=False) and kv.fork(parent, last, last=True)
    kv.check_invariants([first, last])
    assert kv.tokens_at_risk(first) == first.num_computed_tokens  # a private last block, and a window that has moved
    for child in (first, last):
        assert kv.block_tables(child)[1][:3] == [NO_BLOCK] * 3
        compute(kv, child, 1)
    kv.check_invariants([first, last])
    kv.free(first)
    kv.check_invariants([last])


def test_what_a_prefill_will_need_is_promised_to_it():
    kv = manager(num_blocks=100, window_blocks=7)
    first = make("a", range(60))
    assert kv.admit(first) and kv.pools[1].num_free == 7  # at most ceil((6 - 1 + 4) / 4) + 1 at a time
    assert kv.room()[1] == 3
    assert not kv.admit(make("b", range(60)))
    assert kv.admit(make("c", range(100, 108)))  # two blocks in all
    kv.free(first)
    assert kv.admit(make("d", range(60)))


def test_chunks_shrink_to_the_blocks_that_are_free():
    kv = manager(num_blocks=100, window_blocks=4, max_chunk=1000)
    made = make("a", range(60))
    assert kv.admit(made)
    assert kv.allocate_chunk(made, 60, 1) == 12  # one block stays free for the decodes
    assert compute(kv, made, 60) == 16
    assert kv.allocate_chunk(made, 60, 100) == 8  # 4 blocks, of which the last two can still be seen
    kv.check_invariants([made])


def check_bound(core) -> None:
    for running in core.scheduler.running():
        for group, table in zip(core.kv.groups, core.kv.block_tables(running), strict=True):
            if group.sliding_window is not None:
                most = -(-(group.sliding_window + core.config.max_num_batched_tokens) // group.block_size) + 1
                assert len(table) - table.count(NO_BLOCK) <= most


SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@SETTINGS
@given(
    seed=st.integers(0, 2**20),
    block_size=st.integers(1, 4),
    window=st.integers(1, 14),
    spare=st.integers(0, 8),
    full=st.integers(0, 1),
    budget=st.sampled_from([1, 2, 5, 32]),
    seqs=st.integers(1, 6),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "longest-prefix", "fair"]),
)
def test_any_life_of_an_engine_with_a_window(seed, block_size, window, spare, full, budget, seqs, caching, policy):
    """Adding, aborting, resetting and stepping at random; every finished answer is the right one, and work ends."""
    rng = random.Random(seed)
    fewest = KVGroup(1, block_size, window).blocks_in_window(1)
    core = make_core(
        num_blocks=-(-rng.randint(24, 70) // block_size),
        block_size=block_size,
        max_model_len=48,
        groups=full,
        windows=[(window, fewest + spare)],
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
        policy=policy,
    )
    collector, orders, aborted = Collector(), {}, set()
    for number in range(rng.randint(2, 12)):
        family = rng.randrange(2)
        prompt = [5 + (family * 11 + i * i) % 25 for i in range(rng.randint(1, 18))] + [
            5 + rng.randrange(25) for _ in range(rng.randint(0, 4))
        ]
        order = request(
            f"r{number}", prompt, n=rng.choice([1, 1, 3]), max_tokens=rng.randint(1, 20), priority=rng.randrange(2), seed=number
        )
        orders[order.request_id] = order
        collector.expect(order)
        core.add_request(order)
        for _ in range(rng.randint(0, 6)):
            collector.add(core.step())
            core.check_invariants()
            check_bound(core)
        if rng.random() < 0.15:
            name = f"r{rng.randint(0, number)}"
            deltas = core.abort([name])
            aborted |= {delta.request_id for delta in deltas}
            collector.add(deltas)
        if rng.random() < 0.05:
            core.reset_prefix_cache()
    finish(core, collector)
    kept = {name: output for name, output in collector.outputs.items() if name not in aborted}
    check_against_reference(kept, [orders[name] for name in kept], core.executor.info)


def test_the_features_of_the_random_lives_do_fire():
    """The same kind of life, counted: holes, hits, forks and preemptions all happen, in pools of a few blocks."""
    core = make_core(num_blocks=30, block_size=2, groups=1, windows=[(5, 10)], max_num_batched_tokens=6, max_model_len=64)
    prompts = [[5 + (i * i) % 25 for i in range(12)] + [5 + number] for number in range(6)]
    orders = [request(f"r{i}", p, n=2 if i == 0 else 1, max_tokens=24, eos=False, seed=i) for i, p in enumerate(prompts)]
    collector = Collector()
    for order in orders:
        collector.expect(order)
        core.add_request(order)
    while core.has_unfinished_requests():
        collector.add(core.step())
        core.check_invariants()
        check_bound(core)
    check_against_reference(collector.outputs, orders, core.executor.info)
    stats = core.stats
    assert stats.preemptions and stats.forks and stats.prefix_hit_tokens and stats.blocks_freed_behind_window > 20


class LongExecutor(FakeExecutor):
    """The digest of a token says where it stands, and nothing more: linear in a long prompt."""

    def digests(self, known, end):
        return list(range(end))


@pytest.mark.parametrize("window", [None, 256])
def test_a_prompt_of_32k_tokens_stalls_no_stream(window):
    length, budget, stalled = 32 * 1024, 512, 4
    windows = [] if window is None else [(window, 200)]
    executor = LongExecutor(num_blocks=2400, block_size=16, max_model_len=length + 64, windows=windows)
    core = make_core(executor, max_num_batched_tokens=budget, max_stalled_steps=stalled, max_num_seqs=8, max_decode_batch_size=4)
    streams = [request(f"s{i}", range(5, 12), max_tokens=400, eos=False) for i in range(6)]  # more than decode in one step
    for order in streams:
        core.add_request(order)
    for _ in range(4):
        core.step()
    core.add_request(request("long", [5 + i % 20 for i in range(length)], max_tokens=1, eos=False))
    last, longest, steps, most = {order.request_id: 4 for order in streams}, 0, 4, 0
    while core.has_request("long"):
        served = {delta.request_id for delta in core.step()}
        steps += 1
        for name in last:
            if name in served:
                longest, last[name] = max(longest, steps - last[name] - 1), steps
        longest = max(longest, *(steps - step for step in last.values()))
        if window is not None:
            most = max(most, core.kv.pools[1].num_blocks - core.kv.pools[1].num_free)
            check_bound(core)
    core.check_invariants()
    assert all(core.has_request(order.request_id) for order in streams), "the streams must have run all the time"
    assert 1 <= longest <= stalled
    assert steps - 4 <= length // (budget - 4) + 3
    assert core.stats.preemptions == 0
    if window is not None:
        assert most <= (256 + 512) // 16 + 1 + 6 * (256 // 16 + 2) and core.stats.blocks_freed_behind_window >= (length - 256) // 16
