"""Beams on the real model and the native kernels: the same bits alone, in company, in a tiny pool and in chunks of any size."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import EngineConfig, SamplingParams
from octavo.outputs import OutputAccumulator, RequestOutput
from octavo.wiring import EngineParts

pytest.importorskip("octavo._native", reason="the native module is not built")

Work = list[tuple[list[int], SamplingParams]]
#: The longest prompt and answer need 4 blocks of 16.
SMALL_POOL = 5


def work_of(count: int) -> Work:
    rng = np.random.default_rng(6)
    stopping: tuple[bool | str, ...] = (True, False, "never")
    made = []
    for i in range(count):
        prompt = rng.integers(1000, 40000, int(rng.integers(3, 45))).tolist()
        width = 2 + i % 3
        made.append((prompt, SamplingParams(beam_width=width, n=width, max_tokens=14, logprobs=1, early_stopping=stopping[i % 3])))
    return made


@pytest.fixture(scope="module")
def engine(smollm2_path):
    """Run requests beside each other (and beside sampled ones, with `company`); returns their outputs and the core."""

    def run(work: Work, company: int = 0, **settings):
        parts = EngineParts.load(EngineConfig(model=str(smollm2_path), backend="cpu", **settings))
        core, inputs, found = parts.core(), parts.input_processor(), {}
        for i, (prompt, params) in enumerate(work):
            core.add_request(inputs.process(f"r{i}", prompt, params))
            found[f"r{i}"] = OutputAccumulator(f"r{i}", None, prompt, params.n)
        for i in range(company):
            params = SamplingParams(temperature=0.9, seed=i, n=1 + i % 2, max_tokens=12, ignore_eos=True)
            core.add_request(inputs.process(f"c{i}", [2000 + i] * (5 + 3 * i), params))
        while core.has_unfinished_requests():
            for delta in core.step():
                if delta.request_id in found:
                    found[delta.request_id].add(delta)
            core.check_invariants()
        assert core.kv.num_used_blocks == 0
        return [exact(one.output) for one in found.values()], core

    return run


def exact(output: RequestOutput) -> list[tuple]:
    return [(c.index, c.text, c.token_ids, c.logprobs, c.cumulative_logprob, c.finish_reason) for c in output.outputs]


@pytest.fixture(scope="module")
def alone(engine):
    work = work_of(5)
    found = []
    for one in work:
        outputs, core = engine([one], num_kv_blocks=200, enable_prefix_caching=False)
        found += outputs
        assert core.stats.forks > 8 and core.stats.preemptions == 0 and core.stats.blocks_copied > 0
    assert all(len({str(c[2]) for c in choices}) == len(choices) for choices in found)
    return work, found


def test_together_and_in_company(engine, alone):
    work, expected = alone
    outputs, core = engine(work, company=4, num_kv_blocks=400)
    assert outputs == expected and max(core.stats.batch_sizes) > 12


@pytest.mark.parametrize("caching", [True, False])
def test_in_a_pool_for_little_more_than_one_sequence(engine, alone, caching):
    work, expected = alone
    outputs, core = engine(work, company=2, num_kv_blocks=SMALL_POOL, enable_prefix_caching=caching)
    assert outputs == expected and core.stats.preemptions > 0 and core.stats.tokens_recomputed > 0


@pytest.mark.parametrize("chunk", [1, 7])
def test_in_steps_of_any_size(engine, alone, chunk):
    work, expected = alone
    outputs, core = engine(work[:3], company=2, num_kv_blocks=300, max_num_batched_tokens=chunk)
    assert outputs == expected[:3]
    assert max(sum(entry.num_tokens for entry in event.entries) for event in core.events.recent(None)) == chunk
