"""A soak: random requests at full load on a real engine, and each of them alone in another one; both must say the same, bit
for bit.

The engine under load has a pool for about two sequences, steps of changing sizes, all policies in turn, prefix cache and
recorded steps, and requests that end by stop strings, ids, the model's own end, their length, or an abort at a random token.
The one for single requests has room, no cache, one thread, and no recorded steps. Compared are token ids, text, reasons and
logprobs as exact values; of an aborted request what it had said.
Not here: how many requests, on which model (test_soak.py, tools/soak.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo import EngineConfig, SamplingParams
from octavo.engine.engine_core import EngineCore
from octavo.outputs import OutputAccumulator, RequestOutput
from octavo.wiring import EngineParts

#: Called with what is going on, and how many requests of how many are done.
Progress = Callable[[str, int, int], None]
#: Settings of the engine under load; one slice of the requests each.
LOADS: tuple[dict[str, Any], ...] = (
    {"policy": "priority", "max_num_batched_tokens": 64},
    {"policy": "fair", "max_num_batched_tokens": 7, "max_decode_batch_size": 5},
    {"policy": "shortest-prefill", "max_num_batched_tokens": 256, "max_num_seqs": 24},
    {"policy": "longest-prefix", "max_num_batched_tokens": 33, "max_prefill_batch_size": 2},
    {"policy": "fcfs", "max_num_batched_tokens": 48, "enable_prefix_caching": False},
)
#: Counters that show that what may go wrong has taken place.
MUST_HAPPEN = (
    "preemptions",
    "tokens_recomputed",
    "prefix_hit_tokens",
    "forks",
    "blocks_copied",
    "blocks_evicted",
    "steps_replayed",
    "requests_aborted",
)
#: So many requests wait at most, so that what arrives later still finds the cache of what came before.
MOST_WAITING = 24


@dataclass(frozen=True)
class Job:
    name: str
    prompt: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    tenant: str | None
    #: Aborted once its choices have drawn so many tokens together; None: never.
    abort_after: int | None


@dataclass(frozen=True)
class Shape:
    """What requests may look like for one model."""

    #: Token ids of prompts.
    ids: range
    #: Tokens of the longest prompt and the longest answer.
    prompt: int
    answer: int


@dataclass
class Outcome:
    requests: int = 0
    choices: int = 0
    #: Hypotheses of beam searches among them.
    beams: int = 0
    tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    stats: Counter[str] = field(default_factory=Counter)


def draw_jobs(count: int, seed: int, shape: Shape) -> list[Job]:
    rng = random.Random(f"soak/{seed}")
    families = [[rng.choice(shape.ids) for _ in range(shape.prompt)] for _ in range(6)]
    return [_draw_job(rng, f"r{number}", families, shape) for number in range(count)]


def _draw_job(rng: random.Random, name: str, families: list[list[int]], shape: Shape) -> Job:
    shared = rng.choice(families)[: rng.choice([0, rng.randint(0, shape.prompt - 1), shape.prompt // 2])]
    own = [rng.choice(shape.ids) for _ in range(rng.randint(1, max(1, min(16, shape.prompt - len(shared)))))]
    params = _draw_params(rng, shape)
    return Job(
        name,
        (shared + own)[: shape.prompt],
        params,
        priority=rng.choice([0, 0, 0, 1, -1]),
        cache_salt=rng.choice([None, None, None, "a", "b"]),
        tenant=rng.choice([None, "t", "u"]),
        # what a search has found when it is aborted need not be the beginning of what it would find
        abort_after=rng.randint(0, shape.answer) if rng.random() < 0.12 and params.beam_width is None else None,
    )


def _draw_params(rng: random.Random, shape: Shape) -> SamplingParams:
    most = rng.choice([1, rng.randint(1, shape.answer), rng.randint(1, shape.answer), shape.answer])
    if rng.random() < 0.05:
        width = rng.randint(2, 4)
        return SamplingParams(
            beam_width=width, n=rng.randint(1, width), temperature=0.0, max_tokens=min(most, 12), early_stopping=rng.random() < 0.5
        )
    greedy = rng.random() < 0.3
    some = {
        "logit_bias": {rng.choice(shape.ids): rng.uniform(-5, 5) for _ in range(4)},
        "allowed_token_ids": [rng.choice(shape.ids) for _ in range(60)],
        "bad_words": ["e", "ab"],
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "repetition_penalty": rng.uniform(1, 1.5),
        "stop": rng.sample("abcdefghijklmnopqrstuvwxyz 0123456789", 3),
        "stop_token_ids": [rng.choice(shape.ids) for _ in range(len(shape.ids) // 40)][:1000],
        "min_tokens": rng.randint(0, most),
        "logprobs": rng.choice([0, 1, 5]),
        "logprobs_mode": "processed",
        "include_stop_in_output": True,
        "skip_special_tokens": False,
        "ignore_eos": True,
        "top_k": rng.choice([1, 5, 40]),
        "top_p": rng.choice([0.3, 0.9]),
        "min_p": 0.05,
        "typical_p": 0.9,
    }
    chosen: dict[str, Any] = {name: value for name, value in some.items() if rng.random() < (0.5 if name == "logprobs" else 0.15)}
    if rng.random() < 0.04:  # steps with these are not recorded ones
        chosen["prompt_logprobs"] = 2
    return SamplingParams(
        n=rng.choice([1, 1, 1, 1, 2, 3, 4]),
        temperature=0.0 if greedy else rng.uniform(0.4, 1.5),
        seed=rng.getrandbits(64),
        max_tokens=most,
        **chosen,
    )


class Engine:
    """A core on a model; its requests come in as jobs."""

    def __init__(self, config: EngineConfig) -> None:
        parts = EngineParts.load(config)
        self.core: EngineCore = parts.core()
        self._inputs = parts.input_processor()
        self.found: dict[str, OutputAccumulator] = {}

    def add(self, job: Job) -> None:
        request = self._inputs.process(
            job.name, job.prompt, job.params, priority=job.priority, cache_salt=job.cache_salt, tenant=job.tenant
        )
        self.found[job.name] = OutputAccumulator(job.name, None, job.prompt, job.params.n)
        self.core.add_request(request)

    def step(self) -> None:
        for delta in self.core.step():
            self.found[delta.request_id].add(delta)

    def abort(self, name: str) -> None:
        for delta in self.core.abort([name]):
            self.found[name].add(delta)


def exact(output: RequestOutput) -> list[Any]:
    choices = [(c.index, c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason, c.error) for c in output.outputs]
    return [output.prompt_logprobs, *choices]


def run_alone(jobs: list[Job], config: dict[str, Any], progress: Progress) -> dict[str, RequestOutput]:
    """One after the other, nothing cached, nothing recorded, one thread."""
    engine = Engine(EngineConfig(**config, enable_prefix_caching=False, replay=False, threads=1))
    for done, job in enumerate(jobs):
        engine.add(job)
        while engine.core.has_unfinished_requests():
            engine.step()
        progress("alone", done + 1, len(jobs))
    assert engine.core.stats.preemptions == engine.core.stats.prefix_hit_tokens == engine.core.stats.steps_replayed == 0
    return {name: accumulator.output for name, accumulator in engine.found.items()}


def run_loaded(
    jobs: list[Job], config: dict[str, Any], seed: int, progress: Callable[[int], None]
) -> tuple[dict[str, RequestOutput], Counter[str]]:
    """All of them as fast as the queue takes them, with aborts and resets of the cache; and the engine's counters."""
    engine, rng = Engine(EngineConfig(**config)), random.Random(f"load/{seed}")
    core, arriving, aborting = engine.core, iter(jobs), {job.name: job.abort_after for job in jobs if job.abort_after is not None}
    _arrive(engine, arriving)
    while core.has_unfinished_requests():
        engine.step()
        core.check_invariants()
        for name, after in list(aborting.items()):
            accumulator = engine.found.get(name)
            if accumulator is not None and sum(len(choice.token_ids) for choice in accumulator.output.outputs) >= after:
                del aborting[name]
                engine.abort(name)
        if rng.random() < 0.002:
            core.reset_prefix_cache()
        _arrive(engine, arriving)
        progress(core.stats.requests_finished)
    stats = core.stats
    assert stats.requests_added == stats.requests_finished == len(jobs) and stats.requests_failed == 0
    assert stats.blocks_used == 0 and all(pool.num_free == pool.num_blocks for pool in core.kv.pools)
    return {name: found.output for name, found in engine.found.items()}, Counter({name: getattr(stats, name) for name in MUST_HAPPEN})


