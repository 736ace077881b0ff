"""A tiny model to decode with, and the program itself."""

import os
import subprocess
import sys

import pytest

from tests.tiny_models import write_tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A random Llama whose greedy text repeats itself soon, as those of random models do."""
    pytest.importorskip("transformers")
    return write_tiny(tmp_path_factory.mktemp("lab") / "tiny", family="llama", fmt="safetensors", seed=3).path


@pytest.fixture
def octavo():
    """Runs `octavo ARGUMENTS` as a process of its own."""

    def run(*arguments, **settings):
        environment = {**os.environ, "NO_COLOR": "1"}
        return subprocess.run(
            [sys.executable, "-m", "octavo.cli.main", *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=300, env=environment, check=False, **settings,
        )  # fmt: skip

    return run
