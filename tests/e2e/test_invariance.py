"""Promise 1 on the real model and the native kernels: the same bits, whatever else happens.

32 requests of mixed lengths and settings, each compared with itself alone in a fresh engine. Texts, token ids and
logprobs are compared as exact values, so that a difference of one unit in the last place shows even where the text is
the same. Every test asserts the counter that proves its feature fired.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from octavo import EngineConfig, SamplingParams
from octavo.outputs import OutputAccumulator, RequestOutput
from octavo.wiring import EngineParts

pytest.importorskip("octavo._native", reason="the native module is not built")

Work = list[tuple[list[int], SamplingParams]]
#: The longest prompt and answer together need 7 blocks of 16.
SMALL_POOL = 8
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def mixed_requests(count: int, shared_prefix: int = 0, n: int = 1) -> Work:
    """Prompts of 1 to 48 tokens (after a shared prefix); greedy and sampled, penalties, filters and logprobs mixed."""
    rng = np.random.default_rng(5)
    prefix = rng.integers(1000, 40000, shared_prefix).tolist()
    work = []
    for i in range(count):
        prompt = prefix + rng.integers(1000, 40000, int(rng.integers(1, 48))).tolist()
        params = SamplingParams(
            n=n,
            temperature=0.0 if i % 3 == 0 and n == 1 else 0.8,
            top_p=0.9 if i % 2 else 1.0,
            repetition_penalty=1.1 if i % 4 == 1 else 1.0,
            seed=i,
            max_tokens=int(rng.integers(12, 24)),
            ignore_eos=True,
            logprobs=1,
        )
        work.append((prompt, params))
    return work


class Engine:
    """A core on the real model; its weights are loaded once and shared, everything else is fresh each time."""

    def __init__(self, parts: EngineParts) -> None:
        self.core = parts.core()
        self.inputs = parts.input_processor()

    def whole_pool(self) -> list[int]:
        """A prompt that leaves no block for anyone else."""
        group = self.core.executor.info.kv_groups[0]
        return [1000] * (group.num_blocks * group.block_size)

    def run(self, work: Work, *, preempt_all: bool = False) -> list[RequestOutput]:
        """All requests at once. preempt_all: whenever a choice has drawn three tokens and never been preempted, an urgent
        request for the whole pool comes in and pushes out whatever runs."""
        found: dict[str, OutputAccumulator] = {}
        urgent = itertools.count()
        spared: set[tuple[str, int]] = set()
        for i, (prompt, params) in enumerate(work):
            request = self.inputs.process(f"r{i}", prompt, params)
            self.core.add_request(request)
            found[request.request_id] = OutputAccumulator(request.request_id, None, prompt, params.n)
        while self.core.has_unfinished_requests():
            pushing = False
            for delta in self.core.step():
                if delta.request_id not in found:
                    continue
                found[delta.request_id].add(delta)
                choice = (delta.request_id, delta.index)
                if delta.finish_reason is None and len(found[delta.request_id].output.outputs[delta.index].token_ids) == 3:
                    pushing = pushing or choice not in spared
                    spared.add(choice)
            if preempt_all and pushing:
                self.core.add_request(self.inputs.process(f"urgent{next(urgent)}", self.whole_pool(), ONE_TOKEN, priority=-1))
            self.core.check_invariants()
        return [item.output for item in found.values()]


@pytest.fixture(scope="module")
def load(smollm2_path):
    def make(**settings) -> Engine:
        return Engine(EngineParts.load(EngineConfig(model=str(smollm2_path), backend="cpu", **settings)))

    return make


@pytest.fixture(scope="module")
def alone(load):
    """What each request says by itself, one after the other, nothing cached."""

    def run(work: Work, **settings) -> list:
        engine = load(num_kv_blocks=200, enable_prefix_caching=False, **settings)
        return [exact(engine.run([one])[0]) for one in work]

    return run


def exact(output: RequestOutput) -> list[tuple]:
    return [(c.index, c.text, c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs]


def all_exact(outputs: Sequence[RequestOutput]) -> list:
    return [exact(output) for output in outputs]


@pytest.fixture(scope="module")
def mixed(alone):
    work = mixed_requests(32)
    return work, alone(work)


def test_all_at_once(load, mixed):
    work, expected = mixed
    engine = load(num_kv_blocks=400)
    assert all_exact(engine.run(work)) == expected
    assert engine.core.stats.preemptions == 0
    assert max(event.running for event in engine.core.events.recent(None)) > 16


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_each_preempted_at_least_once(load, mixed, chunk):
    """A pool of 8 blocks for 32 requests, and steps of 1, 7 and 64 tokens."""
    work, expected = mixed
    # Nobody waits so long that urgent requests may no longer push it out.
    engine = load(num_kv_blocks=SMALL_POOL, max_num_batched_tokens=chunk, promote_after_steps=1_000_000)
    outputs = engine.run(work, preempt_all=True)
    assert all_exact(outputs) == expected
    assert min(output.outputs[0].metrics.num_preemptions for output in outputs) >= 1
    largest = max(sum(entry.num_tokens for entry in event.entries) for event in engine.core.events.recent(None))
    assert largest == chunk
    assert engine.core.kv.num_used_blocks == 0


def test_small_pool_preempts_by_itself(load, mixed):
    work, expected = mixed
    engine = load(num_kv_blocks=SMALL_POOL, enable_prefix_caching=False)
    assert all_exact(engine.run(work)) == expected
    assert engine.core.stats.preemptions > 0


def test_prefix_hits(load, alone):
    """A prefix of 40 tokens in common, then everything once more: whole prompts are found, and their last token recomputed."""
    work = mixed_requests(12, shared_prefix=40)
    expected = alone(work)
    engine = load(num_kv_blocks=400)
    engine.run(work[:1])
    assert all_exact(engine.run(work)) == expected
    once = engine.core.stats.prefix_hit_tokens
    assert once >= 11 * 32
    assert all_exact(engine.run(work)) == expected
    assert engine.core.stats.prefix_hit_tokens > 2 * once


def test_prompts_of_whole_blocks_are_copied_not_written(load, alone):
    rng = np.random.default_rng(8)
    work = [(rng.integers(1000, 40000, 16 * k).tolist(), SamplingParams(temperature=0, max_tokens=8, logprobs=1)) for k in (1, 2, 3)]
    expected = alone(work)
    engine = load(num_kv_blocks=100)
    for _ in range(3):
        assert all_exact(engine.run(work)) == expected
    assert engine.core.stats.blocks_copied == 6


def test_prefix_hits_and_preemption(load, alone):
    """Both at once: a shared prefix in a pool so small that each request is preempted at least once."""
    work = mixed_requests(12, shared_prefix=40)
    engine = load(num_kv_blocks=SMALL_POOL)
    outputs = engine.run(work, preempt_all=True)
    assert all_exact(outputs) == alone(work)
    assert engine.core.stats.prefix_hit_tokens > 0
    assert min(output.outputs[0].metrics.num_preemptions for output in outputs) >= 1


@pytest.mark.parametrize("pool", [400, SMALL_POOL])
def test_int8_kv(load, alone, pool):  # E20
    """Shared prefixes, forks and preemption over quantised blocks: copied, found and recomputed to the same bits."""
    work = mixed_requests(4, shared_prefix=40) + mixed_requests(2, shared_prefix=20, n=2)
    engine = load(num_kv_blocks=pool, kv_dtype="int8")
    engine.run(work[:1])  # its blocks are there to be found
    expected = alone(work, kv_dtype="int8")
    assert all_exact(engine.run(work)) == expected
    if pool == SMALL_POOL:  # parents that hold blocks give way first, so that there are no forks here
        assert all_exact(engine.run(work, preempt_all=True)) == expected
    assert expected != alone(work[:1]) + expected[1:]  # not the bits of bfloat16
    assert engine.core.stats.prefix_hit_tokens > 0 and engine.core.stats.forks > 0
    assert (engine.core.stats.preemptions > 0) == (pool == SMALL_POOL)


def test_blocks_follow_the_kv_dtype(load):  # E20
    """As many blocks as their real bytes allow: 30 layers, 3 KV heads, 16 tokens, K and V of 64 numbers."""
    bytes_of_vector = {"f32": 256, "bf16": 128, "f16": 128, "int8": 64 + 2}
    for kv_dtype, size in bytes_of_vector.items():
        group = load(kv_cache_memory="64MiB", kv_dtype=kv_dtype).core.executor.info.kv_groups[0]
        assert group.num_blocks == (64 << 20) // (30 * 3 * 16 * 2 * size)


@pytest.mark.parametrize("pool", [400, SMALL_POOL])
def test_four_choices(load, alone, pool):
    work = mixed_requests(8, shared_prefix=20, n=4)
    expected = alone(work)
    assert all(len({c[1] for c in request}) == 4 for request in expected)  # the choices differ
    engine = load(num_kv_blocks=pool)
    outputs = engine.run(work, preempt_all=pool == SMALL_POOL)
    assert all_exact(outputs) == expected
    assert engine.core.stats.forks > 0
    fewest = min(choice.metrics.num_preemptions for output in outputs for choice in output.outputs)
    assert (fewest >= 1) == (pool == SMALL_POOL)


def test_a_choice_equals_the_same_request_without_siblings(load, alone):
    """Choice 0 of n = 4 draws what n = 1 draws: random numbers are keyed by seed, choice and position."""
    many = mixed_requests(4, n=4)
    single = [
        (
            prompt,
            SamplingParams(
                temperature=0.8,
                top_p=p.top_p,
                repetition_penalty=p.repetition_penalty,
                seed=p.seed,
                max_tokens=p.max_tokens,
                ignore_eos=True,
                logprobs=1,
            ),
        )
        for prompt, p in many
    ]
    assert [request[0] for request in alone(many)] == [request[0] for request in alone(single)]


def test_threads_and_levels_of_batching(load, mixed):
    work, expected = mixed
    for settings in ({"threads": 1}, {"max_num_seqs": 3}, {"max_decode_batch_size": 2, "max_prefill_batch_size": 1}):
        engine = load(num_kv_blocks=300, **settings)
        assert all_exact(engine.run(work[:12])) == expected[:12]


def test_replayed_and_eager(load, mixed):
    """`mixed` was computed with steps replayed; here every operation is called from Python."""
    work, expected = mixed
    engine = load(num_kv_blocks=400, replay=False)
    assert all_exact(engine.run(work)) == expected
    stats = engine.core.stats
    assert stats.steps_replayed == 0 and stats.steps_eager == stats.steps > 10
    engine = load(num_kv_blocks=400)
    assert all_exact(engine.run(work[:8])) == expected[:8]
    stats, events = engine.core.stats, engine.core.events.recent(None)
    assert stats.steps_eager == 1 and stats.steps_replayed == stats.steps - 1 > 10
    assert [event.replayed for event in events] == [False, *[True] * stats.steps_replayed]


def test_steps_with_prompt_logprobs_are_eager(load):
    engine = load(num_kv_blocks=100)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    engine.run([([1000] * 20, ONE_TOKEN), ([1000] * 20, params)])
    assert [event.replayed for event in engine.core.events.recent(None)] == [False, False, True, True]
