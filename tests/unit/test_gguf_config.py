"""GGUF metadata -> ModelConfig: the same model as the Hugging Face files say, and refusals by key."""

from __future__ import annotations

import logging
import math
import struct
from dataclasses import replace

import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo.loading.gguf import GGUFFile
from octavo.loading.gguf_config import gguf_model_config
from octavo.loading.hf_config import read_hf_config
from tests.fuzz import gguf_bytes as g
from tests.tiny_models import llama3_freq_factors, write_tiny

pytest.importorskip("gguf")

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}),
    ("llama", {"rope_parameters": YARN}),
    ("qwen2", {"num_hidden_layers": 3, "rms_norm_eps": 1e-6}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
]


@pytest.mark.parametrize(("family", "settings"), MODELS)
def test_both_formats_mean_the_same_model(tmp_path, family, settings):
    hf = read_hf_config(write_tiny(tmp_path / "hf", family, **settings).path / "config.json")
    with GGUFFile(write_tiny(tmp_path / "gguf", family, "gguf", **settings).path) as file:
        ours = gguf_model_config(file)
    assert math.isclose(ours.rms_norm_eps, hf.rms_norm_eps, rel_tol=1e-7)  # float32 in the file
    assert replace(ours, rms_norm_eps=hf.rms_norm_eps) == hf


def test_llama3_becomes_frequency_factors(tmp_path):
    with GGUFFile(write_tiny(tmp_path, "llama", "gguf", rope_parameters=LLAMA3).path) as file:
        rope = gguf_model_config(file).rope
    assert (rope.kind, rope.theta) == ("default", 5e5)
    assert rope.freq_factors == tuple(llama3_freq_factors(LLAMA3, 16).tolist())
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=dict(LLAMA3))
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = rope.theta ** (-np.arange(0, 16, 2) / 16)
    assert np.allclose(plain / np.array(rope.freq_factors), expected.numpy(), rtol=1e-6)
    assert len(set(rope.freq_factors)) > 2  # the case reaches all three branches


