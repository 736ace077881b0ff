"""The native sampler inside the engine: that it is the one in use, and that the specification would have said the same."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import LLM, EngineConfig, SamplingParams
from octavo.outputs import OutputAccumulator, RequestOutput
from octavo.sampling.native import NativeSampler
from octavo.sampling.sampler import NumpySampler
from octavo.wiring import EngineParts
from tests.tiny_models import write_tiny

pytest.importorskip("octavo._native", reason="the native module is not built")

SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.01},
    {"typical_p": 0.9, "presence_penalty": 0.5},
    {"temperature": 2.0, "allowed_token_ids": list(range(1000, 1100)), "logit_bias": {1001: 2.0}},
    {"temperature": 0.0, "min_tokens": 8, "frequency_penalty": 1.0},
]


def run(parts: EngineParts, sampler: type | None) -> tuple[list[RequestOutput], NativeSampler | NumpySampler]:
    """Twelve requests at once, two with each of the settings; `sampler` replaces the engine's own if given."""
    core, inputs, found = parts.core(), parts.input_processor(), {}
    runner = core.executor.runner
    if sampler is not None:
        runner.sampler = sampler()
    for i in range(12):
        prompt = np.random.default_rng(i).integers(1000, 40000, 5 + 3 * i).tolist()
        params = SamplingParams(
            **SETTINGS[i % 6],
            seed=i,
            max_tokens=12,
            logprobs=3 if i % 2 else None,
            logprobs_mode="processed" if i % 4 == 1 else "raw",
            prompt_logprobs=2 if i == 3 else None,
        )
        core.add_request(inputs.process(f"r{i}", prompt, params))
        found[f"r{i}"] = OutputAccumulator(f"r{i}", None, prompt, 1)
    while core.has_unfinished_requests():
        for delta in core.step():
            found[delta.request_id].add(delta)
    assert runner.sampler.rows == core.stats.tokens_sampled > 60
    return [item.output for item in found.values()], runner.sampler


def test_the_engine_samples_natively_what_the_specification_says(smollm2_path):
    def parts() -> EngineParts:
        return EngineParts.load(EngineConfig(model=str(smollm2_path), backend="cpu", num_kv_blocks=200))

    outputs, sampler = run(parts(), None)
    assert isinstance(sampler, NativeSampler)
    expected, sampler = run(parts(), NumpySampler)
    assert isinstance(sampler, NumpySampler)
    for got, wanted in zip(outputs, expected, strict=True):
        assert got.outputs[0].token_ids == wanted.outputs[0].token_ids and got.outputs[0].text == wanted.outputs[0].text
        for ours, theirs in (
            (got.outputs[0].logprobs, wanted.outputs[0].logprobs),
            (got.prompt_logprobs and got.prompt_logprobs[1:], wanted.prompt_logprobs and wanted.prompt_logprobs[1:]),
        ):
            assert (ours is None) == (theirs is None)
            for entry, other in zip(ours or [], theirs or [], strict=True):
                assert [(i, e.rank) for i, e in entry.items()] == [(i, e.rank) for i, e in other.items()]
                assert [e.logprob for e in entry.values()] == pytest.approx([e.logprob for e in other.values()], abs=1e-5)


BACKENDS = [
    ({"backend": "cpu"}, "native"),
    ({"backend": "cpu", "op_backends": "attend=reference"}, "native"),
    ({"backend": "reference"}, "numpy"),
]


@pytest.mark.parametrize(("settings", "name"), BACKENDS, ids=str)
def test_each_backend_has_its_sampler(tmp_path, settings, name):
    with LLM(str(write_tiny(tmp_path / "m", family="llama", fmt="safetensors", seed=1).path), **settings) as llm:
        llm.generate(["ab", "c"], SamplingParams(max_tokens=4, temperature=0.9, ignore_eos=True))
        sampler = llm.executor.runner.sampler
        assert (sampler.name, sampler.rows) == (name, 8)
