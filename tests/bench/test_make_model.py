"""Made models against the gguf package, transformers and our own loader: names, shapes, types, values, text."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.bench import made_vocabulary
from octavo.bench import make_model as bench
from octavo.bench.model_shapes import SHAPES, ModelShape, tensors
from octavo.cli.main import main
from octavo.errors import ConfigError
from octavo.loading.source import resolve_source
from octavo.models.registry import model_class

gguf = pytest.importorskip("gguf")

SMALL = ModelShape("small", "qwen2", 2, 128, 192, 4, 2, 1500, 512, 1e6, 1e-6, True, False, "qwen2")
TYPES = {"gguf-q4_0": "Q4_0", "gguf-q4_1": "Q4_1", "gguf-q8_0": "Q8_0"}


def fields(reader) -> dict[str, object]:
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


REAL = {"qwen2.5-7b": 7_615_616_512, "qwen2.5-0.5b": 494_032_768, "smollm2-135m": 134_515_008}
LLAMA = replace(SMALL, architecture="llama", qkv_bias=False, tied=True, pre="smollm")


def test_shapes_have_the_parameters_of_the_real_models():
    assert {name: sum(tensor.count for tensor in tensors(shape)) for name, shape in SHAPES.items()} == REAL


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=["qwen2", "llama"])
def test_every_tensor_as_the_gguf_package_reads_it(tmp_path, kind, shape):
    seen: list[tuple[int, int]] = []
    path = bench.make(shape, kind, tmp_path / "m.gguf", seed=3, progress=lambda done, total: seen.append((done, total)))
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert list(found) == [tensor.gguf for tensor in tensors(shape)]
    for wanted in tensors(shape):
        tensor = found[wanted.gguf]
        assert tuple(tensor.shape[::-1]) == wanted.shape
        assert tensor.tensor_type.name == ("F32" if len(wanted.shape) == 1 else TYPES[kind])
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        if len(wanted.shape) == 2:
            assert values.std() == pytest.approx(wanted.spread, rel=0.15)
            assert abs(values.mean()) < wanted.spread * 0.15
            blocks = np.frombuffer(tensor.data.tobytes(), bench.FORMATS[kind].block)
            for plane in {"d", "m"} & set(blocks.dtype.names):  # no two blocks alike, as far as a half can tell
                assert np.unique(blocks[plane]).size > min(blocks.size, 2000) * 0.4
    assert seen[-1] == (seen[-1][1], sum(t.n_bytes for t in reader.tensors)) and seen == sorted(seen)


def test_metadata_make_the_model_that_was_asked_for(tmp_path):
    path = bench.make(SMALL, "gguf-q4_0", tmp_path / "m.gguf")
    meta = fields(gguf.GGUFReader(path))
    assert meta["general.architecture"] == "qwen2" and meta["qwen2.block_count"] == 2 and meta["qwen2.rope.freq_base"] == 1e6
    assert len(meta["tokenizer.ggml.tokens"]) == len(meta["tokenizer.ggml.token_type"]) == SMALL.vocab
    files = resolve_source(str(path))
    config = files.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size) == (2, 128, 192, 1500)
    assert (config.num_heads, config.num_kv_heads, config.rope.theta, config.rms_norm_eps) == (4, 2, 1e6, pytest.approx(1e-6))
    assert config.qkv_bias and not config.tie_word_embeddings and config.max_position == 512
    expected = {f"{part.gguf}.{kind}" for spec in model_class("qwen2").weights(config) for part in spec.parts
                for kind in (["weight", "bias"] if spec.bias else ["weight"])}  # fmt: skip
    assert set(files.gguf_file.tensors) == expected
    files.gguf_file.close()


@pytest.mark.parametrize("kind", [*TYPES, "safetensors-bf16"])
def test_a_made_model_generates_text(tmp_path, kind):
    """Finite logits, neither flat nor of one token, and other tokens after another prompt."""
    path = bench.make(SMALL, kind, tmp_path / ("m.gguf" if kind in TYPES else "m"))
    with LLM(str(path), kv_cache_memory="16MiB") as llm:
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
        outputs = llm.generate(["the quick brown fox", "1, 2, 3"], params)
        chat = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4, ignore_eos=True))
    answers = [output.outputs[0] for output in outputs]
    assert all(len(set(answer.token_ids)) > 4 for answer in answers) and answers[0].token_ids != answers[1].token_ids
    best = [max(position.values(), key=lambda entry: entry.logprob).logprob for answer in answers for position in answer.logprobs]
    assert -6 < np.mean(best) < -0.2 and len(chat[0].outputs[0].token_ids) == 4


def test_the_generated_vocabulary_in_both_formats_encodes_alike(tmp_path):
    """And as the tokenizers library does with the folder's file."""
    from tokenizers import Tokenizer

    from octavo.tokenizer import load_tokenizer

    text = "the Quick  brown föx\n 12"
    path = bench.make(replace(SMALL, pre="gpt-2"), "gguf-q8_0", tmp_path / "m.gguf")
    folder = bench.make(SMALL, "safetensors-bf16", tmp_path / "m")
    ours = load_tokenizer(resolve_source(str(path))).encode(text)
    assert ours == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert ours == load_tokenizer(resolve_source(str(folder))).encode(text) and len(ours) < len(text.encode())


