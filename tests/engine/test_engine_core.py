"""One request's life in the core: endings, stop strings, n > 1, aborts, faults, logprobs, events."""

from __future__ import annotations

import math

import pytest

from octavo.engine.scheduler_output import TokenKind
from octavo.errors import EngineDeadError, InvalidRequestError
from tests.engine.fake import (
    EOS,
    Collector,
    FakeExecutor,
    FakeTokenizer,
    check_against_reference,
    digests,
    finish,
    make_core,
    prompt_logprob,
    reference_tokens,
    request,
    run,
)

TOKENIZER = FakeTokenizer()
SMILE = "\U0001f600"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def spelling(text: str, end: int | None = EOS):
    """A script that writes the text whatever the prompt, then ends."""
    tokens = ids(text)
    return lambda prompt, count: tokens[count] if count < len(tokens) else end if end is not None else ids("z")[0]


def answer(core, order, name="a"):
    """The only choice of a run, and the pieces its text came in."""
    collector = Collector()
    collector.expect(order)
    core.add_request(order)
    finish(core, collector)
    return collector.outputs[name].outputs[0], [d.text for d in collector.deltas]


# Endings and stop strings


@pytest.mark.parametrize(
    "text, fields, expected, reason, stop_reason",
    [
        ("abc", {}, "abc", "stop", None),  # the model's own end; its text is never shown
        ("abc", {"skip_special_tokens": False}, "abc", "stop", None),
        ("abcdef", {"max_tokens": 3}, "abc", "length", None),
        ("abcdefghijklm", {"stop": ["defghij"]}, "abc", "stop", "defghij"),  # A04: spans several tokens
        ("abcdefghijklm", {"stop": ["defghij"], "include_stop_in_output": True}, "abcdefghij", "stop", "defghij"),
        ("uno due tre", {"stop": ["tre\nxxxx"]}, "uno due tre", "stop", None),  # A05: withheld, then the end comes
        ("uno due tre", {"stop": ["tre\nxxxx"], "max_tokens": 11}, "uno due tre", "length", None),
        ("abab", {"stop": ["ab"]}, "", "stop", "ab"),
        ("abab", {"stop": ["ab"], "min_tokens": 3}, "ab", "stop", "ab"),  # a stop string before min_tokens is text
        ("abc", {"stop": ["c"], "max_tokens": 3}, "ab", "stop", "c"),  # both at once: the stop counts
        ("abcd", {"stop_token_ids": ids("c")}, "ab", "stop", ids("c")[0]),
        ("abcd", {"stop_token_ids": ids("c"), "include_stop_in_output": True}, "abc", "stop", ids("c")[0]),
        ("abc", {"stop_token_ids": [EOS]}, "abc", "stop", None),
        ("ab", {"min_tokens": 3, "max_tokens": 3}, "ab", "length", None),  # an end that should have been masked is no end
        (f"a{SMILE}", {"max_tokens": 2}, "a", "length", None),  # A02: half a character is dropped
        (f"a{SMILE}", {"max_tokens": 3}, f"a{SMILE}", "length", None),
    ],
)
def test_how_a_choice_ends(text, fields, expected, reason, stop_reason):
    choice, pieces = answer(make_core(script=spelling(text)), request("a", ids("q"), **{"max_tokens": 50, **fields}))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (expected, reason, stop_reason)
    assert "".join(pieces) == expected and "\ufffd" not in expected
    assert len(pieces) == len(choice.token_ids)  # one delta a token, the last one with the ending


def test_ignore_eos_goes_on_to_max_tokens_but_not_past_own_stop_ids():
    script = spelling("ab", end=EOS)
    choice, _ = answer(make_core(script=script), request("a", ids("q"), eos=False, ignore_eos=True, max_tokens=5))
    assert choice.token_ids == [*ids("ab"), EOS, EOS, EOS] and choice.finish_reason == "length"
    choice, _ = answer(make_core(script=script), request("a", ids("q"), eos=False, ignore_eos=True, max_tokens=5, stop_token_ids=[EOS]))
    assert (choice.finish_reason, choice.stop_reason, choice.text) == ("stop", EOS, "ab")


