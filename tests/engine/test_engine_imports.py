"""The engine needs no array library, and `import octavo` needs nothing at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

import octavo


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); {statement}; print(*(m for m in sys.modules if m not in before))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_octavo_loads_nothing_else():
    assert {m for m in loaded_by("import octavo") if m.startswith("octavo")} == {"octavo"}


def test_the_engine_is_free_of_torch_and_numpy():
    found = loaded_by("import octavo.llm, octavo.engine.async_engine")
    assert not {"numpy", "torch", "rich", "jinja2", "tokenizers", "transformers"} & found


def test_the_public_names():
    assert {name: getattr(octavo, name).__name__ for name in octavo.__all__ if name != "__version__"} == {
        name: name for name in octavo.__all__ if name != "__version__"
    }
    assert set(octavo.__all__) <= set(dir(octavo)) and octavo.__version__
    with pytest.raises(AttributeError):
        octavo.nothing  # noqa: B018
