"""The real SmolLM2 on the NumPy reference: greedy text equal to transformers' on the same dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from tests.models.oracle import logits_of, smollm2_in_transformers

pytest.importorskip("torch")

PROMPTS = [
    "Deep learning is",
    "The capital of France is",
    "Once upon a time, in a small village,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are:\n1.",
    "Q: What is the largest planet?\nA:",
    "import numpy as np\n\n",
    "A recipe for pancakes:\n",
    "The quick brown fox",
    "In 1969, humans",
    "Water boils at",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n",
    "The meaning of life",
    "1, 2, 3, 4,",
    "Photosynthesis is the process by which",
    "El perro come",
    "# Title\n\n## Introduction\n",
    "To be, or not to be,",
    "The difference between a list and a tuple in Python",
]
NEW_TOKENS = 64
#: Where our token is not transformers' own choice, the two must be this close: a tie that rounding decided.
TIE = 1e-3


def test_greedy_text_equals_transformers(smollm2_path):
    llm = LLM(str(smollm2_path), backend="reference")
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    oracle = smollm2_in_transformers(smollm2_path)
    compared = 0
    for output in outputs:
        prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(generated) == NEW_TOKENS
        logits = logits_of(oracle, [*prompt, *generated[:-1]]).astype(np.float64)[len(prompt) - 1 :]
        logprobs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1, keepdims=True)
        for row, token in zip(logprobs, generated, strict=True):
            assert row.max() - row[token] < TIE
            compared += 1
    assert compared == len(PROMPTS) * NEW_TOKENS
