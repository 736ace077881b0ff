"""The sampler as a whole: rows do not touch each other, draws follow their distribution, every setting has an effect."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError
from octavo.sampling import sampler
from octavo.sampling.sampler import NO_TOKEN, draw, sample
from octavo.sampling.state import SamplingState, TokenCounts
from octavo.sampling_params import SamplingParams

VOCAB = 60


def state_of(vocab: int = VOCAB, *, prompt=(), output=(), stop=(), bad=(), seed=0, choice=0, **fields) -> SamplingState:
    params = SamplingParams(**fields).resolve({})
    return SamplingState(params, seed, choice, list(prompt), list(output), frozenset(stop), tuple(bad), vocab)


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def one(logits, state: SamplingState) -> int:
    return int(sample(np.array(logits, dtype=np.float32)[None], [state])[0][0])


# -- greedy ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 9e-6}, {"top_p": 0}, {"top_k": 1}], ids=str)
def test_greedy_is_the_argmax_and_the_lowest_id_wins(fields):
    assert one([-1.0, -0.0, 0.0, -0.0, -5.0], state_of(5, **fields)) == 1
    assert one([2.0, 7.0, 7.0, 7.0, 7.0], state_of(5, **fields)) == 1
    for vocab in (1, 15, 16, 17, 64, 1000, 4097):
        logits = np.random.default_rng(vocab).integers(-3, 4, vocab).astype(np.float32)
        expected = max(range(vocab), key=lambda i: (logits[i], -i))
        assert one(logits, state_of(vocab, **fields)) == expected


def test_plain_greedy_rows_make_no_copy_and_no_random_number(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a greedy row without edits must cost one argmax")

    for name in ("edit", "draw", "uniforms"):
        monkeypatch.setattr(sampler, name, forbidden)
    monkeypatch.setattr(sampler.processors, "candidates", forbidden)
    logits = logits_of(4)
    states = [state_of(temperature=0, stop=[3], prompt=[1], output=[2], min_tokens=1) for _ in range(4)]
    assert sample(logits, states)[0].tolist() == logits.argmax(axis=1).tolist()


def test_logits_are_not_modified_and_may_be_strided():
    wide = logits_of(6, 2 * VOCAB)
    wide.setflags(write=False)
    view = wide[::2, 5 : 5 + VOCAB]
    found = [sample(rows, [mixed_state(kind) for kind in range(3)])[0].tolist() for rows in (view, np.ascontiguousarray(view))]
    assert found[0] == found[1]


def test_half_precision_logits_are_computed_in_float32():
    logits = np.array([[60000.0, 59968.0, -65504.0]], dtype=np.float16)
    for temperature in (1e-5, 1e-4, 1e-3):
        assert sample(logits, [state_of(3, temperature=temperature)])[0].tolist() == [0]


# -- rows do not touch each other ------------------------------------------------------------------------------------------


SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0, "repetition_penalty": 2.0},
    {"top_k": 1},
    {"top_k": 8, "temperature": 1.5},
    {"top_p": 0.9, "temperature": 2.0},
    {"min_p": 0.05},
    {"typical_p": 0.7},
    {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    {"logit_bias": {5: 30.0, 6: 30.0}},
    {"allowed_token_ids": [1, 2, 3, 50]},
    {"min_tokens": 3, "logprobs": 3, "logprobs_mode": "processed"},
    {"temperature": 1e6, "logprobs": 2},
    {"temperature": 1e-4, "top_p": 0.5},
]


def mixed_state(kind: int) -> SamplingState:
    fields = SETTINGS[kind % len(SETTINGS)]
    return state_of(prompt=[kind % 7, 3, 3], stop=[0, 4], bad=[(9,), (3, 8)] if kind % 3 else [], seed=kind, choice=kind % 2, **fields)


def logits_for(kind: int, step: int) -> np.ndarray:
    return logits_of(1, seed=kind * 1000 + step)[0]


def alone(kind: int, steps: int) -> list:
    """(token, logprobs) of each step of a request that has the engine to itself."""
    state, found = mixed_state(kind), []
    for step in range(steps):
        tokens, logprobs = sample(logits_for(kind, step)[None], [state])
        state.append(int(tokens[0]))
        found.append((int(tokens[0]), logprobs[0]))
    return found


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_b05_b06_a_row_is_the_same_in_any_company(data):
    """Random joins, leaves and orders at every step, and preemption (a state rebuilt from its tokens)."""
    running: dict[int, SamplingState] = {}
    outputs: dict[int, list] = {}
    waiting = list(range(data.draw(st.integers(2, 2 * len(SETTINGS)))))
    for _ in range(data.draw(st.integers(2, 6))):
        for kind in [waiting.pop() for _ in range(min(len(waiting), data.draw(st.integers(0, 9))))]:
            running[kind], outputs[kind] = mixed_state(kind), []
        for kind in data.draw(st.lists(st.sampled_from(sorted(running)), unique=True, max_size=2)) if running else []:
            if data.draw(st.booleans()):
                del running[kind]  # finished
            else:
                tokens = [token for token, _ in outputs[kind]]
                old = running[kind]
                running[kind] = SamplingState(
                    old.params, old.seed, old.choice, [kind % 7, 3, 3], tokens, frozenset({0, 4}),
                    ((9,), (3, 8)) if kind % 3 else (), VOCAB,
                )  # fmt: skip
        order = data.draw(st.permutations(sorted(running)))
        if not order:
            continue
        logits = np.stack([logits_for(kind, len(outputs[kind])) for kind in order])
        tokens, logprobs = sample(logits, [running[kind] for kind in order])
        for kind, token, entry in zip(order, tokens.tolist(), logprobs, strict=True):
            running[kind].append(token)
            outputs[kind].append((token, entry))
    for kind, found in outputs.items():
        assert found == alone(kind, len(found))  # floats compared for equality: bit for bit


def test_b05_two_rows_in_both_orders_and_after_one_has_left():
    make = {
        "A": lambda: state_of(temperature=0, repetition_penalty=2.0, prompt=[1, 2]),
        "B": lambda: state_of(seed=99, top_k=1, prompt=[1, 2]),
    }
    logits = {"A": logits_of(5, seed=1), "B": logits_of(5, seed=2)}

    def run(plan: list[str]) -> dict[str, list[int]]:
        states, found = {}, {"A": [], "B": []}
        for names in plan:
            for name in names:
                states.setdefault(name, make[name]())
            rows = np.stack([logits[name][len(found[name])] for name in names])
            for name, token in zip(names, sample(rows, [states[name] for name in names])[0].tolist(), strict=True):
                states[name].append(token)
                found[name].append(token)
        return found

    solo = {"A": run(["A"] * 5)["A"], "B": run(["B"] * 5)["B"]}
    for plan in (["AB"] * 5, ["BA"] * 5, ["AB", "AB", "B", "B", "B"], ["B", "BA", "BA", "A"]):
        for name, tokens in run(plan).items():
            assert tokens == solo[name][: len(tokens)]


def test_b05_wide_rows_are_the_same_in_any_company():
    """Long enough for blocks, SIMD tails and pairwise sums to matter: an odd vocabulary, rows at odd addresses."""
    vocab = 5003
    logits = logits_of(len(SETTINGS), vocab)

    def make(i: int) -> SamplingState:
        return state_of(vocab, seed=i, **{**SETTINGS[i], "logprobs": 4})

    tokens, logprobs = sample(logits, [make(i) for i in range(len(SETTINGS))])
    for i in range(len(SETTINGS)):
        shifted = np.empty(vocab + 1, dtype=np.float32)[1:]
        shifted[:] = logits[i]
        again = sample(shifted[None], [make(i)])
        assert (again[0][0], again[1][0]) == (tokens[i], logprobs[i])


def test_a_spoilt_row_hurts_only_itself():
    clean = logits_of(5)

    def states() -> list[SamplingState]:
        return [state_of(seed=i, temperature=0.9 * (i % 2), logprobs=1, logit_bias={7: -50.0}) for i in range(5)]

    expected, expected_logprobs = sample(clean, states())
    for poison in (np.nan, np.inf, -np.nan):
        for place in (0, 7, 31, VOCAB - 1):  # 7 is biased
            for row in range(5):
                logits = clean.copy()
                logits[row, place] = poison
                tokens, logprobs = sample(logits, states())
                assert tokens[row] == NO_TOKEN and logprobs[row] is None
                others = [i for i in range(5) if i != row]
                assert [tokens[i] for i in others] == [expected[i] for i in others]
                assert [logprobs[i] for i in others] == [expected_logprobs[i] for i in others]
    logits = clean.copy()
    logits[2] = -np.inf
    assert sample(logits, states())[0][2] == NO_TOKEN


@pytest.mark.parametrize("temperature", [0, 1e-7, 1e-5, 1e-4, 2, 1e6])
def test_b03_extreme_temperatures_beside_a_normal_request(temperature):
    logits = np.stack([np.array([65504.0, -65504.0, 65472.0] * 20, dtype=np.float32), logits_of(1)[0]])
    with np.errstate(invalid="raise", divide="raise"):
        tokens, logprobs = sample(logits, [state_of(temperature=temperature, logprobs=3, logprobs_mode="processed"), state_of(seed=5)])
    assert 0 <= tokens[0] < VOCAB and tokens[0] % 3 != 1
    assert all(math.isfinite(entry.logprob) for entry in logprobs[0].values())
    assert tokens[1] == one(logits[1], state_of(seed=5))
    if temperature <= 1e-7:
        assert tokens[0] == 0


def test_shapes_must_fit():
    with pytest.raises(ValueError, match="do not fit"):
        sample(logits_of(2), [state_of()])
    with pytest.raises(ValueError, match="do not fit"):
        sample(logits_of(1, VOCAB + 1), [state_of()])
    tokens, logprobs = sample(np.empty((0, VOCAB), dtype=np.float32), [])
    assert tokens.shape == (0,) and tokens.dtype == np.int32 and logprobs == []


# -- draws follow their distribution ---------------------------------------------------------------------------------------


CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 7: 24.32, 11: 31.26, 15: 37.70}  # p = 0.001


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({}, [1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 10, 11, 12]),
        ({"temperature": 0.5}, [1, 2, 3, 4]),
        ({"temperature": 2.0}, [1, 4, 9, 16]),
        ({"top_k": 2}, [5, 3, 1, 1]),
        ({"top_p": 0.7}, [5, 3, 2, 2]),
        ({"min_p": 0.5}, [5, 3, 2, 1]),
        ({"typical_p": 0.5}, [5, 3, 2, 2, 2, 1, 1]),
        ({"allowed_token_ids": [0, 2, 3], "logit_bias": {3: math.log(2)}}, [5, 3, 2, 2]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(fields, weights):
    """4000 positions of one seed against the exact probabilities; the same draws every time, so never flaky."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(weights, dtype=np.float32))
    expected = expected_shares(fields, weights)
    count = 4000
    states = [state_of(len(weights), prompt=[0] * i, seed=11, **fields) for i in range(count)]
    tokens = sample(np.tile(logits, (count, 1)), states)[0]
    seen = Counter(tokens.tolist())
    assert set(seen) == set(expected)
    chi_square = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in expected.items())
    assert chi_square < CHI_SQUARE_999[len(expected) - 1]


