"""`octavo trace`: records a run in this process (run) or a running server (server), and draws what was recorded (show).

Files: FILE.octrace.json is the record itself, which `octavo explain` reads; --perfetto and --html are pictures of it.
Stateless. Not here: the record and the pictures (trace/).
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import terminal
from octavo.cli.answer import open_llm
from octavo.cli.bench_options import number, option
from octavo.cli.options import chosen_model, engine_options, sampling_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.trace.record import Trace

SUMMARY = "Record what the engine does, step by step, and look at it."
EXAMPLES = """\b
Examples:
  octavo trace run "Name three rivers." "What is rain?" --html trace.html
  octavo trace run smollm2 "Hi" --max-tokens 40 --output run.octrace.json --perfetto run.json
  octavo trace server --url http://127.0.0.1:8000 --seconds 10 --html server.html
  octavo trace show run.octrace.json --html run.html
  octavo explain run.octrace.json
"""
#: Steps kept of a run in this process: about half an hour of decoding.
MOST_STEPS = 200_000
MOST_SECONDS = 3600

Output = Annotated[str | None, option("--output", "the record itself, for octavo explain and trace show", "FILE.octrace.json")]
Html = Annotated[str | None, option("--html", "one page to look at, without a server or network", "FILE.html")]
Perfetto = Annotated[str | None, option("--perfetto", "for ui.perfetto.dev and chrome://tracing", "FILE.json")]


@engine_options
@sampling_options(without=frozenset({"logprobs", "prompt_logprobs", "logprobs_mode"}))
def run(
    config: EngineConfig,
    params: SamplingParams,
    words: Annotated[list[str] | None, typer.Argument(metavar="[MODEL] PROMPT...", hidden=True)] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="whether to wrap prompts in the model's chat template; default: if it has one", show_default=False
        ),
    ] = None,
    with_text: Annotated[bool, typer.Option("--with-text", help="keep prompts and answers in the files")] = False,
    output: Output = None,
    html: Html = None,
    perfetto: Perfetto = None,
) -> int:
    """Complete prompts, all at once, and record every step.

    The first argument is the model where it is a short name (octavo models); --model takes any. Files hold no text without --with-text.
    """
    model, prompts = _split(list(words or []))
    if not prompts:
        raise ConfigError('there is no prompt; write octavo trace run "..." "..."')
    prompts = [terminal.check_text(prompt, "a prompt") for prompt in prompts]
    config = chosen_model(config, model)
    config = replace(config, event_history=max(config.event_history, MOST_STEPS))
    with closing(open_llm(config)) as llm:
        before = _calibrate(llm)
        answers = _complete(llm, prompts, params, chat)
        trace = of_llm(llm)
        trace.calibration, trace.steps = trace.steps[:before], trace.steps[before:]
    if with_text:
        trace.texts = _texts(prompts, answers)
    _write(trace, output, html, perfetto)
    return 0


def server(
    url: Annotated[str, option("--url", "a server of ours on this machine", "URL")] = "http://127.0.0.1:8000",
    seconds: Annotated[str, option("--seconds", "how long to record", "NUMBER")] = "10",
    api_key_env: Annotated[
        str | None, option("--api-key-env", "variable with the server's key; else OCTAVO_API_KEY or OPENAI_API_KEY", "NAME")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
    output: Output = None,
    html: Html = None,
    perfetto: Perfetto = None,
) -> int:
    """Record the steps that a server runs for some time; the server is not slowed down by it, and tells no text."""
    limit = number("--seconds", seconds, float, 0.1, MOST_SECONDS)
    from octavo.cli.trace_client import record

    _write(record(url, api_key_env, limit), output, html, perfetto)
    return 0


def show(
    file: Annotated[str, typer.Argument(metavar="FILE.octrace.json", help="what octavo trace wrote")],
    html: Html = None,
    perfetto: Perfetto = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> int:
    """Draw a record, or say what is in it."""
    from octavo.trace import read

    _write(read(Path(file)), None, html, perfetto)
    return 0


commands = {"run": run, "server": server, "show": show}


def of_llm(llm: LLM) -> Trace:
    """What an engine in this process has recorded so far."""
    from octavo.trace.record import Settings, Trace

    config, groups, events = llm.config, llm.executor.info.kv_groups, llm.events()
    limits = Settings(config.max_num_batched_tokens, config.max_num_seqs, config.max_prefill_batch_size, config.max_decode_batch_size)
    gaps = bool(events) and events[0].step > 1
    return Trace(events, config.model, groups[0].block_size, [group.num_blocks for group in groups], limits, gaps=gaps)


def _calibrate(llm: LLM) -> int:
    """A few steps of one and of four requests: they wake the engine up, and tell what a row costs. Returns how many."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for count in (1, 4):
        length = max(1, min(128 // count, llm.max_model_len // 4))
        llm.generate([[(7 * i + j) % 50 for j in range(length)] for i in range(count)], params, progress=False)
    llm.reset_prefix_cache()
    return llm.stats().steps


def _split(words: list[str]) -> tuple[str | None, list[str]]:
    from octavo.loading.source import SHORT_NAMES

    return (words[0], words[1:]) if len(words) > 1 and words[0] in SHORT_NAMES else (None, words)


def _complete(llm: LLM, prompts: list[str], params: SamplingParams, chat: bool | None) -> list[RequestOutput]:
    if chat is None:
        chat = llm.chat_template is not None and llm.chat_template.source is not None
    if chat:
        return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    return llm.generate(list(prompts), params)


def _texts(prompts: list[str], answers: list[RequestOutput]) -> dict[str, Any]:
    from octavo.trace.record import Text

    found = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        for choice in answer.outputs:
            name = answer.request_id if len(answer.outputs) == 1 else f"{answer.request_id}#{choice.index}"
            found[name] = Text(prompt, choice.text)
    return found


def _write(trace: Trace, output: str | None, html: str | None, perfetto: str | None) -> None:
    """The files that were asked for, and one line on what was recorded."""
    from octavo.trace.record import end, write

    if output is not None:
        write(trace, Path(output))
    if perfetto is not None:
        from octavo.trace.perfetto import chrome_trace

        Path(perfetto).write_text(json.dumps(chrome_trace(trace), allow_nan=False) + "\n", "utf-8")
    if html is not None:
        from octavo.trace.html import page

        Path(html).write_text(page(trace), "utf-8")
    names = dict.fromkeys(admission.request_id for event in trace.steps for admission in event.admitted)
    took = end(trace.steps[-1]) - trace.steps[0].time if trace.steps else 0.0
    listed = ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
    terminal.write(f"{len(trace.steps)} steps in {took:.2f} s, {len(names)} requests admitted{': ' if names else ''}{listed}\n")
    for name in filter(None, (output, perfetto, html)):
        terminal.write(f"wrote {name}\n")
    if not (output or perfetto or html):
        terminal.note("nothing was kept: --output, --html or --perfetto writes a file")