def test_min_tokens_is_sent_to_the_worker_with_every_stop_id():
    core = make_core()
    order = request("a", ids("abc"), min_tokens=6, max_tokens=20, stop_token_ids=[9, 10])
    outputs = run(core, [order])
    (new,) = core.executor.outputs[0].new_requests
    assert new.stop_token_ids == {EOS, 9, 10}
    assert len(outputs["a"].outputs[0].token_ids) >= 6
    check_against_reference(outputs, [order], core.executor.info)


def test_nothing_is_computed_past_the_end():
    core = make_core(script=spelling("abcdef"))
    answer(core, request("a", ids("q"), stop=["cd"], max_tokens=50))
    assert core.stats.tokens_sampled == 4


@pytest.mark.parametrize("length, room", [(19, 1), (18, 2), (5, 15)])
def test_the_context_ends_an_answer(length, room):  # E12, E13
    core = make_core(max_model_len=20)
    order = request("a", [7] * length, eos=False, max_tokens=100)
    choice = run(core, [order])["a"].outputs[0]
    assert len(choice.token_ids) == room and choice.finish_reason == "length"


def test_the_pool_ends_an_answer_and_refuses_a_prompt_beyond_it():  # E01
    core = make_core(num_blocks=3, block_size=4)
    choice = run(core, [request("a", [7] * 12, eos=False, max_tokens=100)])["a"].outputs[0]
    assert len(choice.token_ids) == 1  # its KV is never needed
    choice = run(core, [request("b", [7] * 10, eos=False, max_tokens=100)])["b"].outputs[0]
    assert len(choice.token_ids) == 3
    with pytest.raises(InvalidRequestError, match="needs 4 KV blocks of 4 tokens, but the pool has 3"):
        core.add_request(request("c", [7] * 13))
    assert not core.has_unfinished_requests()
    run(core, [request("d", [8] * 2)])  # a short prompt is not blocked


# Prefix cache


