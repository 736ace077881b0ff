"""`octavo chat`: a conversation on a terminal, or one answer to what is piped in.

Owner of the terminal while it runs. Ctrl-C stops the answer; at the prompt it clears the line, and a second one leaves.
Not here: the conversation and its slash commands (chat_session.py), how an answer is read (answer.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import terminal
from octavo.cli.answer import Answer, open_llm, read_answer
from octavo.cli.chat_session import NOT_SETTABLE, ChatSession
from octavo.cli.options import chosen_model, engine_options, sampling_options
from octavo.config import EngineConfig
from octavo.errors import EngineDeadError, OctavoError
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
"""


@engine_options
@sampling_options(without=NOT_SETTABLE)
def command(
    config: EngineConfig,
    params: SamplingParams,
    name: Annotated[str | None, typer.Argument(metavar="MODEL", help="short name, folder, .gguf file or Hugging Face id")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="the system message")] = None,
) -> int:
    """Talk to a model. With piped input, answer it and exit. An answer has at most 1024 tokens unless --max-tokens says more."""
    if system:
        system = terminal.check_text(system, "--system")
    config = chosen_model(config, name)
    interactive = terminal.is_terminal(sys.stdin)
    piped = None if interactive else terminal.read_input()
    with closing(open_llm(config)) as llm:
        session = ChatSession(for_chat(params, llm.generation_defaults), config.model, system, llm.generation_defaults)
        if piped is not None:
            answer = ask(llm, session, piped)
            terminal.note(answer.summary())
            return 130 if answer.interrupted else 0
        terminal.note(f"{config.model}, up to {llm.max_model_len} tokens. /help lists commands.", sys.stdout)
        loop(llm, session)
    return 0


def for_chat(params: SamplingParams, model_defaults: Mapping[str, Any]) -> SamplingParams:
    """The chat's own defaults, where the user left them open."""
    if params.max_tokens is None:
        params = replace(params, max_tokens=ANSWER_TOKENS)
    if params.repetition_penalty is None and model_defaults.get("repetition_penalty") is None:
        params = replace(params, repetition_penalty=REPETITION_PENALTY)
    return params


def ask(llm: LLM, session: ChatSession, text: str) -> Answer:
    """One turn, streamed to standard output and added to the session; the question is taken back if it fails."""
    session.add_user(text)
    try:
        dropped = session.make_room(llm.max_model_len, lambda messages: len(llm.chat_template.encode_chat(messages)))
        if dropped:
            turns = "turn" if dropped == 1 else f"{dropped} turns"
            terminal.note(f"(the oldest {turns} went, to fit the context of {llm.max_model_len} tokens)")
        answer = read_answer(lambda: llm.stream_chat(session.messages, session.params), 1, terminal.write)
    except BaseException:
        session.take_back()
        raise
    terminal.write("\n")
    session.add_assistant(answer.text)
    totals = session.totals
    totals.answers += 1
    totals.prompt_tokens += answer.num_prompt_tokens
    totals.cached_tokens += answer.output.num_cached_tokens
    totals.tokens += answer.num_tokens
    totals.seconds += answer.total
    return answer


def loop(llm: LLM, session: ChatSession) -> None:
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
            respond(llm, session, text)
        except KeyboardInterrupt:  # before the answer began; later ones end it in read_answer
            terminal.write("\n")
            terminal.note("stopped: the question was taken back", sys.stdout)
        except EngineDeadError:
            raise
        except OctavoError as error:
            terminal.note(f"octavo: {' '.join(str(error).split())}", sys.stdout)
    terminal.write("" if session.done else "\n")


def respond(llm: LLM, session: ChatSession, text: str) -> None:
    """Carry out a slash command, or answer."""
    if not text.strip():
        return
    if text.startswith("/") and not text.startswith("//"):
        shown = session.execute(text.strip(), lambda: asdict(llm.stats()))
        if shown:
            terminal.note(shown, sys.stdout)
        return
    answer = ask(llm, session, terminal.check_text(text.removeprefix("/"), "the message"))
    full = answer.num_prompt_tokens + answer.num_tokens >= llm.max_model_len
    reason = "; the context is full" if full else "; max_tokens ended it (/set max_tokens N)"
    cut = reason if answer.output.outputs[0].finish_reason == "length" else ""
    terminal.note(f"{answer.summary()}{cut}", sys.stdout)


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
