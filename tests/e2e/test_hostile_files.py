"""Files of a stranger's model: whatever they hold, loading and the first request end in an answer or in one OctavoError.

Whole models through `LLM`, native kernels where built. Each case here is a kind that once escaped as another exception,
blocked, took memory without bound or killed the engine; a seeded mutation of every file follows.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, EngineConfig, SamplingParams
from octavo.errors import InvalidRequestError, ModelLoadError, OctavoError
from octavo.loading.source import resolve_source
from octavo.worker.executor import LocalExecutor
from tests.tiny_models import write_json, write_tiny

TEMPLATE = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
GREEDY = SamplingParams(max_tokens=3, temperature=0, logprobs=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m").path


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def load(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), **{"num_kv_blocks": 64, "threads": 1, **settings})


def edit(path: Path, change: Callable[[dict], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def one_line(error: OctavoError) -> str:
    assert "\n" not in str(error)
    return str(error)


# -- the tokenizer -----------------------------------------------------------------------------------------------------
def more_tokens(tokenizer: dict) -> None:
    """ "ll" becomes a token the embedding has no row for: files with tokens added after training look like this."""
    tokenizer["model"]["vocab"] |= {f"unused{i}": 261 + i for i in range(60)} | {"ll": 330}
    tokenizer["model"]["merges"].append(["l", "l"])


def test_a_token_beyond_the_embedding_is_refused_and_the_engine_lives(folder, caplog):
    edit(folder / "tokenizer.json", more_tokens)
    with load(folder) as llm:
        assert "331 tokens, the model 272" in caplog.text
        for call in (
            lambda: llm.generate("hello", GREEDY),
            lambda: llm.stream("hello", GREEDY),
            lambda: llm.chat([{"role": "user", "content": "hello"}], GREEDY),
        ):
            with pytest.raises(InvalidRequestError, match="330"):
                call()
        assert llm.generate("good", GREEDY)[0].outputs[0].finish_reason == "length"
        words = SamplingParams(max_tokens=3, temperature=0, bad_words=["ll"])
        assert llm.generate("good", words)[0].outputs[0].finish_reason == "length"


def test_bos_beyond_the_embedding(folder):
    pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    start = {"<s>": {"id": "<s>", "ids": [99999], "tokens": ["<s>"]}}
    post = {**TEMPLATE, "single": pieces, "special_tokens": start}
    edit(folder / "tokenizer.json", lambda t: t.update(post_processor=post))
    with load(folder) as llm:
        with pytest.raises(InvalidRequestError, match="99999"):
            llm.generate("good", GREEDY)
        assert llm.generate([65], GREEDY)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "part, value",
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "xxxxxxxx"}),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
        (
            "post_processor",
            {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [], "special_tokens": {}},
        ),
    ],
)
def test_files_that_make_the_library_panic_are_load_errors(folder, part, value):
    """A panic of the library's Rust side is a BaseException in Python."""
    edit(folder / "tokenizer.json", lambda t: t.update({part: value}))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json") as caught:
        load(folder)
    one_line(caught.value)


@pytest.mark.parametrize(
    "model, prompt",
    [
        ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}, "hello"),
        ({"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}, "hello"),
        (None, "a" * 34 + "b"),  # (a+)+$ gives up after too many steps: a panic
    ],
)
def test_text_the_tokenizer_cannot_encode_is_a_bad_request(folder, model, prompt):
    evil = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    changes = {"pre_tokenizer": evil} if model is None else {"model": model, "added_tokens": [], "pre_tokenizer": None}
    edit(folder / "tokenizer.json", lambda t: t.update(changes))
    with load(folder) as llm:
        with pytest.raises(InvalidRequestError, match="cannot encode") as caught:
            llm.generate(prompt, GREEDY)
        assert caught.value.code == "tokenizer_failed" and one_line(caught.value)
        assert llm.generate([1, 2], GREEDY)[0].outputs[0].finish_reason == "length"


def test_half_a_character_as_a_named_token(folder):
    edit(folder / "tokenizer_config.json", lambda t: t.update(bos_token="\ud800"))
    with pytest.raises(ModelLoadError):
        load(folder)


def test_a_control_token_of_megabytes(folder):
    """Looking for its beginnings in a chat once took memory with the square of its length."""
    token = {"id": 7, "content": "<" + "h" * 100_000 + ">", "single_word": False, "lstrip": False, "rstrip": False}
    edit(folder / "tokenizer.json", lambda t: t["added_tokens"].append({**token, "normalized": False, "special": True}))
    with pytest.raises(ModelLoadError, match="100002 characters"):
        load(folder)


