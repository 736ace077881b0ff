"""What recording the steps costs: a decode step with and without the record, and the processor time of the recording itself.

Usage: .venv/bin/python -m benchmarks.recording_cost [--rounds 9] [--steps 60] [--output FILE]
One engine with SmolLM2; with 1 and with 8 requests, steps with and without the record take turns, block by block. Without: the entries and
the event of a step are not made and not kept. The recording alone is timed in a loop over the same objects, in microseconds of processor
time a step; that over the time of a step is the share, which exits with 1 from 1 % on. Not here: traces as files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import RESULTS
from octavo import EngineConfig, SamplingParams
from octavo.bench import record
from octavo.bench.statistics import summary
from octavo.engine import engine_core
from octavo.engine.engine_core import EngineCore
from octavo.engine.events import EntryEvent, StepEvent
from octavo.wiring import EngineParts

LOOPS = 5000


class Engine:
    def __init__(self, requests: int, length: int) -> None:
        parts = EngineParts.load(EngineConfig(kv_cache_memory="512MiB"))
        self.core: EngineCore = parts.core()
        inputs, params = parts.input_processor(), SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        draw = np.random.default_rng(0)
        for number in range(requests):
            self.core.add_request(inputs.process(f"r{number}", draw.integers(1000, 40000, 64).tolist(), params))
        while len(self.core.scheduler.decoding) < requests or self.core.stats.steps < 8:
            self.core.step()

    def run(self, steps: int) -> float:
        """Mean milliseconds of a step."""
        begin = perf_counter()
        for _ in range(steps):
            self.core.step()
        return 1000 * (perf_counter() - begin) / steps

    def run_without(self, steps: int) -> float:
        """The same without the record: one event for all steps, no entries, nothing kept."""
        event = StepEvent(0, 0.0)

        def reused(step: int, time: float) -> StepEvent:
            event.time = time
            event.entries = []
            return event

        nothing = mock.patch.multiple(engine_core, StepEvent=reused, EntryEvent=lambda *fields: None)
        with nothing, mock.patch.object(self.core, "_record", lambda event, before: None):
            return self.run(steps)

    def recording(self) -> float:
        """Microseconds of processor time that the recording of one step takes."""
        core, (last,) = self.core, self.core.events.recent(1)
        entries, steps, batches = last.entries, core.stats.steps, (dict(core.stats.decode_batch_sizes), dict(core.stats.batch_sizes))
        begin = process_time()
        for number in range(LOOPS):
            event = StepEvent(number, 0.0)
            before = core._block_counts()
            for entry in entries:
                event.entries.append(EntryEvent(entry.request_id, entry.start, entry.num_tokens, entry.kind, entry.why, entry.blocks))
                core._detokenise += perf_counter() - 0.0
            core._record(event, before)
        found = 1e6 * (process_time() - begin) / LOOPS
        core.stats.steps, core.stats.decode_batch_sizes, core.stats.batch_sizes = steps, *batches
        return found


def measure(requests: int, rounds: int, steps: int) -> dict[str, Any]:
    engine = Engine(requests, 2 * rounds * steps + 64)
    found: dict[str, list[float]] = {"ms a step, with": [], "ms a step, without": [], "us of recording a step": []}
    for number in range(rounds):
        pair = [("ms a step, with", engine.run), ("ms a step, without", engine.run_without)]
        for name, run in pair if number % 2 == 0 else reversed(pair):
            found[name].append(run(steps))
        found["us of recording a step"].append(engine.recording())
        engine.run(1)
    results: dict[str, Any] = {name: summary(values, 4) for name, values in found.items()}
    results["ratio with / without"] = summary(
        [a / b for a, b in zip(found["ms a step, with"], found["ms a step, without"], strict=True)], 5
    )
    share = results["us of recording a step"]["median"] / 1000 / results["ms a step, without"]["median"]
    return results | {"recording, share of a step": round(share, 5)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60, help="steps with and without the record in each round (default 60)")
    parser.add_argument("--output", type=Path, default=RESULTS / "recording_cost.json")
    options = parser.parse_args(arguments)
    before = record.machine()
    results = {f"{requests} requests": measure(requests, options.rounds, options.steps) for requests in (1, 8)}
    method = (
        f"SmolLM2, {options.rounds} rounds of {options.steps} decode steps with and without the record in turn; {LOOPS} recordings a round"
    )
    record.write(options.output, "recording_cost", "python -m benchmarks.recording_cost", method, before, results)
    for name, of in results.items():
        ratio, alone = of["ratio with / without"]["median"], of["us of recording a step"]["median"]
        print(f"{name}: {alone:.1f} us a step, {100 * of['recording, share of a step']:.3f} % of it; with/without {ratio:.4f}")
    return int(max(of["recording, share of a step"] for of in results.values()) >= 0.01)


if __name__ == "__main__":
    sys.exit(main())
