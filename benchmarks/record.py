"""What every committed measurement carries beside its figures: the machine, the versions, the commit, the command.

Not here: measuring.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OCTAVO = Path(sys.executable).with_name("octavo")


def machine() -> dict[str, Any]:
    """What `octavo doctor` says of the machine, and how busy it is."""
    report = json.loads(subprocess.run([str(OCTAVO), "doctor", "--json"], capture_output=True, text=True, check=True).stdout)
    info = {name: report[name] for name in ("octavo", "python", "cpu", "cores", "memory", "native", "packages")}
    info["native"].pop("file", None)
    return {**info, "kernel": platform.release(), "load_average": os.getloadavg()}


def commit() -> str:
    """The commit measured, with "+" where files differ from it; "" outside a checkout."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def summary(values: list[float], digits: int = 4) -> dict[str, Any]:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "runs": [round(value, digits) for value in values],
    }


def write(name: str, command: str, method: str, before: dict[str, Any], results: dict[str, Any], path: Path | None = None) -> Path:
    """results/NAME.json, or `path`."""
    path = path or ROOT / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": name,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "method": method,
        "machine": before,
        "results": results,
    }
    path.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    return path