@pytest.mark.parametrize("length", [4, 8, 5, 1])
def test_a_cached_prompt_gives_the_same_answer(length):  # E02
    core = make_core(block_size=4)
    prompt = [5 + i for i in range(length)]
    orders = [request(name, prompt, eos=False) for name in ("first", "second")]
    collector = Collector()
    for order in orders:
        collector.expect(order)
    core.add_request(orders[0])
    while not collector.tokens("first"):
        collector.add(core.step())
    core.add_request(orders[1])  # while the first one runs
    finish(core, collector)
    check_against_reference(collector.outputs, orders, core.executor.info)
    assert collector.outputs["second"].num_cached_tokens == min(length // 4 * 4, length - 1)
    assert core.stats.blocks_copied == (length in (4, 8))


def test_hits_fire_and_change_nothing_and_reset_stops_them():
    orders = [request(f"r{i}", [5 + j % 20 for j in range(20)] + [5 + i], eos=False, seed=i, temperature=1.0) for i in range(6)]
    texts = []
    for caching in (True, False):
        core = make_core(enable_prefix_caching=caching, max_num_seqs=2)
        outputs = run(core, orders)
        check_against_reference(outputs, orders, core.executor.info)
        texts.append([outputs[o.request_id].outputs[0].text for o in orders])
        assert (core.stats.prefix_hit_tokens > 0) == caching == (core.stats.blocks_shared > 0)
    assert texts[0] == texts[1]
    before = core.stats.prefix_hit_tokens
    core.reset_prefix_cache()
    run(core, [request("again", orders[0].prompt_token_ids)])
    assert core.stats.prefix_hit_tokens == before


def test_the_next_turn_of_a_chat_hits_the_prompt_but_not_the_answer():
    core = make_core(block_size=2)
    first = request("a", [5, 6, 7, 8], eos=False, max_tokens=6)
    answer_ids = run(core, [first])["a"].outputs[0].token_ids
    second = request("b", [5, 6, 7, 8, *answer_ids, 9], eos=False)
    outputs = run(core, [second])
    check_against_reference(outputs, [second], core.executor.info)
    assert outputs["b"].num_cached_tokens == 4


# n > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 3, 4, 8, 9])
@pytest.mark.parametrize("seqs", [1, 2, 16])
def test_choices_share_the_prompt_and_are_reproducible(temperature, length, seqs):  # B07
    order = request("a", [5 + i for i in range(length)], n=4, seed=1, temperature=temperature, eos=False)
    core = make_core(max_num_seqs=seqs, enable_prefix_caching=False)
    outputs = run(core, [order])
    check_against_reference(outputs, [order], core.executor.info)
    assert [c.index for c in outputs["a"].outputs] == [0, 1, 2, 3]
    assert (len({tuple(c.token_ids) for c in outputs["a"].outputs}) == 1) == (temperature == 0)
    assert core.stats.forks == 4
    assert core.stats.prompt_tokens_computed == length - 1 + 4  # the prompt once, its last token by each
    # Only a partial tail is copied, by all children but the last one, which writes it in place: in one step or in several.
    assert core.stats.blocks_copied == (3 if (length - 1) % 4 else 0)
    again = run(make_core(), [order])
    assert again["a"].outputs[0].token_ids == outputs["a"].outputs[0].token_ids


def test_the_last_child_writes_its_parents_tail_in_place():
    core = make_core(max_num_seqs=1, enable_prefix_caching=False)
    run(core, [request("a", [5, 6, 7], n=3, eos=False)])
    assert core.stats.blocks_copied == 2


def test_more_choices_than_sequences_are_done_in_parts():
    core = make_core(max_num_seqs=3, num_blocks=40)
    order = request("a", [5, 6, 7, 8, 9], n=20, temperature=1.0, eos=False, max_tokens=4)
    outputs = run(core, [order])
    check_against_reference(outputs, [order], core.executor.info)
    assert max(event.running for event in core.events.recent()) <= 3


def test_a_holding_parent_gives_way_when_memory_is_short():
    core = make_core(num_blocks=5, block_size=2, enable_prefix_caching=False)
    order = request("a", [5, 6, 7, 8, 9, 10], n=3, eos=False, temperature=1.0, max_tokens=4)
    outputs = run(core, [order])
    check_against_reference(outputs, [order], core.executor.info)
    assert core.stats.preemptions > 0 and core.stats.forks < 3


def test_a_holding_parent_gives_way_before_any_running_request():
    core = make_core(num_blocks=7, block_size=2, max_num_seqs=1, enable_prefix_caching=False)
    order = request("a", [5 + i for i in range(8)], n=2, eos=False, max_tokens=6)
    outputs = run(core, [order])
    check_against_reference(outputs, [order], core.executor.info)
    assert [name for event in core.events.recent() for name in event.preempted] == ["a"]
    assert [choice.metrics.num_preemptions for choice in outputs["a"].outputs] == [0, 0]


def test_every_choice_has_one_ending_and_usage_counts_the_prompt_once():  # A07
    core = make_core()
    collector = Collector()
    order = request("a", [5, 6, 7], n=3, temperature=1.0, max_tokens=30)
    collector.expect(order)
    core.add_request(order)
    finish(core, collector)
    endings = [d for d in collector.deltas if d.finish_reason]
    assert sorted(d.index for d in endings) == [0, 1, 2]
    assert {d.num_prompt_tokens for d in collector.deltas} == {3}
    assert {d.request_id for d in collector.deltas} == {"a"}
    assert core.stats.requests_finished == 1


# Logprobs


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [2, 64])
@pytest.mark.parametrize("length", [1, 6])
def test_prompt_logprobs_come_once_with_the_first_delta(n, budget, length):
    core = make_core(max_num_batched_tokens=budget)
    prompt = [5 + i for i in range(length)]
    run(core, [request("warm", prompt)])  # would be a hit
    collector = Collector()
    order = request("a", prompt, n=n, prompt_logprobs=0, logprobs=1, eos=False, max_tokens=4)
    collector.expect(order)
    core.add_request(order)
    finish(core, collector)
    found = collector.outputs["a"].prompt_logprobs
    assert found[0] is None and len(found) == length
    values = digests(prompt, length)
    for position in range(1, length):
        ((token, entry),) = found[position].items()
        assert token == prompt[position] and entry.text == TOKENIZER.token_text(token)
        assert entry.logprob == prompt_logprob(values[position - 1], token).logprob
    assert [d.prompt_logprobs is not None for d in collector.deltas] == [True] + [False] * (len(collector.deltas) - 1)
    for choice in collector.outputs["a"].outputs:
        assert len(choice.logprobs) == 4 and len(choice.logprobs[0]) == 2
        assert choice.cumulative_logprob == pytest.approx(
            math.fsum(e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs, strict=True))
        )
        assert choice.logprobs[0][choice.token_ids[0]].text == TOKENIZER.token_text(choice.token_ids[0])


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt():
    core = make_core(num_blocks=8, block_size=2, max_num_batched_tokens=7)
    order = request("a", [5 + i for i in range(12)], prompt_logprobs=0, max_tokens=3, eos=False, priority=1)
    collector = Collector()
    for each in (order, storm := request("storm", [9] * 14, max_tokens=1, eos=False)):
        collector.expect(each)
    core.add_request(order)
    collector.add(core.step())
    core.add_request(storm)
    assert core._requests["a"].num_computed_tokens == 7
    finish(core, collector)
    assert core.stats.preemptions == 1
    expected = digests(order.prompt_token_ids, 12)
    logprobs = [next(iter(e.values())).logprob for e in collector.outputs["a"].prompt_logprobs[1:]]
    assert logprobs == [prompt_logprob(expected[p], order.prompt_token_ids[p + 1]).logprob for p in range(11)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("length", [1, 6])
def test_no_new_token_at_all(n, length):  # B14
    core = make_core()
    collector = Collector()
    order = request("a", [5 + i for i in range(length)], n=n, prompt_logprobs=0, max_tokens=0)
    collector.expect(order)
    core.add_request(order)
    finish(core, collector)
    output = collector.outputs["a"]
    assert len(output.prompt_logprobs) == length
    assert [(c.text, c.token_ids, c.finish_reason) for c in output.outputs] == [("", [], "length")] * n


# Aborts


def test_abort_in_every_state_is_silent_final_and_leaks_nothing():  # A12, E09
    core = make_core(num_blocks=40, max_num_seqs=2, max_num_batched_tokens=4)
    collector = Collector()
    orders = {
        "running": request("running", [5, 6, 7], max_tokens=50, eos=False),
        "prefill": request("prefill", [5] * 30, max_tokens=5),
        "parent": request("parent", [6] * 9, n=3, max_tokens=5),
        "queued": request("queued", [7] * 9, n=2, max_tokens=5),
        "stays": request("stays", [8] * 9, max_tokens=5, eos=False),
    }
    for order in orders.values():
        collector.expect(order)
        core.add_request(order)
    for _ in range(2):
        collector.add(core.step())
    for name in ("prefill", "queued", "running", "parent"):
        collector.add(core.abort([name, name, "unknown"]))
        core.check_invariants()
        assert core.abort([name]) == []
    finish(core, collector)
    for name in ("prefill", "queued", "running", "parent"):
        assert {c.finish_reason for c in collector.outputs[name].outputs} == {"abort"}
    check_against_reference({"stays": collector.outputs["stays"]}, [orders["stays"]], core.executor.info)
    assert core.abort(["stays", "stays"]) == []  # the finish was seen first
    core.add_request(request("running", [9, 10], max_tokens=1))  # the id is free again


def test_abort_with_children_half_admitted():
    core = make_core(max_num_seqs=2, enable_prefix_caching=False)
    collector = Collector()
    order = request("a", [5, 6, 7], n=4, max_tokens=30, eos=False, temperature=1.0)
    collector.expect(order)
    core.add_request(order)
    for _ in range(4):
        collector.add(core.step())
    assert core.stats.holding == 1 and core.stats.running == 2
    collector.add(core.abort(["a"]))
    core.check_invariants()
    assert not core.has_unfinished_requests() and core.stats.blocks_used == 0
    assert {c.finish_reason for c in collector.outputs["a"].outputs} == {"abort"}


def test_abort_between_schedule_and_result():  # E09
    core = make_core()
    collector = Collector()
    for order in (request("a", [5] * 9, max_tokens=3), request("b", [6] * 9, max_tokens=3, eos=False)):
        collector.expect(order)
        core.add_request(order)
    core.executor.before_step = lambda output: collector.add(core.abort(["a"]))
    collector.add(core.step())
    core.executor.before_step = lambda output: None
    core.check_invariants()
    finish(core, collector)
    assert collector.outputs["a"].outputs[0].finish_reason == "abort" and len(collector.tokens("b")) == 3


def test_abort_flushes_withheld_text_by_the_same_rule():
    core = make_core(script=spelling("abcd"))
    collector = Collector()
    order = request("a", ids("q"), stop=["bcdz"], max_tokens=50)
    collector.expect(order)
    core.add_request(order)
    for _ in range(3):
        collector.add(core.step())
    assert collector.outputs["a"].outputs[0].text == "a"
    collector.add(core.abort(["a"]))
    assert collector.outputs["a"].outputs[0].text == "abc"


# Faults


@pytest.mark.parametrize("n", [1, 3])
def test_a_fault_of_one_request_ends_only_that_one(n):
    core = make_core()
    core.executor.errors["bad"] = "the model produced non-finite logits"
    good, bad = request("good", [5] * 5, eos=False), request("bad", [6] * 5, n=n)
    outputs = run(core, [good, bad])
    check_against_reference({"good": outputs["good"]}, [good], core.executor.info)
    assert [(c.finish_reason, c.error) for c in outputs["bad"].outputs] == [("error", "the model produced non-finite logits")] * n
    before = core.stats.prefix_hit_tokens
    core.executor.errors.clear()
    run(core, [request("later", [6] * 5)])
    assert core.stats.prefix_hit_tokens == before  # the failed step's KV was never made findable


def test_a_fault_of_one_choice_leaves_the_others():
    core = make_core()
    core.executor.errors["a#1"] = "broken"
    outputs = run(core, [request("a", [6] * 5, n=3, eos=False)])
    assert [c.finish_reason for c in outputs["a"].outputs] == ["length", "error", "length"]


def test_a_broken_executor_kills_the_engine_for_everyone():
    core = make_core()
    core.add_request(request("a", [5, 6]))

    def fail(output):
        raise RuntimeError("out of memory")

    core.executor.before_step = fail
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="out of memory"):
            core.step()
    with pytest.raises(EngineDeadError, match="start it again"):
        core.add_request(request("b", [5]))
    assert core.abort(["a"]) == [] and core.dead is not None


