"""SamplingParams: every limit, from both sides; whatever a caller sends, the answer is a value or an error naming the field."""

from __future__ import annotations

import dataclasses
import math
from collections import UserDict, UserList

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError, shown
from octavo.sampling_params import (
    GREEDY_TEMPERATURE,
    MAX_BAD_WORDS,
    MAX_BEAM_WIDTH,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_LIST,
    SamplingParams,
)

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
NUMBERS = {
    "temperature": (0.0, 1e6), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "typical_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
    "length_penalty": (-10.0, 10.0),
}  # fmt: skip
INTEGERS = {
    "n": (1, MAX_N), "top_k": (-1, 2**31 - 1), "max_tokens": (1, 2**31 - 1), "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, MAX_LOGPROBS), "prompt_logprobs": (0, MAX_LOGPROBS), "seed": (-(2**63), 2**64 - 1),
    "best_of": (1, MAX_N), "beam_width": (1, MAX_BEAM_WIDTH),
}  # fmt: skip
OPTIONAL = {"temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "logit_bias", "max_tokens",
            "allowed_token_ids", "seed", "logprobs", "prompt_logprobs", "best_of", "beam_width"}  # fmt: skip


def refused(**fields) -> str:
    """The message of the refusal, which must name the last field given."""
    name = list(fields)[-1]
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    message = str(caught.value)
    assert type(caught.value) is InvalidRequestError and caught.value.param == name and caught.value.code == "invalid_value"
    assert message.startswith(name) and "\n" not in message and len(message) < 300
    return message


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no text for you")

    def __eq__(self, other) -> bool:
        return False

    __hash__ = None


HUGE = 10**5000
JUNK = [None, True, False, math.nan, math.inf, -math.inf, HUGE, -HUGE, 1e300, -5, 1.5, "", "hot", "1", b"x", [], [[]], {}, {1}, object(),
        Hostile(), [Hostile()], {"a": Hostile()}, "\ud800", ["\ud800"], range(10**30), [None], [True], [1.0], ["x" * 10**6],
        (1,) * 10**6, {"1": True}, {"1": "1"},
        {1.0: 1}, {None: 1}, {True: 1}, {HUGE: 1}, {"9" * 5000: 1}, 1j, memoryview(b"ab")]  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_junk_is_a_value_or_an_error_naming_the_field(name):
    for value in JUNK:
        try:
            params = SamplingParams(**{name: value})
        except InvalidRequestError as error:
            assert error.param == name and str(error).startswith(name) and "\n" not in str(error) and len(str(error)) < 300
        else:
            assert value is None and name in OPTIONAL or isinstance(getattr(params, name), (int, float, str, bool, tuple, dict))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([-1, 0, 1, 2, 0.5, "raw", "7"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.sampled_from(["1", "22"]), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5))
@settings(max_examples=400, deadline=None)
def test_any_json_is_accepted_whole_or_refused_by_name(body):
    try:
        params = SamplingParams(**body)
    except InvalidRequestError as error:
        assert error.param in body or (error.param, "max_tokens") == ("min_tokens", "max_tokens")
        return
    assert dataclasses.replace(params) == params, "what was accepted is stable under a second check"
    assert isinstance(params.greedy, bool)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_limits(name):
    low, high = NUMBERS[name]
    for value in (low, high, (low + high) / 2, int(high)):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf)):
        assert "between" in refused(**{name: value})
    for value in (math.nan, math.inf, -math.inf, True, "1", [1], b"1", 1j):
        assert "finite number" in refused(**{name: value})
    assert "between" in refused(**{name: HUGE})


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_have_limits(name):
    low, high = INTEGERS[name]
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (low - 1, high + 1, HUGE, -HUGE):
        assert "between" in refused(**{name: value}) or (name, value) == ("max_tokens", 0)
    for value in (True, 1.0, "1", math.nan, [1]):
        assert "integer" in refused(**{name: value})


@pytest.mark.parametrize("name", ["include_stop_in_output", "ignore_eos", "skip_special_tokens"])
def test_switches_are_true_or_false(name):
    for value in (True, False):
        assert getattr(SamplingParams(**{name: value}), name) is value
    for value in (0, 1, None, "true", []):
        assert "true or false" in refused(**{name: value})


