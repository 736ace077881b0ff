"""What a caller gets back: whole results, and the pieces of a stream.

Plain data. The engine core emits `CompletionDelta`s, one per choice and step; the caller's side joins them into a
`RequestOutput` (`OutputAccumulator`), so that a stream and a whole reply can never differ.
Not here: making text and finish reasons (engine/output_processor.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token at one position; rank 1 is the most probable."""

    logprob: float
    rank: int
    text: str = ""


#: One position: the chosen token first, then the most probable ones in order (the chosen one is always included).
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class RequestMetrics:
    """Monotonic times in seconds (time.perf_counter of the engine's process) and counts of one request."""

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds."""
        return None if self.first_token is None else self.first_token - self.arrival


@dataclass(slots=True)
class CompletionDelta:
    """What one step added to one choice of one request.

    `text` is final: nothing in it is ever taken back. `token_ids` and `logprobs` have one entry a token; they may run
    ahead of `text`, which is withheld while it could be the start of a stop string or half a character.
    Exactly one delta per choice has a finish_reason, and it is the last.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    #: The stop string or stop token id that ended it; None for an end-of-sequence token.
    stop_reason: str | int | None = None
    error: str | None = None
    #: Known from the first delta on.
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    #: The seed in force (drawn at random when the request had none).
    seed: int = 0
    #: Only on the first delta of a request that asked: entry 0 is None, the first token has no context.
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    #: Only with finish_reason.
    metrics: RequestMetrics | None = None
    #: Only with finish_reason, where choices were ranked (best_of, beams); else it is the sum of `logprobs`.
    cumulative_logprob: float | None = None
    #: Tokens of choices that were drawn and are not returned (best_of), on one delta of the request.
    num_discarded_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One finished or growing choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class RequestOutput:
    """Result of one prompt: `outputs` has n choices in index order. `finished` once every choice is."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    seed: int = 0
    #: Tokens of choices that were drawn and are not returned (best_of).
    num_discarded_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.outputs)


class OutputAccumulator:
    """Joins the deltas of one request into its RequestOutput; owns that output until it is finished."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], n: int) -> None:
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, [CompletionOutput(i) for i in range(n)])

    def add(self, delta: CompletionDelta) -> None:
        """Join one delta. Raises ValueError, before anything is changed, for one that breaks the contract of
        CompletionDelta: after the last of its choice, or without one logprobs entry a token."""
        out = self.output
        choice = out.outputs[delta.index]
        if choice.finish_reason is not None:
            raise ValueError(f"choice {delta.index} of request {delta.request_id} has finished: nothing may follow")
        if delta.logprobs is not None and len(delta.logprobs) != len(delta.token_ids):
            raise ValueError(f"{len(delta.logprobs)} logprobs for {len(delta.token_ids)} tokens of request {delta.request_id}")
        out.num_cached_tokens = max(out.num_cached_tokens, delta.num_cached_tokens)
        out.seed = delta.seed
        out.num_discarded_tokens += delta.num_discarded_tokens
        if delta.prompt_logprobs is not None:
            out.prompt_logprobs = delta.prompt_logprobs
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs, choice.cumulative_logprob = [], 0.0
            choice.logprobs.extend(delta.logprobs)
            for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):
                choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + entry[token].logprob
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            choice.error, choice.metrics = delta.error, delta.metrics
            if delta.cumulative_logprob is not None:
                choice.cumulative_logprob = delta.cumulative_logprob
