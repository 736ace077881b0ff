"""`octavo bench`: measures a server (serve), the engine in this process (latency), single ops
(bench_kernels.py), engines side by side (bench_compare.py), and simulates the scheduler (bench_scheduler.py).

Tables for people go to standard output, or one JSON object with --json; the progress bar goes to a terminal only.
Stateless. Not here: how anything is measured (bench/), the committed experiments (the checkout's benchmarks/).
"""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import terminal
from octavo.cli.answer import open_llm
from octavo.cli.bench_compare import compare, export_model
from octavo.cli.bench_kernels import LimitsFile, kernels, known_limits
from octavo.cli.bench_options import Json, Model, Output
from octavo.cli.bench_options import command_line as _command
from octavo.cli.bench_options import number as _number
from octavo.cli.bench_options import numbers as _numbers
from octavo.cli.bench_options import option as _option
from octavo.cli.bench_options import progress as _progress
from octavo.cli.bench_options import show as _show
from octavo.cli.bench_scheduler import scheduler
from octavo.cli.make_model import make_model
from octavo.cli.options import chosen_model, engine_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError

SUMMARY = "Measure a server (any that speaks OpenAI's protocol), the engine, single ops, or other engines; simulate the scheduler."
EXAMPLES = """\b
Examples:
  octavo bench serve --concurrency 8 --requests 50 --max-tokens 128
  octavo bench serve --max-decode-batch-size 4 --plot batch4.svg
  octavo bench serve --url http://127.0.0.1:8000 --rate 2 --requests 100 --json
  octavo bench latency --prompt-tokens 128,512 --batch-size 1,8 --breakdown
  octavo bench kernels --rows 1,8 --plot kernels.svg
  octavo bench make-model qwen2.5-7b --format gguf-q4_0 --output random-7b.gguf
  octavo bench compare --peer llamacpp=/path/to/venv/bin/python --rounds 5
  octavo bench scheduler --policy fcfs,fair --rate 3 --tenants 4
"""
METHOD = "one client, streams; definitions in docs/benchmarks.md"


