"""Policies through the core: who is admitted when, and the bounds that hold for any arrivals. All bounds are in steps."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import EngineConfig, PolicyName
from octavo.engine.fair import FEW_TURNS, MOST_TENANTS, Fair
from octavo.engine.policies import PREFIX_LOOKUPS, make_policy
from octavo.engine.request import Request
from tests.engine.fake import check_against_reference, make_core, request, run

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def letters(length: int, start: int = 5) -> list[int]:
    return [5 + (start * 3 + i * 7) % 25 for i in range(length)]


def order_of_start(orders, **settings) -> str:
    """In which order requests get their first token, one running at a time; the first one runs while the others come."""
    core = make_core(**{"max_num_seqs": 1, **settings})
    core.add_request(request("_", letters(3, 99), max_tokens=3, eos=False))
    core.step()
    for order in orders:
        core.add_request(order)
    started: list[str] = []
    while core.has_unfinished_requests():
        core.step()
        started += [r.request_id for r in core.scheduler.running() if r.request_id not in started]
        core.check_invariants()
    return "".join(name for name in started if name != "_")


def test_first_come_first_served_whatever_the_priority():
    orders = [request(name, letters(length, i), priority=-i) for i, (name, length) in enumerate(zip("abcd", (9, 3, 30, 1), strict=True))]
    assert order_of_start(orders, policy="fcfs") == "abcd"


def test_priority_then_arrival():
    orders = [request(name, letters(4, i), priority=level) for i, (name, level) in enumerate(zip("abcd", (5, 0, 5, -1), strict=True))]
    assert order_of_start(orders, policy="priority") == "dbac"


def test_the_shortest_prefill_first():
    orders = [request(name, letters(length, i)) for i, (name, length) in enumerate(zip("abcd", (9, 3, 30, 3), strict=True))]
    assert order_of_start(orders, policy="shortest-prefill") == "bdac"


def test_the_longest_cached_prefix_first():
    core = make_core(max_num_seqs=1, policy="longest-prefix")
    known = letters(20, 1)
    run(core, [request("known", known, max_tokens=1, eos=False)])
    core.add_request(request("_", letters(3, 99), max_tokens=4, eos=False))
    core.step()
    for name, prompt in (
        ("none", letters(24, 2)),
        ("little", known[:5] + letters(9, 3)),
        ("all", [*known, 7]),
        ("most", known[:13] + letters(4, 4)),
    ):
        core.add_request(request(name, prompt, max_tokens=1, eos=False))
    ends = []
    while core.has_unfinished_requests():
        ends += [d.request_id for d in core.step() if d.finish_reason is not None]
    assert ends == ["_", "all", "most", "little", "none"]
    assert core.stats.prefix_hit_tokens >= 20 + 12 + 4


def test_what_the_longest_prefix_knows_follows_the_cache():
    """Blocks that come make a request's prefix longer, blocks that are evicted shorter; each step looks at a bounded number."""
    core = make_core(num_blocks=64, policy="longest-prefix", max_num_seqs=1)
    policy, kv = core.scheduler.waiting, core.kv
    prompt = letters(40, 1)
    waiting = Request(request("w", prompt), 5)
    serials: list[int] = []
    assert kv.prefixes.follow(waiting, serials, 100) == 1 and serials == []
    run(core, [request("a", prompt[:20], max_tokens=1, eos=False)])
    kv.prefixes.follow(waiting, serials, 100)
    assert len(serials) == 5
    run(core, [request("b", prompt, max_tokens=1, eos=False)])
    assert kv.prefixes.follow(waiting, serials, 3) == 3 and len(serials) == 7  # one to see that the fifth is there, two more
    kv.prefixes.follow(waiting, serials, 100)
    assert len(serials) == 10
    run(core, [request("big", letters(230, 3), max_tokens=1, eos=False)])  # evicts the ends first
    kv.prefixes.follow(waiting, serials, 100)
    assert len(serials) == len(kv.prefixes.match(waiting)[0][0]) < 10
    kv.reset_prefix_cache()
    kv.prefixes.follow(waiting, serials, 100)
    assert serials == [] and len(policy) == 0
    assert PREFIX_LOOKUPS < 1000