@pytest.mark.parametrize(("quant", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32"), ("Q8_0", "float32")])
def test_dtype(tmp_path, quant, dtype):
    with GGUFFile(write_tiny(tmp_path, "llama", "gguf", quant=quant).path) as file:
        assert gguf_model_config(file).dtype == dtype


# -- single keys ---------------------------------------------------------------------------------------------------------
BASE = {
    "general.architecture": g.text("general.architecture", "llama"),
    **{
        f"llama.{key}": g.uint(f"llama.{key}", value)
        for key, value in {
            "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64, "attention.head_count": 2,
        }.items()
    },
    "llama.attention.layer_norm_rms_epsilon": g.real("llama.attention.layer_norm_rms_epsilon", 1e-5),
}  # fmt: skip
EMBEDDING = g.tensor("token_embd.weight", (32, 10))


def parse(tmp_path, *changes: bytes, without: str = "", tensors=(EMBEDDING,), data=bytes(1280)):
    """BASE with entries added or, where the key is the same, replaced."""
    entries = {key: value for key, value in BASE.items() if key != without}
    for change in changes:
        size = struct.unpack_from("<Q", change)[0]
        entries[change[8 : 8 + size].decode()] = change
    path = tmp_path / "x.gguf"
    path.write_bytes(g.gguf(list(entries.values()), list(tensors), data))
    with GGUFFile(path) as file:
        return gguf_model_config(file)


def u32s(key: str, *values: int) -> bytes:
    return g.array(key, g.UINT32, [struct.pack("<I", v) for v in values])


def test_defaults(tmp_path):
    config = parse(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.vocab_size, config.tie_word_embeddings) == (2, 16, 10, True)
    assert (config.rope.theta, config.rope.dim, config.rope.kind) == (10000.0, 16, "default")


def test_equal_values_per_layer_are_one_value(tmp_path):
    assert parse(tmp_path, u32s("llama.attention.head_count_kv", 1, 1)).num_kv_heads == 1
    with pytest.raises(ModelLoadError, match="attention.head_count_kv differs between layers"):
        parse(tmp_path, u32s("llama.attention.head_count_kv", 1, 2))


def test_yarn_attention_factor(tmp_path):
    def yarn(*more: bytes):
        scaling = [g.text("llama.rope.scaling.type", "yarn"), g.real("llama.rope.scaling.factor", 4.0)]
        return parse(tmp_path, *scaling, g.uint("llama.rope.scaling.original_context_length", 32), *more).rope

    assert yarn().attention_factor is None  # YaRN's own, 0.1 ln(4) + 1
    assert math.isclose(yarn(g.real("llama.rope.scaling.attn_factor", 0.5)).attention_factor, 0.5 * (0.1 * math.log(4) + 1))


def test_unknown_keys_are_reported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        parse(tmp_path, g.uint("llama.colour", 3))
    assert "ignored the unknown metadata key colour" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([g.text("general.architecture", "mamba")], "'mamba' is not supported; supported are llama, qwen2"),
        ([g.uint("general.architecture", 3)], "general.architecture must be a string"),
        ([g.uint("split.count", 3)], "split GGUF"),
        ([g.uint("llama.expert_count", 8)], "mixture-of-experts"),
        ([g.entry("llama.attention.causal", g.BOOL, b"\0")], "causal"),
        ([g.text("llama.tensor_data_layout", "odd")], "tensor_data_layout"),
        ([g.real("llama.attention.scale", 0.5)], "attention.scale is not supported"),
        ([g.real("llama.attention.clamp_kqv", 8.0)], "attention.clamp_kqv is not supported"),
        ([g.real("llama.logit_scale", 0.5)], "logit_scale is not supported"),
        ([g.uint("llama.attention.sliding_window_pattern", 6)], "sliding_window_pattern is not supported"),
        ([g.text("llama.rope.scaling.type", "longrope")], "'longrope' is not supported"),
        ([g.text("llama.rope.scaling.type", "linear")], "rope.scaling.factor is missing"),
        ([g.uint("llama.rope.dimension_count", 8)], "rope.dimension_count 8 differs"),
        ([g.uint("llama.vocab_size", 11)], "vocab_size is 11, but token_embd.weight has 10 rows"),
        ([g.uint("llama.attention.value_length", 8)], "differ"),
        ([g.uint("llama.attention.head_count", 3)], "not a multiple"),
        ([g.uint("llama.attention.head_count", 0)], "attention.head_count must be"),
        ([g.uint("llama.block_count", 2**31)], "block_count must be"),
        ([g.text("llama.context_length", "128")], "context_length must be"),
        ([g.real("llama.embedding_length", 32.0)], "embedding_length must be"),
        ([g.real("llama.rope.freq_base", math.nan)], "rope.freq_base must be"),
        ([g.uint("llama.attention.head_count_kv", 3)], "cannot share 3 KV heads"),
    ],
)
def test_refused(tmp_path, changes, message):
    with pytest.raises(ModelLoadError, match=message) as error:
        parse(tmp_path, *changes)
    assert "x.gguf" in str(error.value)


@pytest.mark.parametrize("key", [k for k in BASE if k != "general.architecture"])
def test_missing_keys_are_named(tmp_path, key):
    with pytest.raises(ModelLoadError, match=rf"{key.removeprefix('llama.')} is missing"):
        parse(tmp_path, without=key)
    with pytest.raises(ModelLoadError, match="general.architecture is missing"):
        parse(tmp_path, without="general.architecture")


def test_bad_tensors(tmp_path):
    with pytest.raises(ModelLoadError, match="token_embd.weight is missing"):
        parse(tmp_path, tensors=(), data=b"")
    for values, message in (
        ([1.0] * 7, r"shape \[7\], expected \[8\]"),
        ([1.0] * 7 + [0.0], "not positive"),
        ([math.nan] * 8, "not positive"),
    ):
        freqs = g.tensor("rope_freqs.weight", (len(values),), offset=1280)
        with pytest.raises(ModelLoadError, match=message):
            parse(tmp_path, tensors=(EMBEDDING, freqs), data=bytes(1280) + struct.pack(f"<{len(values)}f", *values))
    with pytest.raises(ModelLoadError, match="next to rope scaling 'linear'"):
        scaling = [g.text("llama.rope.scaling.type", "linear"), g.real("llama.rope.scaling.factor", 2.0)]
        parse(tmp_path, *scaling, tensors=(EMBEDDING, g.tensor("rope_freqs.weight", (8,), offset=1280)), data=bytes(1312))
