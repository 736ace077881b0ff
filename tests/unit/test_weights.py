"""Filling weights by a table: every tensor used, every weight filled, values equal to what was written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.errors import ModelLoadError
from octavo.loading.source import resolve_source
from octavo.loading.weights import load_weights
from octavo.ops.layout import dequantize
from octavo.weight_spec import Part, WeightSpec, per_layer
from tests.tiny_models import gguf_name, permute_for_gguf, write_tiny

gguf = pytest.importorskip("gguf")


class PlainOps:
    """Packs to plain float32 arrays, and remembers what it was given."""

    def __init__(self):
        self.layouts: list[list[str]] = []

    def pack_linear(self, parts, bias=None):
        self.layouts.append([part.layout for part in parts])
        return np.concatenate([dequantize(part) for part in parts]), bias

    def pack_vector(self, values):
        assert values.ndim == 1 and values.dtype == np.float32
        return values


def table(config) -> list[WeightSpec]:
    """A name map of this test's own: q, k and v fused; gate alone and up alone."""
    c, hidden = config, config.hidden_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q_heads, kv_heads = (c.num_heads, c.num_kv_heads) if c.architecture == "llama" else (0, 0)
    hf = "model.layers.{i}"
    qkv = (
        Part(f"{hf}.self_attn.q_proj", "blk.{i}.attn_q", q, q_heads),
        Part(f"{hf}.self_attn.k_proj", "blk.{i}.attn_k", kv, kv_heads),
        Part(f"{hf}.self_attn.v_proj", "blk.{i}.attn_v", kv),
    )
    layer = [
        WeightSpec("layers.{i}.qkv", "linear", qkv, hidden, bias=c.qkv_bias),
        WeightSpec("layers.{i}.o", "linear", (Part(f"{hf}.self_attn.o_proj", "blk.{i}.attn_output", hidden),), q, bias=c.o_bias),
        WeightSpec(
            "layers.{i}.gate", "linear", (Part(f"{hf}.mlp.gate_proj", "blk.{i}.ffn_gate", c.intermediate_size),), hidden, bias=c.mlp_bias
        ),
        WeightSpec("layers.{i}.up", "linear", (Part(f"{hf}.mlp.up_proj", "blk.{i}.ffn_up", c.intermediate_size),), hidden, bias=c.mlp_bias),
        WeightSpec(
            "layers.{i}.down", "linear", (Part(f"{hf}.mlp.down_proj", "blk.{i}.ffn_down", hidden),), c.intermediate_size, bias=c.mlp_bias
        ),
        WeightSpec("layers.{i}.norm1", "vector", (Part(f"{hf}.input_layernorm", "blk.{i}.attn_norm", hidden),)),
        WeightSpec("layers.{i}.norm2", "vector", (Part(f"{hf}.post_attention_layernorm", "blk.{i}.ffn_norm", hidden),)),
    ]
    tied = "embed" if c.tie_word_embeddings else None
    return [
        WeightSpec("head", "linear", (Part("lm_head", "output", c.vocab_size),), hidden, tied_to=tied),
        WeightSpec("embed", "embedding", (Part("model.embed_tokens", "token_embd", c.vocab_size),), hidden),
        *per_layer(layer, c.num_layers),
        WeightSpec("norm", "vector", (Part("model.norm", "output_norm", hidden),)),
    ]


def load(path, ops=None, specs=None, progress=None):
    files = resolve_source(str(path))
    return load_weights(files, table(files.config) if specs is None else specs, ops or PlainOps(), progress)


def expected(tiny, specs) -> dict[str, object]:
    state, out = tiny.state_dict, {}
    for spec in specs:
        parts = [part.hf.replace("lm_head", "model.embed_tokens") if spec.tied_to else part.hf for part in spec.parts]
        weights = np.concatenate([state[f"{part}.weight"] for part in parts])
        bias = np.concatenate([state[f"{part}.bias"] for part in parts]) if spec.bias else None
        out[spec.target] = weights if spec.kind == "vector" else (weights, bias)
    return out


def assert_loaded(tiny):
    files = resolve_source(str(tiny.path))
    found, wanted = load(tiny.path), expected(tiny, table(files.config))
    assert set(found) == set(wanted)
    for target, value in wanted.items():
        pair = (found[target], value) if isinstance(value, tuple) else ([found[target]], [value])
        for ours, theirs in zip(*pair, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert np.array_equal(ours, theirs), target


SETTINGS = [
    {},
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 1},
    {"attention_bias": True, "mlp_bias": True},
]


