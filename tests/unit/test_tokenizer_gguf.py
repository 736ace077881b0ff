"""Tokenizers rebuilt from GGUF metadata give the ids of the originals; hostile metadata is refused."""

from __future__ import annotations

import logging

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from octavo.errors import ModelLoadError
from octavo.tokenizer import pre_tokenizers as known
from octavo.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer_oracles import NASTY, TEXT, gguf_metadata

G = "tokenizer.ggml."
BYTE_TO_CHAR = bytes_to_unicode()
CASES = {
    "qwen3": {"kind": "gpt2", "pre": "qwen2"},
    "llama2": {"kind": "llama"},
    "gemma3": {"kind": "llama"},
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tokenizer_assets):
    """(name, the library's original, ours rebuilt from GGUF metadata)."""
    folder = tokenizer_assets / request.param
    meta = gguf_metadata(folder, **CASES[request.param])
    if request.param == "gemma3":
        meta[G + "add_space_prefix"] = False
    return request.param, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), Tokenizer.from_gguf(meta)


def comparable(name: str, text: str) -> bool:
    # A literal U+2581 is a space to SentencePiece and to us; Gemma's tokenizer.json keeps runs of it apart from spaces.
    # A written BOS is ours once, the library's twice.
    return not (name == "gemma3" and "▁" in text) and not text.startswith(("<s>", "<bos>"))


@pytest.mark.parametrize("text", NASTY)
def test_ids_equal_the_original_on_nasty_text(pair, text):
    name, original, rebuilt = pair
    if comparable(name, text):
        assert rebuilt.encode(text, parse_special=True) == original.encode(text).ids


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_ids_equal_the_original_on_any_text(pair, text):
    name, original, rebuilt = pair
    assume(comparable(name, text))
    assert rebuilt.encode(text, parse_special=True) == original.encode(text).ids


@pytest.mark.parametrize("text", NASTY)
def test_round_trip_and_decode_equal_the_original(pair, text):
    name, original, rebuilt = pair
    ids = rebuilt.encode(text, add_special_tokens=False, parse_special=True)
    shown = rebuilt.decode(ids, skip_special_tokens=False)
    assert shown == original.decode(original.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)


def test_special_ids_and_ends(pair):
    name, original, rebuilt = pair
    expected = {
        "qwen3": (None, {"<|im_end|>", "<|endoftext|>"}),
        "llama2": ("<s>", {"</s>"}),
        "gemma3": ("<bos>", {"<end_of_turn>", "<eos>"}),
    }
    bos, ends = expected[name]
    assert rebuilt.bos_token_id == (None if bos is None else original.token_to_id(bos))
    assert {original.id_to_token(i) for i in rebuilt.eos_token_ids} == ends
    assert rebuilt.vocab_size == original.get_vocab_size()


# ---- SmolLM2, the file that every install has


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    from octavo.loading.gguf import GGUFFile

    with GGUFFile(smollm2_path) as file:
        return dict(file.metadata)


@pytest.fixture(scope="module")
def smollm2_pair(smollm2):
    """The pipeline of SmolLM2's published tokenizer.json: single digits, then the library's own GPT-2 step."""
    tokens, merges = smollm2[G + "tokens"], smollm2[G + "merges"]
    oracle = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges]))
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    oracle.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[:17]])
    return oracle, Tokenizer.from_gguf(smollm2)


