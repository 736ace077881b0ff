"""The safetensors reader: equal to the safetensors package, complete over shards, unharmed by hostile files."""

from __future__ import annotations

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.errors import ModelLoadError
from octavo.loading.safetensors import INDEX_NAME, Checkpoint, SafetensorsFile, checkpoint_paths
from octavo.loading.tensor_source import SafetensorsSource, vector
from octavo.ops.layout import dequantize
from tests.tiny_models import write_tiny


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_equals_what_the_safetensors_package_wrote(tmp_path):
    rng = np.random.default_rng(0)
    written = {
        "f32": rng.standard_normal((3, 5)).astype(np.float32),
        "f16": rng.standard_normal((2, 7)).astype(np.float16),
        "bf16": rng.standard_normal((4, 3)).astype(ml_dtypes.bfloat16),
        "vector": rng.standard_normal(9).astype(ml_dtypes.bfloat16),
    }
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(Checkpoint(checkpoint_paths(tmp_path)))
    assert source.shapes() == {name: values.shape for name, values in written.items()}
    for name in ("f32", "f16", "bf16"):
        assert source.matrix(name).layout == name
        assert np.array_equal(dequantize(source.matrix(name)), written[name].astype(np.float32))
    assert np.array_equal(vector(source, "vector"), written["vector"].astype(np.float32))
    source.close()


