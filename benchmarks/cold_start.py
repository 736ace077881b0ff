"""How long from the shell's prompt to the first token: `octavo run smollm2 "Hi" --max-tokens 1` as a new process.

Usage: .venv/bin/python benchmarks/cold_start.py [--runs 15] [--output results/cold_start.json]
Each round starts every variant once, in turn, so that a machine that is busy for a while disturbs all of them alike.
`python` is the interpreter doing nothing: what no program in Python can do without.
Not here: speed once started (the other benchmarks).
"""

from __future__ import annotations

import argparse
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

VARIANTS = {
    "python": [sys.executable, "-c", "pass"],
    "octavo --version": [str(OCTAVO), "--version"],
    'octavo run smollm2 "Hi" --max-tokens 1': [str(OCTAVO), "run", "smollm2", "Hi", "--max-tokens", "1"],
}


def start_once(command: list[str]) -> float:
    """Wall seconds of one process, from exec to exit. Raises if it fails: a failure would be fast."""
    begin = time.perf_counter()
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if result.returncode or not (result.stdout or command[1:2] == ["-c"]):
        raise SystemExit(f"{' '.join(command)} failed: {result.stderr.strip() or 'no output'}")
    return seconds


def summary(seconds: list[float]) -> dict[str, Any]:
    return {
        "median_s": round(statistics.median(seconds), 4),
        "min_s": round(min(seconds), 4),
        "max_s": round(max(seconds), 4),
        "runs_s": [round(value, 4) for value in seconds],
    }


def machine_info() -> dict[str, Any]:
    """What `octavo doctor` says of the machine, and how busy it was."""
    report = json.loads(subprocess.run([str(OCTAVO), "doctor", "--json"], capture_output=True, text=True, check=True).stdout)
    info = {name: report[name] for name in ("octavo", "python", "cpu", "cores", "memory", "native", "packages")}
    info["native"].pop("file", None)
    return {**info, "kernel": platform.release(), "load_average": os.getloadavg()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=15, help="rounds that count (default 15); one more goes first, to fill the caches")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "cold_start.json")
    options = parser.parse_args()
    before = machine_info()
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(options.runs + 1):
        for name, command in VARIANTS.items():
            seconds = start_once(command)
            if number:
                times[name].append(seconds)
    result = {
        "benchmark": "cold_start",
        "date": time.strftime("%Y-%m-%d"),
        "method": f"{options.runs} rounds after one to fill the caches, the variants in turn; wall time of each process",
        "machine": before,
        "results": {name: summary(seconds) for name, seconds in times.items()},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    for name, values in result["results"].items():
        print(f"{name:42} median {values['median_s']:.3f} s   min {values['min_s']:.3f}   max {values['max_s']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
