"""`octavo bench make-model`: writes a model file of a real model's shape with random weights.

The path goes to standard output when the file is whole; the progress bar goes to a terminal only.
Stateless. Not here: what is written (bench/make_model.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import terminal
from octavo.config_sources import coerce
from octavo.errors import ConfigError


def make_model(
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help="qwen2.5-7b, qwen2.5-0.5b or smollm2-135m")],
    form: Annotated[
        str, typer.Option("--format", help="of the weights", metavar="gguf-q4_0|gguf-q4_1|gguf-q8_0|safetensors-bf16")
    ] = "gguf-q4_0",
    output: Annotated[str | None, typer.Option("--output", help="default: the shape's and the format's name, here", metavar="FILE")] = None,
    layers: Annotated[str | None, typer.Option("--layers", help="fewer (or more) layers than the real model", metavar="INTEGER")] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="folder with tokenizer.json; default: a generated vocabulary", metavar="DIR")
    ] = None,
    seed: Annotated[str, typer.Option("--seed", help="of the weights", metavar="INTEGER")] = "0",
) -> int:
    """Write a model of that shape with random weights, to measure speed and memory with; its answers are noise."""
    from octavo.bench import make_model as bench

    wanted = bench.shape_of(shape, None if layers is None else _integer("--layers", layers, 1, 1000))
    ending = ".gguf" if form.startswith("gguf") else ""
    path = Path(output if output is not None else f"{shape}-{form.partition('-')[2]}{ending}")
    with _bar() as progress:
        bench.make(
            wanted,
            form,
            path,
            seed=_integer("--seed", seed, 0, 2**63),
            tokenizer=None if tokenizer is None else Path(tokenizer),
            progress=progress,
        )
    terminal.write(f"{path}\n")
    return 0


def _integer(flag: str, text: str, low: int, high: int) -> int:
    try:
        value = coerce(text, int)
    except ValueError as error:
        raise ConfigError(f"{flag} {error}") from None
    if not low <= value <= high:
        raise ConfigError(f"{flag} must be from {low} to {high}, got {text}")
    return int(value)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None] | None]:
    """A progress callback, or None where standard error is no terminal."""
    if not terminal.is_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("writing the model"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
