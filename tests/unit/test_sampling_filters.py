"""Every edit and filter against its definition written out in float64 with Python lists, and against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling import processors
from octavo.sampling.sampler import edit
from octavo.sampling.state import SamplingState
from octavo.sampling_params import SamplingParams

NO_BANS = np.empty(0, dtype=np.int64)


def state_of(vocab: int, *, prompt=(), output=(), stop=frozenset(), bad=(), seed=0, **fields) -> SamplingState:
    return SamplingState(SamplingParams(**fields).resolve({}), seed, 0, list(prompt), list(output), frozenset(stop), tuple(bad), vocab)


def outcome(logits: np.ndarray, state: SamplingState) -> dict[int, float]:
    """Token id -> probability of what the code under test would draw from."""
    x = edit(logits, state)
    kept, weights = processors.candidates(x, state.filters, int(x.argmax()))
    ids = np.arange(logits.size) if state.allowed_ids is None else state.allowed_ids
    ids = ids if kept is None else ids[kept]
    return {int(i): float(w) / float(weights.sum(dtype=np.float64)) for i, w in zip(ids, weights, strict=True) if w > 0}


# -- the definitions -----------------------------------------------------------------------------------------------------


def by_hand(logits, *, prompt=(), output=(), stop=frozenset(), bad=(), **fields) -> dict[int, float]:
    params = SamplingParams(**fields).resolve({})
    x = {i: float(v) for i, v in enumerate(logits)}
    for i, value in (params.logit_bias or {}).items():
        x[i] += value
    for i in x:
        if i in prompt or i in output:
            x[i] = x[i] * params.repetition_penalty if x[i] < 0 else x[i] / params.repetition_penalty
        times = list(output).count(i)
        x[i] -= params.frequency_penalty * times + (params.presence_penalty if times else 0.0)
    sequence = [*prompt, *output]
    banned = {b[-1] for b in bad if list(b[:-1]) == sequence[len(sequence) - len(b) + 1 :] and len(b) - 1 <= len(sequence)}
    if len(output) < params.min_tokens:
        banned |= set(stop)
    allowed = set(x) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    left = {i: x[i] for i in sorted(allowed - banned) if x[i] > -math.inf} or {i: x[i] for i in sorted(allowed)}
    top = max(left.values())
    mass = {i: math.exp((v - top) / params.temperature) for i, v in left.items()}

    def share(tokens):
        total = math.fsum(mass[i] for i in tokens)
        return {i: mass[i] / total for i in tokens}

    def until(order, probabilities, goal):
        taken, held = [], 0.0
        for i in order:
            taken.append(i)
            held += probabilities[i]
            if held >= goal:
                break
        return taken

    p = share(left)
    if 0 < params.top_k < len(x):
        p = share(sorted(p, key=lambda i: (-p[i], i))[: params.top_k])
    if params.top_p < 1:
        p = share(until(sorted(p, key=lambda i: (-p[i], i)), p, params.top_p))
    if params.min_p > 0:
        p = share([i for i in p if p[i] >= params.min_p * max(p.values())])
    if params.typical_p < 1:
        entropy = -math.fsum(q * math.log(q) for q in p.values() if q)
        p = share(until(sorted(p, key=lambda i: (abs(-math.log(p[i]) - entropy) if p[i] else math.inf, i)), p, params.typical_p))
    return {i: q for i, q in p.items() if q > 1e-45}


def assert_same(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    for i, probability in expected.items():
        assert found[i] == pytest.approx(probability, rel=1e-4, abs=1e-12)


def rows(count: int, vocab: int, spread: float = 2.5):
    return (np.random.default_rng(count * 1000 + vocab).standard_normal((count, vocab)) * spread).astype(np.float32)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 7.0},
        {"top_k": 5},
        {"top_k": 1, "top_p": 0.8},
        {"top_p": 0.8},
        {"top_p": 0.05},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"typical_p": 0.6},
        {"typical_p": 0.0},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "typical_p": 0.8, "temperature": 1.4},
        {"top_p": 0.9, "typical_p": 0.4, "temperature": 0.7},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "presence_penalty": 1.5, "frequency_penalty": -0.8, "top_p": 0.9},
        {"logit_bias": {3: 5.0, 7: -100.0}, "allowed_token_ids": [9, 3, 7, 3, 21], "min_p": 1e-3},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [40, 300])
def test_filters_follow_their_definitions(fields, vocab):
    history = {"prompt": [1, 5, 9, 9, 30], "output": [2, 5, 2, 2, 31]}
    for logits in rows(6, vocab):
        assert_same(outcome(logits, state_of(vocab, **history, **fields)), by_hand(logits, **history, **fields))


@given(
    values=st.lists(st.integers(-40, 40), min_size=2, max_size=30),
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.sampled_from([0, -1, 2, 5, 10**9]),
    min_p=st.sampled_from([0.0, 0.13]),
    bad=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=3),
    output=st.lists(st.integers(0, 1), max_size=4),
    min_tokens=st.integers(0, 3),
    presence=st.sampled_from([0.0, 1.25]),
    repetition=st.sampled_from([1.0, 2.0]),
)
@settings(max_examples=150, deadline=None)
def test_mixtures_follow_their_definitions_with_ties(values, temperature, top_k, min_p, bad, output, min_tokens, presence, repetition):
    logits = np.array(values, dtype=np.float32) / 8  # exact in float32 and with many ties
    fields = {
        "temperature": temperature, "top_k": top_k, "min_p": min_p, "min_tokens": min_tokens,
        "presence_penalty": presence, "repetition_penalty": repetition,
    }  # fmt: skip
    history = {"prompt": [0], "output": output, "stop": frozenset({0, 1, 10**6}), "bad": tuple(bad)}
    assert_same(outcome(logits, state_of(logits.size, **history, **fields)), by_hand(logits, **history, **fields))


# -- selection and order: the parts the filters stand on -------------------------------------------------------------------


@given(st.lists(st.sampled_from([-np.inf, -3.0, -1e-40, -0.0, 0.0, 1e-40, 2.0, 3e38]), min_size=1, max_size=60), st.integers(0, 70))
@settings(max_examples=200, deadline=None)
def test_selection_and_order_break_ties_by_index(values, count):
    x = np.array(values, dtype=np.float32)
    expected = sorted(range(x.size), key=lambda i: (-values[i], i))
    assert processors.in_order(x, np.arange(x.size)).tolist() == expected
    assert processors.largest(x, count).tolist() == sorted(expected[:count])


def test_a_flat_nucleus_needs_every_widening_of_the_selection():
    logits = np.zeros(20_000, dtype=np.float32)
    state = state_of(logits.size, top_p=0.9)
    assert sorted(outcome(logits, state)) == list(range(18_000))


# -- transformers as the oracle --------------------------------------------------------------------------------------------


def survivors_of_transformers(warper, logits: np.ndarray, input_ids=(0,)) -> dict[int, float]:
    torch = pytest.importorskip("torch", reason="torch is the oracle here; install octavo[test]")
    scores = warper(torch.tensor([list(input_ids)]), torch.tensor(logits, dtype=torch.float64)[None])
    p = torch.softmax(scores, -1)[0].tolist()
    return {i: q for i, q in enumerate(p) if q > 1e-45}


@pytest.mark.parametrize(
    ("name", "argument", "fields"),
    [
        ("TemperatureLogitsWarper", 0.4, {"temperature": 0.4}),
        ("TemperatureLogitsWarper", 30.0, {"temperature": 30}),
        ("TopKLogitsWarper", 7, {"top_k": 7}),
        ("TopPLogitsWarper", 0.85, {"top_p": 0.85}),
        ("TopPLogitsWarper", 0.02, {"top_p": 0.02}),
        ("MinPLogitsWarper", 0.1, {"min_p": 0.1}),
        ("TypicalLogitsWarper", 0.3, {"typical_p": 0.3}),
        ("TypicalLogitsWarper", 0.95, {"typical_p": 0.95}),
        ("RepetitionPenaltyLogitsProcessor", 1.6, {"repetition_penalty": 1.6}),
        ("RepetitionPenaltyLogitsProcessor", 0.5, {"repetition_penalty": 0.5}),
    ],
)
def test_filters_agree_with_transformers(name, argument, fields):
    process = pytest.importorskip("transformers.generation.logits_process", reason="transformers is the oracle; install octavo[test]")
    warper = getattr(process, name)(argument)
    for logits in rows(8, 200):
        expected = survivors_of_transformers(warper, logits, input_ids=[4, 8, 8, 15, 150])
        assert_same(outcome(logits, state_of(200, prompt=[4, 8, 8], output=[15, 150], **fields)), expected)


def test_a_chain_agrees_with_transformers():
    process = pytest.importorskip("transformers.generation.logits_process", reason="transformers is the oracle; install octavo[test]")
    chain = process.LogitsProcessorList(
        [
            process.RepetitionPenaltyLogitsProcessor(1.3),
            process.TemperatureLogitsWarper(1.5),
            process.TopKLogitsWarper(60),
            process.TopPLogitsWarper(0.9),
            process.MinPLogitsWarper(0.02),
            process.TypicalLogitsWarper(0.9),
        ]
    )
    fields = {"repetition_penalty": 1.3, "temperature": 1.5, "top_k": 60, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9}
    for logits in rows(8, 200):
        expected = survivors_of_transformers(chain, logits, input_ids=[3, 77])
        assert_same(outcome(logits, state_of(200, prompt=[3], output=[77], **fields)), expected)


@pytest.mark.parametrize("output", [[], [1], [1, 2], [9, 1, 2], [2, 1]])
def test_bad_words_agree_with_transformers(output):
    process = pytest.importorskip("transformers.generation.logits_process", reason="transformers is the oracle; install octavo[test]")
    bad = [(3,), (1, 4), (1, 2, 5), (7, 1, 6), (2, 1, 8)]
    logits = rows(1, 12)[0]
    warper = process.NoBadWordsLogitsProcessor([list(b) for b in bad], eos_token_id=11)
    expected = survivors_of_transformers(warper, logits, input_ids=[7, *output])
    assert_same(outcome(logits, state_of(12, prompt=[7], output=output, bad=bad)), expected)


# -- cases ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_k", "survivors"), [(0, {0, 1, 2}), (-1, {0, 1, 2}), (1, {2}), (2, {1, 2}), (3, {0, 1, 2}), (10**9, {0, 1, 2})]
)
@pytest.mark.parametrize("source", ["request", "generation_config"])
def test_b01_top_k(top_k, survivors, source):
    logits = np.array([1, 2, 3], dtype=np.float32)
    own, defaults = ({"top_k": top_k}, {}) if source == "request" else ({}, {"top_k": top_k})
    for temperature in (1.0, 2.0):
        params = SamplingParams(temperature=temperature, **own).resolve(defaults)
        found = outcome(logits, SamplingState(params, 0, 0, [], [], frozenset(), (), 3))
        total = sum(math.exp(float(logits[i]) / temperature) for i in survivors)
        assert_same(found, {i: math.exp(float(logits[i]) / temperature) / total for i in survivors})


@pytest.mark.parametrize("fields", [{"top_k": 1, "top_p": 0.8}, {"top_p": 1e-9}, {"min_p": 1}, {"typical_p": 1e-9, "top_p": 1e-9}], ids=str)
def test_b02_the_most_probable_token_survives(fields):
    logits = np.array([0.5, 3.0, -1.0, 2.9], dtype=np.float32)
    assert outcome(logits, state_of(4, **fields)) == {1: 1.0}


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"top_p": 0.5}, 25_000),
        ({"min_p": 1.0}, 50_000),
        ({"top_p": 0.5, "min_p": 0.9, "top_k": 100}, 50),
        ({"top_p": 0.25, "min_p": 0.9, "top_k": 40_000, "typical_p": 0.5}, 5_000),
        ({"top_p": 1e-9, "min_p": 1.0, "top_k": 7}, 1),
    ],
    ids=str,
)
def test_b02_flat_distribution(fields, count):
    found = outcome(np.full(50_000, -7.25, dtype=np.float32), state_of(50_000, **fields))
    assert sorted(found) == list(range(count))
    assert_same(found, dict.fromkeys(range(count), 1 / count))


def test_typical_p_may_drop_the_most_probable_token():
    """By its definition: one token of probability 0.4 among many rare ones says less than the entropy."""
    p = np.array([0.4] + [0.6 / 30] * 30)
    found = outcome(np.log(p).astype(np.float32), state_of(31, typical_p=0.49))
    assert 0 not in found and len(found) == 25


def test_all_banned_rows_are_defined():
    logits = np.array([4.0, 3.0, 2.0, 1.0], dtype=np.float32)
    eos = frozenset({3})
    assert outcome(logits, state_of(4, allowed_token_ids=[3], min_tokens=5, stop=eos)) == {3: 1.0}
    assert set(outcome(logits, state_of(4, allowed_token_ids=[2, 3], min_tokens=5, stop=eos))) == {2}
    assert set(outcome(logits, state_of(4, bad=[(0,), (1,), (2,), (3,)]))) == {0, 1, 2, 3}
    assert set(outcome(logits, state_of(4, bad=[(0,), (1,)], min_tokens=1, stop={2, 3}))) == {0, 1, 2, 3}
    ruled_out = np.array([1.0, -np.inf, -np.inf, 0.0], dtype=np.float32)
    assert outcome(ruled_out, state_of(4, allowed_token_ids=[1, 2])) == {1: 0.5, 2: 0.5}
    assert set(outcome(ruled_out, state_of(4, bad=[(0,)], min_tokens=1, stop={3}))) == {0, 3}


def test_arguments_are_not_modified():
    logits = rows(1, 50)[0]
    logits.setflags(write=False)
    state = state_of(50, prompt=[1], output=[2], repetition_penalty=1.5, logit_bias={4: 3.0}, bad=[(5,)], top_p=0.9, typical_p=0.9)
    outcome(logits, state)


@pytest.mark.parametrize("penalty", [1e-3, 1e3])
def test_penalties_never_make_an_infinite_logit(penalty):
    logits = np.array([3e38, -3e38, 1.0, -np.inf], dtype=np.float32)
    x = logits.copy()
    processors.penalize_(x, np.arange(4), np.ones(4, dtype=np.float32), penalty, 2.0, 2.0)
    assert not np.isnan(x).any() and not np.isposinf(x).any() and x[3] == -np.inf
    assert sum(outcome(logits, state_of(4, output=[0, 1, 2, 3], repetition_penalty=penalty)).values()) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 2.0, 1e6])
@pytest.mark.parametrize("fields", [{}, {"typical_p": 0.9}, {"top_p": 0.9, "min_p": 0.1}], ids=str)
def test_b03_extreme_temperatures_give_numbers(temperature, fields):
    for logits in ([-65504.0, 65504.0, 65472.0], [3e38, -3e38, 0.0], [-np.inf, 1.0, 1.0]):
        with np.errstate(invalid="raise", divide="raise"):
            found = outcome(np.array(logits, dtype=np.float32), state_of(3, temperature=temperature, **fields))
        assert sum(found.values()) == pytest.approx(1)
        assert int(np.argmax(logits)) in found
