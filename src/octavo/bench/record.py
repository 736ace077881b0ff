"""What every results file carries beside its figures: the machine, the versions, the commit, the command, the method.

Stateless. Not here: measuring; which file a benchmark writes (its caller says).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import octavo
from octavo.errors import OctavoError

#: How to start the program in a process of its own, whatever the shell's PATH says.
OCTAVO = (sys.executable, "-m", "octavo.cli.main")
#: Versions that matter to a figure beyond those `octavo doctor` lists.
PACKAGES = ("httpx2", "uvicorn", "uvloop", "pyzmq", "msgspec")


def machine() -> dict[str, Any]:
    """What `octavo doctor` says of the machine, and how busy it is now."""
    found = subprocess.run([*OCTAVO, "doctor", "--json"], capture_output=True, text=True, check=False)
    if found.returncode not in (0, 1) or not found.stdout:
        raise OctavoError(f"octavo doctor does not run here: {found.stderr.strip() or found.returncode}")
    report = json.loads(found.stdout)
    info = {name: report[name] for name in ("octavo", "python", "cpu", "cores", "memory", "native", "packages")}
    info["native"].pop("file", None)
    info["packages"] |= {name: version for name in PACKAGES if (version := _version(name))}
    return {**info, "kernel": platform.release(), "load_average": os.getloadavg()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit measured, with "+" where files differ from it; "" where the package does not lie in its own checkout."""
    root = Path(octavo.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git here
        return ""


def write(path: Path, name: str, command: str, method: str, before: dict[str, Any], results: dict[str, Any]) -> Path:
    """Write the results file; `before` is what `machine()` said before the measurement. Returns `path`."""
    record = {
        "benchmark": name,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "method": method,
        "machine": before,
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", "utf-8")
    return path
