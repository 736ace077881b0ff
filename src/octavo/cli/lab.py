"""`octavo lab`: lists the lessons, runs one, or opens the pages in a browser.

Stateless. Not here: the lessons (lab/), the pages (lab/ui/).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import terminal
from octavo.config_sources import coerce, field_types, flag_name, nearest
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.lab.lessons import Lesson, Progress

SUMMARY = "Lessons that measure what inference does, step by step, on this machine."
EXAMPLES = """\b
Examples:
  octavo lab list
  octavo lab run attention
  octavo lab run standard --quick
  octavo lab run standard --strategy my.py
  octavo lab run standard --output standard.json --plot standard.svg
  octavo lab ui
"""


def _option(flag: str, help: str, metavar: str) -> Any:
    return typer.Option(flag, help=help, metavar=metavar, show_default=False)


Json = Annotated[bool, typer.Option("--json", help="print one JSON object, for programs")]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks and what the engine logs")]


def list_lessons(as_json: Json = False, debug: Debug = False) -> int:
    """Name the lessons, what each is about, and where its text lies."""
    from octavo.lab.lessons import LESSONS

    rows = [{"name": lesson.name, "title": lesson.title, "text": str(lesson.text)} for lesson in LESSONS.values()]
    if as_json:
        terminal.write(terminal.as_json({"lessons": rows}))
    else:
        terminal.write("".join(f"{row['name']:<12}{row['title']}\n{'':<12}{row['text']}\n" for row in rows))
    return 0


def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a lesson (octavo lab list)")],
    quick: Annotated[bool, typer.Option("--quick", help="a small version, to see how it goes")] = False,
    runs: Annotated[str | None, _option("--runs", "rounds that count", "INTEGER")] = None,
    lengths: Annotated[str | None, _option("--lengths", "tokens: of the attention, or of the speed-up's curve", "LIST")] = None,
    heads: Annotated[str | None, _option("--heads", "attention: query heads [9]", "INTEGER")] = None,
    kv_heads: Annotated[str | None, _option("--kv-heads", "attention: KV heads [3]", "INTEGER")] = None,
    head_dim: Annotated[str | None, _option("--head-dim", "attention: numbers in a head [64]", "INTEGER")] = None,
    seed: Annotated[str | None, _option("--seed", "attention: of the random inputs [0]", "INTEGER")] = None,
    model: Annotated[str | None, _option("--model", "standard: short name, folder, .gguf file or Hugging Face id", "MODEL")] = None,
    prompt: Annotated[str | None, _option("--prompt", 'standard: ["Deep learning is"]', "TEXT")] = None,
    max_tokens: Annotated[str | None, _option("--max-tokens", "standard: tokens generated [50]", "INTEGER")] = None,
    strategy: Annotated[
        str | None, _option("--strategy", "standard: your own generate or attention; the file runs as the program it is", "FILE.py")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="standard: compute every naive step of the curve")] = False,
    as_json: Json = False,
    output: Annotated[str | None, _option("--output", "write the results with machine, versions and commit", "FILE.json")] = None,
    plot: Annotated[str | None, _option("--plot", "draw the figure", "FILE.svg")] = None,
    debug: Debug = False,
) -> int:
    """Measure one lesson and print its tables.

    The exit code is 1 where what was measured does not hold: a strategy that is not verified, texts that differ.
    """
    given = dict(quick=quick or None, runs=runs, lengths=lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=seed, model=model,
                 prompt=prompt, max_tokens=max_tokens, strategy=strategy, full=full or None)  # fmt: skip
    from octavo.bench import record
    from octavo.lab.lessons import LESSONS

    if name not in LESSONS:
        raise ConfigError(f"there is no lesson {name!r}{nearest(name, tuple(LESSONS))} (octavo lab list names them)")
    if plot is not None and not plot.endswith(".svg"):
        raise ConfigError(f"--plot {plot}: the name must end in .svg")
    lesson = LESSONS[name]
    module, settings = lesson.module, _settings(lesson, given)
    before = record.machine() if output is not None else None
    with _progress() as progress:
        results = module.run(settings, progress)
    try:
        if before is not None:
            record.write(Path(str(output)), f"lab {name}", shlex.join(["octavo", *sys.argv[1:]]), module.METHOD, before, results)
        if plot is not None:
            Path(plot).write_text(module.figure(results), "utf-8")
    finally:  # a file that cannot be written must not take the measurement with it
        terminal.write(terminal.as_json({"lesson": name, "method": module.METHOD, **results}) if as_json else module.report(results))
    why = module.failure(results)
    if why is not None:
        print(f"octavo: {why}", file=sys.stderr)
    return 0 if why is None else 1


def ui(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="short name, folder, .gguf file or Hugging Face id")] = None,
    port: Annotated[str, typer.Option("--port", help="0: any that is free", metavar="INTEGER")] = "8501",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open it in a browser")] = True,
    debug: Debug = False,
) -> int:
    """Open the laboratory's pages, on this machine only (needs the `lab` extra)."""
    from octavo.lab.ui.launch import main

    main(model, port=_number("--port", port, 0, 65535), open_browser=browser)
    return 0


commands = {"list": list_lessons, "run": run, "ui": ui}


def _settings(lesson: Lesson, given: Mapping[str, Any]) -> Any:
    """The lesson's own settings. Raises ConfigError for a flag that is not one of them, or a value that cannot be."""
    cls = lesson.module.Settings
    known, values = {field.name for field in fields(cls)}, {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in known:
            raise ConfigError(f"{flag_name(name)} is no setting of the lesson {lesson.name}")
        try:
            values[name] = coerce(value, field_types(cls)[name])
        except ValueError as error:
            raise ConfigError(f"{flag_name(name)} {error}") from None
    return cls(**values)


def _number(flag: str, text: str, low: int, high: int) -> int:
    try:
        value = int(coerce(text, int))
    except ValueError as error:
        raise ConfigError(f"{flag} {error}") from None
    if not low <= value <= high:
        raise ConfigError(f"{flag} must be from {low} to {high}, got {text}")
    return value


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal, gone when the work is done; nothing elsewhere."""
    if not terminal.is_terminal(sys.stderr):
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # seldom redrawn: the bar runs on the cores that are measured
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("")

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report
