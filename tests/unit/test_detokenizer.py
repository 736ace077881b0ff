"""IncrementalDetokenizer against whole decoding, on the vocabularies of real models and any sequence of ids (CASES A01, A02)."""

from __future__ import annotations

import codecs
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.detokenizer import IncrementalDetokenizer, _split
from octavo.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer_oracles import NASTY, TEXT, load

MODELS = ["qwen3", "llama2"]
IDS = st.lists(st.integers(0, 2**20), max_size=30)


@pytest.fixture(scope="module")
def tokenizers_by_name(tokenizer_assets):
    @functools.cache
    def get(name: str) -> tuple:
        return load(tokenizer_assets / name)

    return get


def stream(tokenizer, prompt, ids, skip=True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def whole(tokenizer: Tokenizer, ids, skip) -> str:
    """decode() without an incomplete last character; only the library's token strings and Python's decoder are used."""
    data = b"".join(tokenizer.token_bytes(i) for i in ids if not (skip and i in tokenizer.special_ids))
    if tokenizer.strip_leading_space:
        data = data.removeprefix(b" ")
    return codecs.utf_8_decode(data, "replace", False)[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=100, deadline=None)
@given(prompt=IDS, ids=IDS, small=st.booleans())
def test_pieces_join_to_the_whole_for_any_ids(tokenizers_by_name, name, skip, prompt, ids, small):
    tokenizer = tokenizers_by_name(name)[1]
    size = 270 if small else tokenizer.vocab_size  # the first ids are bytes, controls and single letters
    prompt, ids = [i % size for i in prompt], [i % size for i in ids]
    text = "".join(stream(tokenizer, prompt, ids, skip))
    assert whole(tokenizer, prompt, skip) + text == whole(tokenizer, prompt + ids, skip)
    decoded = tokenizer.decode(ids, skip)
    joined = "".join(stream(tokenizer, [], ids, skip))
    assert decoded.startswith(joined) and set(decoded[len(joined) :]) <= {"\ufffd"} and len(decoded) - len(joined) <= 1


def test_only_what_more_bytes_could_complete_is_withheld():
    """Every beginning of up to three bytes. Python's own decoder also keeps halves of surrogates, ED A0 to ED BF."""
    characters = {chr(code).encode() for code in range(0x110000) if not 0xD800 <= code < 0xE000}
    beginnings = {character[:size] for character in characters for size in range(1, len(character))}
    for data in [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]:
        text, rest = _split(data)
        assert not rest or (rest in beginnings and data.endswith(rest))
        assert text + rest.decode("utf-8", "replace") == data.decode("utf-8", "replace") or rest
        assert data not in beginnings or rest == data
    assert _split(b"\xed\xa0") == ("\ufffd\ufffd", b"") and _split(b"a\xed\x9f") == ("a", b"\xed\x9f")


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=50, deadline=None)
@given(text=TEXT)
def test_text_comes_back_without_replacement_characters(tokenizers_by_name, name, text):
    backend, tokenizer = tokenizers_by_name(name)
    ids = backend.encode(text, add_special_tokens=False).ids
    pieces = stream(tokenizer, [], ids, skip=False)
    assert "".join(pieces) == backend.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", NASTY)
def test_real_text_equals_the_library(tokenizers_by_name, name, text):
    backend, tokenizer = tokenizers_by_name(name)
    ids = backend.encode(text, add_special_tokens=False).ids
    assert "".join(stream(tokenizer, [], ids, skip=False)) == backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    found = {tokenizer.token_bytes(i): i for i in range(400)}
    return [found[bytes([b])] for b in data]


@pytest.mark.parametrize("name", MODELS)
def test_a_character_over_several_tokens(tokenizers_by_name, name):
    tokenizer = tokenizers_by_name(name)[1]
    assert stream(tokenizer, [], byte_ids(tokenizer, "x😀".encode())) == ["x", "", "", "", "😀", ""]
    # A complete and an incomplete character in one token, as long as the vocabulary has such a token.
    mixed = next((i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b" \xc4"), None)
    if mixed is not None:
        rest = byte_ids(tokenizer, b"\x8f")
        assert stream(tokenizer, [mixed], rest) == ["ď", ""]
        assert stream(tokenizer, byte_ids(tokenizer, b"a"), [mixed, *rest]) == [" ", "ď", ""]


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_point_gives_a_prefix_without_half_characters(tokenizers_by_name, name):
    tokenizer = tokenizers_by_name(name)[1]
    text = "a😀é👍🏽"
    ids = byte_ids(tokenizer, text.encode())
    for cut in range(len(ids) + 1):
        joined = "".join(stream(tokenizer, [], ids[:cut]))
        assert text.startswith(joined) and joined == text.encode()[:cut].decode("utf-8", "ignore")


def test_replacement_characters_the_model_writes_are_kept(tokenizers_by_name):
    tokenizer = tokenizers_by_name("qwen3")[1]
    assert "".join(stream(tokenizer, [], tokenizer.encode("a\ufffdb"))) == "a\ufffdb"
    assert "".join(stream(tokenizer, [], byte_ids(tokenizer, b"a\xffb\xe4\xb8c"))) == "a\ufffdb\ufffdc"


def test_leading_space_of_sentencepiece(tokenizers_by_name):
    tokenizer = tokenizers_by_name("llama2")[1]
    bos, hello, world = tokenizer.bos_token_id, tokenizer.id_of("▁Hello"), tokenizer.id_of("▁world")
    assert stream(tokenizer, [], [hello, world]) == ["Hello", " world", ""]
    assert stream(tokenizer, [bos], [hello]) == ["Hello", ""]
    assert stream(tokenizer, [bos, hello], [world]) == [" world", ""]
    assert stream(tokenizer, [tokenizer.id_of("▁")], [world]) == [" world", ""]


def test_special_tokens_are_skipped_or_shown(tokenizers_by_name):
    tokenizer = tokenizers_by_name("qwen3")[1]
    ids = tokenizer.encode("<think>a<|im_end|>", parse_special=True)
    assert "".join(stream(tokenizer, [], ids)) == "<think>a"
    assert "".join(stream(tokenizer, [], ids, skip=False)) == "<think>a<|im_end|>"


def test_ids_of_padded_logits_are_no_text(tokenizers_by_name):
    tokenizer = tokenizers_by_name("qwen3")[1]
    first, *rest = byte_ids(tokenizer, "é".encode())
    assert stream(tokenizer, [tokenizer.vocab_size + 3], [first, tokenizer.vocab_size, *rest]) == ["", "", "é", ""]


def test_copy_is_independent(tokenizers_by_name):
    tokenizer = tokenizers_by_name("qwen3")[1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    first, second = byte_ids(tokenizer, "é".encode())
    detokenizer.push(first)
    fork = detokenizer.copy()
    assert fork.push(second) == "é" and fork.push(second) == "\ufffd"
    assert detokenizer.push(byte_ids(tokenizer, b"a")[0]) == "\ufffda"


def test_work_per_token_does_not_grow():
    """A fake that counts: one look-up of bytes a generated token, a handful for a prompt of any length."""

    class Counting:
        vocab_size, special_ids, strip_leading_space, calls = 256, frozenset(), True, 0

        def token_bytes(self, token_id: int) -> bytes:
            self.calls += 1
            return bytes([token_id])

    fake = Counting()
    detokenizer = IncrementalDetokenizer(fake, [97] * 100_000)
    assert fake.calls <= 8
    for _ in range(1000):
        detokenizer.push(98)
    assert fake.calls <= 1008
