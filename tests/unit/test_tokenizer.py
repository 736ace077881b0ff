"""Tokenizer on real and synthetic tokenizer.json files: control tokens, BOS, odd configs, ids and bytes (CASES C01, C02)."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import InvalidRequestError, ModelLoadError
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocab import ControlToken, ControlTokens, looks_like_control
from tests.unit.tokenizer_oracles import NASTY, TEXT, load

MODELS = ["qwen3", "llama2", "gemma3"]


@pytest.fixture(scope="module")
def model(tokenizer_assets):
    @functools.cache
    def get(name: str) -> tuple[tokenizers.Tokenizer, Tokenizer]:
        return load(tokenizer_assets / name)

    return get


# ---- real files


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", NASTY)
def test_parsing_control_tokens_equals_the_library(model, name, text):
    library, ours = model(name)
    if not text.startswith(("<s>", "<bos>")):
        assert ours.encode(text, parse_special=True) == library.encode(text).ids
    assert ours.encode_rendered(text) == library.encode(text, add_special_tokens=False).ids


CONTROLS = {
    "qwen3": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<tool_response>"],
    "llama2": ["<s>", "</s>", "<unk>"],
    "gemma3": ["<start_of_turn>", "<end_of_turn>", "<eos>", "<bos>", "<unused7>", "[multimodal]", "<mask>"],
}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_control_tokens_in_text_stay_text(model, name, data):
    _, ours = model(name)
    text = "a" + "".join(data.draw(st.lists(st.one_of(TEXT, st.sampled_from(CONTROLS[name])), max_size=6)))
    control_ids = {token.id for token in ours.controls.tokens.values()}
    plain = ours.encode(text, add_special_tokens=False)
    assert not control_ids & set(plain)
    assert set(CONTROLS[name]) <= set(ours.controls.tokens)
    if name == "qwen3":  # every byte has a token; NFC may compose characters
        import unicodedata

        assert ours.decode(plain, skip_special_tokens=False) == unicodedata.normalize("NFC", text)
    parsed = ours.encode(text, add_special_tokens=False, parse_special=True)
    assert parsed == model(name)[0].encode(text, add_special_tokens=False).ids


def test_added_tokens_that_are_text_always_match(model):
    _, gemma = model("gemma3")
    assert gemma.encode("<table>\n\n\n", add_special_tokens=False) == [gemma.id_of("<table>"), gemma.id_of("\n\n\n")]


@pytest.mark.parametrize(("name", "bos"), [("llama2", "<s>"), ("gemma3", "<bos>")])
@pytest.mark.parametrize("parse", [False, True])
def test_bos_is_never_doubled(model, name, bos, parse):
    _, ours = model(name)
    for text in ("hello", f"{bos}hello", f"{bos}{bos}hello"):
        ids = ours.encode(text, parse_special=parse)
        assert ids.count(ours.bos_token_id) == 1 and ids[0] == ours.bos_token_id
        assert ids == ours.encode("hello")
    assert ours.bos_token_id not in ours.encode("hello", add_special_tokens=False)
    assert ours.encode("") == [ours.bos_token_id]


def test_no_bos_where_the_model_has_none(model):
    _, qwen = model("qwen3")
    assert qwen.bos_token_id is None and qwen.encode("") == [] and qwen.eos_token_id == qwen.id_of("<|im_end|>")


@pytest.mark.parametrize("name", ["qwen3", "llama2"])
def test_ids_outside_the_vocabulary_are_refused(model, name):
    _, ours = model(name)
    for bad in (-1, ours.vocab_size, 2**40, True, "1", 1.0, None):
        with pytest.raises(InvalidRequestError):
            ours.decode([1, bad])
    for bad in (-1, ours.vocab_size, 2**40):
        with pytest.raises(InvalidRequestError):
            ours.token_bytes(bad)
    assert ours.decode([ours.vocab_size - 1], skip_special_tokens=False)
    assert ours.token_text(ours.vocab_size) == ""  # padded logits may name it


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(model, text):
    with pytest.raises(InvalidRequestError):
        model("llama2")[1].encode(text)
    with pytest.raises(InvalidRequestError):
        model("llama2")[1].encode(text, parse_special=True)


def test_token_text_and_bytes(model):
    _, qwen = model("qwen3")
    _, llama = model("llama2")
    assert qwen.token_text(qwen.encode(" the")[0]) == " the"
    assert qwen.token_text(qwen.id_of("<|im_end|>")) == "<|im_end|>"
    half = qwen.encode("🦥")[0]
    assert qwen.token_bytes(half) == "🦥".encode()[: len(qwen.token_bytes(half))]
    assert qwen.token_text(half).startswith("\\xf0")
    assert llama.token_bytes(llama.id_of("<0xE4>")) == b"\xe4" and llama.token_text(llama.id_of("<0xE4>")) == "\\xe4"
    assert llama.token_text(llama.id_of("▁the")) == " the"


@pytest.mark.parametrize("name", ["qwen3", "llama2"])
def test_token_bytes_add_up_to_the_text(model, name):
    _, ours = model(name)
    for text in NASTY:
        ids = ours.encode(text, add_special_tokens=False)
        assert b"".join(map(ours.token_bytes, ids)).decode().removeprefix(" " if ours.strip_leading_space else "") == ours.decode(ids)


def test_threads_do_not_disturb_each_other(model):
    _, ours = model("llama2")
    work = [(text, parse) for text in NASTY for parse in (True, False)] * 8
    expected = [ours.encode(text, parse_special=parse) for text, parse in work]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda item: ours.encode(item[0], parse_special=item[1]), work)) == expected


# ---- synthetic files: every flag of the format


def save(tmp_path, backend) -> tokenizers.Tokenizer:
    backend.save(str(tmp_path / "tokenizer.json"))
    return tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def letters(*added: AddedToken, pre=None, normalizer=None, decoder=None, post=None) -> tokenizers.Tokenizer:
    chars = [chr(c) for c in range(0x21, 0x7F)] + ["▁", "Ġ", "Ċ"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(chars)}, merges=[]))
    backend.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder or decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    if post is not None:
        backend.post_processor = post
    return backend


WORDS = st.lists(st.sampled_from(["a", "bc", " ", "  ", "\n", "<x>", "<l>", "<r>", "<w>", "_", "9", "."]), max_size=12).map("".join)


@pytest.fixture(scope="module")
def flagged(tmp_path_factory):
    added = [
        AddedToken("<x>", special=True, normalized=False),
        AddedToken("<l>", special=True, normalized=False, lstrip=True),
        AddedToken("<r>", special=False, normalized=False, rstrip=True),
        AddedToken("<w>", special=True, normalized=False, single_word=True),
    ]
    path = tmp_path_factory.mktemp("flagged")
    return save(path, letters(*added)), Tokenizer.from_file(path / "tokenizer.json", {})


@settings(max_examples=200, deadline=None)
@given(text=WORDS)
def test_flags_of_added_tokens_equal_the_library(flagged, text):
    library, ours = flagged
    assert ours.encode(text, parse_special=True) == library.encode(text).ids


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    added = [AddedToken("<x>", special=True, normalized=False), AddedToken("\n", special=False, normalized=False)]
    pre = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    path = tmp_path_factory.mktemp("metaspace")
    backend = letters(*added, pre=pre, decoder=decoders.Metaspace(prepend_scheme="first"))
    return save(path, backend), Tokenizer.from_file(path / "tokenizer.json", {})


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.sampled_from(["a", "bc", " ", "\n", "<x>", "▁"]), max_size=8).map("".join))
def test_metaspace_prefix_goes_before_the_first_segment_only(metaspace, text):
    library, ours = metaspace
    assert ours.encode(text, parse_special=True) == library.encode(text).ids


def test_post_processor_and_config_decide_on_bos_and_eos(tmp_path):
    added = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    backend = letters(*added)
    ids = [(t, backend.token_to_id(t)) for t in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    save(tmp_path, backend)
    bos, eos, a = *(i for _, i in ids), backend.token_to_id("a")
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}

    def encode(config):
        return Tokenizer.from_file(tmp_path / "tokenizer.json", config).encode("a")

    assert encode({}) == [bos, a, eos]
    assert encode(named) == [bos, a, eos]
    assert encode(named | {"add_bos_token": False}) == [a, eos]
    assert encode(named | {"add_eos_token": False, "add_bos_token": True}) == [bos, a]
    save(tmp_path, letters(*added))
    assert encode(named) == [a]
    assert encode(named | {"add_bos_token": True, "add_eos_token": True}) == [bos, a, eos]


def test_truncation_padding_and_dropout_of_the_file_are_not_used(tmp_path):
    backend = letters()
    backend.enable_truncation(2)
    backend.enable_padding(length=50, pad_id=3)
    backend.model.dropout = 0.5
    save(tmp_path, backend)
    assert len(Tokenizer.from_file(tmp_path / "tokenizer.json", {}).encode("abcdef")) == 6


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": 7},
        {"bos_token": {"content": None}},
        {"bos_token": ["<s>"]},
        {"eos_token": "not there"},
        {"eos_token": ""},
        {"additional_special_tokens": "abc"},
        {"additional_special_tokens": [None, 3, {"content": "<y>"}]},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"x": 3, "7": {"content": 9, "special": True}}},
        {"add_bos_token": True},
        {"add_bos_token": None},
    ],
)
def test_odd_configs_are_survived(tmp_path, config):
    save(tmp_path, letters())
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json", config)
    assert ours.encode("ab") == ours.encode("ab", add_special_tokens=False) and ours.bos_token_id is None


@pytest.mark.parametrize("config", [{"add_bos_token": "yes"}, {"chat_template": 5}, {"chat_template": [{"name": "rag", "template": "x"}]}])
def test_hostile_configs_are_refused(tmp_path, config):
    save(tmp_path, letters())
    with pytest.raises(ModelLoadError):
        Tokenizer.from_file(tmp_path / "tokenizer.json", config)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"model": {"type": "Nope"}}', '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}']
)
def test_damaged_files_are_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError):
        Tokenizer.from_file(tmp_path / "tokenizer.json", {})
    with pytest.raises(ModelLoadError):
        Tokenizer.from_file(tmp_path / "missing.json", {})


@pytest.mark.parametrize(
    "decoder", [decoders.WordPiece(), decoders.Sequence([decoders.Replace("x", "y"), decoders.Fuse()]), decoders.Strip(" ", 0, 1)]
)
def test_unsupported_decoders_are_refused(tmp_path, decoder):
    save(tmp_path, letters(decoder=decoder))
    with pytest.raises(ModelLoadError, match="decoder"):
        Tokenizer.from_file(tmp_path / "tokenizer.json", {})


def test_tokens_only_the_config_calls_special(tmp_path):
    save(tmp_path, letters())
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json", {"eos_token": "~", "additional_special_tokens": ["@"]})
    assert ours.special_ids == {ours.id_of("~"), ours.id_of("@")} and ours.eos_token_ids == (ours.id_of("~"),)
    assert ours.decode([ours.id_of("a"), ours.id_of("~")]) == "a"


def test_chat_template_of_a_config(tmp_path):
    save(tmp_path, letters())
    for value, expected in (("x", "x"), ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}], "d"), (None, None)):
        assert Tokenizer.from_file(tmp_path / "tokenizer.json", {"chat_template": value}).chat_template == expected


def test_holes_in_the_numbering(tmp_path):
    save(tmp_path, letters())
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["model"]["vocab"]["~"] = 500
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json", {})
    assert ours.vocab_size == 501 and ours.decode(ours.encode("~a")) == "~a" and ours.decode([300]) == ""


def test_a_file_without_decoder_joins_words_by_spaces(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    library = save(tmp_path, backend)
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json", {})
    assert ours.decode(ours.encode("a b a")) == library.decode(library.encode("a b a").ids) == "a b a"


def test_normalizers_apply_between_control_tokens(tmp_path):
    library = save(tmp_path, letters(AddedToken("<X>", special=True, normalized=False), normalizer=normalizers.Lowercase()))
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json", {})
    assert ours.encode("AB<X>CD", parse_special=True) == library.encode("AB<X>CD").ids


# ---- control tokens


@pytest.mark.parametrize(
    ("text", "expected"), [(t, True) for t in ("<|a|>", "<think>", "</tool_call>", "<｜User｜>", "[INST]", "[/INST]", "<unused5>")]
)
def test_markers(text, expected):
    assert looks_like_control(text) is expected


@pytest.mark.parametrize("text", ["<table>", "</h1>", "  ", "\n\n", "hello", "<>", "a<b>", "[]", "▁▁"])
def test_ordinary_added_tokens(text):
    assert not looks_like_control(text)


def test_find_is_leftmost_longest_and_respects_marks():
    controls = ControlTokens({t: ControlToken(i) for i, t in enumerate(["<a>", "<a>b", "a", "<"])})
    assert [(m.start, m.end) for m in controls.find("<a>b<a>a")] == [(0, 4), (4, 7), (7, 8)]
    assert [(m.start, m.end) for m in controls.find("<a>b", [0, 4])] == [(0, 4)]  # beside a token is not inside
    assert [(m.start, m.end) for m in controls.find("<a>b", [3])] == [(0, 3)]
    assert [(m.start, m.end) for m in controls.find("<a>b", [2])] == [(0, 1), (1, 2)]
    assert [(m.start, m.end) for m in controls.find("<a>b", [0, 1])] == [(1, 2)]
    assert [(m.start, m.end) for m in controls.find("<a>b", [0, 1, 2])] == []
    assert list(ControlTokens({}).find("<a>")) == []


def test_edges():
    controls = ControlTokens({"<|im_end|>": ControlToken(0)})
    assert controls.touches_edge("x <|im") == (False, True)
    assert controls.touches_edge("_end|> x") == (True, False)
    assert controls.touches_edge("<|im_end|>") == controls.touches_edge("plain") == (False, False)
    assert ControlTokens({}).touches_edge("x") == (False, False)


def test_load_tokenizer_takes_the_file_else_the_metadata(tmp_path):
    from types import SimpleNamespace

    from octavo.tokenizer import load_tokenizer

    save(tmp_path, letters())
    files = SimpleNamespace(name="m", gguf_metadata=None, tokenizer_path=tmp_path / "tokenizer.json", tokenizer_config={"eos_token": "~"})
    assert load_tokenizer(files).special_tokens_map == {"eos_token": "~"}
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    files = SimpleNamespace(name="m", gguf_metadata=metadata, tokenizer_path=None, tokenizer_config={})
    assert load_tokenizer(files).encode("a") == [0]
    files.gguf_metadata = None
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(files)
