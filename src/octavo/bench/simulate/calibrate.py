"""Measures steps of the real engine, and fits costs to them.

Steps are made as a server makes them, by adding requests and stepping the core, so that a step's time holds all of it: scheduling,
arrays, the model, sampling, text. Two kinds of rounds: prompts alone (of many lengths, several at once, long ones in chunks), and ramps
(more and more requests of one length join, with some steps of pure generation at chosen numbers), which give generated rows at several
contexts and, whenever one joins, mixed steps. Equal steps are repeated; the median of neighbours counts.
Owner of nothing: it is given an engine's parts. Not here: the model of the costs (costs.py).
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

from octavo import __version__
from octavo.bench.simulate.costs import CostFile, Sample, Work, fit, residuals
from octavo.bench.simulate.trace import TraceRequest, token_ids
from octavo.config import EngineConfig
from octavo.engine.engine_core import EngineCore
from octavo.engine.executor import Executor
from octavo.engine.scheduler_output import ExecutorInfo, SchedulerOutput, StepResult
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.wiring import EngineParts, LoadProgress

#: Tokens of prompts that run alone; each is given several times in every round.
PROMPTS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
#: (requests at once, tokens each): several prompts in a step.
GROUPS = ((2, 32), (4, 16), (4, 64), (8, 32), (3, 150))
#: Prompts computed in chunks of the budget: what the tokens before a chunk cost.
LONG = (1536,)
#: (tokens of each prompt, most requests): ramps.
RAMPS = ((8, 64), (48, 32), (192, 12), (640, 4))
#: Numbers of requests at which a ramp pauses, and for how many steps; in between they join together.
PAUSES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PAUSE_STEPS = 4
Done = Callable[[], object]


class _Watched:
    """An executor that remembers what its last step was."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.work: Work | None = None

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.work = Work.of(output.entries)
        return self._executor.execute(output)

    def close(self) -> None:
        """The executor is somebody else's."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """How much is measured; smaller ones for tests."""

    rounds: int = 2
    prompts: tuple[int, ...] = PROMPTS
    groups: tuple[tuple[int, int], ...] = GROUPS
    long: tuple[int, ...] = LONG
    ramps: tuple[tuple[int, int], ...] = RAMPS
    repeats: int = 2

    @property
    def count(self) -> int:
        """How often `measure` calls `done`."""
        return self.rounds * (len(self.prompts) + len(self.groups) + len(self.long) + len(self.ramps)) + 1


def measure(parts: EngineParts, config: EngineConfig, rounds: Rounds = Rounds(), done: Done | None = None) -> list[Sample]:
    """Steps of an engine around `parts.executor`, whose request state is dropped. `done` is called `rounds.count` times.

    Raises ConfigError where the pool or the longest sequence is too small to measure anything.
    """
    found = _Calibration(parts, config)
    tick = done or (lambda: None)
    for _ in found.prompts(1, 32, 2):  # the first steps load what is loaded once
        pass
    tick()
    samples: list[Sample] = []
    for _ in range(rounds.rounds):
        for part in found.rounds(rounds):
            samples += part
            tick()
    if not any(s.work.generated_rows for s in samples) or not any(s.work.prompt_rows for s in samples):
        raise ConfigError("the KV pool or max_model_len is too small to calibrate anything: raise --kv-cache-memory")
    return samples


class _Calibration:
    def __init__(self, parts: EngineParts, config: EngineConfig) -> None:
        self._executor = _Watched(parts.executor)
        self._core = EngineCore(self._executor, parts.tokenizer, config)
        self._inputs = parts.input_processor()
        self._config = config
        self._numbers = itertools.count(1 << 30)  # prompts no trace has
        info = parts.executor.info
        self._room = min(info.max_model_len, *(group.num_blocks * group.block_size for group in info.kv_groups))
        self._pool = min(group.num_blocks * group.block_size for group in info.kv_groups)
        self._ids = (min(1000, info.vocab_size // 4), max(2, info.vocab_size * 3 // 4))

    def rounds(self, rounds: Rounds) -> Iterator[list[Sample]]:
        budget = self._config.max_num_batched_tokens
        for tokens in rounds.prompts:
            yield self.prompts(1, min(tokens, budget), rounds.repeats)
        for count, tokens in rounds.groups:
            yield self.prompts(count, tokens, rounds.repeats)
        for tokens in rounds.long:
            yield self.prompts(1, tokens, 1)
        for tokens, most in rounds.ramps:
            yield self.ramp(tokens, most)

    def prompts(self, count: int, tokens: int, repeats: int) -> list[Sample]:
        """`count` prompts at once, which end with their first token; the median of `repeats`."""
        if tokens + 1 >= self._room or count * (tokens + self._config.block_size) >= self._pool:
            return []
        runs = []
        for _ in range(repeats):
            for _ in range(count):
                self._add(tokens, 1)
            steps = []
            while self._core.has_unfinished_requests():
                steps += self._step()
            runs.append(steps)
        return [sample for group in zip(*runs, strict=False) for sample in _median(group)]

    def ramp(self, tokens: int, most: int) -> list[Sample]:
        """Requests join until `most` run; then all are aborted."""
        config = self._config
        pauses = [pause for pause in PAUSES if pause <= most]
        answer = (PAUSE_STEPS + 4) * len(pauses) + most * tokens // config.max_num_batched_tokens
        most = min(most, config.max_num_seqs, config.max_decode_batch_size, self._pool // (tokens + answer + 2 * config.block_size))
        if tokens + answer >= self._room or most < 1:
            return []
        samples: list[Sample] = []
        names: list[str] = []
        for pause in pauses:
            if pause > most:
                break
            names += [self._add(tokens, answer) for _ in range(pause - len(names))]
            while self._core.num_waiting or self._core.scheduler.prefilling:
                samples += self._step()
            samples += _median([sample for _ in range(PAUSE_STEPS) for sample in self._step()])
        self._core.abort(names)
        return samples

    def _add(self, tokens: int, answer: int) -> str:
        number = next(self._numbers)
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        prompt = token_ids(TraceRequest(0.0, tokens, answer), number, *self._ids)
        self._core.add_request(self._inputs.process(f"calibration-{number}", prompt, params))
        return f"calibration-{number}"

    def _step(self) -> list[Sample]:
        self._executor.work = None
        begun = perf_counter()
        self._core.step()
        seconds = perf_counter() - begun
        return [] if self._executor.work is None else [Sample(self._executor.work, seconds)]


def _median(steps: list[Sample] | tuple[Sample, ...]) -> list[Sample]:
    """One sample for steps of the same rows: their mean work in their median time. Steps of other rows than the first are left out."""
    if not steps:
        return []
    first = steps[0].work
    alike = [s for s in steps if (s.work.generated_rows, s.work.prompt_rows) == (first.generated_rows, first.prompt_rows)]
    contexts = [round(statistics.mean(getattr(s.work, name) for s in alike)) for name in ("generated_context", "prompt_context")]
    work = first._replace(generated_context=contexts[0], prompt_context=contexts[1])
    return [Sample(work, statistics.median(s.seconds for s in alike))]


def load(config: EngineConfig, progress: LoadProgress | None = None) -> EngineParts:
    """The parts of an engine. Raises ModelLoadError or ConfigError."""
    return EngineParts.load(config, progress)


def cost_file(parts: EngineParts, config: EngineConfig, samples: list[Sample], machine: str) -> CostFile:
    """Costs fitted to the samples, with what they are of. Raises OctavoError where they are too few."""
    costs, info = fit(samples), parts.executor.info
    about = {
        "octavo": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "settings": {name: getattr(config, name) for name in ("backend", "threads", "kv_dtype", "quantize", "block_size", "replay")},
        "samples": len(samples),
        "residuals": residuals(costs, samples),
    }
    kv_token_bytes = max(1, sum(info.block_bytes) // config.block_size)
    return CostFile(costs, config.model, machine, kv_token_bytes, info.max_model_len, about)