def test_max_tokens_zero_and_min_tokens():
    assert "prompt_logprobs" in refused(max_tokens=0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    assert "larger than max_tokens 5" in refused(max_tokens=5, min_tokens=6)
    assert SamplingParams(min_tokens=6).max_tokens is None


def test_logprobs_mode():
    assert SamplingParams(logprobs_mode="processed").logprobs_mode == "processed"
    for value in ("RAW", "", None, 1, [], {}):
        assert "'raw' or 'processed'" in refused(logprobs_mode=value)


@pytest.mark.parametrize(("name", "most"), [("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)])
def test_lists_of_strings(name, most):
    assert getattr(SamplingParams(**{name: "one"}), name) == ("one",)
    for value in (["a", "b"], ("a", "b"), UserList(["a", "b"])):
        assert getattr(SamplingParams(**{name: value}), name) == ("a", "b")
    assert len(getattr(SamplingParams(**{name: ["é" * MAX_STOP_CHARS] * most}), name)) == most
    assert f"at most {most}" in refused(**{name: ["a"] * (most + 1)})
    assert f"at most {MAX_STOP_CHARS}" in refused(**{name: ["a" * (MAX_STOP_CHARS + 1)]})
    for value in ("", [""], ["a", ""], [1], [None], [["a"]], [b"a"]):
        assert "non-empty strings" in refused(**{name: value})
    for value in (None, 1, b"a", {"a": 1}, {"a"}, bytearray(b"a")):
        assert "list of strings" in refused(**{name: value})
    assert "Unicode" in refused(**{name: "a\ud800"})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_lists_of_token_ids(name):
    for value in ([0, 2**31 - 1], (0, 2**31 - 1), UserList([0, 2**31 - 1])):
        assert getattr(SamplingParams(**{name: value}), name) == (0, 2**31 - 1)
    assert len(getattr(SamplingParams(**{name: range(MAX_TOKEN_LIST)}), name)) == MAX_TOKEN_LIST
    for value in (range(MAX_TOKEN_LIST + 1), range(10**30)):
        assert f"at most {MAX_TOKEN_LIST}" in refused(**{name: value})
    for value in ("12", b"12", 1, {1: 2}, bytearray(b"1"), memoryview(b"1")):
        assert "list of token ids" in refused(**{name: value})
    for value in ([1.0], ["1"], [True], [None], [[1]], [math.nan]):
        assert "integer" in refused(**{name: value})
    for value in ([-1], [2**31], [HUGE]):
        assert "between" in refused(**{name: value})


def test_empty_lists():
    assert SamplingParams(stop_token_ids=[], stop=[], bad_words=[]) == SamplingParams()
    assert "must not be empty" in refused(allowed_token_ids=[])


def test_b08_logit_bias():
    mixed = SamplingParams(logit_bias={"0": 100, 5: -100, "2147483647": 0.5}).logit_bias
    assert mixed == {0: 100.0, 5: -100.0, 2**31 - 1: 0.5} and all(type(v) is float for v in mixed.values())
    assert SamplingParams(logit_bias=UserDict({"3": 1})).logit_bias == {3: 1.0}
    for key in ("-1", -1, "abc", "", "1.0", 1.0, " 1", "1_0", "+1", "\u0661", None, True, 2**31, str(2**31), HUGE, "9" * 5000, (1,)):
        assert "not a token id" in refused(logit_bias={3: 0.0, key: 5})
    for value in (math.nan, math.inf, -math.inf, 1000, -100.5, HUGE, "5", None, True, [1]):
        message = refused(logit_bias={"77": value})
        assert "[-100, 100]" in message and "77" in message
    for value in ([(1, 2)], "1=2", 5, {1, 2}):
        assert "mapping" in refused(logit_bias=value)
    assert "twice" in refused(logit_bias={"5": 1, 5: 2})
    assert f"at most {MAX_TOKEN_LIST}" in refused(logit_bias=dict.fromkeys(range(20_000), 1.0))
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(MAX_TOKEN_LIST), 1.0)).logit_bias) == MAX_TOKEN_LIST


def test_what_the_caller_keeps_is_not_shared():
    bias, stop, ids = {1: 1.0}, ["a"], [1]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids, allowed_token_ids=ids)
    bias[2] = 5.0
    stop.append("b")
    ids.append(-7)
    assert (params.logit_bias, params.stop, params.stop_token_ids, params.allowed_token_ids) == ({1: 1.0}, ("a",), (1,), (1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}
GENERATION_CONFIG = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.05}


def test_resolve_prefers_the_request_then_the_model_then_neutral():
    for name, neutral in NEUTRAL.items():
        assert getattr(SamplingParams().resolve({}), name) == neutral
        assert getattr(SamplingParams().resolve(GENERATION_CONFIG), name) == GENERATION_CONFIG[name]
        assert getattr(SamplingParams().resolve({**GENERATION_CONFIG, name: None}), name) == neutral
        assert getattr(SamplingParams(**{name: neutral}).resolve(GENERATION_CONFIG), name) == neutral


