"""Beam search on the model of hashes: the same hypotheses as a search written down without blocks, batches and requests; forks that
share full blocks and copy only what is written; preemption, aborts and faults in the middle of a search."""

from __future__ import annotations

import gc
import logging
import math
import random

import pytest

from octavo.engine.request import Request
from tests.engine.beam_oracle import plain_search
from tests.engine.fake import EOS, Collector, begin, digests, distribution, finish, make_core, request, run


def beams(name: str, prompt: list[int], width: int = 4, **fields):
    return request(name, prompt, beam_width=width, **{"n": width, "max_tokens": 12, **fields})


def check(outputs, orders) -> None:
    for order in orders:
        expected = plain_search(order, order.max_tokens)
        got = outputs[order.request_id].outputs
        assert [choice.token_ids for choice in got] == [tokens for tokens, _ in expected]
        assert [choice.cumulative_logprob for choice in got] == pytest.approx([total for _, total in expected])
        for choice in got:
            ended = choice.token_ids[-1] in order.stop_token_ids
            assert choice.finish_reason == ("stop" if ended else "length") and choice.logprobs is None


SETTINGS = [
    {},
    {"width": 1},
    {"width": 2, "n": 1},
    {"early_stopping": True},
    {"early_stopping": "never"},
    {"early_stopping": "never", "length_penalty": 0.0},
    {"length_penalty": -1.0},
    {"length_penalty": 3.0, "early_stopping": "never"},
    {"min_tokens": 4, "early_stopping": True},
    {"stop_token_ids": [5, 6, 7], "early_stopping": True},
    {"stop_token_ids": [8, 9], "width": 7, "n": 3},
    {"max_tokens": 1},
    {"width": 16, "n": 16, "max_tokens": 3},
    {"eos": False},
]


@pytest.mark.parametrize("length", [1, 4, 9])
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_the_hypotheses_are_those_of_the_definition(fields, length):
    order = beams("a", [5 + i for i in range(length)], **fields)
    check(run(make_core(), [order]), [order])


def test_settings_lead_to_different_ends():
    """What the settings of the tests above are for: each changes some answer."""
    found = set()
    for fields in ({}, {"early_stopping": True}, {"early_stopping": "never"}, {"length_penalty": -1.0}):
        prompts = [[5 + seed, 7, 9] for seed in range(8)]
        orders = [beams(str(i), prompt, 3, stop_token_ids=[5, 6, 7], **fields) for i, prompt in enumerate(prompts)]
        outputs = run(make_core(), orders)
        check(outputs, orders)
        found.add(str([[c.token_ids for c in outputs[o.request_id].outputs] for o in orders]))
    assert len(found) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 3},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"max_decode_batch_size": 2},
        {"max_prefill_batch_size": 1},
        {"enable_prefix_caching": False},
        {"policy": "fair"},
        {"policy": "shortest-prefill"},
        {"policy": "longest-prefix"},
        {"groups": 2},
        {"block_size": 1},
    ],
    ids=str,
)
def test_many_searches_beside_other_requests(settings):
    orders = [beams(f"b{i}", [5 + i] * (3 + i), 2 + i % 3, n=2, max_tokens=10) for i in range(6)]
    others = [request(f"o{i}", [6 + i] * 5, temperature=1.0, eos=False, n=1 + i % 2) for i in range(4)]
    core = make_core(**settings)
    outputs = run(core, [one for pair in zip(orders, others, strict=False) for one in pair] + orders[4:])
    check(outputs, orders)
    assert core.stats.forks > 6 * 8 and core.stats.requests_finished == 10


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("blocks", [6, 9, 14])
def test_a_pool_too_small_for_all_beams(blocks, caching):
    """Beams are computed again from their tokens, and the answer is the same; one sequence alone needs 6 blocks."""
    orders = [beams(f"b{i}", [5 + i] * 7, 4, max_tokens=16, eos=False) for i in range(3)]
    core = make_core(num_blocks=blocks, block_size=4, enable_prefix_caching=caching)
    outputs = run(core, orders)
    check(outputs, orders)
    assert core.stats.preemptions > 0
    if not caching:
        assert core.stats.tokens_recomputed > 0
    assert sum(outputs[o.request_id].outputs[0].metrics.num_preemptions for o in orders) > 0


def test_urgent_requests_push_beams_out():
    core = make_core(num_blocks=16, block_size=4)
    order = beams("a", [5] * 9, 4, max_tokens=14, eos=False, priority=1)
    collector = Collector()
    collector.expect(order)
    core.add_request(order)
    for number in range(4):
        for _ in range(4):
            collector.add(core.step())
            core.check_invariants()
        urgent = request(f"u{number}", [9 + number] * 40, max_tokens=2, eos=False)
        collector.expect(urgent)
        core.add_request(urgent)
    finish(core, collector)
    check(collector.outputs, [order])
    assert core.stats.preemptions > 0


