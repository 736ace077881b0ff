"""What the HTTP process and the input processes say to each other: a raw body in, checked prompts or a refusal out.

Plain data (msgspec, MessagePack). The HTTP process never parses a body: whatever a hostile one costs, it costs an input
process, which has a deadline.
Not here: the checks (prepare.py), pipes and processes (input_pool.py, input_process.py).
"""

from __future__ import annotations

from typing import Literal

import msgspec

Endpoint = Literal["chat", "completions"]


class Job(msgspec.Struct, frozen=True):
    endpoint: Endpoint
    body: bytes
    #: "chatcmpl-..." or "cmpl-..."; prompt i of several becomes "<request_id>-<i>".
    request_id: str
    #: Separates the prefix cache of one API key from another's; None without keys.
    key_scope: str | None
    #: time.perf_counter when the request came in.
    arrival: float


class PreparedPrompt(msgspec.Struct, frozen=True):
    request_id: str
    #: An encoded EngineRequest (engine/core_messages.py), passed on unread.
    request: msgspec.Raw
    num_prompt_tokens: int
    #: completions with echo: the prompt as text, and the text of each of its tokens.
    echo_text: str | None = None
    echo_token_texts: list[str] | None = None


class Prepared(msgspec.Struct, tag="prepared", frozen=True):
    """A request that may go to the engine."""

    prompts: list[PreparedPrompt]
    #: Choices of each prompt; choice c of prompt i is reported as index i * n + c.
    n: int
    stream: bool
    #: stream_options.include_usage
    include_usage: bool
    #: The name the client used.
    model: str
    #: Alternatives to report for each token, None: no logprobs in the reply.
    logprobs: int | None
    echo: bool
    #: The client asked for prompt_logprobs itself (they are reported beside the choices).
    prompt_logprobs: bool
    #: Fields that were accepted and do nothing: for the warning header.
    ignored: list[str]


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """What becomes an OpenAI error object."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None


Outcome = Prepared | Refused
