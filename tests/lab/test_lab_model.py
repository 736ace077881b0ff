"""LabModel, the ways to decode, and the roofline: against the engine, and by counting."""

import importlib.util

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.lab.standard import decoding, roofline
from octavo.lab.standard.examples import broken_strategy, good_strategy
from octavo.lab.standard.model import LabModel, StrategyError

BACKENDS = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(importlib.util.find_spec("octavo._native") is None, reason="no kernels")),
]
PROMPT = [72, 101, 108, 108, 111, 32, 119]


@pytest.fixture(scope="module", params=BACKENDS)
def model(request, tiny_path):
    return LabModel.load(str(tiny_path), backend=request.param, num_kv_blocks=16)


def decoded(model, way, max_tokens=24, prompt=PROMPT):
    model.begin(len(prompt))
    model.keep_logits = True
    return way(model, list(prompt), max_tokens)


def test_all_ways_give_the_engines_tokens(model, tiny_path):
    with_engine = LLM(str(tiny_path), backend=model.backend).generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    expected = with_engine[0].outputs[0].token_ids
    assert decoded(model, decoding.naive) == expected and [len(e.token_ids) for e in model.record] == list(range(7, 31))
    assert decoded(model, decoding.kv_cache) == expected and [len(e.token_ids) for e in model.record] == [7] + [1] * 23
    assert decoded(model, good_strategy.generate) == expected and len(model.record) < 24  # guesses were right
    assert decoded(model, broken_strategy.generate) != expected


def test_a_cache_changes_no_logit(model):
    decoded(model, decoding.naive)
    naive = np.concatenate([entry.logits for entry in model.record])
    decoded(model, decoding.kv_cache)
    cached = np.concatenate([entry.logits for entry in model.record])
    assert naive.shape == cached.shape == (24, model.vocab_size)
    if model.backend == "cpu":
        np.testing.assert_array_equal(naive, cached)  # rows of a kind, whatever is computed beside them
    else:
        np.testing.assert_allclose(naive, cached, atol=1e-4)


def test_rows_are_in_order_and_of_their_kind(model, monkeypatch):
    batches = []
    forward = model.runner.model.forward
    monkeypatch.setattr(model.runner.model, "forward", lambda batch: batches.append(batch) or forward(batch))
    model.begin(5)
    ids = [10, 20, 30, 40, 50, 60, 70]
    whole = model.forward(ids, last=4)
    batch = batches[0]
    assert batch.num_generated == 2 and batch.positions.tolist() == [5, 6, 0, 1, 2, 3, 4]
    assert batch.token_ids.tolist() == [60, 70, 10, 20, 30, 40, 50]
    assert batch.query_start_loc.tolist() == [0, 2, 7] and batch.seq_lens.tolist() == [7, 5] and batch.num_generated_logits == 2
    for count in (4, 5, 6, 7):  # row i of the last four is what the first 4 + i tokens give alone
        np.testing.assert_allclose(whole[count - 4], model.forward(ids[:count])[0], atol=1e-4)


def test_a_cache_can_be_taken_back(model):
    model.begin(4)
    cache = model.new_cache()
    model.forward([1, 2, 3, 4], cache)
    straight = model.forward([5, 6], cache)
    model.forward([90, 91, 92], cache, position=4)
    assert cache.length == 7
    np.testing.assert_allclose(model.forward([5, 6], cache, position=4), straight, atol=1e-6)
    assert cache.length == 6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.forward([]), "at least one token"),
        (lambda m: m.forward([1], last=2), "last=2"),
        (lambda m: m.forward([1, -1]), "token ids must be between"),
        (lambda m: m.forward([10**6]), "token ids must be between"),
        (lambda m: m.forward([1], m.new_cache(), position=1), "leaves a hole"),
        (lambda m: m.forward([1], position=-1), "leaves a hole"),
        (lambda m: m.forward([1] * 300), "do not fit"),
        (lambda m: [m.forward([1] * 100, m.new_cache()) for _ in range(3)], "the KV pool is full"),
    ],
)
def test_what_cannot_be_is_said(model, call, words):
    model.begin(4)
    with pytest.raises(StrategyError, match=words):
        call(model)


def test_naive_gives_its_blocks_back(model):
    model.begin(3)
    for _ in range(40):
        model.forward([1, 2, 3] * 20)


def test_the_roofline_counts_what_the_model_has(model):
    line = roofline.measure(model)
    config = model.parts.model_config
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    assert line.layer_weights == config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    assert line.head_weights == config.vocab_size * config.hidden_size
    kv_numbers = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    assert line.kv_bytes == kv_numbers * (2 if model.backend == "cpu" else 4)
    assert line.weight_bytes >= 4 * (line.layer_weights + line.head_weights) and line.bandwidth > 1e8 and line.matmul > 1e7


def test_the_roofline_is_the_larger_of_two_times():
    line = roofline.Roofline(
        bandwidth=1e9, matmul=1e10, weight_bytes=10**8, layer_weights=10**8, head_weights=10**7, kv_bytes=1000.0, attention_flops=100.0
    )
    assert line.step(1, 50) == pytest.approx((10**8 + 50_000) / 1e9)  # 0.1 s of reading, 0.022 s of computing
    keys = 10 * 11 / 2
    assert line.step(10, 10) == pytest.approx((2 * (10 * 10**8 + 10**7) + 100 * keys) / 1e10)
    assert line.step(2, 10) == pytest.approx(max((10**8 + 10_000) / 1e9, (2 * (2 * 10**8 + 10**7) + 100 * (9 + 10)) / 1e10))
    assert line.predict("naive", 3, 4) == pytest.approx(sum(line.step(n, n) for n in (3, 4, 5, 6)))
    assert line.predict("kv_cache", 3, 4) == pytest.approx(line.step(3, 3) + sum(line.step(1, n) for n in (4, 5, 6)))
