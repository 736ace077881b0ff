"""The native sampler against the specification in NumPy and against float64 (sampling_oracle.py), and its bits in any company."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.native import NativeSampler
from octavo.sampling.random import uniforms
from octavo.sampling.sampler import NO_TOKEN, NumpySampler, sample
from tests.ops.sampling_oracle import Draw, processed_matches, raw_matches, state_of

_native = pytest.importorskip("octavo._native", reason="the native module is not built")
LEVELS = _native.isa_levels()
CONTEXTS = {(isa, threads): _native.Context(threads, isa) for isa in LEVELS for threads in (1, 2, 3)}
NATIVE = {isa: NativeSampler(CONTEXTS[isa, 2]) for isa in LEVELS}

#: 8192 columns are one piece of work, 256 one sum.
SIZES = [1, 2, 3, 15, 16, 17, 60, 255, 256, 257, 300, 512, 1023, 4097, 8192, 8193, 20011]


def logits_of(kind: str, vocab: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(vocab)
    row = {
        "normal": normal * 3,
        "narrow": normal * 0.01,
        "wide": normal * 40,
        "tied": np.round(normal),
        "equal": np.full(vocab, -1.5),
        "ascending": np.linspace(-5, 5, vocab),
        "spike": np.where(np.arange(vocab) == seed % vocab, 30.0, normal),
        "holes": np.where(rng.random(vocab) < 0.7, -np.inf, normal),
        "huge": np.clip(normal * 1e38, -3e38, 3e38),
        "half": np.clip(normal * 60000, -65504, 65504),
        "tiny": normal * 1e-41,
    }[kind].astype(np.float32)
    if not np.isfinite(row.max()):  # every column was a hole
        row[seed % vocab] = 0.0
    return row


KINDS = ["normal", "narrow", "wide", "tied", "equal", "ascending", "spike", "holes", "huge", "half", "tiny"]


@st.composite
def requests(draw):
    """(row, arguments of state_of)"""
    vocab = draw(st.sampled_from(SIZES) | st.integers(1, 700))
    ids = st.integers(0, vocab - 1)
    fields = {
        "temperature": draw(st.sampled_from([0.0, 1e-5, 0.01, 0.3, 0.7, 1.0, 1.5, 5.0, 1e6])),
        "top_k": draw(st.sampled_from([0, 0, 0, 1, 2, 5, 50, 300, vocab - 1, vocab])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12, 0.0])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.0, 1e-6, 0.05, 0.5, 1.0])),
        "typical_p": draw(st.sampled_from([1.0, 1.0, 1.0, 0.0, 0.2, 0.9])),
    }
    if draw(st.booleans()):
        fields["repetition_penalty"] = draw(st.sampled_from([0.01, 0.9, 1.1, 2.0, 1000.0]))
        fields["presence_penalty"] = draw(st.sampled_from([0.0, 0.5, -2.0]))
        fields["frequency_penalty"] = draw(st.sampled_from([0.0, 0.25, -2.0]))
    if draw(st.booleans()):
        fields["logit_bias"] = {i: draw(st.sampled_from([-100.0, -0.5, 1.0, 100.0])) for i in draw(st.lists(ids, max_size=4))}
    if draw(st.integers(0, 3)) == 0:
        fields["allowed_token_ids"] = draw(st.lists(ids, min_size=1, max_size=6))
    stop: list[int] = []
    if draw(st.integers(0, 3)) == 0:
        fields["min_tokens"] = 3
        stop = draw(st.lists(ids, max_size=3) | st.just(list(range(vocab))))
    arguments = {
        **fields, "seed": draw(st.integers(-(2**63), 2**64 - 1)), "choice": draw(st.integers(0, 3)), "stop": stop,
        "prompt": draw(st.lists(ids, max_size=6)), "output": draw(st.lists(ids, max_size=4)),
        "bad": [(draw(ids),)] if draw(st.booleans()) else [],
    }  # fmt: skip
    return logits_of(draw(st.sampled_from(KINDS)), vocab, draw(st.integers(0, 10**6))), arguments


def check(row: np.ndarray, arguments: dict) -> int:
    """Every level draws an acceptable token, the specification's own unless a rounding decides. Returns how many differ."""
    vocab, differing = row.size, 0
    expected = sample(row[None], [state_of(vocab, **arguments)])[0][0]
    oracle = Draw(row, state_of(vocab, **arguments))
    for sampler in NATIVE.values():
        token = sampler.sample(row[None], [state_of(vocab, **arguments)])[0][0]
        assert oracle.accepts(token), (token, expected)
        differing += token != expected
    return differing


