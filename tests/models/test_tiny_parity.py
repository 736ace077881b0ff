"""Tiny random models, every parameter random, in both formats, against transformers in float32; and proof that each part
of the model is needed: with any one of them removed the logits no longer agree."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from octavo.ops.reference import ReferenceOps
from tests.models import harness
from tests.models.oracle import logits_of
from tests.tiny_models import hf_model, write_tiny

pytest.importorskip("torch")
TOLERANCE = 1e-4  # of the largest logit
REMOVED = 1e-3  # a removed part must move the logits by more than this

FAMILIES = ["llama", "qwen2"]
FORMATS = ["safetensors", "gguf"]
BACKENDS = [
    "reference",
    "torch",
    pytest.param("cpu", marks=pytest.mark.skipif(find_spec("octavo._native") is None, reason="the native module is not built")),
]


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def tokens_for(vocab_size: int, length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made = {}

    def make(family: str, fmt: str, **overrides):
        key = (family, fmt, tuple(sorted((k, repr(v)) for k, v in overrides.items())))
        if key not in made:
            model = write_tiny(tmp_path_factory.mktemp(f"{family}_{fmt}") / "model", family=family, fmt=fmt, seed=3, **overrides)
            made[key] = (model, hf_model(model))
        return made[key]

    return make


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tiny, family, fmt, backend):
    model, oracle = tiny(family, fmt)
    executor = harness.load(model.path, backend=backend, kv_dtype="f32")
    assert executor.ops.name == backend
    for length, chunk in ((1, 512), (16, 512), (17, 5), (50, 512), (70, 16)):
        tokens = tokens_for(executor.model_config.vocab_size, length)
        assert difference(harness.all_logits(executor, tokens, chunk=chunk), logits_of(oracle, tokens)) < TOLERANCE


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_rows_equal_too(tiny, family, fmt):
    model, oracle = tiny(family, fmt)
    executor = harness.load(model.path, backend="reference")
    tokens = tokens_for(executor.model_config.vocab_size, 40)
    assert difference(harness.all_logits(executor, tokens, num_prompt=9), logits_of(oracle, tokens)) < TOLERANCE


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_tied_and_untied_heads(tiny, family, tied, fmt):
    model, oracle = tiny(family, fmt, tie_word_embeddings=tied)
    executor = harness.load(model.path, backend="reference")
    assert (executor.runner.model.lm_head.weight is executor.runner.model.embed.weight) == tied
    tokens = tokens_for(executor.model_config.vocab_size, 12)
    assert difference(harness.all_logits(executor, tokens), logits_of(oracle, tokens)) < TOLERANCE


class _Nothing:
    """Stands in for a part of the model: contributes zeros."""

    def __init__(self, ops, width):
        self.ops, self.width = ops, width

    def __call__(self, x, batch):
        return np.zeros((x.shape[0], self.width), dtype=np.float32)


def _ones(executor, width):
    return executor.ops.pack_vector(np.ones(width, dtype=np.float32))


def _set(owner_of, name, value_of):
    def apply(executor):
        setattr(owner_of(executor.runner.model), name, value_of(executor))

    return apply


def _other_rope(executor):
    from dataclasses import replace

    config = executor.model_config
    return executor.ops.rope_table(replace(config.rope, theta=config.rope.theta * 3), config.max_position)


REMOVALS = {
    "input norm of layer 0": _set(lambda m: m.layers[0].input_norm, "weight", lambda e: _ones(e, e.model_config.hidden_size)),
    "input norm of layer 1": _set(lambda m: m.layers[1].input_norm, "weight", lambda e: _ones(e, e.model_config.hidden_size)),
    "post norm": _set(lambda m: m.layers[0].post_norm, "weight", lambda e: _ones(e, e.model_config.hidden_size)),
    "final norm": _set(lambda m: m.norm, "weight", lambda e: _ones(e, e.model_config.hidden_size)),
    "norm epsilon": _set(lambda m: m.norm, "eps", lambda e: 0.3),
    "attention": _set(lambda m: m.layers[1], "attn", lambda e: _Nothing(e.ops, e.model_config.hidden_size)),
    "mlp": _set(lambda m: m.layers[1], "mlp", lambda e: _Nothing(e.ops, e.model_config.hidden_size)),
    "attention scale": _set(lambda m: m.layers[0].attn, "scale", lambda e: 1.0),
    "rotary base": _set(lambda m: m.layers[0].attn, "rope", _other_rope),
    "causal window": _set(lambda m: m.layers[0].attn, "window", lambda e: 3),
    "silu": lambda e: setattr(e.ops, "silu_mul", lambda gu: gu[:, : gu.shape[1] // 2] * gu[:, gu.shape[1] // 2 :]),
    "a layer": lambda e: e.runner.model.layers.pop(),
}


@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("family", FAMILIES)
def test_removing_a_part_is_noticed(tiny, family, removal):
    model, oracle = tiny(family, "safetensors")
    executor = harness.load(model.path, backend="reference")
    tokens = tokens_for(executor.model_config.vocab_size, 30)
    expected = logits_of(oracle, tokens)
    assert difference(harness.all_logits(executor, tokens), expected) < TOLERANCE
    REMOVALS[removal](executor)
    assert difference(harness.all_logits(executor, tokens), expected) > REMOVED


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_removing_a_bias_of_qwen2_is_noticed(tiny, monkeypatch, part):
    model, oracle = tiny("qwen2", "safetensors")
    pack, seen = ReferenceOps.pack_linear, []
    sizes = {name: model.hf_config_kwargs[key] for name, key in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))}

    def without_bias(self, parts, bias=None):
        seen.append(bias is not None)
        if bias is not None:
            head = len(bias) // (sizes["q"] + 2 * sizes["k"])
            q, k = sizes["q"] * head, sizes["k"] * head
            bias = bias.copy()
            bias[{"q": slice(0, q), "k": slice(q, q + k), "v": slice(q + k, None)}[part]] = 0
        return pack(self, parts, bias)

    monkeypatch.setattr(ReferenceOps, "pack_linear", without_bias)
    executor = harness.load(model.path, backend="reference")
    assert sum(seen) == executor.model_config.num_layers
    tokens = tokens_for(executor.model_config.vocab_size, 20)
    assert difference(harness.all_logits(executor, tokens), logits_of(oracle, tokens)) > REMOVED
