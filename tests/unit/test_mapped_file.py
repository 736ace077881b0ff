"""Memory of a mapped file that has been read goes when it is released, and only the memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.loading.gguf import GGUFFile
from octavo.loading.mapped_file import MappedFile
from octavo.loading.source import resolve_source
from tests.models import harness
from tests.tiny_models import write_tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident_kib(path: Path) -> int:
    """Of all mappings of a file."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_released_bytes_leave_memory_and_can_be_read_again(tmp_path):
    path = tmp_path / "f"
    data = np.random.default_rng(0).bytes(8 << 20)
    path.write_bytes(data)
    mapped = MappedFile(path, least=1)
    view = mapped.view(0, len(data))
    assert bytes(view) == data and resident_kib(path) == 8 << 10
    mapped.release(4 << 20, 4 << 20)
    assert resident_kib(path) == 4 << 10
    mapped.release(1, 100)
    mapped.release(0, len(data))
    assert resident_kib(path) == 0 and bytes(view) == data
    mapped.close()
    mapped.release(0, 1)  # of a closed file: nothing


@pytest.mark.parametrize("fmt", ["gguf", "safetensors"])
def test_loading_lets_go_of_each_tensor(tmp_path, fmt, monkeypatch):
    """Every byte of every tensor, once; and a second load of the same file is the same model."""
    released: list[tuple[int, int]] = []
    real = MappedFile.release
    monkeypatch.setattr(MappedFile, "release", lambda self, offset, size: (released.append((offset, size)), real(self, offset, size))[1])
    tiny = write_tiny(tmp_path / "m", fmt=fmt, seed=1)
    tokens = list(range(30))
    first = harness.all_logits(harness.load(tiny.path), tokens)
    files = resolve_source(str(tiny.path))
    if fmt == "gguf":
        assert isinstance(files.gguf_file, GGUFFile)
        assert sorted(released) == sorted((t.offset, t.nbytes) for t in files.gguf_file.tensors.values())
        files.gguf_file.close()
    else:
        assert sum(size for _, size in released) == sum(values.nbytes for values in tiny.state_dict.values())
    np.testing.assert_array_equal(harness.all_logits(harness.load(tiny.path), tokens), first)
