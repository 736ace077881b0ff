"""Beam search against transformers' generate(num_beams) in float32 on a tiny random model, whole stack, reference backend.

Where the two part, it must be a near-tie: our hypothesis, scored by transformers' own logits, is as good as theirs.
"""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from tests.models.oracle import logits_of
from tests.tiny_models import hf_model, write_tiny

torch = pytest.importorskip("torch")
PROMPT = [104, 101, 108, 108, 111, 44, 32]
NEAR = 1e-4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = write_tiny(tmp_path_factory.mktemp("beams") / "model", seed=11)
    return model, hf_model(model)


def total(oracle, tokens: list[int]) -> float:
    rows = torch.log_softmax(torch.tensor(logits_of(oracle, PROMPT + tokens)).double(), dim=-1)
    return sum(float(rows[len(PROMPT) - 1 + i, token]) for i, token in enumerate(tokens))


def theirs(oracle, width: int, n: int, max_tokens: int, stops: list[int], **settings) -> list[list[int]]:
    found = oracle.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        num_beams=width,
        num_return_sequences=n,
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=stops,
        pad_token_id=271,
        return_dict_in_generate=True,
        **settings,
    )
    cut = []
    for row in found.sequences[:, len(PROMPT) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        cut.append(row[:end])
    return cut


SETTINGS = [
    {"early_stopping": True, "length_penalty": 1.0},
    {"early_stopping": False, "length_penalty": 1.0},
    {"early_stopping": "never", "length_penalty": 1.0},
    {"early_stopping": False, "length_penalty": 0.0},
    {"early_stopping": "never", "length_penalty": 2.0},
    {"early_stopping": False, "length_penalty": -1.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_same_sequences_as_transformers(tiny, settings):
    """Logits of a random model are nearly even, so many ids end a sequence: beams end at every length, and at the last one."""
    model, oracle = tiny
    length, parted, ended = settings["length_penalty"], 0, set()
    with LLM(str(model.path), backend="reference", kv_dtype="f32", num_kv_blocks=256) as llm:
        for width, n, count, num_stops in ((2, 2, 12, 16), (4, 4, 12, 8), (4, 1, 9, 2), (5, 3, 20, 15)):
            stops = list(range(num_stops))
            params = SamplingParams(beam_width=width, n=n, max_tokens=count, ignore_eos=True, stop_token_ids=stops, **settings)
            ours = llm.generate(PROMPT, params)[0].outputs
            for choice, tokens in zip(ours, theirs(oracle, width, n, count, stops, **settings), strict=True):
                assert choice.cumulative_logprob == pytest.approx(total(oracle, choice.token_ids), abs=1e-3)
                ended.add((choice.finish_reason, len(choice.token_ids)))
                if choice.token_ids != tokens:
                    parted += 1
                    score = choice.cumulative_logprob / len(choice.token_ids) ** length
                    assert score == pytest.approx(total(oracle, tokens) / len(tokens) ** length, abs=NEAR)
        assert llm.stats().forks > 4 * 8
    assert parted <= 1 and len(ended) > 1
