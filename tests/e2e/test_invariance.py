"""Promise 1 on the real model and the native kernels: the same text, bit for bit, whatever else happens.

Each test asserts the counter that proves its feature fired. Logprobs are compared as exact numbers, so that a difference
of one unit in the last place shows even where the text is the same.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from tests.models import harness

pytest.importorskip("octavo._native", reason="needs the native module")

SENTENCE = "The history of computing is longer than the history of electronic machines, and it begins with counting. "


def requests(count: int = 32) -> list[tuple[list[int], SamplingParams]]:
    """Mixed lengths (1 to about 120 tokens), some greedy and some sampled, with penalties and logprobs here and there."""
    rng = np.random.default_rng(5)
    made = []
    for i in range(count):
        prompt = rng.integers(1000, 40000, int(rng.integers(1, 120))).tolist()
        params = SamplingParams(
            temperature=0 if i % 3 == 0 else 0.8,
            top_p=1.0 if i % 2 else 0.9,
            repetition_penalty=1.1 if i % 4 == 1 else 1.0,
            seed=i,
            max_tokens=int(rng.integers(20, 40)),
            ignore_eos=True,
            logprobs=2,
        )
        made.append((prompt, params))
    return made


def results(outputs) -> list[list[tuple]]:
    return [[(c.index, c.text, c.token_ids, c.logprobs) for c in output.outputs] for output in outputs]


def alone(path, work, **settings):
    """Each request by itself: the answer everything else is compared with."""
    with LLM(str(path), backend="cpu", enable_prefix_caching=False, **settings) as llm:
        return [results(llm.generate([prompt], params))[0] for prompt, params in work]


@pytest.fixture(scope="module")
def solo(smollm2_path):
    work = requests()
    return work, alone(smollm2_path, work)


def together(path, work, **settings):
    with LLM(str(path), backend="cpu", **settings) as llm:
        outputs = llm.generate([p for p, _ in work], [s for _, s in work])
        return results(outputs), outputs, llm.stats()


def test_batched(smollm2_path, solo):
    work, expected = solo
    got, _, stats = together(smollm2_path, work)
    assert got == expected
    assert stats["num_preemptions"] == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_every_request_preempted(smollm2_path, solo, chunk):
    """A pool that holds about two of the 32 requests, and chunks of 1, 7 and 64 tokens a step."""
    work, expected = solo
    got, outputs, stats = together(
        smollm2_path, work, num_kv_blocks=24, max_num_batched_tokens=max(chunk, 32), max_num_seqs=32, max_decode_batch_size=32
    )
    assert got == expected
    assert stats["num_preemptions"] > 0
