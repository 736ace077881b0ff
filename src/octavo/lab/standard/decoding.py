"""Two ways to decode greedily with the same model and the same ops. Each token needs the one before it; the question is
what else is computed with it.

Stateless. Not here: what `model.forward` does (model.py), your own way (strategy.py, examples/).
"""

from __future__ import annotations

from octavo.lab.standard.model import LabModel


def naive(model: LabModel, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """Everything is computed again for each token: n tokens cost 1 + 2 + ... + n rows, the square of the length."""
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        logits = model.forward(ids)
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt_ids) :]


def kv_cache(model: LabModel, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """K and V of a token do not change once it is there: they are kept, and each step computes one row."""
    cache = model.new_cache()
    logits = model.forward(prompt_ids, cache)
    answer = [int(logits[-1].argmax())]
    while len(answer) < max_tokens:
        logits = model.forward([answer[-1]], cache)
        answer.append(int(logits[-1].argmax()))
    return answer
