"""BestOf: of the choices that a request draws, the n with the highest logprob a token (OpenAI's definition of best_of).

Owner of one request's deltas until its last choice has ended; nothing of it is known before. The engine core makes one for each
request with best_of > n and passes it what it would have sent. Not here: drawing the choices, which are like those of any n.
"""

from __future__ import annotations

import math

from octavo.engine.request import EngineRequest
from octavo.outputs import CompletionDelta, CompletionOutput, OutputAccumulator


class BestOf:
    def __init__(self, origin: EngineRequest) -> None:
        params = origin.sampling_params
        self._n = params.n
        self._wants_logprobs = params.logprobs is not None
        self._joined = OutputAccumulator(origin.request_id, None, origin.prompt_token_ids, params.num_choices)
        self._num_prompt_tokens = len(origin.prompt_token_ids)

    def add(self, delta: CompletionDelta) -> list[CompletionDelta]:
        """Join a delta; returns one whole delta for each of the n best with the last of them, nothing before."""
        self._joined.add(delta)
        output = self._joined.output
        if not output.finished:
            return []
        ranked = sorted(output.outputs, key=_rank)
        deltas = [self._whole(choice, index) for index, choice in enumerate(ranked[: self._n])]
        deltas[0].prompt_logprobs = output.prompt_logprobs
        deltas[0].num_discarded_tokens = sum(len(choice.token_ids) for choice in ranked[self._n :])
        return deltas

    def _whole(self, choice: CompletionOutput, index: int) -> CompletionDelta:
        output = self._joined.output
        return CompletionDelta(
            output.request_id,
            index,
            choice.text,
            choice.token_ids,
            choice.logprobs if self._wants_logprobs else None,
            choice.finish_reason,
            choice.stop_reason,
            choice.error,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            seed=output.seed,
            metrics=choice.metrics,
            cumulative_logprob=choice.cumulative_logprob,
        )


def _rank(choice: CompletionOutput) -> tuple[bool, float, int]:
    """Smaller is better: complete choices first, then by mean logprob, equal ones in the order they were drawn in."""
    mean = (choice.cumulative_logprob or 0.0) / len(choice.token_ids) if choice.token_ids else -math.inf
    return choice.finish_reason not in ("stop", "length"), -mean, choice.index
