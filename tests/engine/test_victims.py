"""Whom a waiting request pushes out: those who only hold blocks first, and nobody where that would not let it start."""

from __future__ import annotations

from tests.engine.fake import begin, check_against_reference, finish, letters, make_core, request


def preempted(core) -> list[str]:
    return [name for event in core.events.recent() for name in event.preempted]


def test_a_less_urgent_parent_that_holds_gives_up_its_blocks_before_anybody_who_runs():
    core = make_core(num_blocks=70, block_size=4, max_num_seqs=5, enable_prefix_caching=False)
    running = [request(f"mid{i}", letters(8, i), max_tokens=60, eos=False, priority=1) for i in range(3)]
    low = request("low", letters(100, 7), max_tokens=40, n=6, temperature=1.0, eos=False, priority=9)
    collector = begin(core, [*running, low], 4)
    assert list(core.scheduler.holding) == ["low"]
    assert [r.request_id for r in core.scheduler.running()][3:] == ["low#0", "low#1"]
    core.scheduler._preempt(core._requests["low"].children[0])
    core.scheduler._preempt(core._requests["low"].children[1])
    assert core.kv.tokens_at_risk(core._requests["low"]) >= 0  # now it alone keeps what it computed
    before = len(preempted(core))
    urgent = request("urgent", letters(200, 3), max_tokens=1, eos=False, priority=-9)
    collector.expect(urgent)
    core.add_request(urgent)
    collector.add(core.step())
    core.check_invariants()
    assert preempted(core)[before:] == ["low"]
    assert collector.outputs["urgent"].outputs[0].finish_reason == "length"  # all in that very step
    finish(core, collector)
    check_against_reference(collector.outputs, [*running, low, urgent], core.executor.info)


def test_nobody_is_preempted_where_all_that_may_be_are_not_enough():
    """22 blocks: an equal one holds 13 of them, a less urgent one 4. One that needs 9 and a spare one waits, and both go on."""
    core = make_core(num_blocks=22, block_size=4, enable_prefix_caching=False)
    equal = request("equal", letters(48), max_tokens=12, eos=False)
    low = request("low", letters(12, 2), max_tokens=12, eos=False, priority=5)
    collector = begin(core, [equal, low], 2)
    waiting = request("waiting", letters(36, 3), max_tokens=1, eos=False)
    collector.expect(waiting)
    core.add_request(waiting)
    while core.has_request("equal"):
        before = len(collector.tokens("low"))
        collector.add(core.step())
        assert len(collector.tokens("low")) == before + 1
    assert preempted(core) == []
    finish(core, collector)
    check_against_reference(collector.outputs, [equal, low, waiting], core.executor.info)


def test_nobody_loses_blocks_for_one_who_lacks_a_place_that_no_victim_can_give():
    core = make_core(num_blocks=40, block_size=4, max_num_seqs=1, enable_prefix_caching=False)
    low = request("low", letters(20), max_tokens=8, n=3, temperature=1.0, eos=False, priority=5)
    collector = begin(core, [low], 2)
    assert list(core.scheduler.holding) == ["low"]
    first = request("first", letters(8, 1), max_tokens=6, eos=False)
    second = request("second", letters(8, 2), max_tokens=2, eos=False)
    for order in (first, second):
        collector.expect(order)
        core.add_request(order)
    collector.add(core.step())
    assert preempted(core) == ["low#0"]  # for its place; the parent keeps its blocks, which nobody needs
    finish(core, collector)
    assert "low" not in preempted(core)
    check_against_reference(collector.outputs, [low, first, second], core.executor.info)