def expected_shares(fields, weights):
    """Exact probabilities of the cases above, each read off its definition by eye."""
    kept = {
        "top_k": [0, 1],
        "top_p": [0, 1, 2],  # 5 + 3 of 12 is under 0.7; one of the two equal tokens, the lower id
        "min_p": [0, 1],
        "typical_p": [1, 2, 3, 4],  # entropy 1.80, informations 1.16 1.67 2.08 2.08 2.08 2.77 2.77: nearest are 1.67, 2.08
        "allowed_token_ids": [0, 2, 3],
    }.get(next((k for k in fields if k != "temperature"), ""), range(len(weights)))
    power = 1 / fields.get("temperature", 1.0)
    shares = {i: weights[i] ** power for i in kept if weights[i]}
    if "logit_bias" in fields:
        shares[3] *= 2
    total = sum(shares.values())
    return {i: w / total for i, w in shares.items()}


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.25, 1.0]), min_size=1, max_size=1200).filter(any),
    random=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 2.0**-53])),
)
@settings(max_examples=200, deadline=None)
def test_draw_inverts_the_cumulative_sum(weights, random):
    index = draw(np.array(weights, dtype=np.float32), random)
    assert weights[index] > 0
    goal = random * math.fsum(weights)
    rounding = 1e-12 * len(weights) + 1e-7 * len(weights) * 1e-3
    assert math.fsum(weights[:index]) <= goal + rounding
    assert math.fsum(weights[: index + 1]) >= goal - rounding


