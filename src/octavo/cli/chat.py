"""`octavo chat`: a conversation on a terminal, or one answer to what is piped in; with the engine, or with a server (--url).

Owner of the terminal while it runs. Ctrl-C stops the answer; at the prompt it clears the line, and a second one leaves.
Not here: the conversation and its slash commands (chat_session.py), how an answer is read (answer.py), the client of a
server (remote.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from octavo.cli import terminal
from octavo.cli.answer import Answer, open_llm, read_answer
from octavo.cli.chat_session import NOT_SETTABLE, ChatSession
from octavo.cli.options import chosen_model, engine_options, sampling_options
from octavo.config import EngineConfig
from octavo.config_sources import field_types, flag_name
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, OctavoError
from octavo.outputs import CompletionDelta
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
#: The longest answer unless the user says otherwise: a small model that repeats itself must come to an end.
ANSWER_TOKENS = 1024
#: Where neither the user nor the model's files say: without it small models fall into loops ("Boil an egg:" for ever).
#: Only in the chat; `run`, Python and the server compute what they are told.
REPETITION_PENALTY = 1.1
EXAMPLES = """\b
Examples:
  octavo chat
  octavo chat path/to/model.gguf --temperature 0.2
  octavo chat --system "Answer in one sentence."
  echo "What is the capital of France?" | octavo chat
  octavo chat --url http://127.0.0.1:8000
"""


class ChatModel(Protocol):
    """What answers."""

    name: str
    #: None where it is not known.
    max_model_len: int | None
    generation_defaults: Mapping[str, Any]
    #: Whether it is a server, which only says that a conversation is too long once it has been sent.
    remote: bool

    def greeting(self) -> str: ...
    def make_room(self, session: ChatSession) -> int: ...
    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[CompletionDelta]: ...
    def complete(self, answer: Answer) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def why(self) -> str: ...
    def close(self) -> None: ...


class LocalModel:
    """The engine in this process."""

    remote = False

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm = llm
        self.name = name
        self.max_model_len: int | None = llm.max_model_len
        self.generation_defaults: Mapping[str, Any] = llm.generation_defaults
        self.stream_chat = llm.stream_chat
        self.close = llm.close

    def greeting(self) -> str:
        return f"{self.name}, up to {self.max_model_len} tokens"

    def make_room(self, session: ChatSession) -> int:
        return session.make_room(self._llm.max_model_len, lambda messages: len(self._llm.chat_template.encode_chat(messages)))

    def complete(self, answer: Answer) -> None:
        """The deltas have told everything."""

    def stats(self) -> dict[str, Any]:
        return asdict(self._llm.stats())

    def why(self) -> str:
        """Where the time of the last answer went."""
        from octavo.cli.trace import of_llm
        from octavo.trace import explain, report

        return "\n".join(report.lines(explain(of_llm(self._llm))))


@engine_options
@sampling_options(without=NOT_SETTABLE)
def command(
    context: typer.Context,
    config: EngineConfig,
    params: SamplingParams,
    name: Annotated[str | None, typer.Argument(metavar="MODEL", help="short name, folder, .gguf file or Hugging Face id")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="TEXT", help="the same; with --url: the server's name of it")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="the system message")] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="talk to this OpenAI-compatible server")] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option("--api-key-env", metavar="NAME", help="variable with the server's key; else OCTAVO_API_KEY or OPENAI_API_KEY"),
    ] = None,
) -> int:
    """Talk to a model. With piped input, answer it and exit. An answer has at most 1024 tokens unless --max-tokens says more."""
    if system:
        system = terminal.check_text(system, "--system")
    if url is None and api_key_env is not None:
        raise ConfigError("--api-key-env needs --url")
    model = name if name is not None else model
    open_model = opener(chosen_model(config, model)) if url is None else remote_opener(context.params, url, model, api_key_env)
    interactive = terminal.is_terminal(sys.stdin)
    piped = None if interactive else terminal.read_input()
    with closing(open_model()) as chat_model:
        session = ChatSession(for_chat(params, chat_model), chat_model.name, system, chat_model.generation_defaults)
        if piped is not None:
            answer = ask(chat_model, session, piped)
            terminal.note(answer.summary())
            return 130 if answer.interrupted else 0
        terminal.note(f"{chat_model.greeting()}. /help lists commands.", sys.stdout)
        loop(chat_model, session)
    return 0


def opener(config: EngineConfig) -> Callable[[], ChatModel]:
    return lambda: LocalModel(open_llm(config), config.model)


def remote_opener(given: Mapping[str, Any], url: str, model: str | None, api_key_env: str | None) -> Callable[[], ChatModel]:
    """Checks what was `given` on the command line before anything is read from standard input."""
    for setting in field_types(EngineConfig):
        if given.get(setting) is not None and setting not in ("model", "seed"):  # --seed is the request's
            raise ConfigError(f"{flag_name(setting)} is the server's business, and has no use with --url")
    from octavo.cli.remote import RemoteModel, base_url, find_key

    base = base_url(url)
    key = find_key(os.environ, api_key_env, base)
    named = terminal.check_text(model, "--model") if model is not None else None
    return lambda: RemoteModel(base, key, named)


def for_chat(params: SamplingParams, model: ChatModel) -> SamplingParams:
    """The chat's own defaults, where the user left them open. A server decides itself about what its API may not know."""
    if params.max_tokens is None:
        params = replace(params, max_tokens=ANSWER_TOKENS)
    if params.repetition_penalty is None and model.generation_defaults.get("repetition_penalty") is None and not model.remote:
        params = replace(params, repetition_penalty=REPETITION_PENALTY)
    return params


