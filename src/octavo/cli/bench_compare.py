"""`octavo bench compare` and `octavo bench export-model`: our engine beside others, each in a process of its own.

Markdown for people goes to standard output, or one JSON object with --json. Exit codes: 0 when every engine did all of the
work, 1 when one did not (the table says why, and holds what the others did), 2 for bad usage.
Stateless. Not here: how anything is measured (bench/comparison.py).
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import terminal
from octavo.cli.bench_options import Json, Model, Output, command_line, number, option, progress
from octavo.cli.options import chosen_model, engine_options
from octavo.config import EngineConfig

_Texts = list[str] | None


@engine_options
def compare(
    config: EngineConfig,
    name: Model = None,
    peer: Annotated[
        _Texts,
        option("--peer", "an engine beside ours: llamacpp, openvino, transformers, vllm; repeat for more", "NAME=/path/to/venv/bin/python"),
    ] = None,
    peer_model: Annotated[_Texts, option("--peer-model", "what that engine loads instead of MODEL", "NAME=PATH")] = None,
    peer_option: Annotated[_Texts, option("--peer-option", "a setting of that engine", "NAME.KEY=VALUE")] = None,
    work: Annotated[
        str,
        option("--work", "decode:PROMPT:GENERATED:REQUESTS, prefill:PROMPT:REQUESTS, or a set: small, large", "LIST"),
    ] = "small",
    rounds: Annotated[str, option("--rounds", "rounds that count, after one to warm up")] = "3",
    starts: Annotated[str, option("--starts", "starts that count of each engine, after one that fills the page cache")] = "1",
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="one process at any moment, started anew each round: for models that fit only once")
    ] = False,
    load_timeout: Annotated[str, option("--load-timeout", "seconds for one engine to load", "NUMBER")] = "900",
    timeout: Annotated[str, option("--timeout", "seconds for one item of work on one engine", "NUMBER")] = "600",
    seed: Annotated[str, option("--seed", "of the random prompts; the base seed of our engine does not matter here")] = "0",
    as_json: Json = False,
    output: Output = None,
) -> int:
    """Give the same work to our engine and to others, in turn, and compare tokens a second, load, start and memory.

    Every engine runs in a process of its own interpreter, with the same prompts and as many threads. Ratios above 1: ours is faster.
    """
    from octavo.bench import comparison, comparison_report, peer_choice, record
    from octavo.bench.comparison import Plan
    from octavo.bench.work import parse

    items = parse(work)
    config = chosen_model(config, name)
    counts = [number("--rounds", rounds, int, 1, 1000), number("--starts", starts, int, 1, 100), number("--seed", seed, int, 0, 2**31)]
    limits = [number(flag, text, float, 0.1, 86400) for flag, text in (("--load-timeout", load_timeout), ("--timeout", timeout))]
    before = record.machine()
    with ExitStack() as stack:
        model = peer_choice.model_path(config.model)
        exported = _exported_once(stack, str(model))
        engines = [peer_choice.ours(config, model), *peer_choice.chosen(peer or [], peer_model or [], peer_option or [], model, exported)]
        threads = config.threads or int(before["cores"]["usable"])
        plan = Plan(engines, items, counts[0], threads, counts[1], one_at_a_time, counts[2], *limits)
        for path in dict.fromkeys(Path(engine.model) for engine in engines):
            comparison.read_through(path)
        stack.enter_context(comparison.ended_by_sigterm())
        with progress(comparison.steps(plan), "items") as (begin, done):
            begin()
            results = comparison.compare(plan, done)
    figures = {"model": model.name, **comparison_report.figures(plan, results)}
    try:
        if output is not None:
            shown = command_line()
            for path in {engine.python for engine in engines} | {engine.model for engine in engines[1:]}:
                shown = shown.replace(path, ".../" + "/".join(Path(path).parts[-3:]))
            record.write(Path(output), "compare", shown, METHOD, before, figures)
    finally:  # a file that cannot be written must not take the measurement with it
        terminal.write(terminal.as_json(figures) if as_json else comparison_report.markdown(figures))
    return 0 if all(result.error is None for result in results) else 1


METHOD = "engines in turn, one working at a time, random prompts anew each round; definitions in docs/benchmarks.md"


def _exported_once(stack: ExitStack, model: str) -> Any:
    """A function that gives the exported folder: made when first asked for, gone when the comparison ends."""
    made: list[Path] = []

    def exported() -> Path:
        from octavo.bench import peer_choice

        if not made:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-compare-")))
            with progress(1, "exporting the weights") as (begin, _):
                begin()
                made.append(peer_choice.export(model, folder))
        return made[0]

    return exported


def export_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="short name or .gguf file")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="made if needed; must be empty")],
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> int:
    """Write a GGUF model's weights as bfloat16 safetensors with a config.json, for engines that read no GGUF (no tokenizer)."""
    from octavo.bench import peer_choice

    path = peer_choice.export(model, Path(folder))
    terminal.note(f"wrote {path}")
    return 0