@pytest.mark.parametrize("size", [1, 255, 256, 257, 512, 777])
def test_draw_reaches_both_ends_and_skips_zeros(size):
    weights = np.zeros(size, dtype=np.float32)
    weights[[0, size - 1]] = 1.0
    assert draw(weights, 0.0) == 0
    assert draw(weights, 1 - 2.0**-53) == size - 1
    lonely = np.zeros(size, dtype=np.float32)
    lonely[size // 2] = 1e-38
    assert {draw(lonely, u) for u in (0.0, 0.3, 1 - 2.0**-53)} == {size // 2}


@pytest.mark.parametrize("size", [1024, 1000, 256])
def test_draw_of_equal_weights_is_exact(size):
    weights = np.ones(size, dtype=np.float32)
    assert [draw(weights, (i + 0.5) / size) for i in range(size)] == list(range(size))
    if size == 1024:  # these ends of cells are exact: a cell is closed below and open above
        assert [draw(weights, i / size) for i in range(size)] == list(range(size))


def test_b07_choices_differ_and_repeat():
    def run(temperature):
        states = [state_of(seed=1, choice=choice, temperature=temperature) for choice in range(4)]
        found = [[] for _ in states]
        for step in range(12):
            tokens = sample(np.tile(logits_of(1, seed=step), (4, 1)), states)[0].tolist()
            for state, tokens_of, token in zip(states, found, tokens, strict=True):
                state.append(token)
                tokens_of.append(token)
        return found

    first = run(1.0)
    assert first == run(1.0)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert len({tuple(tokens) for tokens in run(0)}) == 1


def test_a_large_vocabulary():
    vocab = 152_064
    logits = logits_of(3, vocab, spread=4.0)
    states = [state_of(vocab, seed=i, logprobs=20, **f) for i, f in enumerate([{}, {"top_p": 0.95, "top_k": 64}, {"typical_p": 0.9}])]
    tokens, logprobs = sample(logits, states)
    for i in range(3):
        exact = logits[i].astype(np.float64)
        lse = np.log(np.exp(exact - exact.max()).sum()) + exact.max()
        top = np.argsort(-exact, kind="stable")[:20].tolist()
        assert list(logprobs[i])[1 if tokens[i] not in top else 0 :][:1] == [top[0]] or tokens[i] in top
        for token, entry in logprobs[i].items():
            assert entry.logprob == pytest.approx(exact[token] - lse, abs=1e-4)
            assert entry.rank == 1 + np.count_nonzero(exact > exact[token])
    assert tokens[1] in np.argsort(-logits[1], kind="stable")[:64]


# -- state -----------------------------------------------------------------------------------------------------------------


def test_position_and_counts_follow_append():
    state = state_of(prompt=[1, 2, 2], output=[3], repetition_penalty=1.1)
    assert state.position == 4
    for token in (3, 5):
        state.append(token)
    assert state.position == 6
    assert dict(zip(state.counts.ids.tolist(), state.counts.counts.tolist(), strict=True)) == {1: 0, 2: 0, 3: 2, 5: 1}


def test_without_repetition_penalty_the_prompt_is_not_counted():
    state = state_of(prompt=[1, 2], output=[3], presence_penalty=1.0)
    assert state.counts.ids.tolist() == [3]
    assert state_of(prompt=[1, 2], output=[3]).counts is None


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 1)), max_size=400))
@settings(max_examples=40, deadline=None)
def test_token_counts_equal_a_counter(additions):
    counts, expected = TokenCounts(), Counter()
    for token, count in additions:
        counts.add(token, count)
        expected[token] += count
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == dict(expected)
    assert counts.ids.tolist() == list(dict.fromkeys(token for token, _ in additions))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {VOCAB: 5}}, "logit_bias"),
        ({"allowed_token_ids": [1, VOCAB]}, "allowed_token_ids"),
    ],
    ids=str,
)
def test_b08_ids_outside_the_vocabulary_are_refused(fields, param):
    with pytest.raises(InvalidRequestError, match="outside the model's vocabulary") as caught:
        state_of(**fields)
    assert caught.value.param == param