def ask(model: ChatModel, session: ChatSession, text: str) -> Answer:
    """One turn, streamed to standard output and added to the session, which is as it was if the turn fails."""
    before = list(session.turns)
    session.add_user(text)
    dropped = 0

    def show(piece: str) -> None:
        nonlocal dropped
        if dropped:
            turns = "turn" if dropped == 1 else f"{dropped} turns"
            size = f" of {model.max_model_len} tokens" if model.max_model_len else ""
            terminal.note(f"(the oldest {turns} went, to fit the context{size})")
            dropped = 0
        terminal.write(piece)

    try:
        dropped = model.make_room(session)
        while True:
            try:
                answer = read_answer(lambda: model.stream_chat(session.messages, session.params), 1, show, at_once=model.remote)
                break
            except InvalidRequestError as error:
                if not (model.remote and error.code == "context_length_exceeded" and session.drop_oldest()):
                    raise
                dropped += 1
    except BaseException:
        session.turns = before
        raise
    show("\n")
    model.complete(answer)
    session.add_assistant(answer.text)
    totals = session.totals
    totals.answers += 1
    totals.prompt_tokens += answer.num_prompt_tokens
    totals.cached_tokens += answer.output.num_cached_tokens
    totals.tokens += answer.num_tokens
    totals.seconds += answer.total
    return answer


def loop(model: ChatModel, session: ChatSession) -> None:
    """Read, answer, until the user leaves. Whatever goes wrong with one turn is said in one line."""
    with suppress(ImportError):
        import readline  # noqa: F401  its import gives input() line editing and a history
    leaving = False
    while not session.done:
        try:
            text = read_message()
        except KeyboardInterrupt:
            if leaving:
                break
            leaving = True
            terminal.write("\n")
            terminal.note("(Ctrl-C again or Ctrl-D leaves)", sys.stdout)
            continue
        except EOFError:
            break
        leaving = False
        try:
            respond(model, session, text)
        except KeyboardInterrupt:  # before the answer began; later ones end it in read_answer
            terminal.write("\n")
            terminal.note("stopped: the question was taken back", sys.stdout)
        except EngineDeadError:
            raise
        except OctavoError as error:
            terminal.note(f"octavo: {' '.join(str(error).split())}", sys.stdout)
    terminal.write("" if session.done else "\n")


def respond(model: ChatModel, session: ChatSession, text: str) -> None:
    """Carry out a slash command, or answer."""
    if not text.strip():
        return
    if text.startswith("/") and not text.startswith("//"):
        shown = session.execute(text.strip(), model.stats, model.why)
        if shown:
            terminal.note(shown, sys.stdout)
        return
    answer = ask(model, session, terminal.check_text(text.removeprefix("/"), "the message"))
    terminal.note(answer.summary() + cut_short(model, session, answer), sys.stdout)


def cut_short(model: ChatModel, session: ChatSession, answer: Answer) -> str:
    """Why the answer ended, where the model did not end it."""
    output = answer.output.outputs[0]
    if output.finish_reason == "length":
        room = model.max_model_len is None or answer.num_prompt_tokens + answer.num_tokens < model.max_model_len
        full = not room or (answer.unit == "token" and answer.num_tokens < (session.params.max_tokens or 0))
        return "; the context is full" if full else "; max_tokens ended it (/set max_tokens N)"
    return f"; the server ended it: {output.stop_reason}" if model.remote and output.stop_reason else ""


def read_message(read: Callable[[str], str] = input) -> str:
    """One message: a line, lines that end in a backslash joined with the next, or everything between two triple quotes.

    Raises EOFError and KeyboardInterrupt; a message begun is then given up.
    """
    line = read(PROMPT)
    if line.lstrip().startswith(QUOTES):
        text = line.lstrip().removeprefix(QUOTES)
        while QUOTES not in text:
            text += "\n" + read(MORE)
        before, _, after = text.partition(QUOTES)
        return (before + after).strip("\n")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + read(MORE)
    return line