@pytest.mark.parametrize("text", NASTY)
def test_smollm2_equals_its_published_pipeline(smollm2_pair, text):
    oracle, rebuilt = smollm2_pair
    assert rebuilt.encode(text, parse_special=True) == oracle.encode(text).ids
    assert rebuilt.decode(rebuilt.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_smollm2_equals_its_published_pipeline_on_any_text(smollm2_pair, text):
    oracle, rebuilt = smollm2_pair
    assert rebuilt.encode(text, parse_special=True) == oracle.encode(text).ids
    # The vocabulary has no token for a few bytes (some control characters, rare planes); the original drops them too.
    if all(rebuilt.id_of(BYTE_TO_CHAR[byte]) is not None for byte in text.encode()):
        assert rebuilt.decode(rebuilt.encode(text)) == text


def test_smollm2_control_tokens(smollm2_pair):
    _, rebuilt = smollm2_pair
    assert rebuilt.encode("<|im_start|>user\nHi<|im_end|>", parse_special=True)[0] == 1
    assert not set(rebuilt.encode("<|im_start|>user\nHi<|im_end|>")) & rebuilt.special_ids
    assert rebuilt.eos_token_ids == (2, 0) and rebuilt.bos_token_id == 1
    assert "<|im_start|>" in (rebuilt.chat_template or "")


# ---- pre-tokenizers by name


def pieces(name: str, text: str) -> list[str]:
    spec = known.build(name)
    assert spec is not None
    return [text[start:end] for _, (start, end) in spec.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", known.known_names())
@settings(max_examples=10, deadline=None)
@given(text=st.one_of(TEXT, st.sampled_from(NASTY)))
def test_every_named_pre_tokenizer_loses_nothing(name, text):
    assert "".join(pieces(name, text)) == text


@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        ("smollm starcoder refact command-r codeshell exaone", "ab 1234 c", ["ab", " ", "1", "2", "3", "4", " c"]),
        ("gpt-2 mpt olmo", "ab 1234 c", ["ab", " 1234", " c"]),
        ("llama-bpe llama3 dbrx smaug-bpe", "ab 1234 c", ["ab", " ", "123", "4", " c"]),
        ("qwen2 stablelm2", "ab 1234 c", ["ab", " ", "1", "2", "3", "4", " c"]),
        ("deepseek-coder", "ab 12 c", ["ab", " ", "1", "2", " c"]),
        ("deepseek-llm", "ab 12 c", ["ab", " ", "12", " c"]),
        ("viking", "ab12. c", ["ab", "1", "2", ".", " c"]),
        ("bloom poro-chat", "ab12. c", ["ab12", ".", " c"]),
        ("falcon", "a--b 12345", ["a", "--", "b", " ", "123", "45"]),
        ("default", "a--b 12345", ["a", "--", "b", " ", "123", "45"]),
        ("gpt-4o", "camelCase WORLD's 1234", ["camel", "Case", " WORLD's", " ", "123", "4"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("gpt-2", "we'll WE'LL", ["we", "'ll", " WE", "'", "LL"]),
        ("llama-bpe qwen2", "we'll WE'LL", ["we", "'ll", " WE", "'LL"]),
        ("gpt-2", "a  \n b", ["a", "  \n", " b"]),
        ("llama-bpe qwen2", "a  \n b;\n", ["a", "  \n", " b", ";\n"]),
        ("deepseek-v3", "x中文y 12345", ["x", "中文", "y", " ", "123", "45"]),
    ],
)
def test_how_names_split(names, text, expected):
    for name in names.split():
        assert pieces(name, text) == expected, name


def byte_level(**changes):
    letters = [chr(c) for c in range(0x21, 0x7F)] + ["Ġ", "Ċ"]
    tokens = [*letters, "ab", "Ġab", "<|end|>", "<tool_call>", "<b>"]
    types = [1] * (len(letters) + 2) + [3, 4, 4]
    meta = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": ["a b", "Ġ ab"]}
    return {G + k: v for k, v in (meta | changes).items() if v is not None}


def test_unknown_or_missing_pre_tokenizer_is_loud(caplog):
    for change in ({"pre": "no-such"}, {"pre": None}):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert Tokenizer.from_gguf(byte_level(**change)).encode("ab ab")
        assert "tokenizer.ggml.pre" in caplog.text and "default" in caplog.text
    caplog.clear()
    Tokenizer.from_gguf(byte_level())
    assert not caplog.records


def test_user_defined_tokens_match_whole_unless_they_steer_the_model():
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert tokenizer.encode("<b>") == [tokenizer.id_of("<b>")]
    assert tokenizer.id_of("<tool_call>") not in tokenizer.encode("<tool_call>")
    ids = tokenizer.encode("<tool_call><|end|>", parse_special=True)
    assert ids == [tokenizer.id_of("<tool_call>"), tokenizer.id_of("<|end|>")]
    assert tokenizer.decode(ids) == "<tool_call>"  # user-defined is shown, control is not


def test_bos_and_eos_flags():
    extra = {"bos_token_id": 0, "eos_token_id": 1}
    assert Tokenizer.from_gguf(byte_level(**extra)).encode("ab") == [96]
    assert Tokenizer.from_gguf(byte_level(**extra, add_bos_token=True, add_eos_token=True)).encode("ab") == [0, 96, 1]
    assert Tokenizer.from_gguf(byte_level(**extra, add_bos_token=True)).encode("ab", add_special_tokens=False) == [96]
    assert Tokenizer.from_gguf(byte_level(**extra, pre="llama-bpe")).encode("ab") == [0, 96]
    assert Tokenizer.from_gguf(byte_level(add_bos_token=True)).encode("ab") == [96]


def test_all_named_end_tokens_count():
    tokenizer = Tokenizer.from_gguf(byte_level(eos_token_id=0, eot_token_id=3, eom_token_id=4))
    assert tokenizer.eos_token_ids == (0, 3, 4, tokenizer.id_of("<|end|>"))


def sentencepiece(**changes):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "ab", "▁ab", "USER x", "un", "u", "n"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 4, 5, 1, 1]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0, -1000.0, -0.5, -3.0, -4.0]
    meta = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return {G + k: v for k, v in (meta | changes).items() if v is not None}


