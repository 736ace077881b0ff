"""Transcoding GGUF blocks to packed layouts: bit for bit what the gguf package dequantises, whatever the bytes."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo.ops.layout import BLOCK, dequantize
from octavo.quantization.packed import permute_rows, row_pieces
from octavo.quantization.registry import TRANSCODERS, transcode

gguf = pytest.importorskip("gguf")

KINDS = sorted(TRANSCODERS)
NAMES = {kind: gguf.GGMLQuantizationType(kind).name for kind in KINDS}
LAYOUTS = {
    "F32": "f32", "F16": "f16", "BF16": "bf16", "Q4_0": "q4_b32", "Q4_1": "q4_b32", "Q4_K": "q4_b32", "Q5_0": "q8_b32",
    "Q5_1": "q8_b32", "Q5_K": "q8_b32", "Q8_0": "q8_b32", "Q6_K": "q8_b16",
}  # fmt: skip


def raw_rows(kind: int, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Random bytes of the right size: every bit pattern of quants and scales, NaN and inf scales among them."""
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    return np.random.default_rng(seed).integers(0, 256, (rows, cols // block * nbytes), dtype=np.uint8)


def oracle(kind: int, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(raw, gguf.GGMLQuantizationType(kind))


def pack(kind: int, raw: np.ndarray, cols: int):
    return transcode(memoryview(raw.tobytes()), kind, (raw.shape[0], cols), name="w")


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bit for bit, but for which NaN it is: no order of operations is observable in that."""
    assert ours.dtype == theirs.dtype == np.float32
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


def test_all_promised_types_are_there():
    assert set(NAMES.values()) == set(LAYOUTS)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES.get)
@pytest.mark.parametrize(("rows", "cols"), [(1, 256), (37, 512), (5, 1280)])
def test_random_bytes(kind, rows, cols):
    raw = raw_rows(kind, rows, cols)
    packed = pack(kind, raw, cols)
    assert packed.layout == LAYOUTS[NAMES[kind]] and packed.shape == (rows, cols)
    assert_same_bits(dequantize(packed), oracle(kind, raw))


@pytest.mark.parametrize("kind", [k for k in KINDS if not NAMES[k].endswith("_K")], ids=NAMES.get)
def test_values_the_gguf_package_quantised(kind):
    values = np.random.default_rng(1).standard_normal((16, 96)).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType(kind)).view(np.uint8).reshape(16, -1)
    ours = dequantize(pack(kind, raw, 96))
    assert_same_bits(ours, oracle(kind, raw))
    assert np.abs(ours - values).max() < 0.4  # and it is about the same matrix


@pytest.mark.parametrize("kind", KINDS, ids=NAMES.get)
def test_shapes_and_dtypes_keep_the_contract(kind):
    packed = pack(kind, raw_rows(kind, 6, 512), 512)
    block = BLOCK[packed.layout] or None
    expected = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16, "q4_b32": np.uint8, "q8_b32": np.int8, "q8_b16": np.int8}
    assert packed.data.dtype == expected[packed.layout]
    assert packed.data.reshape(6, -1).shape == (6, 256 if packed.layout == "q4_b32" else 512)
    assert packed.data.strides[-1] == packed.data.itemsize
    for plane in (packed.scale, packed.offset):
        if plane is not None:
            assert plane.shape == (6, 512 // block)
            assert plane.dtype == (np.float32 if NAMES[kind].endswith("_K") else np.float16)
    assert (packed.scale is None) == (block is None)


@pytest.mark.parametrize("kind", [2, 3, 8], ids=NAMES.get)
def test_blocks_of_32_are_views(kind):
    buffer = np.frombuffer(raw_rows(kind, 4, 64).tobytes(), np.uint8)
    packed = transcode(memoryview(buffer), kind, (4, 64), name="w")
    for plane in filter(lambda plane: plane is not None, (packed.data, packed.scale, packed.offset)):
        assert np.shares_memory(plane, buffer)


@pytest.mark.parametrize("kind", [0, 1, 30], ids=NAMES.get)
def test_floats_are_views(kind):
    raw = raw_rows(kind, 4, 64)
    buffer = raw.tobytes()
    packed = transcode(memoryview(buffer), kind, (4, 64), name="w")
    assert np.shares_memory(packed.data, np.frombuffer(buffer, np.uint8))
    shifted = memoryview(b"\0" + buffer)[1:]  # misaligned in memory: copied, so that kernels may rely on alignment
    assert transcode(shifted, kind, (4, 64), name="w").data.flags.aligned
    assert_same_bits(dequantize(transcode(shifted, kind, (4, 64), name="w")), oracle(kind, raw))


@pytest.mark.parametrize("kind", KINDS, ids=NAMES.get)
def test_permute_rows(kind):
    raw = raw_rows(kind, 12, 256, seed=3)
    order = np.random.default_rng(0).permutation(12)
    assert_same_bits(dequantize(permute_rows(pack(kind, raw, 256), order)), oracle(kind, raw[order]))
    chosen = np.array([3, 3, 0])
    assert_same_bits(dequantize(permute_rows(pack(kind, raw, 256), chosen)), oracle(kind, raw[chosen]))


@pytest.mark.parametrize("kind", [k for k in KINDS if NAMES[k].startswith("Q")], ids=NAMES.get)
@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0xFC00, 0x0001, 0x8000], ids=["nan", "inf", "-inf", "denormal", "-0"])
def test_hostile_scales(kind, bits):
    raw = raw_rows(kind, 2, 256)
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    at = nbytes - 2 if NAMES[kind] == "Q6_K" else 0
    raw.reshape(-1, nbytes)[:, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
    assert_same_bits(dequantize(pack(kind, raw, 256)), oracle(kind, raw))


@pytest.mark.parametrize("kind", [k for k in KINDS if NAMES[k] in ("Q4_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")], ids=NAMES.get)
def test_work_in_pieces(kind, monkeypatch):
    monkeypatch.setattr("octavo.quantization.packed._PIECE", 600)
    assert [(s.start, s.stop) for s in row_pieces(5, 256)] == [(0, 2), (2, 4), (4, 5)]
    raw = raw_rows(kind, 5, 256)
    assert_same_bits(dequantize(pack(kind, raw, 256)), oracle(kind, raw))


@pytest.mark.parametrize(("kind", "name"), [(10, "Q2_K"), (16, "IQ2_XXS"), (26, "I32"), (39, "MXFP4")])
def test_unsupported_types_are_named(kind, name):
    with pytest.raises(ModelLoadError, match=rf"'blk.0.ffn_up.weight' has the type {name}"):
        transcode(memoryview(b""), kind, (1, 256), name="blk.0.ffn_up.weight", type_name=name)


def test_real_tensors(smollm2_path):
    from octavo.loading.gguf import GGUFFile
    from octavo.loading.tensor_source import GGUFSource, vector

    file = GGUFFile(smollm2_path)  # test_gguf_reader.py has compared its raw bytes with the gguf package's
    source = GGUFSource(file)

    def raw(name: str) -> np.ndarray:
        return np.frombuffer(file.tensors[name].raw(), np.uint8).reshape(file.tensors[name].shape[0], -1)

    for name in ("blk.0.attn_q.weight", "blk.17.ffn_down.weight", "blk.29.ffn_gate.weight"):
        assert_same_bits(dequantize(source.matrix(name)), oracle(3, raw(name)))
    rows = np.arange(0, 49152, 997)
    assert_same_bits(dequantize(permute_rows(source.matrix("token_embd.weight"), rows)), oracle(8, raw("token_embd.weight")[rows]))
    assert np.array_equal(vector(source, "output_norm.weight"), raw("output_norm.weight").view("<f4").ravel())
