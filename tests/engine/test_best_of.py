"""best_of: of all choices drawn, the n with the highest mean log probability, against the same choices drawn with n."""

from __future__ import annotations

import pytest

from tests.engine.fake import Collector, finish, make_core, request, run

PROMPT = [5, 6, 7, 8, 9]


def drawn(count: int, **fields):
    """All choices with their logprobs, as n = count gives them."""
    order = request("a", PROMPT, n=count, temperature=1.0, max_tokens=12, **{"logprobs": 0, **fields})
    return run(make_core(), [order])["a"].outputs


def best(count: int, n: int, **fields):
    order = request("a", PROMPT, n=n, best_of=count, temperature=1.0, max_tokens=12, **fields)
    return run(make_core(), [order])["a"]


def mean(choice) -> float:
    return sum(entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)) / len(choice.token_ids)


@pytest.mark.parametrize("count, n", [(2, 1), (6, 1), (6, 3), (8, 7)])
def test_the_n_best_of_the_choices_drawn(count, n):
    choices = drawn(count)
    ranked = sorted(choices, key=mean, reverse=True)
    assert [choice.index for choice in ranked] != list(range(count)), "the order they were drawn in would do"
    output = best(count, n)
    assert [choice.token_ids for choice in output.outputs] == [choice.token_ids for choice in ranked[:n]]
    assert [choice.index for choice in output.outputs] == list(range(n))
    for got, expected in zip(output.outputs, ranked, strict=False):
        assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
        assert got.logprobs is None and got.cumulative_logprob == pytest.approx(expected.cumulative_logprob)
    everything = sum(len(choice.token_ids) for choice in choices)
    assert sum(len(choice.token_ids) for choice in output.outputs) + output.num_discarded_tokens == everything


def test_best_of_equal_to_n_is_n():
    assert [c.token_ids for c in best(3, 3).outputs] == [c.token_ids for c in drawn(3)]


def test_logprobs_that_were_asked_for():
    choices = {tuple(choice.token_ids): choice for choice in drawn(5, logprobs=1)}
    for choice in best(5, 2, logprobs=1).outputs:
        assert choice.logprobs == choices[tuple(choice.token_ids)].logprobs


def test_prompt_logprobs_come_with_the_answer():
    output = best(4, 2, prompt_logprobs=0)
    assert len(output.prompt_logprobs) == len(PROMPT) and output.prompt_logprobs[0] is None
    order = request("a", PROMPT, n=2, best_of=4, max_tokens=0, prompt_logprobs=0)
    output = run(make_core(), [order])["a"]
    assert len(output.prompt_logprobs) == len(PROMPT) and [choice.finish_reason for choice in output.outputs] == ["length"] * 2


def test_a_choice_that_failed_is_the_last_to_be_returned():
    core = make_core()
    order = request("a", PROMPT, n=3, best_of=4, temperature=1.0, eos=False)

    def spoil(output):
        core.executor.errors = {e.request_id: "broken" for e in output.entries if e.request_id in ("a#1", "a#2") and e.start == 7}

    core.executor.before_step = spoil
    assert [choice.finish_reason for choice in run(core, [order])["a"].outputs] == ["length", "length", "error"]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_abort_ends_all_of_it(steps):
    core = make_core()
    collector = Collector()
    order = request("a", PROMPT, n=2, best_of=5, temperature=1.0, eos=False)
    collector.expect(order)
    core.add_request(order)
    for _ in range(steps):
        assert core.step() == []
    collector.add(core.abort(["a"]))
    assert [choice.finish_reason for choice in collector.outputs["a"].outputs] == ["abort"] * 2
    finish(core, collector)
    assert core.stats.requests_aborted == 1 and not core._gathering