@engine_options
def serve(
    config: EngineConfig,
    name: Model = None,
    model: Annotated[str | None, _option("--model", "the model's name at --url; default: the first it lists", "NAME")] = None,
    url: Annotated[
        str | None, _option("--url", "the server; default: start one of ours with the engine's flags, then stop it", "URL")
    ] = None,
    concurrency: Annotated[str | None, _option("--concurrency", "requests open at once [8; with --rate: no limit]")] = None,
    requests: Annotated[str, _option("--requests", "requests in all")] = "50",
    max_tokens: Annotated[str, _option("--max-tokens", "tokens of each answer at most")] = "128",
    rate: Annotated[
        str | None, _option("--rate", "requests a second, arriving at random, instead of a fixed concurrency", "NUMBER")
    ] = None,
    prompt_tokens: Annotated[str | None, _option("--prompt-tokens", "ask with random words, about this many tokens")] = None,
    prompt_file: Annotated[
        str | None, _option("--prompt-file", 'prompts, one a line: text, or JSON with "prompt" or "messages"', "FILE")
    ] = None,
    endpoint: Annotated[str, _option("--endpoint", "which API", "chat|completions")] = "chat",
    temperature: Annotated[str, _option("--temperature", "0: always the most probable token", "NUMBER")] = "0",
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos", help="go on to --max-tokens; default: only where the server is ours", show_default=False
        ),
    ] = None,
    warmup: Annotated[str, _option("--warmup", "requests before the measurement")] = "2",
    timeout: Annotated[str, _option("--timeout", "seconds for one request", "NUMBER")] = "600",
    seed: Annotated[str, _option("--seed", "of arrivals and random words")] = "0",
    plot: Annotated[str | None, _option("--plot", "draw the distributions (needs matplotlib)", "FILE.svg|.png")] = None,
    as_json: Json = False,
    output: Output = None,
) -> int:
    """Load a server with requests and measure what they experience.

    The key is taken from OCTAVO_API_KEY or OPENAI_API_KEY. The exit code is 1 when a request failed.
    """
    from octavo.bench import plot as plots
    from octavo.bench import record, report
    from octavo.bench.client import base_url
    from octavo.bench.load import Load
    from octavo.bench.serving import Measurement

    if name is not None and (url is not None or model is not None):
        raise ConfigError("with --url the model is named by --model alone" if url else "MODEL and --model are the same: give one")
    arrivals = None if rate is None else _number("--rate", rate, float, 1e-3, 1e5)
    most = None if concurrency is None else _number("--concurrency", concurrency, int, 1, 10_000)
    load = Load(
        requests=_number("--requests", requests, int, 1, 1_000_000),
        concurrency=8 if most is None and arrivals is None else most,
        rate=arrivals,
        seed=_number("--seed", seed, int, 0, 2**63),
    )
    if endpoint not in ("chat", "completions"):
        raise ConfigError(f"--endpoint must be chat or completions, got {endpoint!r}")
    what = Measurement(
        load,
        _prompts(prompt_tokens, prompt_file, endpoint, load),
        model if url is not None else None,
        "chat" if endpoint == "chat" else "completions",
        _number("--max-tokens", max_tokens, int, 1, 1_000_000),
        _number("--temperature", temperature, float, 0, 100),
        ignore_eos,
        _number("--timeout", timeout, float, 0.001, 86400),
        _number("--warmup", warmup, int, 0, 10_000),
    )
    if plot is not None:
        plots.check(Path(plot))
    if url is not None:
        url = base_url(url)
        if config != EngineConfig():
            terminal.note("the engine's settings are not used: the server at --url is running already")
    before = record.machine() if output is not None else None
    measured, command = _measure(url, chosen_model(config, name or model), what)
    try:
        if before is not None:
            record.write(Path(str(output)), "serve", _command(), METHOD, before, {**measured.figures, "server_command": command})
        if plot is not None:
            plots.save(
                Path(plot),
                f"{what.load.requests} requests to {measured.figures['asked']['model']}",
                [("run", measured.records, measured.batches)],
            )
    finally:  # a file that cannot be written must not take the measurement with it
        _show(measured.figures, report.tables(measured.figures), as_json)
    return 0 if measured.figures["success_rate"] == 1 else 1


def _measure(url: str | None, config: EngineConfig, what: Any) -> tuple[Any, str | None]:
    """What was measured, and how the server was started where that was done here."""
    from octavo.bench.own_server import OwnServer
    from octavo.bench.serving import measure

    with _progress(what.load.requests, "requests") as (begin, done):
        if url is not None:
            return measure(url, what, done, begin), None
        with OwnServer(config) as server:
            return measure(server.url, what, done, begin), shlex.join(["octavo", *server.command[3:]])


def _prompts(prompt_tokens: str | None, prompt_file: str | None, endpoint: str, load: Any) -> Any:
    from octavo.bench import prompts

    if prompt_tokens is not None and prompt_file is not None:
        raise ConfigError("--prompt-tokens and --prompt-file exclude each other")
    if prompt_tokens is not None:
        return prompts.of_length(_number("--prompt-tokens", prompt_tokens, int, 1, 1_000_000), min(load.requests, 1000), load.seed)
    if prompt_file is None:
        return prompts.QUESTIONS
    found = prompts.from_file(Path(prompt_file))
    if endpoint == "completions" and not all(isinstance(prompt, str) for prompt in found):
        raise ConfigError(f"{prompt_file} has messages, and --endpoint completions takes text")
    return found


