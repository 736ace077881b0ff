"""From Prepared and CompletionDeltas to what a client reads: a whole reply, or the chunks of a stream.

Both are made of the same parts by the same functions, so that joined chunks equal the reply. Dicts, not models: a chunk
costs a few microseconds, and `encode` makes one line of JSON of it. A stream always has the same tail, whatever the
timing: the content of a choice, one chunk with its finish_reason and nothing else, usage if it was asked for.
Owner of what must be remembered of one reply: joined choices, offsets, counts of tokens.
Not here: SSE framing (sse.py), statuses and error objects (errors.py), where deltas come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from octavo.outputs import CompletionDelta, Logprob, OutputAccumulator, PositionLogprobs
from octavo.server.errors import ApiError
from octavo.server.prepared import Endpoint, Prepared, PreparedPrompt
from octavo.server.text_offsets import TextOffsets, bytes_of

Json = dict[str, Any]

#: JSON has no infinity; this is OpenAI's word for "very unlikely".
LOGPROB_FLOOR = -9999.0


class Head(NamedTuple):
    """What every chunk of one reply repeats."""

    #: "chatcmpl-..." or "cmpl-...": Job.request_id.
    id: str
    #: Unix time in seconds.
    created: int
    fingerprint: str | None = None


def encode(value: Json) -> bytes:
    """One line of JSON in UTF-8."""
    return msgspec.json.encode(value)


class WholeReply:
    """For requests without `stream`: `add` all deltas, then take `body`."""

    def __init__(self, endpoint: Endpoint, prepared: Prepared, head: Head) -> None:
        self._endpoint, self._prepared, self._head = endpoint, prepared, head
        self._joined = {p.request_id: OutputAccumulator(p.request_id, None, [], prepared.n) for p in prepared.prompts}
        self._usage = _Usage(prepared)
        #: Set once a choice ended with "abort" or "error": the reply is this, and the rest of the request should be aborted.
        self.failure: ApiError | None = None

    def add(self, deltas: Sequence[CompletionDelta]) -> None:
        for delta in deltas:
            if self.failure is None:
                self.failure = _failure(delta)
                self._usage.add(delta)
                self._joined[delta.request_id].add(delta)

    def body(self) -> Json:
        """The reply; call it after every choice has finished and `failure` is None."""
        object_ = "chat.completion" if self._endpoint == "chat" else "text_completion"
        choices = [choice for number in range(len(self._prepared.prompts)) for choice in self._choices(number)]
        reply = _envelope(self._head, object_, self._prepared.model, choices) | {"usage": self._usage.report()}
        if self._endpoint == "chat" and self._prepared.prompt_logprobs is not None:
            output = self._joined[self._prepared.prompts[0].request_id].output
            reply["prompt_logprobs"] = _prompt_logprobs(output.prompt_logprobs, self._prepared.prompt_logprobs)
        return reply

    def _choices(self, number: int) -> list[Json]:
        prepared, prompt = self._prepared, self._prepared.prompts[number]
        output = self._joined[prompt.request_id].output
        choices = []
        for choice in output.outputs:
            index = number * prepared.n + choice.index
            ending = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            if self._endpoint == "chat":
                message = {"role": "assistant", "content": choice.text, "refusal": None}
                logprobs = None if prepared.logprobs is None else _chat_logprobs(choice.token_ids, choice.logprobs, prepared.logprobs)
                choices.append({"index": index, "message": message, "logprobs": logprobs, **ending})
                continue
            parts = _CompletionLogprobs(prepared, prompt)
            opening = parts.opening(output.prompt_logprobs)
            logprobs = _joined(opening, parts.of(choice.token_ids, choice.logprobs))
            text = (prompt.echo_text or "") + choice.text
            made: Json = {"index": index, "text": text, "logprobs": logprobs, **ending}
            if prepared.prompt_logprobs is not None:
                made["prompt_logprobs"] = _prompt_logprobs(output.prompt_logprobs, prepared.prompt_logprobs)
            choices.append(made)
        return choices


class StreamReply:
    """For requests with `stream`: send the chunks of each `add`, then those of `end`, then [DONE]."""

    def __init__(self, endpoint: Endpoint, prepared: Prepared, head: Head) -> None:
        self._endpoint, self._prepared, self._head = endpoint, prepared, head
        self._prompts = {prompt.request_id: _Prompt(number, prompt) for number, prompt in enumerate(prepared.prompts)}
        self._opened: dict[int, _CompletionLogprobs] = {}
        self._usage = _Usage(prepared)
        #: As in WholeReply. `add` still returns what came before it: send that, then the error, and no [DONE].
        self.failure: ApiError | None = None

    def add(self, deltas: Sequence[CompletionDelta]) -> list[Json]:
        """The chunks these deltas make, possibly none."""
        chunks: list[Json] = []
        for delta in deltas:
            if self.failure is None:
                self.failure = _failure(delta)
                self._usage.add(delta)
                if self.failure is None or delta.text:  # no opening for a choice that has nothing else
                    chunks += self._chunks(delta)
        return chunks

    def end(self) -> list[Json]:
        """What follows the last finish_reason: the usage chunk if it was asked for."""
        return [self._chunk(None, self._usage.report())] if self._prepared.include_usage else []

    def _chunks(self, delta: CompletionDelta) -> list[Json]:
        prompt = self._prompts[delta.request_id]
        if delta.prompt_logprobs is not None:
            prompt.logprobs = delta.prompt_logprobs
        index = prompt.number * self._prepared.n + delta.index
        chunks = [] if index in self._opened else self._open(index, prompt)
        logprobs = self._logprobs(self._opened[index], delta)
        if delta.text or logprobs is not None:
            chunks.append(self._chunk(self._choice(index, delta.text, logprobs)))
        if delta.finish_reason in ("stop", "length"):
            ending: Json = {"delta": {}} if self._endpoint == "chat" else {"text": ""}
            ending |= {"logprobs": None, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            chunks.append(self._chunk({"index": index, **ending}))
        return chunks

    def _open(self, index: int, prompt: _Prompt) -> list[Json]:
        """What a choice begins with: the role, or the prompt where it is wanted."""
        asked = self._prepared.prompt_logprobs
        parts = self._opened[index] = _CompletionLogprobs(self._prepared, prompt.prepared)
        if self._endpoint == "chat":
            opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            chunk = self._chunk(opening)
            if asked is not None and index == 0:
                chunk["prompt_logprobs"] = _prompt_logprobs(prompt.logprobs, asked)
            return [chunk]
        logprobs = parts.opening(prompt.logprobs)
        if not self._prepared.echo and asked is None:
            return []
        choice = self._choice(index, prompt.prepared.echo_text or "", logprobs)
        if asked is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(prompt.logprobs, asked)
        return [self._chunk(choice)]

    def _logprobs(self, parts: _CompletionLogprobs, delta: CompletionDelta) -> Json | None:
        asked = self._prepared.logprobs
        if asked is None or not delta.token_ids:
            return None
        return (
            _chat_logprobs(delta.token_ids, delta.logprobs, asked)
            if self._endpoint == "chat"
            else parts.of(delta.token_ids, delta.logprobs)
        )

    def _choice(self, index: int, text: str, logprobs: Json | None) -> Json:
        if self._endpoint == "chat":
            return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, choice: Json | None, usage: Json | None = None) -> Json:
        object_ = "chat.completion.chunk" if self._endpoint == "chat" else "text_completion"
        chunk = _envelope(self._head, object_, self._prepared.model, [] if choice is None else [choice])
        if self._prepared.include_usage:
            chunk["usage"] = usage
        return chunk


@dataclass(slots=True)
class _Prompt:
    number: int
    prepared: PreparedPrompt
    #: They come with the first delta of the prompt, whichever choice that is of.
    logprobs: list[PositionLogprobs | None] | None = None


def _envelope(head: Head, object_: str, model: str, choices: list[Json]) -> Json:
    return {
        "id": head.id,
        "object": object_,
        "created": head.created,
        "model": model,
        "system_fingerprint": head.fingerprint,
        "choices": choices,
    }


def _failure(delta: CompletionDelta) -> ApiError | None:
    """OpenAI has no finish_reason for these two: the request fails as a whole."""
    if delta.finish_reason == "error":
        return ApiError(500, f"the answer could not be computed: {delta.error or 'no reason given'}", code="generation_failed")
    if delta.finish_reason == "abort":
        return ApiError(503, "the server ended this request before its answer was complete", code="request_aborted")
    return None


@dataclass(slots=True)
class _Usage:
    """Every prompt counts once, every token of every choice counts, also one that left no text or whose choice is not returned."""

    prepared: Prepared
    completion_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)

    def add(self, delta: CompletionDelta) -> None:
        self.completion_tokens += len(delta.token_ids) + delta.num_discarded_tokens
        if delta.num_cached_tokens > self.cached.get(delta.request_id, 0):
            self.cached[delta.request_id] = delta.num_cached_tokens

    def report(self) -> Json:
        prompt_tokens = sum(prompt.num_prompt_tokens for prompt in self.prepared.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


# Logprobs


def _number(value: float) -> float:
    return value if value >= LOGPROB_FLOOR and math.isfinite(value) else LOGPROB_FLOOR


def _top(position: PositionLogprobs, most: int) -> list[Logprob]:
    return sorted((one for one in position.values() if one.rank <= most), key=lambda one: one.rank)


def _chat_logprobs(token_ids: Sequence[int], found: Sequence[PositionLogprobs] | None, most: int) -> Json:
    """Exactly the `most` most probable tokens beside the chosen one, which may or may not be among them."""
    content = [
        _chat_token(position[token]) | {"top_logprobs": [_chat_token(one) for one in _top(position, most)]}
        for token, position in zip(token_ids, found or [], strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(one: Logprob) -> Json:
    return {"token": one.text, "logprob": _number(one.logprob), "bytes": list(bytes_of(one.text))}


def _prompt_logprobs(found: Sequence[PositionLogprobs | None] | None, most: int) -> list[Json | None] | None:
    """vLLM's form: token id -> its logprob, rank and text; the token of the prompt first, null for the first position."""
    if found is None:
        return None
    return [None if position is None else _prompt_position(position, most) for position in found]