@pytest.mark.parametrize("where", ["execute", "schedule", "update"])
def test_an_interrupt_aborts_everything_and_the_engine_goes_on(where, monkeypatch):
    core = make_core(max_num_seqs=3, num_blocks=30)
    collector = Collector()
    orders = [request(f"r{i}", [5 + i] * 6, n=1 + i % 3, max_tokens=20, eos=False) for i in range(4)]
    for order in orders:
        collector.expect(order)
        core.add_request(order)
    for _ in range(3):
        collector.add(core.step())

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if where == "execute":
            patch.setattr(core.executor, "before_step", interrupt)
        else:
            patch.setattr(core.scheduler, "_plan_decodes" if where == "schedule" else "append_token", interrupt)
        core.step()
    collector.add(core.step())
    assert not core.has_unfinished_requests()
    assert {c.finish_reason for o in collector.outputs.values() for c in o.outputs} == {"abort"}
    core.check_invariants()
    again = [request(f"r{i}", [5 + i] * 6, max_tokens=5, eos=False) for i in range(4)]
    check_against_reference(run(core, again), again, core.executor.info)
    assert len(core.executor.known) <= 4  # the worker was told to forget the others


def test_an_interrupted_step_keeps_its_copies_and_its_drops():
    core = make_core(block_size=4)
    collector = Collector()
    orders = [request("a", [5] * 8, max_tokens=1, eos=False), request("b", [5] * 8, max_tokens=9, eos=False)]
    for order in orders:
        collector.expect(order)
        core.add_request(order)
        if order.request_id == "a":
            collector.add(core.step())  # a has ended; the next step tells the worker, and copies its last block for b
    core.executor.before_step = lambda output: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.executor.before_step = lambda output: None
    assert core.executor.outputs[-1].block_copies and core.executor.outputs[-1].dropped_request_ids == ["a"]
    core.check_invariants()
    collector.add(core.step())
    assert core.stats.blocks_used == 0 and core.stats.prefix_hit_tokens == 7
    again = [request("a", [6] * 3, max_tokens=3, eos=False), request("b", [5] * 8, max_tokens=3, eos=False)]
    check_against_reference(run(core, again), again, core.executor.info)


