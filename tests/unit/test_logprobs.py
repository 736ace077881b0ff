"""Reported probabilities: values, ranks, order, raw against processed, and numbers that JSON can hold."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.logprobs import LOGPROB_FLOOR, processed_logprobs, prompt_logprobs, raw_logprobs
from octavo.sampling.sampler import sample
from octavo.sampling.state import SamplingState
from octavo.sampling_params import SamplingParams


def state_of(vocab: int, *, output=(), seed=0, **fields) -> SamplingState:
    return SamplingState(SamplingParams(**fields).resolve({}), seed, 0, [0], list(output), frozenset(), (), vocab)


def log_softmax(row) -> list[float]:
    values = [float(v) for v in row]
    top = max(values)
    total = math.log(math.fsum(math.exp(v - top) for v in values))
    return [v - top - total for v in values]


VALUES = st.sampled_from([-np.inf, -2e4, -30.0, -1.5, -0.0, 0.0, 0.25, 3.0, 1e4])


@given(st.lists(VALUES, min_size=1, max_size=40).filter(lambda v: max(v) > -np.inf), st.data())
@settings(max_examples=200, deadline=None)
def test_raw_logprobs_follow_the_definition(values, data):
    token, k = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 20))
    found = raw_logprobs(np.array(values, dtype=np.float32), token, k)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert list(found) == list(dict.fromkeys([token, *order[:k]]))
    exact = log_softmax(values)
    for i, entry in found.items():
        assert entry.rank == order.index(i) + 1
        assert entry.logprob == pytest.approx(max(exact[i], LOGPROB_FLOOR), abs=1e-5)
        assert entry.text == ""
    json.dumps({i: entry.logprob for i, entry in found.items()}, allow_nan=False)


def test_raw_probabilities_sum_to_one():
    row = np.random.default_rng(0).standard_normal(30_000).astype(np.float32) * 3
    total = math.fsum(math.exp(raw_logprobs(row, i, 0)[i].logprob) for i in np.argsort(-row)[:300]) + math.fsum(
        math.exp(p) for p in sorted(log_softmax(row))[:-300]
    )
    assert total == pytest.approx(1, abs=1e-6)
    small = row[:500]
    assert math.fsum(math.exp(raw_logprobs(small, i, 0)[i].logprob) for i in range(500)) == pytest.approx(1, abs=1e-6)


SETTINGS = [
    {"temperature": 0.5},
    {"temperature": 2},
    {"temperature": 1, "top_p": 0.1},
    {"temperature": 0, "presence_penalty": 2.0, "logit_bias": {1: 4.0}},
    {"top_k": 3, "min_p": 0.2, "typical_p": 0.5, "repetition_penalty": 1.8},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_b12_raw_values_do_not_depend_on_the_settings(fields):
    logits = np.random.default_rng(3).standard_normal((1, 50)).astype(np.float32)
    exact = log_softmax(logits[0])
    tokens, logprobs = sample(logits, [state_of(50, output=[4, 4], logprobs=5, **fields)])
    assert next(iter(logprobs[0])) == tokens[0]
    for i, entry in logprobs[0].items():
        assert entry == raw_logprobs(logits[0], int(tokens[0]), 5)[i]
        assert entry.logprob == pytest.approx(exact[i], abs=1e-5)


def test_b12_processed_values_are_the_probabilities_drawn_from():
    logits = np.log(np.array([[5, 3, 2, 2]], dtype=np.float32))
    for fields, shares in [
        ({"top_p": 0.7}, {0: 0.5, 1: 0.3, 2: 0.2}),
        ({"temperature": 0.5}, {0: 25 / 42, 1: 9 / 42, 2: 4 / 42, 3: 4 / 42}),
        ({"allowed_token_ids": [1, 3]}, {1: 0.6, 3: 0.4}),
        ({"logit_bias": {3: math.log(5)}, "top_k": 2}, {3: 10 / 15, 0: 5 / 15}),
        ({"logit_bias": {0: -50}}, {0: math.exp(-50) * 5 / 7, 1: 3 / 7, 2: 2 / 7, 3: 2 / 7}),
    ]:
        for seed in range(8):
            tokens, logprobs = sample(logits, [state_of(4, seed=seed, logprobs=20, logprobs_mode="processed", **fields)])
            found = logprobs[0]
            assert next(iter(found)) == tokens[0]
            ranks = sorted(shares, key=lambda i: (-shares[i], i))
            assert found.keys() == shares.keys()
            for i, entry in found.items():
                assert entry.logprob == pytest.approx(math.log(shares[i]), abs=1e-5)
                assert entry.rank == ranks.index(i) + 1


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}], ids=str)
def test_processed_greedy_is_certain(fields):
    logits = np.array([[1.0, 2.0, 0.5]], dtype=np.float32)
    logprobs = sample(logits, [state_of(3, logprobs=2, logprobs_mode="processed", **fields)])[1][0]
    assert [(i, e.logprob, e.rank) for i, e in logprobs.items()] == [(1, 0.0, 1)]


def test_b11_masked_tokens_are_numbers_that_json_holds():
    logits = np.array([[1.0, 2.0, -np.inf, -np.inf, -np.inf]], dtype=np.float32)
    raw = sample(logits, [state_of(5, logprobs=5)])[1][0]
    assert len(raw) == 5 and [raw[i].logprob for i in (2, 3, 4)] == [LOGPROB_FLOOR] * 3 == [-9999.0] * 3
    processed = sample(logits, [state_of(5, logprobs=5, logprobs_mode="processed", allowed_token_ids=[0, 1])])[1][0]
    assert set(processed) == {0, 1}, "what could not be drawn is left out"
    banned = SamplingState(SamplingParams(logprobs=5, logprobs_mode="processed").resolve({}), 0, 0, [0], [], frozenset(), ((1,),), 5)
    assert set(sample(logits, [banned])[1][0]) == {0}
    one_left = sample(logits, [state_of(5, logprobs=5, logprobs_mode="processed", allowed_token_ids=[2])])[1][0]
    assert [(i, e.logprob) for i, e in one_left.items()] == [(2, 0.0)]
    forced = sample(logits, [state_of(5, logprobs=1, allowed_token_ids=[3])])[1][0]
    assert forced[3].logprob == LOGPROB_FLOOR and list(forced) == [3, 1], "raw: the model thought it impossible"
    for entry in (raw, processed, one_left, forced):
        json.dumps({i: e.logprob for i, e in entry.items()}, allow_nan=False)


def test_processed_ties_rank_by_id():
    found = processed_logprobs(np.array([10, 20, 30]), np.array([1.0, 1.0, 1.0], dtype=np.float32), 20, 3)
    assert [(i, e.rank) for i, e in found.items()] == [(20, 2), (10, 1), (30, 3)]


def test_prompt_logprobs_equal_row_by_row():
    logits = np.random.default_rng(1).standard_normal((7, 33)).astype(np.float32)
    targets = [3, 0, 32, 8, 8, 1, 2]
    logits.setflags(write=False)
    expected = [raw_logprobs(row, t, 4) for row, t in zip(logits, targets, strict=True)]
    assert prompt_logprobs(logits, targets, 4) == expected
    assert prompt_logprobs(logits, np.array(targets, dtype=np.int32), 4) == expected
    cut = prompt_logprobs(logits[:3], targets[:3], 4) + prompt_logprobs(logits[3:], targets[3:], 4)
    assert cut == expected, "however the prompt was cut"
    assert [next(iter(entry)) for entry in expected] == targets
    assert all(len(entry) == 1 for entry in prompt_logprobs(logits, targets, 0))
    assert prompt_logprobs(logits[:0], [], 4) == []


@pytest.mark.parametrize("targets", [[1], [1, 2, 3], [1, 33], [1, -1]])
def test_prompt_logprobs_refuses_what_does_not_fit(targets):
    with pytest.raises(ValueError, match="do not fit"):
        prompt_logprobs(np.zeros((2, 33), dtype=np.float32), targets, 1)


def test_logprobs_agree_with_torch():
    torch = pytest.importorskip("torch", reason="torch is the oracle here; install octavo[test]")
    logits = np.random.default_rng(2).standard_normal((3, 1000)).astype(np.float32) * 5
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)
    top = torch.topk(expected, 6).indices.tolist()
    for m, entry in enumerate(prompt_logprobs(logits, [5, 6, 7], 6)):
        assert [i for i in entry if i != 5 + m or i in top[m]] == top[m]
        for i, found in entry.items():
            assert found.logprob == pytest.approx(expected[m, i].item(), abs=1e-5)