@given(
    own=st.dictionaries(st.sampled_from(list(NEUTRAL)), st.sampled_from([0, 1]), max_size=6).filter(
        lambda d: d.get("repetition_penalty", 1)
    ),
    known=st.sets(st.sampled_from(list(NEUTRAL))),
)
@settings(max_examples=100, deadline=None)
def test_resolve_fills_exactly_what_is_missing(own, known):
    params = SamplingParams(**own, n=3, stop="x", logit_bias={"4": 1}, max_tokens=9)
    extra = {"eos_token_id": 2, "do_sample": True, "n": 7, "max_tokens": 1}
    resolved = params.resolve({**extra, **{name: GENERATION_CONFIG[name] for name in known}})
    for name in NEUTRAL:
        expected = own.get(name, GENERATION_CONFIG[name] if name in known else NEUTRAL[name])
        assert getattr(resolved, name) == expected
    for name in set(FIELDS) - set(NEUTRAL):
        assert getattr(resolved, name) == getattr(params, name)
    assert resolved.resolve(GENERATION_CONFIG) is resolved, "nothing is left to fill"


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", -1), ("top_k", -5), ("top_k", 1.5), ("top_p", 7), ("repetition_penalty", 0), ("min_p", True)],
)
def test_bad_defaults_of_a_model_are_an_error_naming_the_field(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams().resolve({name: value})
    assert caught.value.param == name
    assert getattr(SamplingParams(**{name: NEUTRAL[name]}).resolve({name: value}), name) == NEUTRAL[name]


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": GREEDY_TEMPERATURE / 2}, True),
        ({"temperature": GREEDY_TEMPERATURE}, False),
        ({"top_k": 1}, True),
        ({"top_k": 0}, False),
        ({"top_k": -1}, False),
        ({"top_p": 0}, True),
        ({"top_p": 1e-9}, False),
        ({"min_p": 1}, False),
    ],
    ids=str,
)
def test_greedy(fields, greedy):
    assert SamplingParams(**fields).greedy is SamplingParams(**fields).resolve({}).greedy is greedy


def test_greedy_may_come_from_the_model():
    assert SamplingParams().resolve({"top_k": 1}).greedy and not SamplingParams().greedy


@given(st.recursive(st.integers() | st.text() | st.floats(), lambda inner: st.lists(inner, max_size=4), max_leaves=40), st.integers(4, 90))
@settings(max_examples=100, deadline=None)
def test_shown_is_one_short_line(value, limit):
    text = shown(value, limit)
    assert len(text) <= limit and len(text.splitlines()) <= 1
    assert text == repr(value) or (text.endswith("...") and repr(value).startswith(text[:-3]))


def test_shown_survives_a_hostile_repr():
    assert shown(Hostile()) == "<Hostile>" and shown(HUGE) == "<int>"


def test_ranked_choices_and_beams_are_at_least_n():
    assert SamplingParams(n=2, best_of=2).num_choices == 2 and not SamplingParams(n=2, best_of=2).whole_only
    assert SamplingParams(n=2, best_of=5).num_choices == 5 and SamplingParams(n=2, best_of=5).whole_only
    assert SamplingParams(beam_width=1).whole_only and SamplingParams(beam_width=4).num_sequences == 4
    assert "smaller than n" in refused(n=3, best_of=2)
    assert "smaller than n" in refused(n=3, beam_width=2)
    assert "beam_width" in refused(beam_width=2, best_of=2)
    assert "never" in refused(early_stopping="always")


@pytest.mark.parametrize(
    "field",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"logit_bias": {1: 1}},
     {"allowed_token_ids": [1]}, {"bad_words": ["x"]}, {"logprobs_mode": "processed"}],
    ids=str,
)  # fmt: skip
def test_beams_are_ranked_by_the_model_alone(field):
    assert "beam search" in refused(beam_width=2, **field)
    neutral = {"repetition_penalty": 1, "logit_bias": {}, "bad_words": [], "presence_penalty": 0}
    assert SamplingParams(beam_width=2, **neutral).beam_width == 2


def test_the_model_s_defaults_do_not_reach_beams():
    resolved = SamplingParams(beam_width=2, temperature=0.7).resolve({"repetition_penalty": 1.3, "temperature": 0.6, "top_k": 5})
    assert (resolved.temperature, resolved.repetition_penalty, resolved.top_k, resolved.greedy) == (0.0, 1.0, 0, True)
    assert resolved.resolve({"top_k": 7}) is resolved