# -- what is no plain file ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "chat_template.jinja", "model.safetensors", "x.gguf"])
@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "folder"])
def test_pipes_devices_links_and_folders(folder, name, kind):
    """A pipe would block and /dev/zero never end; both answer False to is_file, so only opening tells."""
    path = folder / name
    if name == "x.gguf":
        (folder / "model.safetensors").unlink()
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else name)
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")) as caught:
        load(folder)
    one_line(caught.value)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
def test_a_file_that_opens_but_cannot_be_read():
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(Path("/proc/self/mem"))


def test_a_gguf_cut_while_it_is_loaded_is_an_error_not_a_bus_error(tmp_path):
    path = write_tiny(tmp_path / "g", fmt="gguf").path
    files = resolve_source(str(path))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelLoadError, match="has changed") as caught:
        LocalExecutor(files, EngineConfig(model=str(path), num_kv_blocks=8))
    assert str(caught.value).count(str(path)) == 1


# -- claims ------------------------------------------------------------------------------------------------------------
def test_a_claim_of_a_huge_context_costs_what_the_pool_costs(folder):
    """Rotary tables are as long as the longest sequence the pool can hold, not as a file's claim of 67 million positions."""
    edit(folder / "config.json", lambda c: c.update(max_position_embeddings=2**26))
    with load(folder) as llm:
        assert llm.max_model_len == 2**26
        output = llm.generate([5] * 1000, SamplingParams(temperature=0, ignore_eos=True))[0].outputs[0]
        assert len(output.token_ids) == 64 * 16 + 1 - 1000 and output.finish_reason == "length"


def test_yarn_beyond_every_limit(folder):
    rope = {"rope_type": "yarn", "factor": 1e6, "rope_theta": 1e4, "original_max_position_embeddings": 2**26}
    edit(folder / "config.json", lambda c: c.update(rope_parameters=rope))
    with pytest.raises(ModelLoadError, match="positions is more than"):
        load(folder)


def test_limits_that_mean_no_limit(folder):
    same = [
        load(folder, **settings).generate("hello", GREEDY)[0].outputs[0].token_ids
        for settings in (
            {},
            {"max_num_batched_tokens": 2**31 - 1},
            {"kv_cache_memory": "10TB", "num_kv_blocks": None},
            {"threads": 10**9},
            {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        )
    ]
    assert all(tokens == same[0] for tokens in same)


# -- mutation ----------------------------------------------------------------------------------------------------------
VALUES = [
    None,
    True,
    0,
    -1,
    2,
    1.5,
    1e308,
    float("nan"),
    2**63,
    10**400,
    "",
    "a",
    "\ud800",
    "x" * 300,
    [],
    [[]],
    {},
    {"a": 1},
    [None],
    ["a"],
    "BPE",
]


def mutate_json(value: Any, rng: random.Random) -> None:
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        for key in keys[:40]:
            places.append((node, key))
            walk(node[key])

    walk(value)
    parent, key = rng.choice(places)
    if rng.random() < 0.7:
        parent[key] = rng.choice(VALUES)
    else:
        del parent[key]


def try_it(path: Path) -> bool:
    """True if the model answers, False if it is refused; anything else is the fault this looks for."""
    try:
        with load(path) as llm:
            llm.generate("hello", GREEDY)
            llm.chat([{"role": "user", "content": "hi"}], GREEDY)
        return True
    except OctavoError as error:
        one_line(error)
        return False


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_mutated_json(folder, name):
    original, rng = (folder / name).read_text(), random.Random(name)
    outcomes = []
    for _ in range(60):
        content = json.loads(original)
        mutate_json(content, rng)
        write_json(folder / name, content)
        outcomes.append(try_it(folder))
    assert True in outcomes and False in outcomes  # it reaches both


@pytest.mark.parametrize("fmt", ["safetensors", "gguf"])
def test_mutated_weights(tmp_path, fmt):
    path = write_tiny(tmp_path / "m", fmt=fmt).path
    file = path / "model.safetensors" if fmt == "safetensors" else path
    original, rng = file.read_bytes(), random.Random(fmt)
    outcomes = []
    for _ in range(80):
        data = bytearray(original)
        for _ in range(rng.choice([1, 1, 3])):
            data[rng.randrange(min(len(data), 9000))] = rng.choice([0, 1, 34, 48, 255, rng.randrange(256)])
        file.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        outcomes.append(try_it(path))
    assert True in outcomes and False in outcomes
