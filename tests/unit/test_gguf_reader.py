"""The GGUF reader: equal to the gguf package on real and written files, and unharmed by hostile ones."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ModelLoadError
from octavo.loading.gguf import BLOCK_TYPES, GGUFFile
from tests.fuzz import gguf_bytes as g
from tests.fuzz.fuzz_gguf import fuzz

gguf = pytest.importorskip("gguf")


def opened(tmp_path, data: bytes) -> GGUFFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return GGUFFile(path)


def test_block_types_are_those_of_the_gguf_package():
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        assert BLOCK_TYPES[int(kind)] == (kind.name, block, nbytes)


def test_real_file_equals_the_gguf_package(smollm2_path):
    reader = gguf.GGUFReader(smollm2_path)
    with GGUFFile(smollm2_path) as file:
        theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert file.metadata == theirs
        assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            ours = file.tensors[tensor.name]
            assert (ours.type, ours.offset, ours.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
            assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
        for tensor in reader.tensors[::40]:
            assert bytes(file.tensors[tensor.name].raw()) == tensor.data.tobytes()


def test_every_kind_of_value(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "é😀")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("words", ["", "a", "日本"])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = GGUFFile(path).metadata
    for bits in (8, 16, 32, 64):
        assert values[f"u{bits}"] == 2**bits - 1 and values[f"i{bits}"] == -(2 ** (bits - 1))
    assert values["f32"] == float(np.float32(0.1)) and values["f64"] == 0.1
    assert values["yes"] is True and values["no"] is False and values["flags"] == [True, False]
    assert (values["text"], values["numbers"], values["words"]) == ("é😀", [1, -2, 3], ["", "a", "日本"])


def test_version_2_alignment_and_tensors(tmp_path):
    entries = [g.uint("general.alignment", 64), g.text("general.architecture", "llama")]
    tensors = [g.tensor("b", (4, 2), offset=64), g.tensor("a", (3,), offset=0)]
    data = struct.pack("<3f", 1, 2, 3).ljust(64, b"\0") + struct.pack("<8f", *range(8))
    file = opened(tmp_path, g.gguf(entries, tensors, data, version=2, alignment=64))
    assert file.tensors["b"].shape == (2, 4) and file.tensors["b"].offset % 64 == 0
    assert np.frombuffer(file.tensors["a"].raw(), "<f4").tolist() == [1, 2, 3]
    assert np.frombuffer(file.tensors["b"].raw(), "<f4").tolist() == list(range(8))
    assert file.tensors["b"].raw().readonly


def test_views_outlive_close_and_new_ones_are_refused(tmp_path):
    file = opened(tmp_path, g.gguf([], [g.tensor("a", (2,))], struct.pack("<2f", 1, 2)))
    view = np.frombuffer(file.tensors["a"].raw(), "<f4")
    file.close()
    file.close()
    assert file.closed and view.tolist() == [1, 2]
    with pytest.raises(ModelLoadError, match="closed"):
        file.tensors["a"].raw()


# -- long lists of strings: the whole-array way and the loop must agree ---------------------------------------------
WORDS = st.one_of(st.text(max_size=12), st.sampled_from(["", "\0", "a\0b", "x" * 255, "x" * 256, "é" * 300, "\x01", "\x00" * 9]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text(min_size=1, max_size=12).map(lambda s: s.replace("\0", "_")), min_size=64, max_size=90), st.lists(WORDS, max_size=2)
)
def test_long_lists_of_strings(tmp_path, plain, odd):
    words = plain[:70] + odd + plain[70:]
    file = opened(tmp_path, g.gguf([g.array("words", g.STRING, [g.string(w) for w in words]), g.uint("after", 7)]))
    assert file.metadata == {"words": words, "after": 7}


def test_long_list_with_bad_utf8_or_cut_off(tmp_path):
    items = [g.string("token")] * 100
    with pytest.raises(ModelLoadError, match=r"words'\[60\] is not UTF-8"):
        opened(tmp_path, g.gguf([g.array("words", g.STRING, [*items[:60], g.string(b"\xff\xfe"), *items[:60]])]))
    whole = g.gguf([g.array("words", g.STRING, items)])
    with pytest.raises(ModelLoadError, match=r"words'\[99\]"):
        opened(tmp_path, whole.rstrip(b"\0")[:-2])


# -- hostile files ---------------------------------------------------------------------------------------------------
ONE = struct.pack("<2f", 1, 2).ljust(32, b"\0")
HUGE = 2**60
HOSTILE = {
    "empty": (b"", "only 0 bytes"),
    "four bytes": (b"GGUF", "only 4 bytes"),
    "cut in the counts": (b"GGUF" + struct.pack("<IQ", 3, 1), "only 16 bytes"),
    "another format": (b"PK\x03\x04" + bytes(40), "starts with"),
    "reversed magic": (g.gguf(magic=b"FUGG"), "starts with"),
    "version 1": (g.gguf(version=1), "version is 1"),
    "version 99": (g.gguf(version=99), "version is 99"),
    "big-endian": (g.gguf(order=">"), "big-endian"),
    "number of entries": (g.gguf(num_entries=HUGE), "metadata entries is"),
    "number of tensors": (g.gguf(num_tensors=HUGE), "tensors is"),
    "more entries than there": (g.gguf([g.uint("a", 1)], num_entries=2), "a metadata key|ends at|empty"),
    "length of a key": (g.gguf([g.string("a", HUGE)], num_entries=1, data=bytes(64)), "metadata key is"),
    "length of a string": (g.gguf([g.entry("a", g.STRING, g.string("x", 2**40))]), "needs 1099511627776 bytes"),
    "length wraps": (g.gguf([g.entry("a", g.STRING, g.string("x", 2**64 - 8))]), "needs 18446744073709551608 bytes"),
    "empty key": (g.gguf([g.uint("", 1)]), "empty"),
    "key of two lines": (g.gguf([g.uint("a\nb", 1)]), "not printable"),
    "tensor name of two lines": (g.gguf([], [g.tensor("a\x1b[2J\n", (2,))], ONE), "not printable"),
    "key not UTF-8": (g.gguf([g.uint(b"\xff", 1)]), "not UTF-8"),
    "value not UTF-8": (g.gguf([g.text("a", b"\xc3\x28")]), "not UTF-8"),
    "key twice": (g.gguf([g.uint("a", 1), g.uint("a", 2)]), "there twice"),
    "unknown value type": (g.gguf([g.entry("a", 13, bytes(8))]), "value type 13"),
    "boolean of 2": (g.gguf([g.entry("a", g.BOOL, b"\x02")]), "boolean"),
    "array of arrays": (g.gguf([g.array("a", g.ARRAY, [struct.pack("<IQ", 4, 0)])]), "array of arrays"),
    "deep arrays": (g.gguf([g.entry("a", g.ARRAY, struct.pack("<IQ", 9, 1) * 5000)]), "array of arrays"),
    "array of unknown": (g.gguf([g.array("a", 77, [])]), "unknown value type 77"),
    "length of an array": (g.gguf([g.array("a", g.FLOAT32, [], HUGE)]), "the length of metadata 'a' is"),
    "length of a string array": (g.gguf([g.array("a", g.STRING, [], 2**21)]), "the length of metadata 'a' is"),
    "alignment 0": (g.gguf([g.uint("general.alignment", 0)]), "alignment is 0"),
    "alignment 3": (g.gguf([g.uint("general.alignment", 3)]), "alignment is 3"),
    "alignment 48": (g.gguf([g.uint("general.alignment", 48)]), "alignment is 48"),
    "alignment 2**30": (g.gguf([g.uint("general.alignment", 2**30)]), "alignment is 1073741824"),
    "alignment a string": (g.gguf([g.text("general.alignment", "32")]), "alignment is not"),
    "alignment a byte": (g.gguf([g.entry("general.alignment", g.UINT8, b"\x20")]), "alignment is not"),
    "no dimensions": (g.gguf([], [g.tensor("a", ())], ONE), "0 dimensions"),
    "many dimensions": (g.gguf([], [g.tensor("a", (1,) * 5)], ONE), "5 dimensions"),
    "2**32 - 1 dimensions": (g.gguf([], [g.tensor("a", (1,), num_dims=2**32 - 1)], ONE), "dimensions"),
    "zero dimension": (g.gguf([], [g.tensor("a", (0,))], ONE), "dimension of 0"),
    "hidden zero dimension": (g.gguf([], [g.tensor("a", (2**63, 0))], ONE), "dimension of 0"),
    "product overflow": (g.gguf([], [g.tensor("a", (2**63, 2))], ONE), "needs 73786976294838206464 bytes"),
    "product wraps to 8": (g.gguf([], [g.tensor("a", (2**62 + 2, 4))], ONE), "needs"),
    "unknown type": (g.gguf([], [g.tensor("a", (2,), kind=5)], ONE), "unknown type 5"),
    "broken block": (g.gguf([], [g.tensor("a", (33,), kind=g.Q4_0)], ONE), "multiple of the 32"),
    "past the end": (g.gguf([], [g.tensor("a", (2,), offset=32)], ONE), "ends at byte"),
    "far past the end": (g.gguf([], [g.tensor("a", (2,), offset=2**64 - 32)], ONE), "ends at byte"),
    "truncated data": (g.gguf([], [g.tensor("a", (2,))], ONE[:7]), "broken download"),
    "misaligned": (g.gguf([], [g.tensor("a", (2,), offset=4)], ONE), "multiple of the alignment"),
    "overlap": (g.gguf([], [g.tensor("a", (9,)), g.tensor("b", (2,), offset=32)], ONE * 2), "overlap"),
    "same place": (g.gguf([], [g.tensor("a", (2,)), g.tensor("b", (2,))], ONE), "overlap"),
    "tensor twice": (g.gguf([], [g.tensor("a", (2,)), g.tensor("a", (2,), offset=32)], ONE * 2), "there twice"),
    "tensor name not UTF-8": (g.gguf([], [g.tensor(b"\xff", (2,))], ONE), "not UTF-8"),
    "tensor name too long": (g.gguf([], [g.tensor("a" * 2000, (2,))], ONE), "2000 bytes long"),
    "fewer tensors than said": (g.gguf([], [g.tensor("a", (2,))], b"", num_tensors=2), "tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_by_name_in_little_memory(tmp_path, case):
    data, message = HOSTILE[case]
    (tmp_path / "x.gguf").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=message) as error:
            GGUFFile(tmp_path / "x.gguf")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "x.gguf" in str(error.value) and "\n" not in str(error.value)
    assert peak < 2 << 20


def test_many_arrays_are_refused_before_they_fill_the_memory(tmp_path):
    """Each within the limit of one array; a number of two bytes in the file is an object of forty in memory."""
    numbers = (np.arange(1 << 20, dtype=np.uint16) | 0x100).tobytes()  # value type 2
    arrays = [g.entry(f"a{i}", g.ARRAY, struct.pack("<IQ", 2, 1 << 20) + numbers) for i in range(6)]
    with pytest.raises(ModelLoadError, match="the length of metadata 'a4' is 1048576, more than the limit of 0"):
        opened(tmp_path, g.gguf(arrays))


def test_a_header_without_end_is_refused(tmp_path):
    """A string of half a gigabyte, in a file that is really as long (a sparse one)."""
    path = tmp_path / "x.gguf"
    path.write_bytes(g.gguf([g.entry("a", g.STRING, g.string("x", 1 << 29))]))
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelLoadError, match="beyond the limit of 268435456 bytes"):
        GGUFFile(path)


def test_a_missing_file_or_a_folder(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            GGUFFile(path)


def test_fuzz(tmp_path, caplog):
    outcomes = fuzz(700, 7, tmp_path)
    assert outcomes["loaded"] > 25  # else the mutations are too wild to reach the blocks
    assert outcomes["not a usable GGUF file"] > 250
    assert not list(tmp_path.glob("crash-*"))
