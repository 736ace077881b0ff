"""What a decoding step should take: the larger of (bytes it must read / memory bandwidth) and (operations / matmul speed).

The roofline model (Williams, Waterman & Patterson 2009). It knows nothing of overhead, so what is measured lies above.
Not here: the steps themselves (decoding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from octavo.lab.standard.model import LabModel

#: float32 values read to measure the bandwidth: 256 MB, more than any cache here holds.
_STREAM = 1 << 26
_MATMUL_ROWS = 256
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Roofline:
    """The model's costs on one backend, and the machine's speeds, measured a moment ago."""

    bandwidth: float  # bytes a second, read by all threads of the BLAS
    matmul: float  # operations a second of this backend, at many rows
    weight_bytes: int  # as this backend holds them; each step reads all of them once
    layer_weights: int  # numbers in the layers' matrices: each row of a step is multiplied by them
    head_weights: int  # numbers in the output matrix: only rows whose logits are wanted
    kv_bytes: float  # K and V of a token, all layers
    attention_flops: float  # for one query and one key, all layers

    def step(self, rows: int, tokens: int) -> float:
        """Seconds of a step that computes the last `rows` of a sequence of `tokens`, and the logits of the last one."""
        keys = rows * tokens - rows * (rows - 1) / 2  # that the rows see
        flops = 2.0 * (rows * self.layer_weights + self.head_weights) + keys * self.attention_flops
        read = self.weight_bytes + tokens * self.kv_bytes
        return max(read / self.bandwidth, flops / self.matmul)

    def predict(self, way: str, prompt: int, max_tokens: int) -> float:
        """Seconds of a whole answer, naive or with a cache."""
        if way == "naive":
            return sum(self.step(n, n) for n in range(prompt, prompt + max_tokens))
        return self.step(prompt, prompt) + sum(self.step(1, n) for n in range(prompt + 1, prompt + max_tokens))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(model: LabModel) -> Roofline:
    """About two seconds."""
    config = model.parts.model_config
    assert config is not None
    inner, head = _matrices(model)
    info = model.parts.executor.info
    return Roofline(
        bandwidth=_bandwidth(),
        matmul=_matmul(model),
        weight_bytes=sum({id(w): _nbytes(w) for w in [*inner, head]}.values()),
        layer_weights=sum(_numbers(w) for w in inner),
        head_weights=_numbers(head),
        kv_bytes=sum(info.block_bytes) / model.block_size,
        attention_flops=4.0 * config.num_layers * config.num_heads * config.head_dim,
    )


def _best(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few tries: a peak is asked for."""
    work()
    times = []
    for _ in range(_TRIES):
        begin = perf_counter()
        work()
        times.append(perf_counter() - begin)
    return min(times)


def _bandwidth() -> float:
    values = np.ones(_STREAM, np.float32)
    return values.nbytes / _best(lambda: np.dot(values, values))  # one array read once, two flops for four bytes


def _matmul(model: LabModel) -> float:
    """With the largest matrix of a layer, by the backend's own op, at many rows."""
    weight = model.runner.model.layers[0].mlp.gate_up_proj.weight
    columns, inputs = _shape(weight)
    x = np.random.default_rng(0).standard_normal((_MATMUL_ROWS, inputs), dtype=np.float32)

    def work() -> None:
        model.ops.begin_step(_MATMUL_ROWS)
        model.ops.linear(x, weight, 0)

    return 2.0 * _MATMUL_ROWS * columns * inputs / _best(work)


def _matrices(model: LabModel) -> tuple[Sequence[Any], Any]:
    """The matrices of all layers, and that of the output."""
    net = model.runner.model
    layers = [w for layer in net.layers for w in (layer.attn.qkv_proj, layer.attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)]
    return [layer.weight for layer in layers], net.lm_head.weight


def _shape(weight: Any) -> tuple[int, int]:
    """(columns, inputs) of a weight of the native kernels or of the reference."""
    return (weight.columns, weight.k) if hasattr(weight, "columns") else weight.matrix.shape


def _numbers(weight: Any) -> int:
    columns, inputs = _shape(weight)
    return columns * inputs


def _nbytes(weight: Any) -> int:
    return int(weight.nbytes if hasattr(weight, "columns") else weight.matrix.nbytes)
