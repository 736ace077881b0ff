"""A raw body -> Prepared, or Refused with a reason: JSON, fields, types, template, tokens, in that order.

A pure function of the job and the Intake (but for the seeds that InputProcessor draws). It runs in an input process, since
what it costs is up to the client. No message repeats a body; some show up to 80 characters of the one bad value.
Not here: the HTTP side of it (input_pool.py), what the engine does with the result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from octavo.engine.core_messages import encode_request
from octavo.engine.input_processor import MAX_SALT_CHARS, EngineTokenizer, InputProcessor, Prompt
from octavo.engine.request import EngineRequest
from octavo.errors import InvalidRequestError, shown
from octavo.sampling_params import MAX_BEAM_WIDTH, SamplingParams
from octavo.server import fields, json_body
from octavo.server.prepared import Endpoint, Job, Outcome, Prepared, PreparedPrompt, Refused
from octavo.server.protocol import ChatRequest, CompletionRequest, checked
from octavo.server.text_offsets import TextOffsets

#: Logprobs in one reply, of prompt and answer: they are kept until they are sent, and a whole reply is made in one go.
MAX_LOGPROBS = 250_000

_SAMPLING = (
    "n", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids", "seed",
    "skip_special_tokens", "length_penalty", "early_stopping",
)  # fmt: skip
#: They mean something only with beams.
_OF_BEAMS = ("length_penalty", "early_stopping")
#: Names of our own in messages -> names in a body.
_RENAMED: dict[Endpoint, dict[str, str]] = {"chat": {"logprobs": "top_logprobs", "prompt": "messages"}, "completions": {}}


class Intake(NamedTuple):
    """What requests are prepared with."""

    processor: InputProcessor
    served_names: tuple[str, ...]
    max_json_depth: int
    max_prompts: int
    max_choices: int


def prepare(job: Job, intake: Intake) -> Outcome:
    """Never raises for anything that a body holds."""
    try:
        body = json_body.parse(job.body, intake.max_json_depth)
        honoured, ignored = fields.sort(job.endpoint, body)
        _check_model(honoured, intake.served_names)
        request = checked(job.endpoint, honoured)
        _check_stream_options(request)
        params = _sampling(request)
        _check_whole(request, params)
        if params.beam_width is None:
            ignored += [name for name in _OF_BEAMS if name in honoured]
        made = _chat(job, request, params, intake) if isinstance(request, ChatRequest) else _completions(job, request, params, intake)
        _check_logprobs(made)
        return _prepared(job, request, made, intake, ignored)
    except _NotServedError as error:
        return Refused(404, str(error), "model", "model_not_found")
    except InvalidRequestError as error:
        return _refused(error)


class _NotServedError(Exception):
    pass


def _fail(name: str, message: str, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {message}", param=name, code=code)


def _refused(error: InvalidRequestError) -> Refused:
    message, param = " ".join(str(error).split()), error.param
    if param is not None and message.startswith("must "):
        message = f"{param}: {message}"
    return Refused(400, message[:1000], param, error.code)


def _renamed(error: InvalidRequestError, endpoint: Endpoint) -> InvalidRequestError:
    """An error of the engine's side with the name that the field has in the API."""
    name = _RENAMED[endpoint].get(error.param or "")
    if name is None:
        return error
    message = str(error)
    if message.startswith(f"{error.param}:"):
        message = name + message[len(error.param or "") :]
    return InvalidRequestError(message, param=name, code=error.code)


# Fields


def _check_model(honoured: dict[str, Any], served_names: tuple[str, ...]) -> None:
    name = honoured.get("model")
    if isinstance(name, str) and name not in served_names:
        raise _NotServedError(f"the model {shown(name)} does not exist here; there is {', '.join(served_names)[:200]}")