def test_b08_a_full_list_of_biases_works():
    vocab = 5000
    bias = dict.fromkeys(range(4096), -100.0)
    assert all(one(logits_of(1, vocab, seed=i)[0], state_of(vocab, seed=i, logit_bias=bias)) >= 4096 for i in range(5))


def test_unresolved_params_are_refused():
    with pytest.raises(ValueError, match="resolve"):
        SamplingState(SamplingParams(), 0, 0, [], [], frozenset(), (), 4)


def test_ids_that_can_never_be_drawn_are_ignored():
    state = state_of(stop=[VOCAB, -1, 10**9], bad=[(VOCAB + 1,), (), (2, 10**9)], min_tokens=1, temperature=0)
    logits = logits_of(1)[0]
    assert one(logits, state) == int(logits.argmax())


# -- B09: every accepted field changes something -----------------------------------------------------------------------------


REPEATING = {"prompt": [0, 1, 0, 1], "output": [2, 2, 2], "stop": [7], "bad": []}
#: Token 7 is the most probable, then 2 (generated three times), then 0 (only in the prompt), then fresh ones.
RANKED = np.array([3.0, 2.0, 3.2, 2.9, 2.8, 2.6, 2.5, 3.3], dtype=np.float32)


def chosen(fields, **history) -> list[int]:
    return [one(RANKED, state_of(8, seed=seed, **{**REPEATING, **history}, **fields)) for seed in range(40)]


