"""Who is preempted, and how much is computed twice: counted, in pools that hold only part of what runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.request import Request
from tests.engine.fake import check_against_reference, make_core, request, run


def letters(length: int, start: int = 5) -> list[int]:
    return [5 + (start * 3 + i * 7) % 25 for i in range(length)]


def useful(orders) -> int:
    """Tokens that have to be computed once."""
    return sum(len(o.prompt_token_ids) + o.max_tokens - 1 for o in orders)


def computed(core) -> int:
    return core.stats.prompt_tokens_computed + core.stats.generated_tokens_computed


def preempted(core) -> list[str]:
    return [name for event in core.events.recent() for name in event.preempted]


def test_the_victim_is_the_one_with_the_least_to_recompute():
    core = make_core(num_blocks=20, block_size=4, enable_prefix_caching=False)
    orders = [
        request("oldest", letters(4), max_tokens=30, eos=False),
        request("short", letters(8, 1), max_tokens=20, eos=False),
        request("long", letters(40, 2), max_tokens=20, eos=False),
    ]
    outputs = run(core, orders)
    assert preempted(core)[0] == "short"  # not the latest, which has five times as much to lose
    check_against_reference(outputs, orders, core.executor.info)


def test_what_others_hold_too_is_not_to_be_recomputed():
    core = make_core(num_blocks=40, block_size=4)
    shared = letters(32)
    core.add_request(request("a", [*shared, 7], max_tokens=20, eos=False))
    core.step()
    core.add_request(request("b", [*shared, 8, 9], max_tokens=20, eos=False))
    core.add_request(request("c", letters(9, 3), max_tokens=20, eos=False))
    core.step()
    by_name: dict[str, Request] = core._requests
    risk = {name: core.kv.tokens_at_risk(by_name[name]) for name in "abc"}
    assert risk == {"a": 2, "b": 2, "c": 9}
    core.step()
    assert core.kv.tokens_at_risk(by_name["a"]) == 3
    core.abort(["b"])
    assert core.kv.tokens_at_risk(by_name["a"]) == 35


def test_a_request_that_would_free_nothing_is_passed_over():
    """b has all of a's blocks: a's own preemption would give none back."""
    core = make_core(num_blocks=40, block_size=4)
    core.add_request(request("a", letters(8), max_tokens=20, eos=False))
    core.step()
    core.add_request(request("b", letters(8) + [9], max_tokens=20, eos=False))
    core.step()
    a = core._requests["a"]
    table = core.kv.block_tables(a)[0]
    assert len(table) == 3 and core.kv.tokens_at_risk(a) == 1
    core.kv.pools[0].ref_counts[table[2]] += 1
    assert core.kv.tokens_at_risk(a) == -1
    core.kv.pools[0].ref_counts[table[2]] -= 1


@pytest.mark.parametrize("num_blocks, block_size, seqs, most", [(200, 1, 16, 80), (100, 2, 10, 120)])
@pytest.mark.parametrize("caching", [False, True])
def test_no_thrash_in_a_pool_that_holds_a_part_of_the_running_set(caching, num_blocks, block_size, seqs, most):
    """A pool for two or three of ten or more sequences: at most one token is recomputed for each that is generated."""
    core = make_core(num_blocks=num_blocks, block_size=block_size, max_num_seqs=seqs, enable_prefix_caching=caching)
    orders = [request(f"r{i}", letters(10, i), max_tokens=most, eos=False) for i in range(seqs)]
    outputs = run(core, orders)
    check_against_reference(outputs, orders, core.executor.info)
    stats = core.stats
    assert stats.preemptions > 5
    assert stats.tokens_recomputed <= stats.tokens_sampled
    assert stats.tokens_recomputed == computed(core) - useful(orders)
    names = preempted(core)
    assert "r0" not in names  # the most urgent one
    steps_between = []
    last_start: dict[str, int] = {}
    for event in core.events.recent():
        for entry in event.entries:
            if entry.why == "resumed" and entry.request_id not in last_start:
                last_start[entry.request_id] = event.step
        for name in event.preempted:
            if name in last_start:
                steps_between.append(event.step - last_start.pop(name))
    assert min(steps_between, default=99) >= 5  # nobody is let in only to be put out again


@settings(max_examples=60, deadline=None)
@given(
    st.integers(12, 40),
    st.sampled_from([1, 2, 4]),
    st.integers(2, 10),
    st.sampled_from([3, 16, 64]),
    st.booleans(),
    st.sampled_from(["fcfs", "shortest-prefill", "longest-prefix", "fair"]),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=2, max_size=14),
)
def test_recomputation_is_bounded(num_blocks, block_size, seqs, budget, caching, policy, sizes):
    """The bound of scheduler.py: twice what is of use, and one pool."""
    pool = num_blocks * block_size
    core = make_core(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        policy=policy,
        promote_after_steps=50,
    )
    orders = []
    for i, (length, most) in enumerate(sizes):
        prompt = letters(min(length, pool - 2), i)
        orders.append(request(f"r{i}", prompt, max_tokens=min(most, pool - len(prompt)), eos=False, tenant=f"t{i % 3}"))
    run(core, orders)
    assert core.stats.tokens_recomputed <= 2 * useful(orders) + pool
    if not caching:
        assert core.stats.tokens_recomputed == computed(core) - useful(orders)
