"""EngineConfig: every setting's limits, memory sizes, and that any value is accepted or refused by name."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import EngineConfig, parse_bytes
from octavo.errors import ConfigError

FIELDS = [field.name for field in dataclasses.fields(EngineConfig)]
COUNTS = ["num_kv_blocks", "block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "max_prefill_batch_size",
          "max_decode_batch_size", "max_waiting_requests", "max_waiting_tokens", "max_stalled_steps", "promote_after_steps",
          "event_history"]  # fmt: skip
OPTIONAL = {"revision", "num_kv_blocks", "max_model_len", "seed"}
HUGE = 10**5000


def refused(**setting) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**setting)
    message = str(caught.value)
    assert type(caught.value) is ConfigError and next(iter(setting)) in message and "\n" not in message and len(message) < 300
    return message


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no text for you")


JUNK = [None, True, False, math.nan, math.inf, HUGE, -HUGE, 10**30, -1, 0, 1.5, 16.0, "", "x", "1\n2", "9" * 5000, "9" * 5000 + "GiB",
        b"2GiB", [], {}, [1], {"a": 1}, object(), Hostile(), 1j, range(3), "\ud800", "y" * 10**6]  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_junk_is_a_value_or_an_error_naming_the_setting(name):
    default = getattr(EngineConfig(), name)
    for value in JUNK:
        try:
            config = EngineConfig(**{name: value})
        except ConfigError as error:
            assert name in str(error) and "\n" not in str(error) and len(str(error)) < 300
        else:
            found = getattr(config, name)
            assert (found is None and name in OPTIONAL) or type(found) is (type(default) if default is not None else type(value))


def test_defaults_are_valid_and_memory_is_a_number():
    config = EngineConfig()
    assert config.kv_cache_memory == 2 * 2**30 and config.model == "smollm2" and config.block_size == 16
    assert dataclasses.replace(config) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.threads = 2


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_positive_integers(name):
    for value in (1, 2**31 - 1):
        assert getattr(EngineConfig(**{name: value}), name) == value
    for value in (0, -1, 2**31, HUGE, True, 1.0, "16", math.nan, [1]):
        assert "positive integer" in refused(**{name: value})
    if name in OPTIONAL:
        assert getattr(EngineConfig(**{name: None}), name) is None
    else:
        refused(**{name: None})


def test_threads_and_seed():
    assert EngineConfig(threads=0).threads == 0 and EngineConfig(threads=64).threads == 64
    for value in (-1, True, False, 1.5, "2", None, HUGE):
        refused(threads=value)
    for value in (None, 0, -(2**63), 2**64 - 1):
        assert EngineConfig(seed=value).seed == value
    for value in (2**64, -(2**63) - 1, True, 1.0, "1", HUGE):
        refused(seed=value)


@pytest.mark.parametrize(
    ("name", "words"), [("backend", ["auto", "cpu", "reference", "torch"]), ("kv_dtype", ["auto", "f32", "f16", "bf16", "int8"])]
)
def test_words(name, words):
    for word in words:
        assert getattr(EngineConfig(**{name: word}), name) == word
    for value in ("AUTO", "", "cuda", None, 1, [], {}):
        message = refused(**{name: value})
        assert all(word in message for word in words)


def test_texts_and_switches():
    for name in ("model", "device", "op_backends"):
        assert getattr(EngineConfig(**{name: "a b"}), name) == "a b"
        for value in (None, 7, True, b"x", ["x"]):
            assert "must be text" in refused(**{name: value})
    assert EngineConfig(revision="main").revision == "main" and EngineConfig(revision=None).revision is None
    assert "must be text" in refused(revision=3)
    for value in (0, 1, None, "true"):
        assert "true or false" in refused(enable_prefix_caching=value)
    assert EngineConfig(enable_prefix_caching=False).enable_prefix_caching is False


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31), ("2G", 2**31), ("2g", 2**31), ("2048MiB", 2**31), ("2097152k", 2**31), ("2 GiB", 2**31), (" 2gib ", 2**31),
        ("2147483648", 2**31), ("2147483648B", 2**31), (2**31, 2**31), ("1.5GiB", 3 * 2**29), ("1GB", 10**9), ("1.5kb", 1500),
        ("3MB", 3 * 10**6), ("9007199254740993", 2**53 + 1), ("1.000000001GB", 10**9 + 1), ("0.5", 0),
    ],
)  # fmt: skip
def test_memory_sizes(text, size):
    assert parse_bytes(text) == size
    if size:
        assert EngineConfig(kv_cache_memory=text).kv_cache_memory == size


@pytest.mark.parametrize(
    "value",
    ["", " ", "GiB", "2 furlongs", "-1GiB", "+1GiB", "1e9", "1,5GiB", "2GiB!", "0x10", "1_000", ".5GiB", "5.GiB", "2 Gi B",
     "\u0662GiB", "2\nGiBx",
     "inf", "nan", "9" * 19, "9" * 5000, None, True, 1.5, math.nan, b"2GiB", [], {}, Hostile()],
    ids=lambda value: ascii(value)[:12] if isinstance(value, (str, bytes)) else type(value).__name__,
)  # fmt: skip
def test_what_is_no_memory_size(value):
    with pytest.raises(ConfigError, match="not a memory size for kv_cache_memory"):
        parse_bytes(value)
    assert "2GiB or 512MiB" in refused(kv_cache_memory=value)


def test_memory_has_limits():
    for value in (0, -1, "0", "0.4", "0GiB", 2**63, HUGE, "999999999999999999GiB"):
        assert "positive integer" in refused(kv_cache_memory=value)
    assert EngineConfig(kv_cache_memory=2**63 - 1).kv_cache_memory == 2**63 - 1


UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@given(st.integers(0, 10**12), st.text("0123456789", max_size=9), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
@settings(max_examples=200, deadline=None)
def test_sizes_are_exact(whole, decimals, unit, space):
    number = f"{whole}.{decimals}" if decimals else f"{whole}"
    assert parse_bytes(f"{number}{space}{unit}") == math.floor(Fraction(number) * UNITS[unit])


@given(st.text(max_size=12))
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_size_or_an_error(text):
    try:
        size = parse_bytes(text)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert isinstance(size, int) and size >= 0 and any(c.isdigit() for c in text)
