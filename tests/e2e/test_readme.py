"""The README's commands and programs are run as they stand there."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("check_docs", ROOT / "tools" / "check_docs.py")
check_docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_docs)

README = (ROOT / "README.md").read_text("utf-8")
SHELL = [line for block in check_docs.blocks(README, "bash") for line in block.splitlines() if line.strip() and not line.startswith("#")]
PYTHON = check_docs.blocks(README, "python")
YAML = check_docs.blocks(README, "yaml")

pytestmark = pytest.mark.usefixtures("smollm2_path")


@pytest.fixture
def shell(tmp_path):
    """A folder like a fresh clone after `make install`: .venv/bin/octavo and make are there, and this interpreter behind them."""
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "octavo").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m octavo.cli.main "$@"\n')
    # `make chat` would first make an environment, which is the one these tests run in already.
    (tmp_path / "Makefile").write_text(
        "\n".join(line.replace("chat: install", "chat:") for line in (ROOT / "Makefile").read_text().splitlines()) + "\n"
    )
    (binaries / "octavo").chmod(0o755)
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "python3").symlink_to(sys.executable)
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environment["PATH"] = os.pathsep.join([str(tmp_path / "python"), environment["PATH"]])
    source = str(ROOT / "src")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH")]))

    def run(command, stdin="What is rain?\n"):
        return subprocess.run(
            ["bash", "-c", command], input=stdin, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def test_there_is_something_to_run():
    assert "make chat" in SHELL and len(SHELL) >= 5 and len(PYTHON) >= 2 and len(YAML) == 1


@pytest.mark.parametrize("command", SHELL)
def test_a_command(shell, command):
    result = shell(command)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() and "Traceback" not in result.stderr


@pytest.mark.parametrize("program", PYTHON, ids=range(len(PYTHON)))
def test_a_program(tmp_path, program):
    file = tmp_path / "program.py"
    file.write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))}
    result = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_openai_program_talks_to_a_server():
    from tests.server.real_server import real_server

    program = next(block for block in check_docs.blocks(README, "text") if "import OpenAI" in block)
    assert "http://127.0.0.1:8000/v1" in program
    with real_server() as server:
        program = program.replace("http://127.0.0.1:8000", server.url)
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0 and "Paris" in result.stdout, (result.stdout, result.stderr)


def test_the_settings_file_is_one(tmp_path):
    from octavo.config_sources import load_config

    (tmp_path / "octavo.yaml").write_text(YAML[0])
    config = load_config(tmp_path / "octavo.yaml", {}, {})
    assert (config.kv_cache_memory, config.max_num_seqs) == (1 << 30, 32)
