"""A model's weights, dequantised and rounded to bfloat16, as a Hugging Face folder: for engines that read no GGUF.

config.json and model.safetensors, no tokenizer. The rounding is the only loss: bfloat16 keeps 8 bits of a float32's 24.
What a config.json cannot say is refused. Pure functions over files. Not here: reading (weights.py), which weights a model
has (models/).
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from octavo.errors import ModelLoadError
from octavo.loading.gguf import GGUFFile
from octavo.loading.hf_config import KNOWN
from octavo.loading.model_files import ModelFiles
from octavo.loading.tensor_source import GGUFSource
from octavo.model_config import ModelConfig, RopeConfig
from octavo.quantization.packed import dequantize_rows, f32_to_bf16, permute_rows, row_pieces
from octavo.weight_spec import Part, WeightSpec


def export_bf16(files: ModelFiles, specs: Sequence[WeightSpec], folder: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the GGUF model `files` with the weights `specs` into `folder`, made if needed; returns it.

    `progress` gets (bytes written, bytes in all). Raises ModelLoadError where the folder has files already, where the
    disk is too full, and for models that cannot be said in config.json.
    """
    if files.kind != "gguf":
        raise ModelLoadError(f"{files.name} is no GGUF file: there is nothing to export")
    source = GGUFSource(GGUFFile(files.paths[0]))
    try:
        stored = source.shapes()
        plain = [spec for spec in specs if not spec.tied_to or f"{spec.parts[0].gguf}.weight" in stored]
        tensors = [(spec, part, kind) for spec in plain for part in spec.parts for kind in ("weight", "bias")[: 1 + spec.bias]]
        missing = [f"{part.gguf}.{kind}" for _, part, kind in tensors if f"{part.gguf}.{kind}" not in stored]
        if missing:
            raise ModelLoadError(f"{source.where}: {len(missing)} tensors are missing: {', '.join(missing[:5])}")
        shapes = {f"{part.hf}.{kind}": stored[f"{part.gguf}.{kind}"] for _, part, kind in tensors}
        config = _config(files.config, tied=len(plain) < len(specs), eos=sorted(files.eos_token_ids), bos=files.bos_token_id)
        total = sum(2 * int(np.prod(shape)) for shape in shapes.values())
        _make_folder(folder, total)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        with (folder / "model.safetensors").open("xb") as out:
            _write_header(out, shapes)
            done = 0
            for spec, part, kind in tensors:
                for piece in _pieces(source, spec, part, kind):
                    done += out.write(piece)
                    if progress is not None:
                        progress(done, total)
    finally:
        source.close()
    return folder


def _make_folder(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ModelLoadError(f"{folder} has files in it: name another folder, or empty it")
    if shutil.disk_usage(folder).free < size + (64 << 20):
        raise ModelLoadError(f"{folder} has no room for {size / 2**30:.1f} GiB")


def _write_header(out: BinaryIO, shapes: dict[str, tuple[int, ...]]) -> None:
    """safetensors: the length of a JSON header, the header, then the tensors end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)


def _pieces(source: GGUFSource, spec: WeightSpec, part: Part, kind: str) -> Iterator[bytes]:
    """bfloat16 rows in Hugging Face's order, some megabytes at a time."""
    packed = source.matrix(f"{part.gguf}.{kind}")
    heads = part.gguf_interleaved_heads
    # the GGUF writer moved row (half, i) of a head to row (i, half); a vector is one row, whose entries move instead
    order = np.arange(part.rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel() if heads else None
    if order is not None and kind == "weight":
        packed = permute_rows(packed, order)
    for rows in row_pieces(*packed.shape):
        values = np.empty((rows.stop - rows.start, packed.shape[1]), np.float32)
        dequantize_rows(packed, rows, values)
        if order is not None and kind == "bias":
            values = values[:, order]
        yield f32_to_bf16(values).tobytes()


def _config(config: ModelConfig, *, tied: bool, eos: list[int], bos: int | None) -> dict[str, Any]:
    family = config.architecture
    if any(config.sliding_windows):
        raise ModelLoadError("a model with sliding windows cannot be exported")
    biases = (config.qkv_bias, config.o_bias)
    if biases != ((True, False) if family == "qwen2" else (config.qkv_bias,) * 2):
        raise ModelLoadError(f"a {family} model with a bias on some of its attention projections cannot be exported")
    return {
        "architectures": [KNOWN[family]],
        "model_type": family,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": tied,
        **({} if family == "qwen2" else {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}),
        **_rope(config.rope, config.head_dim),
        "eos_token_id": eos or None,
        "bos_token_id": bos,
    }


def _rope(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    if rope.freq_factors is not None or rope.kind not in ("default", "linear") or rope.dim != head_dim:
        raise ModelLoadError(f"a model with rotary embeddings of the kind {rope.kind}, by factors or in part cannot be exported")
    scaling = None if rope.kind == "default" else {"rope_type": "linear", "factor": rope.factor}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