# Blocks


def test_full_blocks_are_shared_and_a_partial_one_is_copied_by_all_but_one():
    """8 beams of 1,001 prompt tokens: the prompt's 62 full blocks once, and what the beams have written themselves."""
    core = make_core(num_blocks=200, block_size=16, max_model_len=2048, enable_prefix_caching=False)
    order = beams("a", [5 + i % 20 for i in range(1001)], 8, max_tokens=20, eos=False)
    core.add_request(order)
    most = 0
    while core.has_unfinished_requests():
        core.step()
        core.check_invariants()
        most = max(most, core.kv.num_used_blocks)
    assert most <= 62 + 8 * 2 + 8  # two blocks each, and for a moment both the old and the new tails
    stats = core.stats
    forks, steps = stats.forks, 19
    assert forks == 1 + steps * 8
    # in a step 8 beams go on from s different ones: 8 - s are copies, unless the tail was just full
    assert 0 < stats.blocks_copied <= steps * 7


def test_eight_choices_cost_one_prompt_and_their_tails():
    def peak(n: int) -> int:
        core = make_core(num_blocks=200, block_size=16, max_model_len=2048, enable_prefix_caching=False)
        core.add_request(request("a", [5 + i % 20 for i in range(1000)], n=n, temperature=1.0, eos=False, max_tokens=8))
        most = 0
        while core.has_unfinished_requests():
            core.step()
            core.check_invariants()
            most = max(most, core.kv.num_used_blocks)
        assert core.stats.blocks_copied == n - 1
        return most

    one = 63  # 1,000 tokens in blocks of 16
    assert peak(8) <= 1.1 * one + 8
    assert peak(8) == one + 7  # no answer leaves the tail block: 1,000 + 7 tokens
    assert peak(2) == one + 1


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 7}, {"max_num_batched_tokens": 2}], ids=str)
def test_an_abort_in_the_middle_leaves_nothing_behind(steps, settings):
    core = make_core(**settings)
    orders = [beams("a", [5] * 9, 4, eos=False), beams("b", [6] * 5, 3, eos=False)]
    collector = begin(core, orders, steps)
    collector.add(core.abort(["a"]))
    core.check_invariants()
    assert [choice.finish_reason for choice in collector.outputs["a"].outputs] == ["abort"] * 4
    finish(core, collector)
    check(collector.outputs, orders[1:])
    assert core.stats.requests_aborted == 1 and not core._searches


def test_a_fault_of_one_beam_ends_the_request_and_nobody_else():
    core = make_core()
    orders = [beams("a", [5] * 9, 4, eos=False), beams("b", [6] * 5, 3, eos=False)]

    def spoil(output):
        core.executor.errors = {e.request_id: "broken" for e in output.entries if e.request_id.startswith("a#") and e.start == 12}

    core.executor.before_step = spoil
    outputs = run(core, orders)
    assert [(c.finish_reason, c.error) for c in outputs["a"].outputs] == [("error", "broken")] * 4
    check(outputs, orders[1:])
    assert core.stats.requests_failed == 1


# Text, logprobs


def test_stop_strings_and_text():
    stops = ["b", "f", "k", "q", "x"]
    order = beams("a", [5, 6], 4, stop=stops, early_stopping=True, max_tokens=40, eos=False)
    got = run(make_core(), [order])["a"].outputs
    tokenizer = make_core().tokenizer
    assert len({tuple(choice.token_ids) for choice in got}) == 4
    for choice in got:
        assert choice.finish_reason == "stop" and choice.stop_reason in stops
        text = b"".join(tokenizer.token_bytes(t) for t in choice.token_ids if t not in tokenizer.special_ids).decode("utf-8", "replace")
        assert choice.text + choice.stop_reason == text and not any(stop in choice.text for stop in stops)


def test_logprobs_are_those_of_the_path():
    order = beams("a", [5, 6, 7], 3, logprobs=2)
    for choice in run(make_core(), [order])["a"].outputs:
        assert len(choice.logprobs) == len(choice.token_ids)
        for position, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
            values = distribution(digests([5, 6, 7, *choice.token_ids[:position]], 3)[-1])
            assert next(iter(entry)) == token and 2 <= len(entry) <= 3 and entry[token].logprob == values[token]
            assert [one.rank for one in list(entry.values())[1:]] in ([1, 2], [1], [2])
        assert choice.cumulative_logprob == pytest.approx(
            math.fsum(e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs, strict=True))
        )