# Nobody is overtaken for ever


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(POLICIES),
    st.integers(2, 12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(1, 8), st.integers(-1, 2), st.sampled_from("xyz")),
        min_size=4,
        max_size=20,
    ),
)
def test_the_bounds_hold_for_every_policy(policy, budget, decodes, seqs, stalled, patience, arrivals):
    core = make_core(
        num_blocks=60,
        policy=policy,
        max_num_batched_tokens=budget,
        max_decode_batch_size=decodes,
        max_num_seqs=seqs,
        max_stalled_steps=stalled,
        promote_after_steps=patience,
    )
    scheduler, bound = core.scheduler, core.scheduler.bound.steps
    orders = [
        request(f"r{i}", letters(length, i), max_tokens=most, eos=False, priority=level, tenant=tenant)
        for i, (_, length, most, level, tenant) in enumerate(arrivals)
    ]
    longest = 24 + 8
    due = sorted((wait * 4, i) for i, (wait, *_) in enumerate(arrivals))
    waited: dict[str, int] = {}
    latest_start: dict[str, int] = {}
    first_place = 0
    while due or core.has_unfinished_requests():
        assert scheduler.step < 5000
        while due and (due[0][0] <= scheduler.step or not core.has_unfinished_requests()):
            core.add_request(orders[due.pop(0)[1]])
        queue = {name: r for name, r in core._requests.items() if r in scheduler.waiting}
        free = len(scheduler.prefilling) < scheduler.bound.max_prefills and scheduler.num_running < scheduler.bound.max_running
        core.step()
        left = [r for r in queue.values() if r not in scheduler.waiting]
        first_place = first_place + 1 if queue and free and not left else 0
        assert first_place <= bound, "the first place of the queue is starved"
        assert all(scheduler.step - r.last_step <= bound for r in scheduler.running()), "a running request is starved"
        for name, there in queue.items():
            if there not in scheduler.waiting:
                continue
            waited[name] = waited.get(name, 0) + 1
            if policy == "fcfs":
                assert not [r for r in left if r.order > there.order], "a later one was admitted before it"
            elif policy != "fair":
                if waited[name] > patience:
                    assert all(waited.get(r.request_id, 0) >= waited[name] - 1 for r in left), "overtaken after promote_after_steps"
                if waited[name] == patience:
                    ahead = sum(count >= patience for other, count in waited.items() if other in queue)
                    latest_start[name] = scheduler.step + (ahead + scheduler.bound.max_running + 1) * longest * (bound + 1)
                assert scheduler.step <= latest_start.get(name, scheduler.step)
    assert core.stats.requests_finished == len(orders)


def test_a_request_is_promoted_after_the_stated_steps_and_not_before():
    """Urgent requests keep coming; the less urgent one starts as soon as it is promoted and a place is free."""
    for policy, patience in (("priority", 20), ("priority", 40), ("shortest-prefill", 20), ("longest-prefix", 20)):
        core = make_core(policy=policy, promote_after_steps=patience, max_num_seqs=1, max_model_len=2000)
        if policy == "longest-prefix":
            run(core, [request("known", letters(8, 1), max_tokens=1, eos=False)])
        core.add_request(request("first", letters(8, 1), max_tokens=1, eos=False))
        begun = core.scheduler.step
        core.add_request(request("late", letters(30, 2), max_tokens=2, eos=False, priority=1))
        number = 0
        while core.has_request("late") and number < 200:
            number += 1
            core.add_request(request(f"u{number}", letters(8, 1), max_tokens=1, eos=False))
            core.step()
            if any(r.request_id == "late" for r in core.scheduler.running()):
                break
        assert patience <= core.scheduler.step - begun <= patience + 3, policy
        assert core.stats.requests_promoted >= 1


