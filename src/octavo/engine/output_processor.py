"""OutputProcessor: drawn tokens to text, finish reasons and CompletionDeltas.

Owner of one detokenizer and one stop checker per choice, from its first token to its last. It runs inside the core, so
that nothing is generated past a stop. Not here: sequences and blocks (scheduler.py), joining deltas (outputs.py).

One rule for the end of every choice: unless a stop string matched, the text withheld because it might have become one
is released; an incomplete last character is dropped (detokenizer.finish). So a stream and a whole reply never differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.executor import Clock, ExecutorInfo
from octavo.engine.input_processor import EngineTokenizer
from octavo.engine.request import Request, max_output_tokens
from octavo.engine.scheduler_output import SampledToken
from octavo.engine.stop import StopChecker
from octavo.outputs import CompletionDelta, FinishReason, PositionLogprobs


class Ending(NamedTuple):
    """Why a choice is over. `stop_reason`: the stop string or stop token id, None for the model's own end."""

    reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(slots=True)
class _Choice:
    detokenizer: IncrementalDetokenizer
    stop: StopChecker
    #: Output tokens at which it ends whatever they are: max_tokens, the context's end, the pool's end.
    max_tokens: int

    def flush(self) -> str:
        """The rest of the text; drops an incomplete character."""
        emitted, matched = self.stop.push(self.detokenizer.finish())
        return emitted + ("" if matched is not None else self.stop.flush())


class OutputProcessor:
    def __init__(self, tokenizer: EngineTokenizer, info: ExecutorInfo, clock: Clock = perf_counter) -> None:
        self.tokenizer = tokenizer
        self.info = info
        self.clock = clock
        self._choices: dict[str, _Choice] = {}

    def _choice(self, request: Request) -> _Choice:
        choice = self._choices.get(request.request_id)
        if choice is None:
            params, prompt = request.origin.sampling_params, request.origin.prompt_token_ids
            room = max_output_tokens(self.info, len(prompt))
            choice = self._choices[request.request_id] = _Choice(
                IncrementalDetokenizer(self.tokenizer, prompt, params.skip_special_tokens),
                StopChecker(params.stop, params.include_stop_in_output),
                min(request.origin.max_tokens, room),
            )
        return choice

    def fork(self, request: Request, child: Request) -> None:
        """The child goes on from the text of `request`."""
        choice = self._choice(request)
        self._choices[child.request_id] = replace(choice, detokenizer=choice.detokenizer.copy(), stop=choice.stop.copy())

    def forget(self, request: Request) -> None:
        """Nothing follows, and there is no last delta."""
        self._choices.pop(request.request_id, None)

    def add_token(self, request: Request, sampled: SampledToken) -> tuple[CompletionDelta, Ending | None]:
        """The delta of one drawn token, which is the last in `request.token_ids`; and the ending, if this was it.

        The delta of an ending is complete but for its metrics: pass it through `close`.
        """
        choice = self._choice(request)
        now = self.clock()
        if request.metrics.first_token is None:
            request.metrics.first_token = now
        request.metrics.last_token = now
        text, ending = self._text(request, choice, sampled.token_id)
        if ending is None and request.num_output_tokens >= choice.max_tokens:
            ending = Ending("length")
            text += choice.flush()
        delta = self.delta(request, text)
        delta.token_ids.append(sampled.token_id)
        if sampled.logprobs is not None:
            delta.logprobs = [self.with_texts(sampled.logprobs)]
        return delta, ending

    def _text(self, request: Request, choice: _Choice, token_id: int) -> tuple[str, Ending | None]:
        """Text made final by a token, and the ending by a stop id or a stop string."""
        params, count = request.origin.sampling_params, request.num_output_tokens
        if count > params.min_tokens:
            if token_id in request.origin.eos_token_ids:
                return choice.flush(), Ending("stop")
            if token_id in params.stop_token_ids:
                emitted = choice.stop.push(choice.detokenizer.push(token_id))[0] if params.include_stop_in_output else ""
                return emitted + choice.flush(), Ending("stop", token_id)
        emitted, matched = choice.stop.push(choice.detokenizer.push(token_id), enabled=count >= params.min_tokens)
        return emitted, None if matched is None else Ending("stop", matched)

    def delta(self, request: Request, text: str = "") -> CompletionDelta:
        """A delta of a request's choice, with what every delta carries; prompt logprobs the first time they are ready."""
        delta = CompletionDelta(
            request.origin.request_id,
            request.choice,
            text,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            seed=request.origin.seed,
        )
        found = request.take_prompt_logprobs()
        if found is not None:
            delta.prompt_logprobs = [None if entry is None else self.with_texts(entry) for entry in found]
        return delta

    def early_end(self, request: Request) -> CompletionDelta:
        """The last delta of a choice that ends without a new token (abort, error): releases withheld text."""
        choice = self._choices.get(request.request_id)
        return self.delta(request, "" if choice is None else choice.flush())

    def close(self, request: Request, delta: CompletionDelta, ending: Ending, error: str | None = None) -> CompletionDelta:
        """Make a delta the last one of its choice and forget the choice."""
        self._choices.pop(request.request_id, None)
        delta.finish_reason, delta.stop_reason, delta.error = ending.reason, ending.stop_reason, error
        delta.metrics = replace(request.metrics)
        return delta

    def with_texts(self, entry: PositionLogprobs) -> PositionLogprobs:
        return {token: replace(logprob, text=self.tokenizer.token_text(token)) for token, logprob in entry.items()}
