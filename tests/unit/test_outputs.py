"""OutputAccumulator: however a stream was cut, joining its pieces gives the whole reply."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.outputs import CompletionDelta, CompletionOutput, Logprob, OutputAccumulator, RequestMetrics, RequestOutput

TOKENS = st.lists(st.integers(0, 50), max_size=12)


def entry(token: int) -> dict[int, Logprob]:
    """Awkward numbers, so that adding them in another order would give other bits."""
    return {token: Logprob(-math.sqrt(token + 0.1), 2), 99: Logprob(-0.1, 1)}


def pieces(data, items: list, count: int) -> list[list]:
    """`items` cut at random into `count` runs, some of them empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), min_size=count - 1, max_size=count - 1)))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_cut_and_interleaving_gives_the_same_result(data):
    n = data.draw(st.integers(1, 3))
    with_logprobs = data.draw(st.booleans())
    choices, queues = [], []
    for index in range(n):
        tokens, text = data.draw(TOKENS), data.draw(st.text(max_size=20))
        reason = data.draw(st.sampled_from(["stop", "length", "abort", "error"]))
        stop_reason = data.draw(st.sampled_from([None, 7, "END"]))
        metrics = RequestMetrics(arrival=1.0)
        choices.append((tokens, text, reason, stop_reason, metrics))
        count = data.draw(st.integers(1, 5))
        texts = pieces(data, list(text), count)  # text lags behind tokens: cut on its own
        deltas = [
            CompletionDelta(
                "r", index, text="".join(t), token_ids=ids, logprobs=[entry(i) for i in ids] if with_logprobs else None, seed=42
            )
            for t, ids in zip(texts, pieces(data, tokens, count), strict=True)
        ]
        deltas[-1].finish_reason, deltas[-1].stop_reason, deltas[-1].metrics = reason, stop_reason, metrics
        deltas[-1].error = "broken" if reason == "error" else None
        queues.append(deltas)
    joined = OutputAccumulator("r", "prompt", [1, 2], n)
    while any(queues):
        index = data.draw(st.sampled_from([i for i in range(n) if queues[i]]))
        assert not joined.output.finished
        joined.add(queues[index].pop(0))
    assert joined.output.finished
    assert [choice.index for choice in joined.output.outputs] == list(range(n))
    for choice, (tokens, text, reason, stop_reason, metrics) in zip(joined.output.outputs, choices, strict=True):
        assert (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason) == (tokens, text, reason, stop_reason)
        assert choice.metrics is metrics and choice.error == ("broken" if reason == "error" else None)
        if with_logprobs:
            total = 0.0
            for token in tokens:
                total += entry(token)[token].logprob
            assert choice.logprobs == [entry(token) for token in tokens] and choice.cumulative_logprob == total
        else:
            assert choice.logprobs is None and choice.cumulative_logprob is None


def test_what_belongs_to_the_whole_request():
    joined = OutputAccumulator("r", None, [1, 2, 3], 2)
    prompt = [None, entry(2), entry(3)]
    joined.add(CompletionDelta("r", 1, num_cached_tokens=2, seed=5, prompt_logprobs=prompt))
    joined.add(CompletionDelta("r", 0, text="a", token_ids=[7], seed=5))
    out = joined.output
    assert (out.request_id, out.prompt, out.prompt_token_ids, out.num_cached_tokens, out.seed) == ("r", None, [1, 2, 3], 2, 5)
    assert out.prompt_logprobs is prompt
    assert [choice.text for choice in out.outputs] == ["a", ""] and not out.finished


def test_deltas_are_not_changed_and_not_shared():
    ids, logprobs = [1], [entry(1)]
    first = CompletionDelta("r", 0, token_ids=ids, logprobs=logprobs)
    joined = OutputAccumulator("r", None, [], 1)
    joined.add(first)
    joined.add(CompletionDelta("r", 0, token_ids=[2], logprobs=[entry(2)]))
    assert (ids, logprobs) == ([1], [entry(1)])
    assert joined.output.outputs[0].token_ids == [1, 2]


def test_one_logprob_entry_for_each_token():
    joined = OutputAccumulator("r", None, [], 1)
    with pytest.raises(ValueError, match="1 logprobs for 2 tokens"):
        joined.add(CompletionDelta("r", 0, token_ids=[1, 2], logprobs=[entry(1)]))
    assert joined.output.outputs[0] == CompletionOutput(0), "refused before anything was joined"


def test_nothing_follows_the_last_delta():
    joined = OutputAccumulator("r", None, [], 2)
    joined.add(CompletionDelta("r", 0, text="a", finish_reason="stop"))
    with pytest.raises(ValueError, match="choice 0 of request r has finished"):
        joined.add(CompletionDelta("r", 0, text="b"))
    joined.add(CompletionDelta("r", 1, text="c", finish_reason="length"))
    assert [choice.text for choice in joined.output.outputs] == ["a", "c"]


def test_fresh_objects_share_no_lists():
    assert CompletionDelta("a", 0).token_ids is not CompletionDelta("b", 0).token_ids
    joined = OutputAccumulator("r", None, [], 2)
    assert joined.output.outputs[0].token_ids is not joined.output.outputs[1].token_ids


def test_finished_and_times():
    assert not RequestOutput("r", None, [], [CompletionOutput(0, finish_reason="stop"), CompletionOutput(1)]).finished
    assert RequestOutput("r", None, [], [CompletionOutput(0, finish_reason="stop")]).finished
    assert RequestMetrics(arrival=2.0).ttft is None
    assert RequestMetrics(arrival=2.0, first_token=2.5).ttft == 0.5
