"""What the subcommands of `octavo bench` share: numbers from flags, the command line for a results file, the progress bar, what is shown.

Stateless. Not here: the subcommands (bench.py, bench_compare.py).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from octavo.cli import terminal
from octavo.config_sources import coerce
from octavo.errors import ConfigError


def option(flag: str, help: str, metavar: str = "INTEGER") -> Any:
    return typer.Option(flag, help=help, metavar=metavar)


Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="short name, folder, .gguf file or Hugging Face id")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object when done, for programs")]
Output = Annotated[str | None, option("--output", "write the results with machine, versions and commit", "FILE.json")]


def number(flag: str, text: str, kind: Any, low: float, high: float) -> Any:
    try:
        value = coerce(text, kind)
    except ValueError as error:
        raise ConfigError(f"{flag} {error}") from None
    if not low <= value <= high:
        raise ConfigError(f"{flag} must be from {low:g} to {high:g}, got {text}")
    return value


def numbers(flag: str, text: str) -> list[int]:
    found = [number(flag, item, int, 1, 1_000_000) for item in text.split(",") if item.strip()]
    if not found:
        raise ConfigError(f"{flag} is empty")
    return list(dict.fromkeys(found))


def command_line() -> str:
    return shlex.join(["octavo", *sys.argv[1:]])


@contextmanager
def progress(total: int, words: str) -> Iterator[tuple[Any, Any]]:
    """(begin, done): start the bar, and move it by one. Nothing where standard error is no terminal."""
    if not terminal.is_terminal(sys.stderr):
        yield (lambda: None), (lambda *_: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # seldom redrawn: the bar runs on the cores that are measured
    bar = Progress(*columns, console=Console(file=sys.stderr), transient=True, refresh_per_second=2)
    task = bar.add_task(words, total=total)
    try:
        yield bar.start, lambda *_: bar.advance(task)
    finally:
        bar.stop()


def show(figures: dict[str, Any], tables: list[Any], as_json: bool) -> None:
    if as_json:
        terminal.write(terminal.as_json(figures))
        return
    from rich.console import Console

    console = Console(highlight=False, width=None if terminal.is_terminal(sys.stdout) else 120)
    for number, table in enumerate(tables):
        console.print(*([""] if number else []), table, sep="\n")