def test_sentencepiece_token_types():
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    ids = {t: tokenizer.id_of(t) for t in ("▁", "▁ab", "ab", "USER x", "u", "n", "<0xC3>", "<0xA9>")}
    assert tokenizer.encode("ab ab") == [1, ids["▁ab"], ids["▁ab"]]
    assert tokenizer.encode("é", add_special_tokens=False) == [ids["▁"], ids["<0xC3>"], ids["<0xA9>"]]
    assert tokenizer.encode("abUSER xab", add_special_tokens=False) == [ids["▁ab"], ids["USER x"], ids["▁ab"]]
    assert tokenizer.encode("un", add_special_tokens=False) == [ids["▁"], ids["u"], ids["n"]]  # unused pieces are never made
    assert not set(tokenizer.encode("<s></s>", add_special_tokens=False)) & {1, 2}
    assert tokenizer.decode(tokenizer.encode("ab é <s>")) == "ab é <s>"
    bare = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert bare.encode("ab ab") == [ids["ab"], ids["▁ab"]] and bare.decode([ids["▁ab"]]) == " ab"


HOSTILE = [
    ({"model": None}, "model"),
    ({"model": "bert"}, "bert"),
    ({"model": 7}, "model"),
    ({"tokens": None}, "tokens"),
    ({"tokens": []}, "tokens"),
    ({"tokens": "abc"}, "tokens"),
    ({"tokens": [1, 2]}, "tokens"),
    ({"tokens": ["a", "b", "a"], "token_type": None}, "twice"),
    ({"tokens": ["a", "\ud800"], "token_type": None, "merges": []}, "damaged"),
    ({"token_type": [1, 1]}, "token_type"),
    ({"token_type": ["1"] * 101}, "token_type"),
    ({"token_type": 3}, "token_type"),
    ({"merges": ["ab"]}, "merges"),
    ({"merges": ["a b c"]}, "merges"),
    ({"merges": ["a zz"]}, "damaged"),
    ({"merges": [5]}, "merges"),
    ({"pre": 5}, "pre"),
    ({"bos_token_id": 101}, "bos_token_id"),
    ({"eos_token_id": -1}, "eos_token_id"),
    ({"eos_token_id": "2"}, "eos_token_id"),
    ({"eos_token_id": True}, "eos_token_id"),
    ({"add_bos_token": "yes"}, "add_bos_token"),
    ({"add_eos_token": [1]}, "add_eos_token"),
]


@pytest.mark.parametrize(("changes", "word"), HOSTILE)
def test_hostile_byte_level_metadata_is_refused(changes, word):
    with pytest.raises(ModelLoadError, match=word):
        Tokenizer.from_gguf(byte_level(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": None},
        {"scores": [1.0]},
        {"scores": [float("nan")] * 268},
        {"scores": ["x"] * 268},
        {"add_space_prefix": 3},
        {"unknown_token_id": 999},
    ],
)
def test_hostile_sentencepiece_metadata_is_refused(changes):
    with pytest.raises(ModelLoadError):
        Tokenizer.from_gguf(sentencepiece(**changes))


def test_a_hostile_chat_template_value_is_refused():
    with pytest.raises(ModelLoadError, match="chat_template"):
        Tokenizer.from_gguf(byte_level() | {"tokenizer.chat_template": 5})


def test_empty_tokens_are_kept_as_places(caplog):
    tokens = byte_level()[G + "tokens"]
    tokenizer = Tokenizer.from_gguf(byte_level(tokens=[*tokens[:-1], ""]))
    assert "empty" in caplog.text and tokenizer.vocab_size == len(tokens)


def test_arrays_may_be_numpy():
    import numpy as np

    meta = sentencepiece()
    meta[G + "scores"] = np.array(meta[G + "scores"], np.float32)
    meta[G + "token_type"] = np.array(meta[G + "token_type"], np.int32)
    assert Tokenizer.from_gguf(meta).encode("ab") == Tokenizer.from_gguf(sentencepiece()).encode("ab")
