"""How fast the engine is in this process: prompt tokens and generated tokens a second, at given lengths and batch sizes.

A case is (P prompt tokens, G generated tokens, B requests at once). A round runs every case once, in turn, so that a machine
that is busy for a while disturbs all of them alike. Prompts are random token ids: no two share a prefix.
Stateless but for the LLM it is given. Not here: servers (serving.py), single kernels, other engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo.bench.statistics import summary
from octavo.errors import ConfigError, OctavoError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

#: Parts of a step that do not overlap (StepEvent.timings), and what the executor's part is made of.
WHOLE = ("schedule", "execute", "update")
PARTS = ("schedule", "prepare", "forward", "sample", "update")


class Case(NamedTuple):
    prompt_tokens: int
    tokens: int
    batch_size: int

    @property
    def name(self) -> str:
        requests = "request" if self.batch_size == 1 else "requests"
        return f"{self.batch_size} {requests}, {self.prompt_tokens} prompt tokens, {self.tokens} generated"


@dataclass(slots=True)
class CaseResult:
    """One value a round. Rates are tokens of all requests a second, parts are mean milliseconds of a step."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    #: Wall seconds of prompts and answers, as the caller waits for them.
    total: list[float] = field(default_factory=list)
    prefill_parts: list[dict[str, float]] = field(default_factory=list)
    decode_parts: list[dict[str, float]] = field(default_factory=list)

    def figures(self, breakdown: bool = False) -> dict[str, Any]:
        figures: dict[str, Any] = {"prefill_tokens_per_s": summary(self.prefill, 1)}
        if self.decode:
            figures["decode_tokens_per_s"] = summary(self.decode, 1)
        figures["total_s"] = summary(self.total)
        if breakdown:
            for name, parts in (("prefill_step_ms", self.prefill_parts), ("decode_step_ms", self.decode_parts)):
                if parts:
                    figures[name] = {part: round(float(np.median([each[part] for each in parts])), 4) for part in parts[0]}
        return figures


def cases(prompt_tokens: Sequence[int], tokens: Sequence[int], batch_sizes: Sequence[int]) -> list[Case]:
    """All combinations."""
    return [Case(p, g, b) for p in prompt_tokens for g in tokens for b in batch_sizes]


def check(llm: LLM, wanted: Iterable[Case]) -> None:
    """Raises ConfigError where a case would not measure what it says."""
    config = llm.config
    most = min(config.max_num_seqs, config.max_decode_batch_size)
    for case in wanted:
        if case.prompt_tokens + case.tokens > llm.max_model_len:
            raise ConfigError(f"{case.name}: longer than the model's {llm.max_model_len} tokens")
        if case.batch_size > most:
            raise ConfigError(f"{case.name}: only {most} requests run at once; raise --max-num-seqs and --max-decode-batch-size")
        blocks = case.batch_size * -(-(case.prompt_tokens + case.tokens) // config.block_size)
        if blocks > llm.stats().blocks_total:
            raise ConfigError(f"{case.name}: needs {blocks} KV blocks, there are {llm.stats().blocks_total}; raise --kv-cache-memory")


def measure(
    llm: LLM, wanted: Sequence[Case], rounds: int, seed: int = 0, done: Callable[[], object] | None = None
) -> dict[Case, CaseResult]:
    """`rounds` rounds after one that does not count. `done` is called after each case of each round."""
    check(llm, wanted)
    rng = np.random.default_rng(seed)
    results = {case: CaseResult() for case in wanted}
    for number in range(rounds + 1):
        for case in wanted:
            _run(llm, case, rng, results[case] if number else CaseResult())
            if done is not None:
                done()
    return results


def _run(llm: LLM, case: Case, rng: np.random.Generator, result: CaseResult) -> None:
    """Prompts alone (one token is drawn of each), then prompts and answers; other prompts each time."""
    steps, seconds = generate(llm, case._replace(tokens=1), rng)
    result.prefill.append(case.prompt_tokens * case.batch_size / sum(map(step_seconds, steps)))
    result.prefill_parts.append(_parts(steps))
    if case.tokens > 1:
        steps, seconds = generate(llm, case, rng)
        full = full_steps(steps, case)
        result.decode.append(case.batch_size * len(full) / sum(map(step_seconds, full)))
        result.decode_parts.append(_parts(full))
    result.total.append(seconds)


def full_steps(steps: Sequence[Any], case: Case) -> list[Any]:
    """The events of steps in which every request of the batch got one token. Raises OctavoError where there are none."""
    full = [step for step in steps if len(step.entries) == case.batch_size and all(entry.num_tokens == 1 for entry in step.entries)]
    if not full:
        raise OctavoError(f"{case.name}: no step had all requests in it; generate more tokens")
    return full


def generate(llm: LLM, case: Case, rng: np.random.Generator) -> tuple[list[Any], float]:
    """The events of the steps it took, and the wall seconds."""
    prompts = [rng.integers(*_ids(llm), case.prompt_tokens).tolist() for _ in range(case.batch_size)]
    params = SamplingParams(temperature=0, max_tokens=case.tokens, ignore_eos=True)
    before, begin = llm.stats().steps, time.perf_counter()
    llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - begin
    count = llm.stats().steps - before
    steps = llm.events(count)
    if len(steps) < count:
        raise ConfigError(f"{case.name}: took {count} steps; raise --event-history to that")
    return steps, seconds


def _ids(llm: LLM) -> tuple[int, int]:
    """A range of token ids without the special ones, which stand at the vocabulary's ends."""
    vocabulary = llm.executor.info.vocab_size
    return min(1000, vocabulary // 4), max(vocabulary * 4 // 5, 2)


def step_seconds(step: Any) -> float:
    """Of one event: its parts that do not overlap."""
    return float(sum(step.timings[part] for part in WHOLE))


def _parts(steps: Sequence[Any]) -> dict[str, float]:
    """Mean milliseconds of a step by part; "other" is what the parts do not cover."""
    parts = {part: 1000 * sum(step.timings.get(part, 0.0) for step in steps) / len(steps) for part in PARTS}
    whole = 1000 * sum(map(step_seconds, steps)) / len(steps)
    return {**parts, "other": max(0.0, whole - sum(parts.values())), "step": whole}