def test_other_dtypes_are_refused_by_name(tmp_path):
    save_file({"ids": np.arange(6).reshape(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model.safetensors: tensor 'ids' has the dtype I64"):
        SafetensorsSource(Checkpoint(checkpoint_paths(tmp_path))).matrix("ids")


# -- hostile files ---------------------------------------------------------------------------------------------------
DATA = bytes(8)
HOSTILE = {
    "empty": (b"", "only 0 bytes"),
    "header past the end": (file_of({}, length=5000), "header is 5000 bytes"),
    "header of 2**63": (file_of({"a": entry()}, DATA, length=2**63), "header is 9223372036854775808 bytes"),
    "header over the limit": (file_of({}, length=(1 << 25) + 1), "header is"),
    "not JSON": (file_of(b"{nonsense}    "), "not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}   '), "not valid JSON"),
    "not an object": (file_of([1, 2, 3, 4]), "not a JSON object"),
    "too deep": (file_of(b"[" * 100_000), "not valid JSON"),
    "tensor twice": (file_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', DATA), "there twice"),
    "name of two lines": (file_of({"a\nb": entry()}, DATA), "has the name"),
    "name of a megabyte": (file_of({"a" * 2**20: entry()}, DATA), "has the name"),
    "half a character in a name": (file_of({"\ud800": entry()}, DATA), "has the name"),
    "entry not an object": (file_of({"a": 3, "b": 4}), "not an object"),
    "no dtype": (file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}, DATA), "unknown dtype"),
    "unknown dtype": (file_of({"a": entry(dtype="F12")}, DATA), "unknown dtype 'F12'"),
    "shape a number": (file_of({"a": entry(shape=2)}, DATA), "has the shape"),
    "negative shape": (file_of({"a": entry(shape=[-2, -1])}, DATA), "has the shape"),
    "fractional shape": (file_of({"a": entry(shape=[2.0])}, DATA), "has the shape"),
    "boolean shape": (file_of({"a": entry(shape=[True, 2])}, DATA), "has the shape"),
    "huge shape": (file_of({"a": entry(shape=[2**62, 2**62])}, DATA), "does not have 8 bytes"),
    "shape that wraps": (file_of({"a": entry(shape=[2**62, 4, 2])}, DATA), "does not have 8 bytes"),
    "offsets too few": (file_of({"a": entry(offsets=[0])}, DATA), "data_offsets"),
    "offsets reversed": (file_of({"a": entry(offsets=[8, 0])}, DATA), "data_offsets"),
    "offsets negative": (file_of({"a": entry(offsets=[-8, 0])}, DATA), "data_offsets"),
    "past the end": (file_of({"a": entry()}, DATA[:5]), "ends at byte"),
    "overlap": (file_of({"a": entry(), "b": entry(shape=[1], offsets=[4, 8])}, DATA), "overlaps"),
    "gap": (file_of({"a": entry(shape=[1], offsets=[4, 8])}, DATA), "gap"),
    "trailing bytes": (file_of({"a": entry()}, DATA + b"x"), "1 bytes follow"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_by_name_in_little_memory(tmp_path, case):
    data, message = HOSTILE[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=message) as error:
            SafetensorsFile(tmp_path / "x.safetensors")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "x.safetensors" in str(error.value) and "\n" not in str(error.value)
    assert peak < 4 << 20


# -- shards ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def sharded(tmp_path):
    return write_tiny(tmp_path / "m", shards=3)


def test_shards_are_one_checkpoint(sharded):
    paths = checkpoint_paths(sharded.path)
    assert [p.name for p in paths] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    checkpoint = Checkpoint(paths)
    assert {name: t.shape for name, t in checkpoint.tensors.items()} == {name: v.shape for name, v in sharded.state_dict.items()}
    checkpoint.close()
    assert all(file.mapped.closed for file in checkpoint.files)


def test_a_missing_shard_is_named(sharded):
    (sharded.path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003.safetensors: missing"):
        checkpoint_paths(sharded.path)


def test_a_truncated_shard_is_named(sharded):
    shard = sharded.path / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelLoadError, match=r"model-00003-of-00003.safetensors: .*broken download"):
        Checkpoint(checkpoint_paths(sharded.path))


def edit_index(folder, change) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_the_index_must_tell_the_truth(sharded):
    edit_index(sharded.path, lambda m: m.update({"model.extra.weight": "model-00002-of-00003.safetensors"}))
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003.safetensors: has no tensor 'model.extra.weight'"):
        Checkpoint(checkpoint_paths(sharded.path))
    edit_index(sharded.path, lambda m: m.pop("model.extra.weight"))
    edit_index(sharded.path, lambda m: m.update({"model.norm.weight": "model-00001-of-00003.safetensors"}))
    with pytest.raises(ModelLoadError, match=r"'model.norm.weight' is not in model-00001-of-00003.safetensors but in"):
        Checkpoint(checkpoint_paths(sharded.path))


def test_a_tensor_in_two_shards(sharded):
    first = {"model.norm.weight": np.zeros(64, np.float32)}
    save_file(first, sharded.path / "extra.safetensors")
    edit_index(sharded.path, lambda m: m.update({"model.norm.weight": "extra.safetensors"}))
    with pytest.raises(ModelLoadError, match="'model.norm.weight' is also in extra.safetensors"):
        Checkpoint(checkpoint_paths(sharded.path))


def test_strays_are_ignored_by_the_index(sharded):
    before = checkpoint_paths(sharded.path)
    (sharded.path / "model.safetensors").write_bytes(b"an older copy, never opened")
    (sharded.path / "consolidated.safetensors").write_bytes(b"another")
    assert checkpoint_paths(sharded.path) == before
    Checkpoint(before).close()


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "x.bin", "", "..", 3, None]
)
def test_the_index_cannot_point_elsewhere(sharded, name):
    edit_index(sharded.path, lambda m: m.update({"model.norm.weight": name}))
    with pytest.raises(ModelLoadError, match="not a plain .safetensors name"):
        checkpoint_paths(sharded.path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{"])
def test_a_broken_index(sharded, text):
    (sharded.path / INDEX_NAME).write_text(text)
    with pytest.raises(ModelLoadError, match=INDEX_NAME):
        checkpoint_paths(sharded.path)


def test_without_an_index(tmp_path):
    assert checkpoint_paths(tmp_path) == ()
    (tmp_path / "other.safetensors").touch()
    assert [p.name for p in checkpoint_paths(tmp_path)] == ["other.safetensors"]
    (tmp_path / "more.safetensors").touch()
    with pytest.raises(ModelLoadError, match="2 .safetensors files but no"):
        checkpoint_paths(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert [p.name for p in checkpoint_paths(tmp_path)] == ["model.safetensors"]
