"""The models to read, against transformers and against the engine."""

from pathlib import Path

import numpy as np
import pytest

from octavo.lab.standard import naive_gpt2, naive_llama
from octavo.lab.standard.model import LabModel

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def random_weights(model, seed):
    """Every parameter random, so that none may be left out; and their arrays by name."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shift = 1.0 if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight", "layernorm.weight", "norm.weight")) else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + shift)
        logits = model.eval()(torch.tensor([IDS])).logits[0].numpy()
    return {name: array.numpy() for name, array in model.state_dict().items()}, logits


@pytest.mark.parametrize("seed", range(3))
def test_gpt2_is_that_of_transformers(seed):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=60, n_embd=48, n_layer=3, n_head=4, n_positions=32)
    weights, expected = random_weights(transformers.GPT2LMHeadModel(config), seed)
    got = naive_gpt2.forward(weights, IDS, num_heads=4)
    assert got.dtype == np.float32 and np.abs(got - expected).max() < 1e-4 < expected.std()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_llama_is_that_of_transformers(seed, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=tied, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    weights, expected = random_weights(transformers.LlamaForCausalLM(config), seed)
    if tied:
        del weights["lm_head.weight"]
    got = naive_llama.forward(weights, IDS, num_heads=6, num_kv_heads=2, theta=500.0)
    assert got.dtype == np.float32 and np.abs(got - expected).max() < 1e-4 < expected.std()


def hugging_face_weights(model: LabModel) -> dict[str, np.ndarray]:
    """The dequantised arrays that octavo.loading made, under the names of a checkpoint."""
    net, config = model.runner.model, model.parts.model_config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = {"model.embed_tokens.weight": net.embed.weight.matrix, "model.norm.weight": net.norm.weight}
    for i, layer in enumerate(net.layers):
        h = f"model.layers.{i}"
        qkv, gate_up = layer.attn.qkv_proj.weight.matrix, layer.mlp.gate_up_proj.weight.matrix
        parts = {"q": qkv[:q], "k": qkv[q : q + kv], "v": qkv[q + kv :], "o": layer.attn.o_proj.weight.matrix}
        found |= {f"{h}.self_attn.{name}_proj.weight": matrix for name, matrix in parts.items()}
        found[f"{h}.mlp.gate_proj.weight"], found[f"{h}.mlp.up_proj.weight"] = np.split(gate_up, 2)
        found[f"{h}.mlp.down_proj.weight"] = layer.mlp.down_proj.weight.matrix
        found[f"{h}.input_layernorm.weight"], found[f"{h}.post_attention_layernorm.weight"] = (
            layer.input_norm.weight,
            layer.post_norm.weight,
        )
    return found


def test_llama_reads_the_real_model(smollm2_path):
    model = LabModel.load(str(smollm2_path), backend="reference", num_kv_blocks=8)
    ids = model.tokenizer.encode("Deep learning is a branch of")
    model.begin(len(ids))
    expected = model.forward(ids, last=len(ids))
    config = model.parts.model_config
    got = naive_llama.forward(
        hugging_face_weights(model), ids, config.num_heads, config.num_kv_heads, config.rope.theta, config.rms_norm_eps
    )
    assert np.abs(got - expected).max() < 1e-3 < expected.std()
    assert (got.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("module", [naive_gpt2, naive_llama])
def test_a_model_to_read_fits_on_a_page(module):
    assert len(Path(module.__file__).read_text("utf-8").splitlines()) <= 80