def test_safetensors_load_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = bench.make(SMALL, "safetensors-bf16", tmp_path / "m")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = model.state_dict()
    for tensor in tensors(SMALL):
        values = state[tensor.hf].float().numpy()
        assert values.shape == tensor.shape and np.isfinite(values).all()
        if len(tensor.shape) == 2:
            assert 0.6 * tensor.spread < values.std() < 1.6 * tensor.spread


def test_the_seed_and_nothing_else_decides(tmp_path, monkeypatch):
    first = bench.make(SMALL, "gguf-q4_1", tmp_path / "a.gguf", seed=1).read_bytes()
    assert bench.make(SMALL, "gguf-q4_1", tmp_path / "b.gguf", seed=1).read_bytes() == first
    assert bench.make(SMALL, "gguf-q4_1", tmp_path / "c.gguf", seed=2).read_bytes() != first


def test_a_real_tokenizer_in_a_cut_down_real_shape(tmp_path, capsys, tokenizer_assets):
    """The command, with the real files of Qwen: text is encoded as the tokenizers library encodes it."""
    from tokenizers import Tokenizer

    from octavo.tokenizer import load_tokenizer

    path, folder = tmp_path / "q.gguf", tokenizer_assets / "qwen3"
    assert main(["bench", "make-model", "qwen2.5-0.5b", "--layers", "1", "--tokenizer", str(folder), "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    files = resolve_source(str(path))
    assert files.config.num_layers == 1 and files.config.vocab_size == 151936 and files.config.tie_word_embeddings
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(files)
    for text in ("Hello, wörld! 12345 don't", "  def f(x):\n\treturn x\n", "日本語 ǆ e\u0301"):
        assert tokenizer.encode(text) == oracle.encode(text).ids
    names = {tokenizer.decode([i], skip_special_tokens=False) for i in files.eos_token_ids}
    assert "<|im_end|>" in names


def test_refusals_are_one_line_and_leave_nothing(tmp_path, capsys, monkeypatch):
    there = tmp_path / "there.gguf"
    there.write_bytes(b"mine")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}, "pre_tokenizer": None}))
    huge = {"model": {"type": "BPE", "vocab": {"a": 10**15}, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}}
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge/tokenizer.json").write_text(json.dumps(huge))
    new = ["--output", str(tmp_path / "new.gguf")]
    for arguments, words in (
        (["no-such-shape", *new], "qwen2.5-7b"),
        (["smollm2-135m", "--format", "gguf-q3", *new], "gguf-q4_0"),
        (["smollm2-135m", "--output", str(there)], "there already"),
        (["smollm2-135m", "--layers", "0", *new], "--layers"),
        (["smollm2-135m", "--tokenizer", str(tmp_path), *new], "tokenizer.json"),
        (["smollm2-135m", "--tokenizer", str(tmp_path / "bad"), *new], "byte-level BPE"),
        (["smollm2-135m", "--tokenizer", str(tmp_path / "huge"), *new], "token ids outside"),
    ):
        assert main(["bench", "make-model", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    monkeypatch.setattr(bench.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1})())
    with pytest.raises(ConfigError, match="MiB left"):
        bench.make(SMALL, "gguf-q4_0", tmp_path / "new.gguf")
    monkeypatch.undo()
    monkeypatch.setattr(bench, "_blocks", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="No space left"):
        bench.make(SMALL, "gguf-q4_0", tmp_path / "new.gguf")
    assert there.read_bytes() == b"mine" and {p.name for p in tmp_path.iterdir()} == {"there.gguf", "bad", "huge"}


def test_a_vocabulary_too_large_is_refused():
    with pytest.raises(ConfigError, match="more than the 300"):
        made_vocabulary.generated(replace(SMALL, vocab=300))