def test_refusals_of_the_queue():
    core = make_core(max_waiting_requests=2)
    core.add_request(request("a", [5]))
    with pytest.raises(InvalidRequestError, match="in use") as error:
        core.add_request(request("a", [6]))
    assert error.value.code == "duplicate_request_id"
    core.add_request(request("b", [5]))
    with pytest.raises(InvalidRequestError, match="max_waiting_requests") as error:
        core.add_request(request("c", [5]))
    assert error.value.code == "queue_full" and core.stats.requests_refused == 1


def test_the_queue_is_bounded_in_tokens():
    core = make_core(max_waiting_tokens=20, max_num_seqs=1)
    core.add_request(request("long", [5] * 30, max_tokens=4, eos=False))  # an empty queue takes any prompt
    assert core.stats.waiting_tokens == 30
    with pytest.raises(InvalidRequestError, match="30 tokens are waiting already .max_waiting_tokens") as error:
        core.add_request(request("c", [5]))
    assert error.value.code == "queue_full"
    core.step()
    core.add_request(request("d", [6] * 12, max_tokens=2, n=3, eos=False))
    assert core.stats.waiting_tokens == 12
    assert core.has_room(request("e", [5] * 8)) and not core.has_room(request("f", [5] * 9))
    core.add_request(request("e", [7] * 8, max_tokens=2, eos=False))
    core.abort(["e"])
    assert core.stats.waiting_tokens == 12 and core.stats.requests_refused == 1
    while core.has_unfinished_requests():
        core.step()
    assert core.stats.waiting_tokens == 0


