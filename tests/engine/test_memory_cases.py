"""Faults of scheduling and memory that other engines have had, with the inputs they were reported with: what a reader can
check against the report."""

from __future__ import annotations

import pytest

from octavo.errors import InvalidRequestError
from tests.engine.fake import Collector, check_against_reference, finish, make_core, reference_tokens, request, run


def test_a_prompt_the_pool_cannot_hold_is_refused_and_blocks_nobody():  # E01
    """1,002 tokens for 49 blocks of 16; then a short one, and one whose prompt fits but whose answer does not."""
    core = make_core(num_blocks=49, block_size=16, max_model_len=2048)
    with pytest.raises(InvalidRequestError, match="63 KV blocks .* the pool has 49") as refused:
        core.add_request(request("long", [5 + i % 20 for i in range(1002)]))
    assert refused.value.code == "kv_cache_exceeded"
    orders = [request("short", [5, 6, 7], eos=False), request("full", [5 + i % 20 for i in range(780)], max_tokens=500, eos=False)]
    outputs = run(core, orders)
    assert [outputs[name].outputs[0].finish_reason for name in ("short", "full")] == ["length", "length"]
    assert len(outputs["full"].outputs[0].token_ids) == 49 * 16 + 1 - 780
    check_against_reference(outputs, orders, core.executor.info)


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_same_prompt_of_whole_blocks_again_while_the_first_runs(blocks):  # E02
    prompt = [5 + i for i in range(4 * blocks)]
    core = make_core(num_blocks=40, block_size=4)
    collector, orders = Collector(), [request(f"r{i}", prompt, max_tokens=12, eos=False) for i in range(3)]

    def start(order):
        collector.expect(order)
        core.add_request(order)

    start(orders[0])
    while len(collector.tokens("r0")) < 3:
        collector.add(core.step())
    start(orders[1])  # the first one runs
    finish(core, collector)
    start(orders[2])  # and has ended
    finish(core, collector)
    assert core.stats.prefix_hit_tokens == 2 * (len(prompt) - 1) and core.stats.blocks_copied == 2
    check_against_reference(collector.outputs, orders, core.executor.info)


def test_sixty_four_requests_with_a_shared_prefix_in_a_tiny_pool():  # E03
    prefix = [5 + i % 20 for i in range(13)]
    orders = [request(f"r{i}", [*prefix, 5 + i % 24, 5 + i % 7], max_tokens=40, eos=False, temperature=1.0, seed=i) for i in range(64)]
    core, roomy = make_core(num_blocks=30, block_size=4, max_num_batched_tokens=16), make_core(num_blocks=2000, block_size=4)
    outputs, expected = run(core, orders), run(roomy, orders)
    assert core.stats.preemptions >= 8 and core.stats.prefix_hit_tokens > 0 and core.stats.tokens_recomputed > 0
    assert roomy.stats.preemptions == 0
    for order in orders:
        name = order.request_id
        assert outputs[name].outputs[0].token_ids == expected[name].outputs[0].token_ids == reference_tokens(order)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_stop_string_that_spans_a_preemption(after):  # E04
    """`abc` ends it; the request loses its blocks after 1, 2 or 3 of the letters before and in it. The stream repeats and loses nothing."""
    letters = [6, 5, 6, 7, 8, 9]  # babcde
    core = make_core(num_blocks=20, block_size=2, script=lambda prompt, count: letters[count])
    collector, order = Collector(), request("r", [10, 11, 12, 13, 14], max_tokens=6, stop=("abc",), logprobs=0)
    collector.expect(order)
    core.add_request(order)
    while len(collector.tokens("r")) < after:
        collector.add(core.step())
    core.reset_prefix_cache()  # so that all of it is computed again
    core.scheduler._preempt(next(core.scheduler.running()))
    core.check_invariants()
    finish(core, collector)
    choice = collector.outputs["r"].outputs[0]
    assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == ("b", letters[:4], "stop", "abc")
    assert choice.logprobs is not None and len(choice.logprobs) == 4
    assert choice.metrics is not None and choice.metrics.num_preemptions == 1 and core.stats.tokens_recomputed == 5 + after - 1
    assert "".join(delta.text for delta in collector.deltas) == "b"


@pytest.mark.parametrize("n", [1, 3])
def test_max_tokens_counts_the_whole_answer_over_preemptions(n):  # E04
    core = make_core(num_blocks=40, block_size=2)
    collector, order = Collector(), request("r", [10, 11, 12], max_tokens=9, n=n, eos=False, temperature=1.0)
    collector.expect(order)
    core.add_request(order)
    while core.has_unfinished_requests():
        collector.add(core.step())
        running = list(core.scheduler.running())
        if running and core.scheduler.step % 3 == 0:
            core.scheduler._preempt(running[0])
        core.check_invariants()
    assert core.stats.preemptions >= 2
    assert [len(choice.token_ids) for choice in collector.outputs["r"].outputs] == [9] * n
    check_against_reference(collector.outputs, [order], core.executor.info)


@pytest.mark.parametrize("moment", ["after the first chunk", "between schedule and result", "in the step that finishes"])
def test_abort_during_a_chunked_prefill(moment):  # E09
    core = make_core(num_blocks=100, block_size=4, max_num_batched_tokens=64)
    collector, order = Collector(), request("r", [5 + i % 20 for i in range(200)], max_tokens=1, eos=False)
    collector.expect(order)
    core.add_request(order)
    steps = {"after the first chunk": 1, "between schedule and result": 2, "in the step that finishes": 4}[moment]

    def before_step(output):
        if moment != "after the first chunk" and core.executor.step == steps:
            collector.add(core.abort(["r"]))

    core.executor.before_step = before_step
    for _ in range(steps):
        collector.add(core.step())
    if moment == "after the first chunk":
        assert core.stats.prompt_tokens_computed == 64
        collector.add(core.abort(["r"]))
    assert collector.outputs["r"].outputs[0].finish_reason == "abort" and collector.tokens("r") == []
    assert core.stats.blocks_used == 0 and all(pool.num_free == 100 and not any(pool.ref_counts) for pool in core.kv.pools)
    core.check_invariants()
    again = request("again", [5, 6, 7], max_tokens=3, eos=False)
    assert run(core, [again])["again"].outputs[0].token_ids == reference_tokens(again)
