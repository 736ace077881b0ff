"""How much of the KV memory that requests hold has tokens in it, on requests of mixed lengths; and what eight answers to one
prompt hold.

Usage: .venv/bin/python -m benchmarks.kv_waste [--requests 1000] [--blocks 2048] [--seqs 256] [--output FILE]
The scheduler and the KV manager of the engine with an executor that computes nothing: only lengths matter. Lengths are
log-normal with the means that the paper on paged attention (Kwon et al. 2023, figure 11) gives for ShareGPT: prompts of 161
tokens, answers of 338; all requests wait at the start.
Counted in every step, while it runs and before anything is freed; every KV block once, however many requests share it:
- allocated: the slots of all blocks that a request holds (blocks of the prefix cache that nobody holds are free memory);
- live: those of them whose KV is there when the step has run. A prompt that waits for its turn holds blocks for all its
  tokens, and these count as waste until they are computed; so do the empty slots at the end of each sequence's last block.
  `live_or_due` counts the first as used.
`mean` weighs each step alike, `by_tokens` by the tokens computed in it; `at_load` is the mean of the steps in which requests
waited and more than half of the pool was held, `least_at_load` and `least` the smallest of those and of all.
Exit code 1 if one of the means of `live` is below 0.96, or eight answers to 1,000 tokens hold more than 1.1 times the blocks
of the prompt plus their own.
Not here: time; memory of weights and activations.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import RESULTS
from octavo.bench import record
from octavo.config import EngineConfig
from octavo.engine.engine_core import EngineCore
from octavo.engine.request import EngineRequest
from octavo.engine.scheduler_output import ExecutorInfo, KVGroup, SampledToken, SchedulerOutput, StepResult
from octavo.sampling_params import SamplingParams

BLOCK = 16
#: Mean tokens of ShareGPT's prompts and answers, and how far the logarithms spread.
PROMPT_MEAN, ANSWER_MEAN, SIGMA = 161, 338, 1.0
LONGEST = 2048
TOKEN = 5
LEAST_USE = 0.96
MOST_FORK = 1.1


class Count(NamedTuple):
    """Slots of one step."""

    allocated: int
    live: int
    due: int
    tokens: int
    waiting: int
    blocks: int


class Tokenizer:
    """Says nothing: answers have a length and no text."""

    vocab_size = 32
    special_ids: frozenset[int] = frozenset()
    strip_leading_space = False
    bos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        return []

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def token_text(self, token_id: int) -> str:
        return ""


@dataclass
class CountingExecutor:
    """Draws the same token for everyone, and counts slots while a step runs."""

    info: ExecutorInfo
    counts: list[Count] = field(default_factory=list)
    core: EngineCore | None = None

    def execute(self, output: SchedulerOutput) -> StepResult:
        assert self.core is not None
        self.counts.append(count(self.core, output))
        return StepResult(sampled={entry.request_id: SampledToken(TOKEN) for entry in output.entries if entry.sample})

    def close(self) -> None:
        pass


class Slots:
    """Slots with tokens in them, by block, each block once."""

    def __init__(self) -> None:
        self._full: set[int] = set()
        self._partial: dict[int, int] = {}

    def add(self, table: list[int], tokens: int) -> None:
        full, rest = divmod(tokens, BLOCK)
        self._full.update(table[:full])
        if rest:
            self._partial[table[full]] = max(rest, self._partial.get(table[full], 0))

    def total(self) -> int:
        return BLOCK * len(self._full) + sum(tokens for block, tokens in self._partial.items() if block not in self._full)


def count(core: EngineCore, output: SchedulerOutput) -> Count:
    """The slots held now, and those with KV once this step has run."""
    ends = {entry.request_id: entry.start + entry.num_tokens for entry in output.entries}
    live, due, scheduler = Slots(), Slots(), core.scheduler
    for request in [*scheduler.running(), *scheduler.holding.values()]:
        computed, table = ends.get(request.request_id, request.num_computed_tokens), core.kv.block_tables(request)[0]
        live.add(table, computed)
        due.add(table, max(computed, request.num_target_tokens) if request.request_id in scheduler.prefilling else computed)
    held = core.kv.num_used_blocks
    return Count(held * BLOCK, live.total(), due.total(), output.num_tokens, core.num_waiting, held)


def make_core(blocks: int, seqs: int, budget: int) -> tuple[EngineCore, CountingExecutor]:
    executor = CountingExecutor(ExecutorInfo((KVGroup(blocks, BLOCK),), Tokenizer.vocab_size, LONGEST, (1,)))
    config = EngineConfig(max_num_seqs=seqs, max_decode_batch_size=seqs, max_num_batched_tokens=budget, max_waiting_requests=10**6)
    core = EngineCore(executor, Tokenizer(), config)
    executor.core = core
    return core, executor


def order(name: str, prompt: list[int], tokens: int, n: int = 1) -> EngineRequest:
    params = SamplingParams(n=n, temperature=0, max_tokens=tokens, ignore_eos=True).resolve({})
    return EngineRequest(name, prompt, params, tokens, 0)


def length(rng: random.Random, mean: float) -> int:
    return max(1, min(LONGEST // 2 - 1, round(rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA))))


def mixed(requests: int, blocks: int, seqs: int, budget: int) -> dict[str, Any]:
    """The share of live slots, over the steps of a run of requests of mixed lengths."""
    rng = random.Random(11)
    core, executor = make_core(blocks, seqs, budget)
    prompts, answers = [], []
    for number in range(requests):
        prompts.append(length(rng, PROMPT_MEAN))
        answers.append(length(rng, ANSWER_MEAN))
        core.add_request(order(f"r{number}", [rng.randrange(32) for _ in range(prompts[-1])], answers[-1]))
    while core.has_unfinished_requests():
        core.step()
    steps = [step for step in executor.counts if step.allocated]
    stats = core.stats
    return {
        "prompt_tokens_mean": round(statistics.mean(prompts), 1),
        "answer_tokens_mean": round(statistics.mean(answers), 1),
        "steps": len(steps),
        "steps_while_requests_wait": sum(step.waiting > 0 for step in steps),
        "pool_used_mean": round(statistics.mean(step.blocks for step in steps if step.waiting) / blocks, 4),
        "preemptions": stats.preemptions,
        "live": shares(steps, "live", blocks),
        "live_or_due": shares(steps, "due", blocks),
    }


def shares(steps: list[Count], what: str, blocks: int) -> dict[str, float]:
    found = [getattr(step, what) / step.allocated for step in steps]
    weights = [step.tokens for step in steps]
    loaded = [share for share, step in zip(found, steps, strict=True) if step.waiting and 2 * step.blocks > blocks]
    figures = {
        "mean": statistics.mean(found),
        "by_tokens": sum(share * weight for share, weight in zip(found, weights, strict=True)) / sum(weights),
        "at_load": statistics.mean(loaded),
        "least_at_load": min(loaded),
        "least": min(found),
    }
    return {name: round(value, 4) for name, value in figures.items()}


def fork(prompt: int, tokens: int, n: int, budget: int) -> dict[str, Any]:
    """The most blocks held by n answers to one prompt, and what they may be."""
    core, executor = make_core(4096, 64, budget)
    core.add_request(order("one", [number % 32 for number in range(prompt)], tokens, n))
    while core.has_unfinished_requests():
        core.step()
    of_prompt, of_answer = -(-prompt // BLOCK), -(-(tokens - 1) // BLOCK)
    most = MOST_FORK * of_prompt + n * of_answer
    return {
        "blocks_of_the_prompt": of_prompt,
        "blocks_of_an_answer": of_answer,
        "blocks_held_at_most": max(step.blocks for step in executor.counts),
        "bound": round(most, 1),
        "blocks_without_sharing": n * -(-(prompt + tokens - 1) // BLOCK),
        "blocks_copied": core.stats.blocks_copied,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=2048, help="KV blocks of 16 tokens (default 2048)")
    parser.add_argument("--seqs", type=int, default=256, help="sequences at once (default 256)")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a step (default 512)")
    parser.add_argument("--output", type=Path, default=RESULTS / "kv_waste.json")
    options = parser.parse_args(arguments)
    before = record.machine()
    lengths = mixed(options.requests, options.blocks, options.seqs, options.budget)
    answers = fork(1000, 100, 8, options.budget)
    method = (
        f"{options.requests} requests of log-normal lengths, {options.blocks} blocks of {BLOCK} tokens, steps of {options.budget} tokens; "
        "shares of the slots of held blocks, each block once: with KV when the step has run, or also due to be computed; "
        "8 answers of 100 tokens to a prompt of 1,000"
    )
    command = " ".join(["python -m benchmarks.kv_waste", *(sys.argv[1:] if arguments is None else arguments)])
    record.write(options.output, "kv_waste", command, method, before, {"mixed_lengths": lengths, "eight_answers": answers})
    for name in ("live", "live_or_due"):
        print(f"{name:12} " + "   ".join(f"{kind} {100 * share:.2f} %" for kind, share in lengths[name].items()))
    print(
        f"8 answers: {answers['blocks_held_at_most']} blocks, bound {answers['bound']}, without sharing {answers['blocks_without_sharing']}"
    )
    return int(
        min(lengths["live"][name] for name in ("mean", "by_tokens", "at_load")) < LEAST_USE
        or answers["blocks_held_at_most"] > answers["bound"]
    )


if __name__ == "__main__":
    sys.exit(main())