def test_the_queue_counts_requests_not_their_choices():
    """One place to run: of a request with 20 choices 19 wait, then some preempted ones; it is one request all the time."""
    core = make_core(max_waiting_requests=3, max_num_seqs=1, num_blocks=30)
    core.add_request(request("many", [5] * 6, n=20, max_tokens=3, eos=False))
    while not core.scheduler.decoding:
        core.step()
    assert core.stats.waiting == 19 and core.stats.waiting_tokens == 0 and core.scheduler.counts.num_requests == 1
    core.add_request(request("b", [6] * 4, max_tokens=2, eos=False))
    core.scheduler._preempt(next(core.scheduler.running()))
    assert core.scheduler.counts.num_requests == 2 and core.stats.waiting_tokens > 4
    core.add_request(request("c", [7] * 4, max_tokens=2, eos=False))
    with pytest.raises(InvalidRequestError, match="3 requests are waiting already .max_waiting_requests"):
        core.add_request(request("d", [8]))
    core.abort(["many"])
    assert core.scheduler.counts.num_requests == 2 and core.stats.waiting_tokens == 8 and core.has_room(request("d", [8]))
    while core.has_unfinished_requests():
        core.step()
        core.check_invariants()
    assert core.scheduler.counts.num_requests == 0 and core.stats.waiting_tokens == 0


