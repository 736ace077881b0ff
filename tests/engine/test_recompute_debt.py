"""What recomputed tokens owe: paid by first-time ones, gone with the request that owes, and never a brake on later ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.executor import KVGroup
from octavo.engine.kv_cache_manager import KVCacheManager, Terms
from octavo.engine.metrics import EngineStats
from octavo.engine.recompute_debt import RecomputeDebt
from octavo.engine.request import Request
from tests.engine.fake import check_against_reference, letters, make_core, request, run


def debtor(name: str, lost: int, found: int = 0) -> Request:
    made = Request(request(name, letters(40)), 1)
    made.num_lost_tokens, made.num_computed_tokens = lost, found
    return made


def test_the_oldest_debts_are_paid_first_and_each_is_gone_with_its_request():
    debt = RecomputeDebt()
    a, b, c = debtor("a", 10), debtor("b", 20, found=5), debtor("c", 8, found=8)
    for one in (a, b, c):
        debt.owe(one)
    assert debt.num_tokens == 25 and debt.debtors == {"a", "b"}  # c found all of it in the cache
    debt.pay(4)
    debt.forgive(a)
    assert debt.num_tokens == 15
    debt.owe(a)
    debt.pay(15)
    assert debt.debtors == {"a"} and debt.num_tokens == 10
    debt.pay(1000)
    assert not debt and debt.num_tokens == 0
    debt.forgive(a)


def most_together(core, orders) -> tuple[int, int]:
    """Most sequences in a step, and steps, until all are done."""
    for order in orders:
        core.add_request(order)
    most, begun = 0, core.scheduler.step
    while core.has_unfinished_requests():
        core.step()
        core.check_invariants()
        most = max(most, len(core.events.recent(1)[0].entries))
    return most, core.scheduler.step - begun


def short(count: int, most: int) -> list:
    return [request(f"s{i}", letters(9, 50 + i), max_tokens=most, eos=False) for i in range(count)]


def test_once_a_preempted_request_has_ended_nothing_is_owed():
    """Two requests, one preemption; then one-token requests run as many together as in an engine that never preempted."""
    core = make_core(num_blocks=40, block_size=4)
    run(core, [request("L", letters(70), max_tokens=88, eos=False), request("M", letters(70, 2), max_tokens=14, eos=False)])
    assert core.stats.preemptions == 1 and core.stats.tokens_recomputed > 0
    assert core.scheduler.debt.num_tokens == 0
    assert most_together(core, short(40, 1)) == most_together(make_core(num_blocks=40, block_size=4), short(40, 1))


def test_a_request_pushed_out_again_and_again_owes_what_it_holds_and_after_an_abort_nothing():
    core = make_core(num_blocks=40, block_size=4, enable_prefix_caching=False)
    core.add_request(request("L", letters(80), max_tokens=70, eos=False))
    for _ in range(4):
        core.step()
    for i in range(6):
        core.add_request(request(f"u{i}", letters(150, 7 + i), max_tokens=1, eos=False, priority=-1))
        while core.has_request(f"u{i}"):
            core.step()
        for _ in range(3):
            core.step()
        assert 0 < core.scheduler.debt.num_tokens <= 160
    assert core.stats.preemptions == 6 and core.stats.tokens_recomputed > 3 * 160
    core.abort(["L"])
    assert core.scheduler.debt.num_tokens == 0
    assert most_together(core, short(16, 12)) == most_together(make_core(num_blocks=40, block_size=4), short(16, 12))


def test_first_time_prompt_tokens_pay_too():
    """A stream that came back owes; requests of one token beside it take their place as soon as they have paid for it."""
    core = make_core(num_blocks=60, block_size=4, enable_prefix_caching=False)
    core.add_request(request("L", letters(80), max_tokens=100, eos=False))
    for _ in range(4):
        core.step()
    core.add_request(request("u", letters(200), max_tokens=1, eos=False, priority=-1))
    while core.has_request("u"):
        core.step()
    while core._requests["L"].num_missing_tokens > 1:
        core.step()
    owed, sampled = core.scheduler.debt.num_tokens, core.stats.tokens_sampled
    computed = core.stats.prompt_tokens_computed
    assert owed > 70
    for order in short(3, 1):
        core.add_request(order)
    core.step()
    assert core.stats.prompt_tokens_computed - computed == 27 and core.stats.tokens_sampled - sampled == 4
    assert core.scheduler.debt.num_tokens == owed - 27 - 1


@pytest.mark.parametrize("window", [None, 8])
def test_a_reserve_is_at_most_half_of_a_pool(window):
    groups = (KVGroup(20, 4),) if window is None else (KVGroup(20, 4), KVGroup(20, 4, sliding_window=window))
    for tokens, fits in ((40, True), (41, False)):
        kv = KVCacheManager(groups, True, EngineStats())
        assert kv.admit(Request(request("a", letters(tokens)), 1), Terms(reserve=1000)) == fits


def test_asking_changes_nothing():
    kv = KVCacheManager((KVGroup(10, 4),), True, EngineStats())
    holder, waiting = Request(request("a", letters(24)), 1), Request(request("b", letters(32, 2)), 2)
    assert kv.admit(holder)
    before = kv.stats.copy(), list(kv.pools[0].ref_counts)
    assert not kv.admit(waiting, Terms(without=[]))
    assert not kv.admit(waiting, Terms(headroom=3, without=[holder]))
    assert kv.admit(waiting, Terms(headroom=2, without=[holder]))
    assert (kv.stats, kv.pools[0].ref_counts) == before and waiting.num_computed_tokens == 0
    kv.check_invariants([holder])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(12, 40),
    st.sampled_from([1, 2, 4]),
    st.integers(2, 8),
    st.sampled_from([None, 6]),
    st.booleans(),
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(-1, 1), st.sampled_from([1, 1, 3]), st.integers(0, 20)),
        min_size=2,
        max_size=14,
    ),
)
def test_nothing_is_owed_beyond_the_pool_and_nobody_is_preempted_in_vain(num_blocks, block_size, seqs, window, caching, sizes):
    """Any priorities, choices and aborts: work ends, and a waiting request that pushes others out starts in that very step."""
    pool = num_blocks * block_size
    windows = () if window is None else ((window, num_blocks),)
    core = make_core(
        num_blocks=num_blocks, block_size=block_size, windows=windows, max_num_seqs=seqs, enable_prefix_caching=caching, event_history=1
    )
    scheduler, admit = core.scheduler, core.scheduler._admit

    def watched(waiting):
        before = list(scheduler.plan.preempted)
        done = admit(waiting)
        assert done or scheduler.plan.preempted == before, "preempted in vain"
        return done

    scheduler._admit = watched
    orders = []
    for i, (length, most, level, n, _) in enumerate(sizes):
        prompt = letters(min(length, pool - 2), i)
        most = min(most, pool - len(prompt))
        orders.append(request(f"r{i}", prompt, max_tokens=most, eos=False, priority=level, n=n, temperature=float(n > 1)))
    for order, (*_, wait) in zip(orders, sizes, strict=True):
        core.add_request(order)
        for _ in range(wait % 7):
            core.step()
        if wait > 16:
            core.abort([order.request_id])
        core.check_invariants()
    for _ in range(5000):
        if not core.has_unfinished_requests():
            break
        core.step()
        core.check_invariants()
        assert scheduler.debt.num_tokens <= pool
    assert not core.has_unfinished_requests() and scheduler.debt.num_tokens == 0


def test_what_is_owed_changes_no_answer():
    core = make_core(num_blocks=12, block_size=4)
    orders = [request(f"r{i}", letters(9, i), max_tokens=20, n=1 + 2 * (i == 3), eos=False, priority=i % 2) for i in range(8)]
    outputs = run(core, orders)
    assert core.stats.tokens_recomputed > 0
    check_against_reference(outputs, orders, core.executor.info)
