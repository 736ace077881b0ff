"""How long from the shell's prompt to the first token: `octavo run smollm2 "Hi" --max-tokens 1` as a new process.

Usage: .venv/bin/python -m benchmarks.cold_start [--runs 15] [--output FILE]
Each round starts every variant once, in turn, so that a machine that is busy for a while disturbs all of them alike.
`python` is the interpreter doing nothing: what no program in Python can do without.
Not here: speed once started (the other benchmarks).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import RESULTS
from octavo.bench import record
from octavo.bench.statistics import summary

#: The program as users start it: the script that pip makes.
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=15, help="rounds that count (default 15); one more goes first, to fill the caches")
    parser.add_argument("--output", type=Path, help="where to write; default results/cold_start.json")
    options = parser.parse_args()
    before = record.machine()
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(options.runs + 1):
        for name, command in VARIANTS.items():
            seconds = start_once(command)
            if number:
                times[name].append(seconds)
    method = f"seconds; {options.runs} rounds after one to fill the caches, the variants in turn; wall time of each process"
    results = {name: summary(seconds) for name, seconds in times.items()}
    record.write(options.output or RESULTS / "cold_start.json", "cold_start", "python -m benchmarks.cold_start", method, before, results)
    for name, values in results.items():
        print(f"{name:42} median {values['median']:.3f} s   min {values['min']:.3f}   max {values['max']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