CHANGES = {
    "temperature": ({}, {"temperature": 0}),
    "top_k": ({}, {"top_k": 2}),
    "top_p": ({}, {"top_p": 0.2}),
    "min_p": ({}, {"min_p": 0.95}),
    "typical_p": ({}, {"typical_p": 0.2}),
    "repetition_penalty": ({"temperature": 0, "logit_bias": {7: -100}}, {"repetition_penalty": 2.0}),
    "presence_penalty": ({"temperature": 0, "logit_bias": {7: -100}}, {"presence_penalty": 1.0}),
    "frequency_penalty": ({"temperature": 0, "logit_bias": {7: -100}}, {"frequency_penalty": 1.0}),
    "logit_bias": ({"temperature": 0}, {"logit_bias": {7: -100}}),
    "min_tokens": ({"temperature": 0}, {"min_tokens": 4}),
    "allowed_token_ids": ({}, {"allowed_token_ids": [3, 4]}),
}
#: Fields the sampler does not read: the engine's tests show their effect.
ELSEWHERE = {
    "n", "max_tokens", "stop", "stop_token_ids", "include_stop_in_output", "ignore_eos", "bad_words", "seed",
    "prompt_logprobs", "skip_special_tokens", "logprobs", "logprobs_mode",
    "best_of", "beam_width", "length_penalty", "early_stopping",
}  # fmt: skip


def test_b09_the_table_names_every_field():
    assert {f.name for f in dataclasses.fields(SamplingParams)} == set(CHANGES) | ELSEWHERE


@pytest.mark.parametrize("name", CHANGES)
def test_b09_every_field_changes_the_tokens(name):
    base, change = CHANGES[name]
    assert chosen({**base, **change}) != chosen(base)


def test_b09_effects_that_can_be_foretold():
    assert set(chosen({"temperature": 0})) == {7}
    assert set(chosen({"temperature": 0, "logit_bias": {7: -100}})) == {2}
    assert set(chosen({"temperature": 0, "logit_bias": {5: 100}})) == {5}
    assert set(chosen({"temperature": 1.0, "logit_bias": {5: 100}})) == {5}
    assert set(chosen({"temperature": 0, "min_tokens": 4})) == {2}
    assert set(chosen({"temperature": 0, "min_tokens": 3})) == {7}, "three are generated: the ban is over"
    assert set(chosen({"temperature": 0}, bad=[(7,), (2, 2, 2, 2), (1, 2, 0)])) == {0}
    without_stop = {"temperature": 0, "logit_bias": {7: -100}}
    assert set(chosen({**without_stop, "presence_penalty": 0.25})) == {0}, "presence and frequency leave the prompt alone"
    assert set(chosen({**without_stop, "frequency_penalty": 0.1})) == {0}
    assert set(chosen({**without_stop, "repetition_penalty": 1.5})) == {3}, "repetition sees the prompt too"


def test_b09_seed_and_choice_change_the_draw():
    flat = np.zeros(VOCAB, dtype=np.float32)
    base = [one(flat, state_of(prompt=[0] * i)) for i in range(20)]
    assert base == [one(flat, state_of(prompt=[0] * i)) for i in range(20)]
    assert base != [one(flat, state_of(prompt=[0] * i, seed=1)) for i in range(20)]
    assert base != [one(flat, state_of(prompt=[0] * i, choice=1)) for i in range(20)]
    assert len(set(base)) > 5


def test_b09_logprobs_and_their_mode():
    logits = logits_of(1)
    assert sample(logits, [state_of()])[1] == [None]
    raw = sample(logits, [state_of(logprobs=3, top_k=5)])[1][0]
    processed = sample(logits, [state_of(logprobs=3, top_k=5, logprobs_mode="processed")])[1][0]
    assert raw != processed and raw.keys() == processed.keys()