@pytest.mark.parametrize("fmt", ["safetensors", "gguf"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_llama(tmp_path, fmt, settings):
    assert_loaded(write_tiny(tmp_path, "llama", fmt, seed=5, **settings))


@pytest.mark.parametrize("fmt", ["safetensors", "gguf"])
@pytest.mark.parametrize("tied", [True, False])
def test_qwen2(tmp_path, fmt, tied):
    assert_loaded(write_tiny(tmp_path, "qwen2", fmt, seed=6, tie_word_embeddings=tied))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stored_dtypes_and_shards(tmp_path, dtype):
    tiny = write_tiny(tmp_path, dtype=dtype, shards=4)
    assert_loaded(tiny)
    ops = PlainOps()
    load(tiny.path, ops)
    assert {layout for call in ops.layouts for layout in call} == {"f16" if dtype == "float16" else "bf16"}


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_quantised_llama(tmp_path, quant):
    size = 256 if quant.endswith("K") else 64
    tiny = write_tiny(
        tmp_path, "llama", "gguf", quant=quant, hidden_size=size, intermediate_size=size, head_dim=size // 4, num_hidden_layers=1
    )
    assert_loaded(tiny)


def test_parts_may_differ_in_type(tmp_path):
    quant = {"": "Q4_0", "blk.0.attn_v.weight": "Q8_0", "token_embd.weight": "F16"}
    tiny = write_tiny(tmp_path, "llama", "gguf", quant=quant, num_hidden_layers=1)
    assert_loaded(tiny)
    ops = PlainOps()
    load(tiny.path, ops)
    assert ["q4_b32", "q4_b32", "q8_b32"] in ops.layouts


def test_the_permutation_of_q_and_k_is_undone_and_matters(tmp_path):
    tiny = write_tiny(tmp_path, "llama", "gguf")
    q = tiny.state_dict["model.layers.0.self_attn.q_proj.weight"]
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tiny.path).tensors}["blk.0.attn_q.weight"]
    assert np.array_equal(raw, permute_for_gguf(q, 4)) and not np.array_equal(raw, q)
    assert np.array_equal(load(tiny.path)["layers.0.qkv"][0][:64], q)


def test_a_tied_head_is_the_same_object(tmp_path):
    for fmt in ("safetensors", "gguf"):
        weights = load(write_tiny(tmp_path / fmt, fmt=fmt, tie_word_embeddings=True).path)
        assert weights["head"] is weights["embed"]


def add_tensors(folder, **tensors):
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)


def drop_tensors(folder, *names):
    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if k not in names}, path)


def test_a_head_beside_tied_embeddings_is_ignored(tmp_path):
    tiny = write_tiny(tmp_path, tie_word_embeddings=True)
    add_tensors(tiny.path, **{"lm_head.weight": np.zeros((272, 64), np.float32)})
    weights = load(tiny.path)
    assert weights["head"] is weights["embed"]


def test_derived_buffers_are_ignored(tmp_path):
    tiny = write_tiny(tmp_path)
    add_tensors(tiny.path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    assert_loaded(tiny)


def test_rope_freqs_are_part_of_the_configuration(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    tiny = write_tiny(tmp_path, fmt="gguf", rope_parameters={**rope, "original_max_position_embeddings": 64})
    assert "rope_freqs.weight" in resolve_source(str(tiny.path)).gguf_file.tensors
    assert_loaded(tiny)


# -- what must fail ------------------------------------------------------------------------------------------------------
def test_an_untied_head_that_is_absent(tmp_path):
    tiny = write_tiny(tmp_path)
    drop_tensors(tiny.path, "lm_head.weight")
    with pytest.raises(ModelLoadError, match=r"model.safetensors: 1 tensors are missing: lm_head.weight$"):
        load(tiny.path)


def test_missing_tensors_are_named_and_the_list_is_short(tmp_path):
    tiny = write_tiny(tmp_path, num_hidden_layers=2)
    config = resolve_source(str(tiny.path)).config
    with pytest.raises(ModelLoadError, match=r"90 tensors are missing: model.layers.10.input_layernorm.weight, .* and 82 more"):
        load(tiny.path, specs=table(replace(config, num_layers=12)))


def test_a_tensor_too_many(tmp_path):
    tiny = write_tiny(tmp_path)
    add_tensors(tiny.path, **{"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)})
    with pytest.raises(ModelLoadError, match=r"1 tensors are not part of the model: model.layers.0.self_attn.q_norm.weight"):
        load(tiny.path)


def test_a_bias_that_the_model_does_not_use(tmp_path):
    tiny = write_tiny(tmp_path)
    add_tensors(tiny.path, **{"model.layers.1.self_attn.q_proj.bias": np.ones(64, np.float32)})
    with pytest.raises(ModelLoadError, match=r"1 biases are not part of the model: model.layers.1.self_attn.q_proj.bias"):
        load(tiny.path)


def test_a_bias_that_is_absent(tmp_path):
    tiny = write_tiny(tmp_path, "qwen2")
    drop_tensors(tiny.path, "model.layers.1.self_attn.k_proj.bias")
    with pytest.raises(ModelLoadError, match=r"missing: model.layers.1.self_attn.k_proj.bias$"):
        load(tiny.path)


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 96), r"\[96, 64\]"),
        ("model.layers.0.self_attn.k_proj.weight", (64, 64), r"\[32, 64\]"),
        ("model.norm.weight", (64, 1), r"\[64\]"),
        ("model.norm.weight", (63,), r"\[64\]"),
        ("model.embed_tokens.weight", (64,), r"\[272, 64\]"),
        ("model.embed_tokens.weight", (), r"\[272, 64\]"),
        ("model.layers.0.self_attn.o_proj.weight", (64, 8, 8), r"\[64, 64\]"),
    ],
)
def test_a_wrong_shape(tmp_path, name, shape, needed):
    tiny = write_tiny(tmp_path)
    add_tensors(tiny.path, **{name: np.zeros(shape, np.float32)})
    with pytest.raises(ModelLoadError, match=rf"'{name}' has the shape \[.*\], the model needs {needed}"):
        load(tiny.path)