# Records


def test_events_tell_what_each_step_did():
    core = make_core(block_size=4, num_blocks=8, max_num_batched_tokens=6, event_history=50, max_stalled_steps=50)
    orders = [request(name, [5 + i] * 9, eos=False, max_tokens=12) for i, name in enumerate("ab")]
    run(core, orders)
    events = core.events.recent()
    assert [e.step for e in events] == sorted({e.step for e in events}) and len(events) <= 50
    assert events[0].entries[0] == ("a", 0, 6, TokenKind.PROMPT, "new", ((0, 1, 2),))
    whys = {entry.why for event in events for entry in event.entries}
    assert whys >= {"new", "prompt", "decode", "resumed"}
    stats = core.stats
    assert sum(e.blocks_taken for e in events) == stats.blocks_taken and sum(e.blocks_evicted for e in events) == stats.blocks_evicted
    assert sum(len(e.preempted) for e in events) == stats.preemptions > 0
    assert sum(len(e.entries) for e in events) == sum(len(o.entries) for o in core.executor.outputs)
    assert [name for e in events for name in e.finished] == ["a", "b"]
    assert sum(e.blocks_freed for e in events) == stats.blocks_freed and events[-1].blocks_used == 0
    assert all({"schedule", "execute", "update", "forward"} <= set(e.timings) for e in events if e.entries)
    assert len(core.events.recent(2)) == 2 and core.events.recent(0) == []


def test_the_event_ring_is_bounded():
    core = make_core(event_history=3)
    run(core, [request("a", [5], max_tokens=10, eos=False)])
    assert [e.step for e in core.events.recent()] == [8, 9, 10]


def test_metrics_of_a_choice_are_in_order():
    core = make_core(max_num_seqs=1)
    orders = [request(name, [5] * 4, max_tokens=3, eos=False) for name in "ab"]
    for output in run(core, orders).values():
        metrics = output.outputs[0].metrics
        assert metrics.arrival <= metrics.first_scheduled <= metrics.first_token <= metrics.last_token
        assert metrics.ttft == metrics.first_token - metrics.arrival


def test_stats_account_for_the_pool():
    core = make_core(num_blocks=10, block_size=4)
    core.add_request(request("a", [5] * 9, eos=False))
    core.step()
    stats = core.stats
    assert (stats.blocks_total, stats.blocks_used, stats.blocks_free, stats.running) == (10, 3, 7, 1)
    assert stats.kv_usage == 0.3 and stats.blocks_cached == 2


def test_a_seed_gives_the_same_text_alone_and_in_any_company():  # B06
    target = request("target", [5, 6, 7], seed=42, temperature=1.0, eos=False, max_tokens=10)
    alone = run(make_core(), [target])["target"].outputs[0].token_ids
    others = [request(f"o{i}", [8 + i] * (i + 1), seed=i, temperature=1.0, eos=False, max_tokens=9 - i) for i in range(7)]
    for position in (0, 3, 7):
        company = [*others[:position], target, *others[position:]]
        core = make_core(num_blocks=9, block_size=2, max_num_seqs=4)
        assert run(core, company)["target"].outputs[0].token_ids == alone
        assert core.stats.preemptions > 0
    assert alone == reference_tokens(target)


def test_closing_drops_everything():
    executor = FakeExecutor()
    core = make_core(executor)
    core.add_request(request("a", [5]))
    core.close()
    core.close()
    assert executor.closed and not core.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="closed"):
        core.step()
