"""Time and memory of loading a model: a new process a round, the file in the page cache.

Usage: .venv/bin/python -m benchmarks.load_model MODEL [MODEL ...] [--rounds 5] [--run] [--output FILE] [--set NAME=VALUE ...]
Seconds run from LLM(...) to ready. Memory in MiB: the largest resident size (VmHWM, file pages included), the largest private
(anonymous) part, sampled; and both once loaded. With --run 32 tokens are generated before the last look, and the KV
blocks they took are told apart. MODEL may be a short name, a file or a folder; `octavo bench make-model` makes large ones.
Not here: speed once loaded (the other benchmarks).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from octavo.bench import record
from octavo.bench.statistics import summary
from octavo.loading.source import resolve_source

#: The default of --output.
DEFAULT = RESULTS / "load_model.json"
FIELDS = {"VmHWM": "peak_resident", "VmRSS": "resident", "RssAnon": "private", "RssFile": "file_pages"}


def status() -> dict[str, float]:
    """MiB by name, of this process."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {FIELDS[line[0][:-1]]: round(int(line[1]) / 1024, 1) for line in lines if line[0][:-1] in FIELDS}


def huge_mib() -> float:
    """MiB of private memory in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("AnonHugePages")), 0.0)


class Peak:
    """The largest private memory between enter and exit, looked at every few milliseconds."""

    def __enter__(self) -> Peak:
        self.largest, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.largest = max(self.largest, status()["private"])


def child(model: str, run: bool, settings: dict[str, str]) -> dict[str, Any]:
    """One load, in this process."""
    started = time.perf_counter()
    from octavo import LLM, SamplingParams

    imported, before = time.perf_counter(), status()
    with Peak() as peak:
        begin = time.perf_counter()
        llm = LLM(model, **settings)
        seconds = time.perf_counter() - begin
    found = {"seconds": seconds, "import_seconds": imported - started, "private_before_mib": before["private"]}
    found |= {f"{name}_mib": size for name, size in status().items()}
    found |= {"peak_private_mib": max(peak.largest, found["private_mib"]), "huge_pages_mib": round(huge_mib(), 1)}
    if run:
        tokens = 32
        output = llm.generate([list(range(100, 100 + tokens))], SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))[0]
        info = llm._parts.executor.info
        blocks = -(-(tokens + len(output.outputs[0].token_ids)) // info.kv_groups[0].block_size)
        found |= {f"{name}_after_run_mib": size for name, size in status().items()}
        found["kv_blocks_mib"] = round(blocks * info.block_bytes[0] / 2**20, 2)
    llm.close()
    return found


def one_round(model: str, run: bool, settings: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.load_model", model, "--child", *(["--run"] if run else [])]
    command += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return dict(json.loads(done.stdout))


def warm(model: str) -> float:
    """Reads the model's files once, so that they lie in the page cache; their MiB."""
    size = 0
    for path in resolve_source(model).paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                size += len(chunk)
    return size / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5, help="loads that count (default 5), after one that does not")
    parser.add_argument("--run", action="store_true", help="generate 32 tokens too")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of EngineConfig")
    parser.add_argument("--output", type=Path, help="where to write; default results/load_model.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        settings = dict(setting.split("=", 1) for setting in options.set)
        print(json.dumps(child(options.models[0], options.run, settings)))
        return 0
    before, results = record.machine(), {}
    sizes = {model: warm(model) for model in options.models}
    rounds: dict[str, list[dict[str, Any]]] = {model: [] for model in options.models}
    for number in range(options.rounds + 1):
        for model in options.models:
            one = one_round(model, options.run, options.set)
            if number:
                rounds[model].append(one)
    for model, found in rounds.items():
        figures = {name: summary([one[name] for one in found]) for name in found[0]}
        name = Path(model).name
        peak = figures["peak_resident_mib"]["median"]
        results[name] = {"file_mib": round(sizes[model], 1), "peak_over_file": round(peak / sizes[model], 3), **figures}
        print(f"{name}: {sizes[model]:.0f} MiB, ready after {figures['seconds']['median']:.2f} s, peak {peak:.0f} MiB")
        for key, values in figures.items():
            print(f"  {key:28} median {values['median']:.2f}  min {values['min']:.2f}  max {values['max']:.2f}")
    method = (
        f"{options.rounds} new processes after one that does not count, the models in turn; settings: {' '.join(options.set) or 'defaults'}"
    )
    record.write(options.output or DEFAULT, "load_model", "python -m benchmarks.load_model", method, before, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