@given(requests())
@settings(max_examples=250, deadline=None)
@example((np.array([1.0, 1.0, 1.0], np.float32), {"stop": [0, 1, 2], "min_tokens": 2}))
@example((np.full(5, -np.inf, np.float32), {"temperature": 0.0}))
@example((np.array([-0.0, 0.0, -5.0], np.float32), {"temperature": 0.0}))
@example((np.array([-np.inf, 3.0, -np.inf], np.float32), {"allowed_token_ids": [0, 2], "seed": 3}))
def test_the_token_is_the_specifications(request):
    check(*request)


def test_a_rounding_hardly_ever_decides():
    """The exception of the rule must stay one: of 1500 draws on random logits every one is the specification's, at every level."""
    rng = np.random.default_rng(0)
    fields = [{"top_p": 0.9, "temperature": 0.7}, {"temperature": 1.5}, {"min_p": 0.02}, {"typical_p": 0.8}, {"top_k": 40, "top_p": 0.95}]
    for vocab in (300, 5003, 20011):
        rows = (rng.standard_normal((100, vocab)) * 3).astype(np.float32)
        states = [state_of(vocab, seed=i, repetition_penalty=1.2, prompt=[i % 200, 7], **fields[i % 5]) for i in range(100)]
        expected = sample(rows, states)[0].tolist()
        for sampler in NATIVE.values():
            assert sampler.sample(rows, states)[0].tolist() == expected


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("vocab", [152_064, 200_000])
def test_large_vocabularies(isa, vocab):
    rows = np.stack([logits_of(kind, vocab, 5) for kind in ("normal", "equal", "tied", "ascending")])
    for fields in ({"temperature": 0}, {"temperature": 5.0}, {"top_p": 0.9, "temperature": 5.0}, {"top_k": 1000}, {"typical_p": 0.9}):
        states = [state_of(vocab, seed=i, logprobs=5, **fields) for i in range(len(rows))]
        tokens, logprobs = NATIVE[isa].sample(rows, states)
        for row, state, token, entry in zip(rows, states, tokens.tolist(), logprobs, strict=True):
            assert Draw(row, state).accepts(token)
            assert raw_matches(row, entry, token, 5)


# -- logprobs ----------------------------------------------------------------------------------------------------------------


@given(requests(), st.sampled_from([0, 1, 5, 20]))
@settings(max_examples=120, deadline=None)
def test_reported_logprobs(request, k):
    row, arguments = request
    for sampler in NATIVE.values():
        for mode, temperature in (("raw", {}), ("processed", {})):
            state = state_of(row.size, **arguments, **temperature, logprobs=k, logprobs_mode=mode)
            tokens, entries = sampler.sample(row[None], [state])
            token = int(tokens[0])
            matches = raw_matches(row, entries[0], token, k) if mode == "raw" else processed_matches(Draw(row, state), entries[0], token, k)
            assert matches, (mode, token, entries[0])
            without = sampler.sample(row[None], [state_of(row.size, **arguments)])[0][0]
            assert token == without, "asking for logprobs changed the token"


@pytest.mark.parametrize("isa", LEVELS)
def test_prompt_logprobs(isa):
    rows = np.stack([logits_of(kind, 5003, 1) for kind in ("normal", "tied", "spike", "wide")])
    targets = [0, 17, 5002, 4096]
    found = NATIVE[isa].prompt_logprobs(rows, targets, 5)
    assert [list(entry) for entry in found] == [list(entry) for entry in prompt_logprobs(rows, targets, 5)]
    assert all(raw_matches(row, entry, token, 5) for row, entry, token in zip(rows, found, targets, strict=True))
    assert NATIVE[isa].prompt_logprobs(rows[:0], [], 5) == []
    for wrong in ([0, 1], [0, 1, 2, 5003], [0, 1, 2, -1]):
        with pytest.raises(ValueError, match="do not fit"):
            NATIVE[isa].prompt_logprobs(rows, wrong, 5)


# -- random numbers and the distribution -------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", LEVELS)
def test_the_random_number_is_that_of_seed_choice_and_position(isa):
    """Of 4096 equal logits the token is the first twelve bits of the number."""
    seeds = [0, 1, -1, 2**64 - 1, -(2**63), 2**32, 2**63 + 12345]
    states = [
        state_of(4096, seed=seed, choice=choice, prompt=[0] * length) for seed in seeds for choice in (0, 3) for length in (0, 1, 70000)
    ]
    numbers = uniforms([s.seed for s in states], [s.choice for s in states], [s.position for s in states])
    tokens = NATIVE[isa].sample(np.zeros((len(states), 4096), np.float32), states)[0]
    assert tokens.tolist() == np.floor(numbers * 4096).astype(int).tolist()
    assert len(set(tokens.tolist())) > 20


CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 11: 31.26}  # p = 0.001


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({}, [1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 10, 11, 12]),
        ({"temperature": 0.5}, [1, 4, 9, 16]),
        ({"top_k": 2}, [5, 3, 0, 0]),
        ({"top_p": 0.7}, [5, 3, 2, 0]),
        ({"min_p": 0.3, "logit_bias": {3: math.log(2)}}, [5, 3, 2, 2]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(isa, fields, shares):
    """4000 positions of one seed; the same draws every time, so never flaky."""
    weights = np.array({4: [5, 3, 2, 2], 13: shares}[len(shares)], np.float32)
    if fields == {"temperature": 0.5}:
        weights = np.array([1, 2, 3, 4], np.float32)
    if "min_p" in fields:
        weights = np.array([5, 3, 2, 1], np.float32)
    with np.errstate(divide="ignore"):
        logits = np.log(weights)
    states = [state_of(len(weights), prompt=[0] * i, seed=11, **fields) for i in range(4000)]
    seen = Counter(NATIVE[isa].sample(np.tile(logits, (4000, 1)), states)[0].tolist())
    expected = {i: share / sum(shares) for i, share in enumerate(shares) if share}
    assert set(seen) == set(expected)
    chi_square = sum((seen[i] - 4000 * p) ** 2 / (4000 * p) for i, p in expected.items())
    assert chi_square < CHI_SQUARE_999[len(expected) - 1]


# -- a row is alone ----------------------------------------------------------------------------------------------------------


MIXED = [
    {"temperature": 0}, {"temperature": 0.8}, {"temperature": 0, "repetition_penalty": 2.0}, {"top_k": 8, "temperature": 1.5},
    {"top_p": 0.9, "temperature": 2.0}, {"min_p": 0.05}, {"typical_p": 0.7}, {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    {"logit_bias": {5: 30.0, 6: 30.0}}, {"allowed_token_ids": [1, 2, 3, 50]}, {"min_tokens": 3}, {"temperature": 1e6},
    {"top_k": 700, "top_p": 0.99, "min_p": 0.001, "typical_p": 0.9},
]  # fmt: skip


def mixed_state(kind: int, vocab: int):
    mode = "processed" if kind % 2 else "raw"
    return state_of(
        vocab, **MIXED[kind % len(MIXED)], prompt=[1, 2, kind % 7], output=[3], stop=[0, 4], bad=[(9,)], seed=kind, logprobs=kind % 4,
        logprobs_mode=mode,
    )  # fmt: skip


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("vocab", "rows"), [(257, 40), (20011, 70), (152_064, 9)])
def test_bits_do_not_depend_on_company_threads_or_place(isa, vocab, rows):
    """Alone on one thread against: all rows, in two orders, on 1, 2 and 3 threads, strided and at odd addresses. Logprobs are
    compared as exact values. More rows than one group of them, columns in one and in many pieces."""
    rng = np.random.default_rng(vocab)
    wide = np.empty((2 * rows, vocab + 3), np.float32)
    logits = wide[::2, 3:]
    logits[:] = rng.standard_normal((rows, vocab)) * 3
    wide.setflags(write=False)
    before = logits.copy()
    single = NativeSampler(CONTEXTS[isa, 1])
    alone = [single.sample(logits[i : i + 1].copy(), [mixed_state(i, vocab)]) for i in range(rows)]
    for threads in (1, 2, 3):
        for order in (list(range(rows)), rng.permutation(rows).tolist()):
            view = logits if order == list(range(rows)) else logits[order]
            tokens, logprobs = NativeSampler(CONTEXTS[isa, threads]).sample(view, [mixed_state(i, vocab) for i in order])
            assert [(int(t), lp) for t, lp in zip(tokens, logprobs, strict=True)] == [(int(alone[i][0][0]), alone[i][1][0]) for i in order]
    assert np.array_equal(logits, before)


def test_levels_with_fused_arithmetic_agree():
    """AVX2 and AVX-512 compute the same sequence of operations, so their bits are equal too; checked where both can run."""
    if "avx512vnni" not in LEVELS:
        pytest.skip("this CPU has no AVX-512 VNNI (native/tests/README.md tells how to emulate it)")
    logits = (np.random.default_rng(1).standard_normal((26, 8200)) * 3).astype(np.float32)
    results = [NATIVE[isa].sample(logits, [mixed_state(i, 8200) for i in range(26)]) for isa in ("avx2", "avx512vnni")]
    assert results[0][0].tolist() == results[1][0].tolist() and results[0][1] == results[1][1]


@pytest.mark.parametrize("isa", LEVELS)
def test_a_spoilt_row_hurts_only_itself(isa):
    vocab = 8200
    clean = (np.random.default_rng(3).standard_normal((5, vocab)) * 2).astype(np.float32)

    def run(logits):
        states = [state_of(vocab, seed=i, temperature=0.9 * (i % 2), logprobs=1, logit_bias={7: -50.0}) for i in range(5)]
        return NATIVE[isa].sample(logits, states)

    expected, expected_logprobs = run(clean)
    for poison in (np.nan, np.inf, -np.nan, "all"):
        for place in (0, 7, 8191, vocab - 1):
            for row in range(5):
                logits = clean.copy()
                logits[row, slice(None) if poison == "all" else place] = -np.inf if poison == "all" else poison
                tokens, logprobs = run(logits)
                assert tokens[row] == NO_TOKEN and logprobs[row] is None
                others = [i for i in range(5) if i != row]
                assert [(tokens[i], logprobs[i]) for i in others] == [(expected[i], expected_logprobs[i]) for i in others]


def test_rows_are_counted_and_shapes_checked():
    native, numpy = NativeSampler(CONTEXTS[LEVELS[0], 1]), NumpySampler()
    for sampler in (native, numpy):
        sampler.sample(np.zeros((3, 8), np.float32), [state_of(8)] * 3)
        tokens, logprobs = sampler.sample(np.zeros((0, 8), np.float32), [])
        assert tokens.shape == (0,) and tokens.dtype == np.int32 and logprobs == []
        for shape in ((2, 8), (3, 9)):
            with pytest.raises(ValueError, match="do not fit"):
                sampler.sample(np.zeros(shape, np.float32), [state_of(8)] * 3)
        assert sampler.rows == 3
    half = np.array([[60000.0, 59968.0, -65504.0]], np.float16)
    assert native.sample(half, [state_of(3, temperature=1e-4)])[0].tolist() == [0]


# -- hostile arguments of the kernels themselves -----------------------------------------------------------------------------


def arguments(rows: int = 2, vocab: int = 40, width: int = 3) -> dict:
    return {
        "logits": np.zeros((rows, vocab), np.float32),
        "reals": np.tile([1.0, 0.9, 0.0, 1.0, 1.1, 0.0, 0.0], (rows, 1)),
        "wholes": np.tile(np.array([0, 0, width - 1, 0]), (rows, 1)),
        "keys": np.zeros((rows, 3), np.uint64),
        "edits": [None] * rows,
        "tokens": np.full(rows, -7, np.int32),
        "ids": np.zeros((rows, width), np.int32),
        "values": np.zeros((rows, width)),
        "ranks": np.zeros((rows, width), np.int64),
        "counts": np.zeros(rows, np.int32),
    }


def edits(**parts) -> list:
    names = ("bias_ids", "bias_values", "seen_ids", "seen_counts", "banned_ids", "allowed_ids")
    return [None, tuple(parts.get(name) for name in names)]


def ids(*values) -> np.ndarray:
    return np.array(values, np.int64)


READ_ONLY = np.zeros(2, np.int32)
READ_ONLY.setflags(write=False)
HOSTILE = {
    "logits of another dtype": ({"logits": np.zeros((2, 40))}, TypeError),
    "logits of another rank": ({"logits": np.zeros(40, np.float32)}, TypeError),
    "columns apart": ({"logits": np.zeros((2, 80), np.float32)[:, ::2]}, ValueError),
    "no columns": ({"logits": np.zeros((2, 0), np.float32)}, ValueError),
    "too few rows": ({"logits": np.zeros((1, 40), np.float32)}, ValueError),
    "too many rows": ({"logits": np.zeros((3, 40), np.float32)}, ValueError),
    "settings of another dtype": ({"reals": np.zeros((2, 7), np.float32)}, TypeError),
    "too few settings": ({"reals": np.zeros((2, 6))}, ValueError),
    "too few numbers": ({"wholes": np.zeros((2, 3), np.int64)}, ValueError),
    "signed keys": ({"keys": np.zeros((2, 3), np.int64)}, TypeError),
    "temperature 0, not greedy": ({"reals": np.tile([0.0, 0.9, 0.0, 1.0, 1.1, 0.0, 0.0], (2, 1))}, ValueError),
    "temperature NaN": ({"reals": np.tile([np.nan, 0.9, 0.0, 1.0, 1.1, 0.0, 0.0], (2, 1))}, ValueError),
    "top_p 2": ({"reals": np.tile([1.0, 2.0, 0.0, 1.0, 1.1, 0.0, 0.0], (2, 1))}, ValueError),
    "min_p NaN": ({"reals": np.tile([1.0, 0.9, np.nan, 1.0, 1.1, 0.0, 0.0], (2, 1))}, ValueError),
    "typical_p below 0": ({"reals": np.tile([1.0, 0.9, 0.0, -0.1, 1.1, 0.0, 0.0], (2, 1))}, ValueError),
    "repetition 0": ({"reals": np.tile([1.0, 0.9, 0.0, 1.0, 0.0, 0.0, 0.0], (2, 1))}, ValueError),
    "presence infinite": ({"reals": np.tile([1.0, 0.9, 0.0, 1.0, 1.0, np.inf, 0.0], (2, 1))}, ValueError),
    "top_k negative": ({"wholes": np.tile(ids(-1, 0, 2, 0), (2, 1))}, ValueError),
    "logprobs below -1": ({"wholes": np.tile(ids(0, 0, -2, 0), (2, 1))}, ValueError),
    "more logprobs than room": ({"wholes": np.tile(ids(0, 0, 3, 0), (2, 1))}, ValueError),
    "endless logprobs": ({"wholes": np.tile(ids(0, 0, 2**62, 0), (2, 1))}, ValueError),
    "edits of too few rows": ({"edits": [None]}, ValueError),
    "edits of another kind": ({"edits": [None, [1]]}, TypeError),
    "five edits": ({"edits": [None, (None,) * 5]}, TypeError),
    "an id too large": ({"edits": edits(banned_ids=ids(40))}, IndexError),
    "a negative id": ({"edits": edits(seen_ids=ids(-1), seen_counts=np.zeros(1, np.float32))}, IndexError),
    "ids of another dtype": ({"edits": edits(banned_ids=np.zeros(1, np.int32))}, TypeError),
    "ids apart": ({"edits": edits(banned_ids=np.zeros(8, np.int64)[::2])}, ValueError),
    "ids of rank 2": ({"edits": edits(banned_ids=np.zeros((1, 1), np.int64))}, TypeError),
    "values missing": ({"edits": edits(bias_ids=ids(1))}, TypeError),
    "too few values": ({"edits": edits(bias_ids=ids(1, 2), bias_values=np.zeros(1, np.float32))}, ValueError),
    "a NaN bias": ({"edits": edits(bias_ids=ids(1), bias_values=np.full(1, np.nan, np.float32))}, ValueError),
    "nothing allowed": ({"edits": edits(allowed_ids=ids())}, ValueError),
    "allowed out of order": ({"edits": edits(allowed_ids=ids(3, 2))}, ValueError),
    "allowed twice": ({"edits": edits(allowed_ids=ids(2, 2))}, ValueError),
    "tokens of another dtype": ({"tokens": np.zeros(2, np.int64)}, TypeError),
    "tokens read-only": ({"tokens": READ_ONLY}, TypeError),
    "too few tokens": ({"tokens": np.zeros(1, np.int32)}, ValueError),
    "too few rows of ids": ({"ids": np.zeros((1, 3), np.int32)}, ValueError),
    "too few columns of ranks": ({"ranks": np.zeros((2, 2), np.int64)}, ValueError),
    "rows on top of each other": ({"values": np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8))}, ValueError),
    "too few counts": ({"counts": np.zeros(1, np.int32)}, ValueError),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_arguments_are_refused(case):
    change, error = HOSTILE[case]
    context = CONTEXTS[LEVELS[-1], 2]
    given_arguments = {**arguments(), **change}
    with pytest.raises(error):
        context.sample(**given_arguments)
    assert given_arguments["tokens"].tolist() in ([-7, -7], [0, 0], [0]), "nothing is written before all is checked"
    context.sample(**(good := arguments()))
    assert (good["tokens"] >= 0).all() and good["counts"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("targets", "k", "error"),
    [
        (ids(0), 2, ValueError),
        (ids(0, 40), 2, IndexError),
        (ids(0, -1), 2, IndexError),
        (ids(0, 1), -1, ValueError),
        (ids(0, 1), 3, ValueError),
    ],
    ids=str,
)
def test_hostile_arguments_of_logprobs_are_refused(targets, k, error):
    out = {name: value for name, value in arguments().items() if name in ("ids", "values", "ranks", "counts")}
    with pytest.raises(error):
        CONTEXTS[LEVELS[-1], 2].logprobs(np.zeros((2, 40), np.float32), targets, k, **out)