@engine_options
def latency(
    config: EngineConfig,
    name: Model = None,
    prompt_tokens: Annotated[str, _option("--prompt-tokens", "tokens of each prompt", "LIST")] = "512",
    tokens: Annotated[str, _option("--tokens", "tokens generated for each; 1: only prompts", "LIST")] = "64",
    batch_size: Annotated[str, _option("--batch-size", "requests at once", "LIST")] = "1",
    rounds: Annotated[str, _option("--rounds", "rounds that count, after one to warm up")] = "3",
    breakdown: Annotated[bool, typer.Option("--breakdown", help="where a step's time goes: parts, and every op beside its limit")] = False,
    limits: LimitsFile = None,
    as_json: Json = False,
    output: Output = None,
) -> int:
    """Measure prompts (prefill) and generation (decode) in this process: tokens a second, median of interleaved rounds."""
    from octavo.bench import latency as bench
    from octavo.bench import record

    config = chosen_model(config, name)
    wanted = bench.cases(_numbers("--prompt-tokens", prompt_tokens), _numbers("--tokens", tokens), _numbers("--batch-size", batch_size))
    count = _number("--rounds", rounds, int, 1, 1000)
    before = record.machine() if output is not None else None
    known = known_limits(limits) if breakdown else None
    with closing(open_llm(config)) as llm, _progress(len(wanted) * (count + 1), "cases") as (begin, done):
        bench.check(llm, wanted)
        begin()
        measured = bench.measure(llm, wanted, count, done=done)
    results = {case.name: result.figures(breakdown) for case, result in measured.items()}
    if known is not None:
        for name, parts in _breakdown(config, wanted, count, known).items():
            results[name] |= parts
            for kind in ("prefill", "decode"):
                if f"{kind}_breakdown" in parts:
                    results[name][f"{kind}_breakdown"]["untouched_step_ms"] = results[name][f"{kind}_step_ms"]["step"]
    try:
        if before is not None:
            method = f"{count} interleaved rounds after one to warm up; whole steps, sampling included; random token ids, greedy, no stop"
            record.write(Path(str(output)), "latency", _command(), method, before, results)
    finally:  # as above
        _show({"model": config.model, "cases": results}, _latency_tables(results), as_json)
    return 0


def _breakdown(config: EngineConfig, wanted: Any, rounds: int, known: Any) -> dict[str, dict[str, Any]]:
    """Name of a case -> its breakdowns; by an engine of its own, whose steps call op by op."""
    from octavo.bench import breakdown as bench

    with closing(open_llm(bench.eager(config))) as llm, _progress(len(wanted) * (rounds + 1), "breakdowns") as (begin, done):
        begin()
        found = bench.measure(llm, wanted, rounds, known, done=done)
    return {case.name: {f"{kind}_breakdown": parts for kind, parts in kinds.items()} for case, kinds in found.items()}


def _latency_tables(results: dict[str, Any]) -> list[Any]:
    from rich.table import Table

    from octavo.bench.kernel_report import breakdown_table

    table = Table(box=None, pad_edge=False)
    table.add_column("tokens/s: median (min to max)")
    table.add_column("prefill", justify="right")
    table.add_column("decode", justify="right")
    for name, figures in results.items():
        cells = [figures.get(f"{kind}_tokens_per_s") for kind in ("prefill", "decode")]
        table.add_row(name, *("-" if c is None else f"{c['median']:.1f} ({c['min']:.1f} to {c['max']:.1f})" for c in cells))
    found = [table]
    for kind in ("prefill_step_ms", "decode_step_ms"):
        rows = [(name, figures[kind]) for name, figures in results.items() if kind in figures]
        if rows:
            parts = Table(box=None, pad_edge=False)
            parts.add_column(f"milliseconds of a {kind.split('_')[0]} step")
            for part in rows[0][1]:
                parts.add_column(part, justify="right")
            for name, values in rows:
                parts.add_row(name, *(f"{value:.2f}" for value in values.values()))
            found.append(parts)
    return found + [
        breakdown_table(f"{kind}: {name}", figures[f"{kind}_breakdown"])
        for name, figures in results.items()
        for kind in ("prefill", "decode")
        if f"{kind}_breakdown" in figures
    ]


commands = {
    "serve": serve,
    "latency": latency,
    "kernels": kernels,
    "compare": compare,
    "scheduler": scheduler,
    "export-model": export_model,
    "make-model": make_model,
}