def test_a_promoted_request_is_not_pushed_out():
    core = make_core(policy="priority", promote_after_steps=4, max_num_seqs=1)
    core.add_request(request("urgent", letters(3), max_tokens=12, eos=False))
    core.add_request(request("late", letters(3, 1), max_tokens=10, eos=False, priority=9))
    while "late" not in core.scheduler.decoding:
        core.step()
    core.add_request(request("urgent2", letters(3, 2), max_tokens=2, eos=False))
    ends = []
    while core.has_unfinished_requests():
        ends += [d.request_id for d in core.step() if d.finish_reason is not None]
    assert ends == ["late", "urgent2"] and core.stats.preemptions == 0
    core = make_core(policy="priority", max_num_seqs=1)  # the same without promotion
    core.add_request(request("late", letters(3, 1), max_tokens=10, eos=False, priority=9))
    core.step()
    core.add_request(request("urgent2", letters(3, 2), max_tokens=2, eos=False))
    core.step()
    assert core.stats.preemptions == 1


# Fairness


def served(core) -> dict[str, int]:
    return {str(key): tenant.counter for key, tenant in core.scheduler.waiting._tenants.items()}


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(4, 32),
    st.lists(st.tuples(st.sampled_from("aaab"), st.integers(1, 24), st.integers(1, 20)), min_size=60, max_size=60),
)
def test_two_tenants_that_always_wait_get_the_same(seqs, budget, arrivals):
    """Theorem 4.4 of the paper, with what was computed and generated counted from the steps themselves."""
    core = make_core(num_blocks=40, policy="fair", max_num_seqs=seqs, max_num_batched_tokens=budget, enable_prefix_caching=False)
    prompts = {}
    for i, (tenant, length, most) in enumerate(arrivals):
        name = f"{tenant}{i}"
        prompts[name] = length
        core.add_request(request(name, letters(length, i), max_tokens=most, eos=False, tenant=tenant))
    bound = 2 * max(24, 2 * 40 * 4)
    got = {"a": 0, "b": 0}
    admitted: set[str] = set()
    while all(any(r.origin.tenant == tenant and r in core.scheduler.waiting for r in core._requests.values()) for tenant in "ab"):
        waiting = {name for name, r in core._requests.items() if r in core.scheduler.waiting}
        for delta in core.step():
            got[delta.request_id[0]] += 2 * len(delta.token_ids)
        for name in waiting:
            made = core._requests.get(name)
            if name not in admitted and (made is None or made.was_admitted):
                admitted.add(name)
                got[name[0]] += prompts[name]
        assert abs(got["a"] - got["b"]) <= bound


def test_a_flood_of_one_tenant_does_not_hold_up_another():
    """Alone it waits for what runs, not for the hundred that came before it; under fcfs for all of them."""

    def steps(policy: PolicyName) -> int:
        core = make_core(policy=policy, max_num_seqs=2, max_waiting_requests=500)
        for i in range(100):
            core.add_request(request(f"flood{i}", letters(5, i), max_tokens=10, eos=False, tenant="flood"))
        for _ in range(30):
            core.step()
        core.add_request(request("other", letters(5, 3), max_tokens=1, eos=False, tenant="other"))
        begun = core.scheduler.step
        while core.has_request("other"):
            core.step()
        return core.scheduler.step - begun

    assert steps("fair") <= 12 < 300 < steps("fcfs")


