"""What the HTTP process and the input processes say to each other: a raw body in, checked prompts or a refusal out.

Plain data (msgspec, MessagePack). The HTTP process never parses a body: whatever a hostile one costs, it costs an input
process, which has a deadline. On the pipe each message follows its length in four bytes (big-endian), and each message to
an input process has one answer: Start and SetInfo are answered by Loaded or Broken, Job by an Outcome.
Not here: the checks (prepare.py), pipes and processes (input_pool.py, input_process.py).
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from octavo.config import EngineConfig
from octavo.engine.executor import ExecutorInfo

Endpoint = Literal["chat", "completions"]

LENGTH = struct.Struct(">I")


class Start(msgspec.Struct, tag="start", frozen=True):
    """The first message: load the tokenizer and the template of this model. Holds no keys."""

    config: EngineConfig
    served_names: tuple[str, ...]
    max_json_depth: int
    max_prompts: int
    max_choices: int
    #: Seconds after which an input process ends itself in the middle of a job, should nobody be left to end it.
    job_seconds: float
    #: Bytes that reading requests may take on top of what is loaded.
    memory: int
    #: Its priority once it is loaded (setpriority; 19 is the lowest).
    niceness: int
    #: "module:function" to call instead of FrontParts.load; "" but for tests.
    factory: str = ""


class SetInfo(msgspec.Struct, tag="info", frozen=True):
    """What the engine's model can do; jobs come after it."""

    info: ExecutorInfo


class Job(msgspec.Struct, tag="job", frozen=True):
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
    #: completions with echo: the prompt as text; with logprobs also the text of each of its tokens and where it begins.
    echo_text: str | None = None
    echo_token_texts: list[str] | None = None
    echo_offsets: list[int] | None = None
    #: completions with logprobs: bytes of a character that the prompt leaves unfinished, for the offsets of what follows.
    tail: bytes = b""
    #: completions with logprobs: the first space of the generated text is dropped (SentencePiece, and the prompt has no text).
    strips_space: bool = False


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
    #: The client asked for prompt_logprobs itself: how many alternatives to report for each token of the prompt.
    prompt_logprobs: int | None
    #: Fields that were accepted and do nothing: for the warning header.
    ignored: list[str]
    #: completions with logprobs: generated tokens that leave no text (skip_special_tokens), for the offsets.
    hidden_token_ids: list[int] = []


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """What becomes an OpenAI error object."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None


Outcome = Prepared | Refused


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    pass


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """It cannot be used; the process ends."""

    reason: str


Order = Start | SetInfo | Job
Answer = Prepared | Refused | Loaded | Broken


def framed(message: Order | Answer) -> bytes:
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
