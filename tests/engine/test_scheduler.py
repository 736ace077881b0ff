"""The scheduler through the core: limits, order, starvation bounds, preemption, priorities. All bounds are in steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.request import RequestStatus
from octavo.engine.scheduler_output import TokenKind
from tests.engine.fake import Collector, check_against_reference, finish, make_core, reference_tokens, request, run


def letters(length: int, start: int = 5) -> list[int]:
    return [5 + (start + i * 7) % 25 for i in range(length)]


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_cover_the_prompt_once_and_change_nothing(budget):
    core = make_core(max_num_batched_tokens=budget, enable_prefix_caching=False)
    order = request("a", letters(40), max_tokens=6, eos=False)
    outputs = run(core, [order])
    entries = [e for o in core.executor.outputs for e in o.entries]
    assert sum(e.num_tokens for e in entries) == 45
    assert max(e.num_tokens for e in entries) == min(budget, 40)
    check_against_reference(outputs, [order], core.executor.info)


def test_limits_of_a_step_hold():
    core = make_core(max_num_batched_tokens=20, max_prefill_batch_size=2, max_decode_batch_size=3, max_num_seqs=6)
    orders = [request(f"r{i}", letters(3 + i, i), max_tokens=5, eos=False) for i in range(12)]
    check_against_reference(run(core, orders), orders, core.executor.info)
    for output in core.executor.outputs:
        assert output.num_tokens <= 20
        assert sum(e.num_tokens > 1 for e in output.entries) <= 2
        assert sum(e.num_tokens == 1 for e in output.entries) <= 3
    assert max(event.running for event in core.events.recent()) == 6


def test_decode_and_prefill_share_a_step():
    core = make_core(max_num_batched_tokens=8)
    collector = Collector()
    for order in (request("stream", letters(3), max_tokens=50, eos=False), request("long", letters(60, 3), max_tokens=2, eos=False)):
        collector.expect(order)
        core.add_request(order)
    finish(core, collector)
    mixed = [o for o in core.executor.outputs if {e.kind for e in o.entries} == {TokenKind.PROMPT, TokenKind.GENERATED}]
    assert len(mixed) >= 7


def stalls(core) -> int:
    """Most steps in a row that any running request got nothing, seen after a step."""
    return max((core.scheduler.step - r.last_step for r in core.scheduler.running()), default=0)


def test_a_stream_is_never_starved_by_prompts():  # E14
    core = make_core(num_blocks=2000, max_model_len=2000, max_num_batched_tokens=16, max_stalled_steps=4, block_size=16)
    collector = Collector()

    def add(order):
        collector.expect(order)
        core.add_request(order)

    add(request("stream", letters(4), max_tokens=60, eos=False))
    collector.add(core.step())
    add(request("huge", letters(200, 2), max_tokens=1, eos=False))
    gaps, last = [], core.scheduler.step
    for step in range(59):
        if step % 3 == 0:
            add(request(f"medium{step}", letters(20, step), max_tokens=1, eos=False))
        deltas = core.step()
        collector.add(deltas)
        if any(d.request_id == "stream" for d in deltas):
            gaps.append(core.scheduler.step - last)
            last = core.scheduler.step
    assert len(gaps) == 59 and set(gaps) == {1}  # a token in every step, whatever arrives


def test_a_long_prompt_and_a_short_one_both_start_beside_endless_streams():  # E15
    bound = 4
    core = make_core(num_blocks=2000, max_model_len=2000, max_num_batched_tokens=8, max_decode_batch_size=8, max_stalled_steps=bound)
    collector = Collector()

    def add(order):
        collector.expect(order)
        core.add_request(order)

    for i in range(8):  # these alone fill every step
        add(request(f"s{i}", letters(3, i), max_tokens=300, eos=False))
    while len(core.scheduler.decoding) < 8:
        collector.add(core.step())
    add(request("long", letters(150, 2), max_tokens=1, eos=False))
    add(request("short", letters(3, 3), max_tokens=1, eos=False))
    begun = core.scheduler.step
    while "short" in core._requests or "long" in core._requests:
        collector.add(core.step())
        core.check_invariants()
        assert stalls(core) <= bound
        if core.scheduler.step - begun > 2 * (bound + 1):  # first the long one becomes the head, then the short one
            assert collector.tokens("short"), "the short prompt has no first token yet"
    chunks = [e for o in core.executor.outputs for e in o.entries if e.request_id == "long"]
    assert core.scheduler.step - begun <= (bound + 1) * (len(chunks) + 2)
    core.abort(list(collector.outputs))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 10),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30), st.integers(1, 12), st.sampled_from([1, 1, 3])), min_size=1, max_size=16),
)
def test_the_starvation_bound_holds(budget, decodes, prefills, seqs, stalled, arrivals):
    core = make_core(
        num_blocks=1000,
        max_num_batched_tokens=budget,
        max_decode_batch_size=decodes,
        max_prefill_batch_size=prefills,
        max_num_seqs=seqs,
        max_stalled_steps=stalled,
    )
    scheduler = core.scheduler
    bound = scheduler.bound.steps
    assert bound == stalled or (min(budget, decodes) == 1 and bound == max(4, stalled))
    orders = [request(f"r{i}", letters(length, i), max_tokens=most, n=n, eos=False) for i, (_, length, most, n) in enumerate(arrivals)]
    due = sorted((wait * 3, i) for i, (wait, *_rest) in enumerate(arrivals))
    head, waited = None, 0
    for _ in range(3000):
        while due and (due[0][0] <= scheduler.step or not core.has_unfinished_requests()):
            core.add_request(orders[due.pop(0)[1]])
        if not due and not core.has_unfinished_requests():
            break
        first = scheduler.waiting.peek(scheduler.step + 1)
        free = len(scheduler.prefilling) < scheduler.bound.max_prefills and scheduler.num_running < scheduler.bound.max_running
        core.step()
        waited = waited + 1 if first is not None and first is head and first in scheduler.waiting and free else 0
        head = first
        assert waited <= bound, "the first waiting request is starved"
        assert stalls(core) <= bound, "a running request is starved"
    assert not core.has_unfinished_requests() and not due


def test_more_streams_than_decode_places_take_turns():
    core = make_core(max_decode_batch_size=2, max_stalled_steps=8)
    orders = [request(f"r{i}", letters(2, i), max_tokens=12, eos=False) for i in range(6)]
    collector = Collector()
    for order in orders:
        collector.expect(order)
        core.add_request(order)
    while core.has_unfinished_requests():
        collector.add(core.step())
        assert stalls(core) <= 3
    check_against_reference(collector.outputs, orders, core.executor.info)


def test_thirty_two_requests_each_preempted_at_least_once():  # E03, E04
    """Urgent requests push all others out of a tiny pool, again and again, until each has been out once."""
    core = make_core(num_blocks=12, block_size=4, max_num_seqs=8)
    info, collector = core.executor.info, Collector()
    shared = letters(8)
    orders = [
        request(
            f"r{i}",
            shared[: 4 + i % 5] + letters(1 + i % 4, i),
            seed=i,
            max_tokens=10 + i % 9,
            temperature=i % 2,
            n=4 if i % 8 == 0 else 1,
            eos=False,
            priority=1,
        )
        for i in range(32)
    ]
    for order in orders:
        collector.expect(order)
        core.add_request(order)
    storms = 0
    while any(order.request_id in core._requests for order in orders):
        if core.scheduler.step % 5 == 4:
            storm = request(f"storm{storms}", letters(44, storms), max_tokens=1, eos=False)
            storms += 1
            collector.expect(storm)
            core.add_request(storm)
        collector.add(core.step())
        core.check_invariants()
    finish(core, collector)
    choices = [choice for order in orders for choice in collector.outputs[order.request_id].outputs]
    assert len(choices) == 32 + 3 * 4
    assert min(choice.metrics.num_preemptions for choice in choices) >= 1
    assert core.stats.preemptions >= len(choices)
    assert core.stats.prefix_hit_tokens > 0 and core.stats.forks > 0 and core.stats.blocks_copied > 0
    check_against_reference(collector.outputs, orders, info)


def test_a_pool_too_small_for_two_still_finishes_all():
    core = make_core(num_blocks=9, block_size=2, max_num_seqs=4)
    orders = [request(f"r{i}", letters(4, i), max_tokens=14, eos=False) for i in range(8)]
    outputs = run(core, orders)
    check_against_reference(outputs, orders, core.executor.info)
    assert core.stats.preemptions > 0
    resumed = [o for o in core.executor.outputs for n in o.new_requests if n.output_token_ids]
    assert resumed


def test_a_resumed_request_computes_prompt_rows_before_generated_ones():
    core = make_core(num_blocks=9, block_size=2, max_num_seqs=4, enable_prefix_caching=False)
    orders = [request(f"r{i}", letters(4, i), max_tokens=14, eos=False) for i in range(4)]
    check_against_reference(run(core, orders), orders, core.executor.info)
    entries = [e for o in core.executor.outputs for e in o.entries]
    assert any(e.kind is TokenKind.GENERATED and e.num_tokens > 1 for e in entries)
    assert any(e.kind is TokenKind.PROMPT and not e.sample for e in entries)


def test_the_latest_arrival_is_preempted_and_comes_back_first():
    core = make_core(num_blocks=8, block_size=2, max_num_seqs=2, enable_prefix_caching=False)
    orders = [request(name, letters(3, i), max_tokens=10, eos=False) for i, name in enumerate("abc")]
    outputs = run(core, orders)
    preempted = [name for event in core.events.recent() for name in event.preempted]
    assert preempted and set(preempted) <= {"b", "c"}
    assert outputs["a"].outputs[0].metrics.num_preemptions == 0
    ends = [name for event in core.events.recent() for name in event.finished]
    assert ends == ["a", "b", "c"]


def test_an_urgent_request_goes_first_and_pushes_out_the_less_urgent():
    core = make_core(num_blocks=6, block_size=4, max_num_seqs=2)
    collector = Collector()
    slow = [request(f"slow{i}", letters(6, i), max_tokens=14, eos=False, priority=5) for i in range(3)]
    urgent = request("urgent", letters(16), max_tokens=3, eos=False)
    for order in slow:
        collector.expect(order)
        core.add_request(order)
    for _ in range(3):
        collector.add(core.step())
    collector.expect(urgent)
    core.add_request(urgent)
    collector.add(core.step())
    assert collector.tokens("urgent"), "its first token comes in the very next step"
    finish(core, collector)
    assert core.stats.preemptions >= 1
    check_against_reference(collector.outputs, [*slow, urgent], core.executor.info)


def test_nothing_admitted_in_a_large_queue_costs_nothing():
    """A step looks at the head of the queue only: ten thousand waiting requests are not walked."""
    core = make_core(num_blocks=8, block_size=4, max_num_seqs=1, max_waiting_requests=20_000)
    seen = []
    core.add_request(request("running", letters(3), max_tokens=20, eos=False))
    core.step()
    for i in range(10_000):
        core.add_request(request(f"w{i}", letters(3), max_tokens=1))

    class Watched(dict):
        def get(self, key, default=None):
            seen.append(key)
            return super().get(key, default)

    core.scheduler.waiting._heap._live = Watched(core.scheduler.waiting._heap._live)
    core.step()
    assert len(seen) < 10
    core.abort([f"w{i}" for i in range(10_000)])
    assert len(core.scheduler.waiting._heap._heap) < 200  # removed entries do not pile up


def test_something_always_starts_or_fails():  # E17
    core = make_core(num_blocks=2, block_size=4)
    core.add_request(request("a", letters(4), max_tokens=2, eos=False))
    core.scheduler.kv.admit = lambda *args, **kwargs: False  # a fault in the accounting
    (delta,) = core.step()
    assert delta.finish_reason == "error" and "could not be scheduled" in delta.error
    assert not core.has_unfinished_requests()


def test_a_parent_lets_go_when_its_last_waiting_child_is_gone():
    core = make_core(max_num_seqs=1)
    core.add_request(request("a", letters(6), n=3, max_tokens=9, eos=False))
    while not core.scheduler.decoding:
        core.step()
    parent = core._requests["a"]
    for child in parent.children[1:]:
        assert core.scheduler.holding
        core.scheduler.finish(child, RequestStatus.FINISHED_ABORTED)
    assert not core.scheduler.holding
    core.check_invariants()


def test_reference_is_deterministic():
    order = request("a", letters(5), temperature=1.0, max_tokens=12, eos=False)
    assert reference_tokens(order) == reference_tokens(order)
    assert reference_tokens(order, 0) != reference_tokens(order, 1)
