"""config.json -> ModelConfig, compared with transformers' own reading of the same settings."""

from __future__ import annotations

import json
import math

import pytest

from octavo.errors import ModelLoadError
from octavo.loading.hf_config import parse_hf_config, read_hf_config

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def llama(**changes):
    return parse_hf_config({**LLAMA, **changes})


def qwen(**changes):
    return parse_hf_config({**QWEN, **changes})


def transformers_config(settings: dict):
    transformers = pytest.importorskip("transformers")
    cls = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[settings["model_type"]]
    return cls(**{k: v for k, v in json.loads(json.dumps(settings)).items() if k not in ("model_type", "architectures")})


def test_plain_llama():
    config = llama()
    assert (config.architecture, config.head_dim, config.num_kv_heads, config.dtype) == ("llama", 16, 2, "float32")
    assert (config.rope.kind, config.rope.theta, config.rope.dim) == ("default", 10000.0, 16)
    assert not (config.tie_word_embeddings or config.qkv_bias or config.o_bias or config.mlp_bias or config.sliding_windows)


def test_absent_values_follow_transformers():
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "architectures")}
    for family in ("llama", "qwen2"):
        settings = {**bare, "model_type": family, "num_key_value_heads": None}
        ours, theirs = parse_hf_config(settings), transformers_config(settings)
        assert ours.num_kv_heads == theirs.num_key_value_heads == 4
        assert ours.max_position == theirs.max_position_embeddings
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


def test_head_dim_and_biases():
    assert llama(head_dim=32).head_dim == 32 and llama(head_dim=32).rope.dim == 32
    assert llama(hidden_size=60, num_attention_heads=8, num_key_value_heads=8, head_dim=16).head_dim == 16
    config = llama(attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    config = qwen(attention_bias=True, mlp_bias=True)  # Qwen2 knows neither flag: it always has bias on q, k and v only
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("settings", "dtype"), [({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"), ({"dtype": "auto"}, "float32")]
)
def test_dtype(settings, dtype):
    assert llama(**settings).dtype == dtype


# -- rope --------------------------------------------------------------------------------------------------------------
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2}
STYLES = {
    "old, type": lambda kind, values: {"rope_theta": 5e5, "rope_scaling": {"type": kind, **values}},
    "old, rope_type": lambda kind, values: {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, **values}},
    "new": lambda kind, values: {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **values}},
    "new, theta beside": lambda kind, values: {"rope_theta": 5e5, "rope_parameters": {"rope_type": kind, **values}},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("kind", "values"), [("default", {}), ("linear", {"factor": 2.5}), ("llama3", LLAMA3), ("yarn", YARN)])
def test_rope_styles(style, kind, values):
    settings = STYLES[style](kind, values)
    rope = llama(**settings).rope
    theirs = transformers_config({**LLAMA, **settings}).rope_parameters
    assert (rope.kind, rope.theta) == (kind, 5e5) == (theirs["rope_type"], theirs["rope_theta"])
    assert rope.factor == values.get("factor", 1.0)
    assert rope.original_max_position == values.get("original_max_position_embeddings", 0)
    if kind == "llama3":
        assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    if kind == "yarn":
        assert (rope.beta_fast, rope.beta_slow, rope.attention_factor, rope.truncate) == (16.0, 2.0, None, True)