def _check_stream_options(request: ChatRequest | CompletionRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise _fail("stream_options", "is only allowed together with stream: true")


def _check_whole(request: ChatRequest | CompletionRequest, params: SamplingParams) -> None:
    if request.stream and params.whole_only:
        what = "beam search" if params.beam_width is not None else "best_of larger than n"
        raise _fail("stream", f"an answer by {what} is known only when all of it is: ask without stream")


def _ranking(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """best_of and beam_width. In vLLM's dialect a beam search has as many beams as answers are drawn (best_of, n)."""
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    width = request.beam_width
    if width is None and request.use_beam_search:
        name, width = ("n", request.n) if best_of is None else ("best_of", best_of)
        if width > MAX_BEAM_WIDTH:
            raise _fail(name, f"beam search has at most {MAX_BEAM_WIDTH} beams")
        best_of = None
    return {"best_of": best_of, "beam_width": width}


def _sampling(request: ChatRequest | CompletionRequest) -> SamplingParams:
    chosen = {name: getattr(request, name) for name in _SAMPLING}
    logprobs, prompt_logprobs, max_tokens = request.logprobs, request.prompt_logprobs, request.max_tokens
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise _fail("top_logprobs", "is only allowed together with logprobs: true")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        if request.max_completion_tokens is not None:
            if max_tokens not in (None, request.max_completion_tokens):
                raise _fail("max_completion_tokens", "differs from max_tokens: send one of them")
            max_tokens = request.max_completion_tokens
    elif request.echo and (logprobs is not None or max_tokens == 0):
        # The logprobs of the prompt are what an echo shows; and without them a request for no tokens would have no answer.
        prompt_logprobs = max(prompt_logprobs or 0, logprobs or 0)
    if max_tokens == 0 and prompt_logprobs is None:
        only = "" if isinstance(request, ChatRequest) else "echo or "
        raise _fail("max_tokens", f"0 is only allowed together with {only}prompt_logprobs")
    try:
        return SamplingParams(
            **chosen,
            **_ranking(request),
            include_stop_in_output=request.include_stop_str_in_output,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except InvalidRequestError as error:
        raise _renamed(error, "chat" if isinstance(request, ChatRequest) else "completions") from None


def cache_scope(key_scope: str | None, cache_salt: str | None) -> str | None:
    """One salt of two, such that different pairs have different ones. Raises InvalidRequestError."""
    if cache_salt is not None and not 0 < len(cache_salt) <= MAX_SALT_CHARS:
        raise _fail("cache_salt", f"must be a string of 1 to {MAX_SALT_CHARS} characters")
    if key_scope is None and cache_salt is None:
        return None
    return hashlib.sha256(json.dumps([key_scope, cache_salt]).encode()).hexdigest()


# Prompts


def _check_choices(prompts: int, params: SamplingParams, intake: Intake) -> None:
    count = prompts * params.num_sequences
    if count > intake.max_choices:
        name = next(name for name in ("beam_width", "best_of", "n") if getattr(params, name) is not None)
        raise _fail(name, f"asks for {count} answers, at most {intake.max_choices} are allowed in one request")


def _chat(job: Job, request: ChatRequest, params: SamplingParams, intake: Intake) -> list[EngineRequest]:
    _check_choices(1, params, intake)
    opens = request.add_generation_prompt
    salt = cache_scope(job.key_scope, request.cache_salt)
    try:
        made = intake.processor.process_chat(
            job.request_id,
            request.messages,
            params,
            add_generation_prompt=not request.continue_final_message if opens is None else opens,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
            priority=request.priority,
            cache_salt=salt,
            tenant=job.key_scope,
            arrival=job.arrival,
        )
    except InvalidRequestError as error:
        raise _renamed(error, "chat") from None
    return [made]


def _completions(job: Job, request: CompletionRequest, params: SamplingParams, intake: Intake) -> list[EngineRequest]:
    prompts = prompts_of(request.prompt)
    if len(prompts) > intake.max_prompts:
        raise _fail("prompt", f"holds {len(prompts)} prompts, at most {intake.max_prompts} are allowed in one request")
    _check_choices(len(prompts), params, intake)  # before any of them is tokenised
    salt = cache_scope(job.key_scope, request.cache_salt)
    made = []
    for index, prompt in enumerate(prompts):
        name = job.request_id if len(prompts) == 1 else f"{job.request_id}-{index}"
        try:
            made.append(
                intake.processor.process(
                    name,
                    prompt,
                    params,
                    parse_special=True,
                    priority=request.priority,
                    cache_salt=salt,
                    tenant=job.key_scope,
                    arrival=job.arrival,
                )
            )
        except InvalidRequestError as error:
            if len(prompts) > 1 and error.param in ("prompt", None):
                raise InvalidRequestError(f"prompt[{index}]: {error}", param="prompt", code=error.code) from None
            raise
    return made


def prompts_of(value: Any) -> list[Prompt]:
    """One or several prompts as the API spells them: a text, token ids, or a list of texts or of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if all(type(item) is int for item in value):  # [] too: a prompt of no tokens
            return [value]
        if all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value):
            return value
    raise _fail("prompt", "must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _check_logprobs(made: Sequence[EngineRequest]) -> None:
    params = made[0].sampling_params
    of_prompts = sum(len(request.prompt_token_ids) for request in made) * ((params.prompt_logprobs or 0) + 1)
    of_answers = sum(request.max_tokens for request in made) * params.num_sequences * ((params.logprobs or 0) + 1)
    for name, asked, count, advice in (
        ("prompt_logprobs", params.prompt_logprobs, of_prompts, "ask for fewer"),
        ("logprobs", params.logprobs, of_answers, "ask for fewer, or lower max_tokens or n"),
    ):
        if asked is not None and count > MAX_LOGPROBS:
            raise _fail(name, f"this request could report {count} log probabilities, at most {MAX_LOGPROBS} are allowed: {advice}")


# The result


def _prepared(
    job: Job, request: ChatRequest | CompletionRequest, made: list[EngineRequest], intake: Intake, ignored: list[str]
) -> Prepared:
    params, tokenizer = made[0].sampling_params, intake.processor.tokenizer
    echo = isinstance(request, CompletionRequest) and request.echo
    has_offsets = job.endpoint == "completions" and params.logprobs is not None
    hidden = sorted(tokenizer.special_ids) if has_offsets and params.skip_special_tokens else []
    options = request.stream_options
    extra = [f"stream_options.{name}" for name in (options.model_extra or {})] if options is not None else []
    return Prepared(
        prompts=[_prepared_prompt(one, tokenizer, echo, has_offsets) for one in made],
        n=params.n,
        stream=request.stream,
        include_usage=options is not None and bool(options.include_usage),
        model=request.model or intake.served_names[0],
        logprobs=params.logprobs,
        echo=echo,
        prompt_logprobs=request.prompt_logprobs,
        ignored=fields.listed([*ignored, *extra]),
        hidden_token_ids=hidden,
    )


def _prepared_prompt(made: EngineRequest, tokenizer: EngineTokenizer, echo: bool, has_offsets: bool) -> PreparedPrompt:
    ids = made.prompt_token_ids
    # The core needs the tokens only.
    raw = msgspec.Raw(encode_request(replace(made, prompt=None)))
    if not echo and not has_offsets:
        return PreparedPrompt(made.request_id, raw, len(ids))
    pieces = _pieces(made, tokenizer)
    offsets = TextOffsets(strip_space=tokenizer.strip_leading_space)
    begins = [offsets.add(piece) for piece in pieces]
    return PreparedPrompt(
        made.request_id,
        raw,
        len(ids),
        echo_text=_text(pieces, offsets, tokenizer.strip_leading_space) if echo else None,
        echo_token_texts=[tokenizer.token_text(token) for token in ids] if echo and has_offsets else None,
        echo_offsets=begins if echo and has_offsets else None,
        tail=offsets.tail,
        strips_space=tokenizer.strip_leading_space and not any(pieces),
    )


def _pieces(made: EngineRequest, tokenizer: EngineTokenizer) -> list[bytes]:
    """The bytes that each token of a prompt adds to its text. Left out: special tokens that the tokenizer put around a text,
    and those that the answer would leave out too, in a prompt of token ids."""
    special: Any = tokenizer.special_ids
    if made.prompt is not None:
        text = made.prompt
        hidden = {token for token in set(made.prompt_token_ids) & special if tokenizer.token_text(token) not in text}
    else:
        hidden = special if made.sampling_params.skip_special_tokens else set()
    known = tokenizer.vocab_size  # logits may have more columns than the vocabulary has tokens
    return [b"" if token in hidden or token >= known else tokenizer.token_bytes(token) for token in made.prompt_token_ids]


def _text(pieces: list[bytes], offsets: TextOffsets, strips_space: bool) -> str:
    data = b"".join(pieces)
    data = data[: len(data) - len(offsets.tail)]  # an unfinished character belongs to the answer, which may complete it
    return (data.removeprefix(b" ") if strips_space else data).decode("utf-8", "replace")
