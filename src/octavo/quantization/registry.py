"""Which tensor types of a GGUF file can be loaded, and by which function.

Pure data. Not here: sizes of types we cannot load (loading/gguf.py needs those to check a file).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from octavo.errors import ModelLoadError, shown
from octavo.ops.api import PackedTensor
from octavo.quantization import blocks32, float_types, k_quants

#: (raw bytes of the tensor, (N, K)) -> packed. The bytes have been checked to be as many as the shape asks for.
Transcoder = Callable[[memoryview, tuple[int, int]], PackedTensor]

#: GGUF type id -> transcoder.
TRANSCODERS: Mapping[int, Transcoder] = MappingProxyType(
    {
        0: float_types.f32,
        1: float_types.f16,
        2: blocks32.q4_0,
        3: blocks32.q4_1,
        6: blocks32.q5_0,
        7: blocks32.q5_1,
        8: blocks32.q8_0,
        12: k_quants.q4_k,
        13: k_quants.q5_k,
        14: k_quants.q6_k,
        30: float_types.bf16,
    }
)


def transcode(raw: memoryview, type_id: int, shape: tuple[int, int], *, name: str, type_name: str = "") -> PackedTensor:
    """A matrix of a GGUF file as a PackedTensor [N, K]. Raises ModelLoadError naming the tensor for other types."""
    transcoder = TRANSCODERS.get(type_id)
    if transcoder is None:
        raise ModelLoadError(
            f"tensor {shown(name)} has the type {type_name or type_id}, which is not supported: use a file quantised as"
            " F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K"
        )
    return transcoder(raw, shape)
