"""Python's share of a decode step of SmolLM2 with one request: the time outside native calls, with steps replayed and eager.

Usage: .venv/bin/python -m benchmarks.python_share [--rounds 7] [--steps 64] [--prompt 512] [--threads 0] [--output FILE]
Two engines, one replaying and one not, take turns. Each call of the native context is timed where Python calls it, so the call itself
(conversion of its arguments) counts as native; the rest of `EngineCore.step` is Python's: scheduling, building the batch, the ops'
Python, NumPy in the sampler, text. The timing costs some Python time of its own, most of it in the eager engine, which makes
hundreds of calls a step: `ms a step, not instrumented` is measured without it, in the same turns.
Not here: speed in general (speed.py), single kernels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import RESULTS
from octavo import EngineConfig, SamplingParams
from octavo.bench import record
from octavo.bench.statistics import summary
from octavo.engine.engine_core import EngineCore
from octavo.wiring import EngineParts


class TimedContext:
    """Adds up the seconds inside the native calls of the context it stands for."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.seconds = 0.0
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._context, name)

        def timed(*args: Any) -> None:
            begin = perf_counter()
            method(*args)
            self.seconds += perf_counter() - begin
            self.calls += 1

        setattr(self, name, timed)
        return timed


class Engine:
    """A core that decodes one request; its native context can be exchanged for a timed one."""

    def __init__(self, replay: bool, prompt: int, length: int, threads: int) -> None:
        config = EngineConfig(backend="cpu", replay=replay, threads=threads, kv_cache_memory="256MiB")
        parts = EngineParts.load(config)
        self.core: EngineCore = parts.core()
        self.runner = parts.executor.runner  # type: ignore[attr-defined]
        self.context = self.runner.ops._context
        tokens = np.random.default_rng(0).integers(1000, 40000, prompt).tolist()
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        self.core.add_request(parts.input_processor().process("r", tokens, params))
        while self.core.stats.tokens_sampled < 3:  # the prompt, and two steps of one row
            self.core.step()

    def place(self, context: Any) -> None:
        """The context that ops and replayer call from now on."""
        self.runner.ops._context = context
        if self.runner._replayer is not None:
            self.runner._replayer._context = context

    def run(self, steps: int) -> float:
        """Mean seconds of a step."""
        begin = perf_counter()
        for _ in range(steps):
            self.core.step()
        return (perf_counter() - begin) / steps


def measure(engine: Engine, steps: int) -> dict[str, float]:
    plain = engine.run(steps)
    timed = TimedContext(engine.context)
    engine.place(timed)
    seconds = engine.run(steps)
    engine.place(engine.context)
    native = timed.seconds / steps
    return {
        "ms a step, not instrumented": 1000 * plain,
        "ms a step": 1000 * seconds,
        "ms outside native calls": 1000 * (seconds - native),
        "share of Python": (seconds - native) / seconds,
        "native calls a step": timed.calls / steps,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7); one more goes first")
    parser.add_argument("--steps", type=int, default=64, help="steps of each engine in a round, twice (default 64)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt (default 512)")
    parser.add_argument("--threads", type=int, default=0, help="threads of the kernels (default: what the machine allows)")
    parser.add_argument("--output", type=Path, help="where to write; default results/python_share.json")
    options = parser.parse_args(arguments)
    before = record.machine()
    length = 2 * options.steps * (options.rounds + 1) + 8
    engines = {name: Engine(name == "replayed", options.prompt, length, options.threads) for name in ("replayed", "eager")}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for number in range(options.rounds + 1):
        for name, engine in engines.items():
            for what, value in measure(engine, options.steps).items():
                if number:
                    found[name].setdefault(what, []).append(value)
    stats = {name: engine.core.stats for name, engine in engines.items()}
    if stats["eager"].steps_replayed or stats["replayed"].steps_eager > 2:
        raise SystemExit("the engines did not do what this benchmark compares: see the log")
    method = (
        f"one request, {options.prompt} tokens of prompt; {options.rounds} rounds of {options.steps} decode steps after one to warm up, "
        "the engines in turn; time outside native calls over time of a step"
    )
    results = {name: {what: summary(values, 4) for what, values in of.items()} for name, of in found.items()}
    record.write(
        options.output or RESULTS / "python_share.json", "python_share", "python -m benchmarks.python_share", method, before, results
    )
    for name, of in results.items():
        print(f"{name:9}", ", ".join(f"{what} {values['median']:.3f}" for what, values in of.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