def test_a_wrong_shape_of_a_bias(tmp_path):
    tiny = write_tiny(tmp_path, "qwen2")
    add_tensors(tiny.path, **{"model.layers.0.self_attn.v_proj.bias": np.zeros(64, np.float32)})
    with pytest.raises(ModelLoadError, match=r"v_proj.bias' has the shape \[64\], the model needs \[32\]"):
        load(tiny.path)


def test_an_unsupported_type_names_file_and_tensor(tmp_path):
    path = tmp_path / "x.gguf"
    tiny = write_tiny(tmp_path / "m", fmt="gguf", hidden_size=256, head_dim=64, num_hidden_layers=1)
    writer = gguf.GGUFWriter(path, "llama")
    from tests.tiny_models import _gguf_hyperparameters

    _gguf_hyperparameters(writer, tiny.hf_config_kwargs)
    for name, values in tiny.state_dict.items():
        if name == "model.layers.0.mlp.up_proj.weight":
            writer.add_tensor(gguf_name(name), np.zeros((96, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"x.gguf: tensor 'blk.0.ffn_up.weight' has the type Q2_K"):
        load(path)


def test_a_bad_table(tmp_path):
    tiny = write_tiny(tmp_path, num_hidden_layers=1)
    specs = table(resolve_source(str(tiny.path)).config)
    with pytest.raises(ModelLoadError, match="sets a weight twice: norm"):
        load(tiny.path, specs=[*specs, specs[-1]])
    twice = WeightSpec("other", "vector", specs[-1].parts)
    with pytest.raises(ModelLoadError, match="uses tensor 'model.norm.weight' twice"):
        load(tiny.path, specs=[*specs, twice])


# -- around the edges ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", ["safetensors", "gguf"])
def test_progress_reaches_the_total_and_files_are_closed(tmp_path, fmt):
    tiny = write_tiny(tmp_path, fmt=fmt)
    seen: list[tuple[int, int]] = []
    files = resolve_source(str(tiny.path))
    load_weights(files, table(files.config), PlainOps(), lambda done, total: seen.append((done, total)))
    total = sum(values.nbytes for values in tiny.state_dict.values())
    assert seen[-1] == (total, total) and {t for _, t in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and len(seen) == len(table(files.config))
    if fmt == "gguf":
        assert files.gguf_file.closed
        load_weights(files, table(files.config), PlainOps())  # a second load opens the file again


def test_the_file_is_closed_after_a_failure_too(tmp_path):
    files = resolve_source(str(write_tiny(tmp_path, fmt="gguf").path))
    with pytest.raises(ModelLoadError):
        load_weights(files, table(files.config)[1:], PlainOps())
    assert files.gguf_file.closed


def test_the_real_model(smollm2_path):
    files = resolve_source(str(smollm2_path))

    class KeepParts(PlainOps):
        def pack_linear(self, parts, bias=None):
            return parts

    weights = load_weights(files, table(files.config), KeepParts())
    assert len(weights) == 30 * 7 + 3 and weights["head"] is weights["embed"]
    assert {part.layout for parts in weights.values() if isinstance(parts, list) for part in parts} == {"q4_b32", "q8_b32"}