def _prompt_position(position: PositionLogprobs, most: int) -> Json:
    return {
        str(token): {"logprob": _number(one.logprob), "rank": one.rank, "decoded_token": one.text}
        for place, (token, one) in enumerate(position.items())
        if place == 0 or one.rank <= most
    }


class _CompletionLogprobs:
    """The four parallel lists of /v1/completions for one choice, piece by piece; owns where in its text the next token begins."""

    def __init__(self, prepared: Prepared, prompt: PreparedPrompt) -> None:
        self._asked = prepared.logprobs
        self._prompt = prompt
        self._hidden = frozenset(prepared.hidden_token_ids)
        self._offsets = TextOffsets(len(prompt.echo_text or ""), prompt.tail, prompt.strips_space)

    def opening(self, found: Sequence[PositionLogprobs | None] | None) -> Json | None:
        """Those of the prompt, where it is echoed."""
        prompt = self._prompt
        if self._asked is None or prompt.echo_token_texts is None or found is None:
            return None
        positions = [None if position is None else next(iter(position.values())) for position in found]
        return {
            "tokens": prompt.echo_token_texts,
            "token_logprobs": [None if one is None else _number(one.logprob) for one in positions],
            "top_logprobs": [
                None if position is None else _by_text(next(iter(position.values())), position, self._asked) for position in found
            ],
            "text_offset": prompt.echo_offsets,
        }

    def of(self, token_ids: Sequence[int], found: Sequence[PositionLogprobs] | None) -> Json | None:
        """Those of generated tokens, in order."""
        if self._asked is None:
            return None
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, position in zip(token_ids, found or [], strict=True):
            chosen = position[token]
            made["tokens"].append(chosen.text)
            made["token_logprobs"].append(_number(chosen.logprob))
            made["top_logprobs"].append(_by_text(chosen, position, self._asked))
            made["text_offset"].append(self._offsets.add(b"" if token in self._hidden else bytes_of(chosen.text)))
        return made


def _by_text(chosen: Logprob, position: PositionLogprobs, most: int) -> dict[str, float]:
    """The most probable tokens and the chosen one; of tokens that read the same, the more probable."""
    found: dict[str, float] = {}
    for one in [*_top(position, most), chosen]:
        found.setdefault(one.text, _number(one.logprob))
    return found


def _joined(first: Mapping[str, list[Any]] | None, second: Mapping[str, list[Any]] | None) -> Json | None:
    if first is None or second is None:
        return dict(second) if second is not None else None
    return {name: [*first[name], *second[name]] for name in second}