def _arrive(engine: Engine, arriving: Iterator[Job]) -> None:
    while engine.core.num_waiting < MOST_WAITING and (job := next(arriving, None)) is not None:
        engine.add(job)


def compare(job: Job, loaded: RequestOutput, alone: RequestOutput) -> None:
    """AssertionError unless the loaded one is the one alone, or, where it was aborted, its beginning."""
    if all(choice.finish_reason != "abort" for choice in loaded.outputs):
        assert exact(loaded) == exact(alone), f"{job.name} differs from its solo run: {job}"
        return
    assert job.abort_after is not None, f"{job.name} was aborted by nobody"
    for found, whole in zip(loaded.outputs, alone.outputs, strict=True):
        if found.finish_reason == "abort":
            count = len(found.token_ids)
            assert found.token_ids == whole.token_ids[:count], f"{job.name}#{found.index} differs before its abort: {job}"
            assert (found.logprobs or []) == (whole.logprobs or [])[:count], f"{job.name}#{found.index} differs before its abort: {job}"
        else:
            assert exact(RequestOutput("", None, [], [found])) == exact(RequestOutput("", None, [], [whole])), f"{job.name}: {job}"


def soak(
    jobs: list[Job],
    config: dict[str, Any],
    pool: int,
    room: int,
    seed: int,
    progress: Progress = lambda *_: None,
    loads: Sequence[dict[str, Any]] = LOADS,
) -> Outcome:
    """`config`: of both engines. `pool`: blocks of the one under load, `room`: of the other. Raises AssertionError."""
    outcome, done = Outcome(), 0
    alone = run_alone(jobs, {**config, "num_kv_blocks": room}, progress)
    for number, load in enumerate(loads):
        some = jobs[number :: len(loads)]
        settings = {**config, "num_kv_blocks": pool, **load}
        loaded, stats = run_loaded(
            some, settings, seed + number, lambda finished, done=done: progress("at full load", done + finished, len(jobs))
        )
        done += len(some)
        outcome.stats += stats
        for job in some:
            compare(job, loaded[job.name], alone[job.name])
            outcome.requests += 1
            for choice in loaded[job.name].outputs:
                outcome.choices += 1
                outcome.beams += job.params.beam_width is not None
                outcome.tokens += len(choice.token_ids)
                by = "" if choice.stop_reason is None else " string" if isinstance(choice.stop_reason, str) else " id"
                outcome.reasons[f"{choice.finish_reason}{by}"] += 1
    return outcome