def test_time_without_requests_earns_nothing():
    core = make_core(policy="fair", max_num_seqs=1)
    run(core, [request("b0", letters(3), max_tokens=1, eos=False, tenant="b")])
    run(core, [request(f"a{i}", letters(5, i), max_tokens=10, eos=False, tenant="a") for i in range(10)])
    counters = served(core)
    assert counters["a"] > 200 > counters["b"]
    for i in range(6):
        for tenant in "ab":
            core.add_request(request(f"{tenant}{20 + i}", letters(5, i), max_tokens=10, eos=False, tenant=tenant))
    assert served(core)["b"] >= counters["a"]  # lifted to the last that waited
    ends = []
    while core.has_unfinished_requests():
        ends += [d.request_id[0] for d in core.step() if d.finish_reason is not None]
    assert 2 <= ends[:6].count("a") <= 4  # in turn: b did not get the six places it had not asked for


def test_counters_of_tenants_are_bounded():
    policy = make_policy(EngineConfig(policy="fair"), make_core().kv)
    assert isinstance(policy, Fair)
    for i in range(2 * MOST_TENANTS):
        made = Request(request(f"r{i}", [5], tenant=f"t{i}"), i)
        policy.push(made, 0)
        policy.peek(0)
        policy.remove(made, 0)
        policy.generated(made)
    assert len(policy._tenants) <= MOST_TENANTS + 1 and len(policy._turns) <= MOST_TENANTS


@pytest.mark.parametrize("tenants", [1, 2 * MOST_TENANTS])
def test_requests_that_come_and_go_behind_a_blocked_first_one_leave_nothing(tenants):
    """The first tenant waits all the time, with the smallest counter; others add and abort. Nothing grows with their number."""
    policy = make_policy(EngineConfig(policy="fair"), make_core().kv)
    assert isinstance(policy, Fair)
    first = Request(request("first", [5], tenant="first"), 0)
    policy.push(first, 0)
    for i in range(4 * MOST_TENANTS):
        made = Request(request(f"r{i}", [5], tenant=f"t{i % tenants}"), i + 1)
        policy.generated(made)
        policy.push(made, 0)
        assert policy.peek(0) is first
        policy.remove(made, 0)
        assert len(policy._turns) <= 2 * FEW_TURNS + 2
    assert len(policy._tenants) <= MOST_TENANTS + 2 * FEW_TURNS + 3 and len(policy) == 1
    second = Request(request("second", [5], tenant="t0"), 10**6)
    policy.push(second, 0)
    policy.remove(first, 0)
    assert policy.peek(0) is second


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_walks_the_queue(policy):
    """Ten thousand waiting: a step calls Python functions as often as with a hundred."""
    import sys

    def calls(count: int) -> int:
        core = make_core(policy=policy, max_num_seqs=4, num_blocks=200, max_waiting_requests=20_000)
        for i in range(4):
            core.add_request(request(f"run{i}", letters(3, i), max_tokens=100, eos=False, tenant="r"))
        core.step()
        for i in range(count):
            core.add_request(request(f"w{i}", letters(8, i), priority=i % 3, tenant=f"t{i % 50}"))
        most, found = 0, 0

        def profile(frame, event, arg):
            nonlocal found
            found += event in ("call", "c_call")

        for _ in range(5):
            core.step()
        for _ in range(5):
            found = 0
            sys.setprofile(profile)
            core.scheduler.schedule()
            sys.setprofile(None)
            most = max(most, found)
            core.scheduler.complete_step(())
        return most

    few = calls(100)
    assert calls(10_000) <= 1.2 * few + 20


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_same_answers(policy):
    core = make_core(num_blocks=11, policy=policy, max_num_seqs=6, promote_after_steps=15)
    shared = letters(9)
    orders = [
        request(
            f"r{i}",
            shared[: i % 10] + letters(1 + i % 7, i),
            max_tokens=10 + i % 9,
            n=3 if i % 6 == 5 else 1,
            seed=i,
            temperature=i % 2,
            eos=False,
            priority=i % 3,
            tenant="ab"[i % 2],
        )
        for i in range(24)
    ]
    check_against_reference(run(core, orders), orders, core.executor.info)
    assert core.stats.preemptions > 0 and core.stats.prefix_waits > 0