def test_prompt_logprobs_come_once():
    order = beams("a", [5, 6, 7], 3, prompt_logprobs=0)
    output = run(make_core(), [order])["a"]
    assert len(output.prompt_logprobs) == 3 and output.prompt_logprobs[0] is None
    order = beams("b", [5, 6, 7], 3, prompt_logprobs=0, max_tokens=0)
    output = run(make_core(), [order])["b"]
    assert len(output.prompt_logprobs) == 3 and [(c.text, c.finish_reason) for c in output.outputs] == [("", "length")] * 3


def test_nothing_comes_before_the_end():
    core = make_core()
    core.add_request(beams("a", [5, 6], 2))
    deltas = []
    while core.has_unfinished_requests():
        assert not deltas
        deltas = core.step()
    assert [delta.index for delta in deltas] == [0, 1] and all(delta.finish_reason for delta in deltas)
    assert EOS in {delta.token_ids[-1] for delta in deltas} or max(len(delta.token_ids) for delta in deltas) == 12


@pytest.mark.parametrize("seed", range(12))
def test_searches_come_and_go_among_others_in_small_pools(seed):
    """Random sizes, arrivals and aborts; what is not aborted gives the answer of the definition, and no block is lost."""
    rng = random.Random(seed)
    policy = rng.choice(["priority", "fcfs", "fair", "shortest-prefill", "longest-prefix"])
    core = make_core(
        num_blocks=rng.randint(8, 30),
        max_num_seqs=rng.randint(1, 12),
        max_num_batched_tokens=rng.choice([1, 3, 8, 64]),
        enable_prefix_caching=rng.random() < 0.5,
        policy=policy,
    )
    collector, searches, aborted = Collector(), [], set()
    for i in range(10):
        prompt = [5 + rng.randrange(3)] * rng.randint(1, 12)
        fields = {"max_tokens": rng.randint(1, 9), "priority": rng.randrange(3), "stop_token_ids": [9, 10, 11]}
        if rng.random() < 0.6:
            width = rng.randint(1, 5)
            how = {"early_stopping": rng.choice([True, False, "never"]), "length_penalty": rng.choice([0.5, 1.0, 2.0])}
            order = beams(f"b{i}", prompt, width, n=rng.randint(1, width), **how, **fields)
            searches.append(order)
        else:
            order = request(f"o{i}", prompt, temperature=1.0, n=rng.randint(1, 2), best_of=rng.choice([None, 3]), **fields)
        collector.expect(order)
        core.add_request(order)
        for _ in range(rng.randint(0, 6)):
            collector.add(core.step())
            core.check_invariants()
        if rng.random() < 0.2:
            aborted.add(order.request_id)
            collector.add(core.abort([order.request_id]))
    finish(core, collector)
    check(collector.outputs, [order for order in searches if order.request_id not in aborted])
    assert all(output.finished for output in collector.outputs.values()) and core.stats.requests_finished == 10


def test_a_search_keeps_no_more_requests_than_its_width_needs():
    core, width, most = make_core(), 4, 0
    core.add_request(beams("a", [5, 6, 7], width, max_tokens=60, eos=False))
    gc.collect()
    for _ in range(60):
        core.step()
        most = max(most, sum(isinstance(o, Request) and o.origin.request_id == "a" for o in gc.get_objects()))
    assert width < most <= 6 * width


def test_the_log_and_the_record_tell_of_the_best_answer(caplog):
    core, order = make_core(), beams("a", [5, 6, 7])
    with caplog.at_level(logging.INFO, "octavo"):
        outputs = run(core, [order])
    best = outputs["a"].outputs[0]
    (end,) = [end for event in core.events.recent() for end in event.ends]
    assert end.num_output_tokens == len(best.token_ids) > 0 and end.first_token is not None
    line = next(message for message in caplog.messages if message.startswith("request 'a'"))
    assert f"output {len(best.token_ids)}," in line and "ttft 0.000 s" not in line


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill", "longest-prefix", "fair"])
def test_a_search_goes_on_beside_streams_that_keep_arriving(policy):
    core = make_core(num_blocks=400, policy=policy, max_num_seqs=4, promote_after_steps=5)
    core.add_request(beams("a", [5, 6, 7], 2, max_tokens=20, eos=False))
    longest = stalled = steps = 0
    while core.has_request("a"):
        while core.num_waiting < 6:
            core.add_request(request(f"r{core.stats.requests_added}", [9, 8, 7], max_tokens=80, eos=False, tenant=str(steps % 6)))
        core.step()
        steps += 1
        got = any(entry.request_id.partition("#")[0] == "a" for entry in core.events.recent(1)[0].entries)
        stalled = 0 if got else stalled + 1
        longest = max(longest, stalled)
        core.check_invariants()
        assert steps < 200
    assert longest <= core.config.max_stalled_steps and steps <= 40