def test_rope_details():
    yarn = {**YARN, "rope_type": "yarn", "attention_factor": 1.5, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}
    rope = llama(rope_scaling=yarn).rope
    assert (rope.attention_factor, rope.mscale, rope.mscale_all_dim, rope.truncate) == (1.5, 0.7, 0.9, False)
    # a file from before the stretch: the context is what the scaling makes of it
    assert llama(rope_scaling=yarn).max_position == 16384
    assert llama(rope_scaling={**yarn, "factor": None}, max_position_embeddings=8192).rope.factor == 2.0
    assert llama(rope_scaling={**LLAMA3, "rope_type": "llama3"}, original_max_position_embeddings=512).rope.original_max_position == 512
    without = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    assert llama(rope_scaling={**without, "rope_type": "llama3"}).rope.original_max_position == 4096
    # rope_scaling wins over rope_parameters, as in transformers
    assert llama(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}).rope.kind == "linear"
    assert llama(partial_rotary_factor=0.5).rope.dim == 8
    assert llama(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}).rope.dim == 4


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "ntk", "proportional", "quantum"])
def test_unknown_rope_types_are_refused(kind):
    with pytest.raises(ModelLoadError, match=rf"the rope type '{kind}' is not supported; supported are default, linear, llama3 and yarn"):
        llama(rope_scaling={"type": kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": "2"}, "factor must be a number"),
        ({"type": "linear", "factor": math.inf}, "factor must be a number"),
        ({"type": "linear", "factor": 0}, "factor must be a number"),
        ({"type": "llama3", **LLAMA3, "low_freq_factor": None}, "low_freq_factor is missing"),
        ({"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "must be larger"),
        ({"type": "yarn", **YARN, "beta_fast": 0.5}, "must not be below"),
        ({"type": 3}, "rope_type must be a string"),
        ("linear", "must be an object"),
        ({"full_attention": {"rope_type": "default"}}, "differ between kinds of layers"),
        ({"type": "default", "rope_theta": -1.0}, "rope_theta must be"),
        ({"type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor must be"),
        ({"type": "default", "partial_rotary_factor": 0.2}, "rotated dimensions"),
    ],
)
def test_bad_rope_settings(scaling, message):
    with pytest.raises(ModelLoadError, match=message):
        llama(rope_scaling=scaling)


# -- windows -----------------------------------------------------------------------------------------------------------
WINDOWS = [
    {},
    {"sliding_window": 8},
    {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0},
    *({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": n} for n in (0, 1, 2, 4, 28)),
    {"use_sliding_window": True, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": 8},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    {"use_sliding_window": False, "sliding_window": 8, "layer_types": ["full_attention"] * 4},
]


@pytest.mark.parametrize("settings", WINDOWS)
def test_sliding_windows_are_those_of_transformers(settings):
    theirs = transformers_config({**QWEN, **settings})
    expected = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    ours = qwen(**settings).sliding_windows
    assert (ours or (None,) * 4) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be"),
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ({"layer_types": ["full_attention"] * 3}, "must list 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is off"),
        ({"max_window_layers": -1}, "max_window_layers must be"),
    ],
)
def test_bad_windows(settings, message):
    with pytest.raises(ModelLoadError, match=message):
        qwen(**settings)


# -- what must be refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported are llama, qwen2"),
        ({"model_type": None}, "model_type is missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq' are not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8' are not supported"),
        ({"quantization_config": "awq"}, "are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"vocab_size": 2**40}, "vocab_size must be"),
        ({"vocab_size": "1000"}, "vocab_size must be"),
        ({"vocab_size": 1000.0}, "vocab_size must be"),
        ({"vocab_size": True}, "vocab_size must be"),
        ({"hidden_size": -64}, "hidden_size must be"),
        ({"intermediate_size": 2**60}, "intermediate_size must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"head_dim": 15}, "rotated dimensions"),
        ({"head_dim": 10**6}, "head_dim must be"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings must be"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be"),
        ({"rms_norm_eps": 5}, "rms_norm_eps must be"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be"),
        ({"hidden_size": 10**400}, "hidden_size must be"),
        ({"model_type": "a\nb\ud800" * 1000}, "is not supported"),
        ({"hidden_act": "a\nb" * 1000}, "is not supported"),
        ({"attention_bias": 1}, "attention_bias must be"),
    ],
)
def test_bad_configs_name_the_field(settings, message):
    with pytest.raises(ModelLoadError, match=message) as error:
        llama(**settings)
    assert str(error.value).startswith("config.json: ") and len(str(error.value)) < 300 and str(error.value).isprintable()


def test_files(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert read_hf_config(path) == llama()
    for text in ("", "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ModelLoadError, match="config.json"):
            read_hf_config(path)
