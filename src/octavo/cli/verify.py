"""`octavo verify`: runs a model in every way the engine knows, and shows that none of them changes an answer.

The table goes to standard output, or the certificate with --json; the progress bar goes to a terminal only. Exit code 0: all
holds, 1: something differs or was not proved, 2: bad usage.
Stateless. Not here: the matrix and the comparison (verify/).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import terminal
from octavo.cli.loading_bar import LoadingBar
from octavo.cli.options import chosen_model, engine_options
from octavo.config import EngineConfig
from octavo.config_sources import coerce
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.verify.report import Report, RowReport

EXAMPLES = """\b
Examples:
  octavo verify
  octavo verify --quick
  octavo verify ./model.gguf --prompt "Deep learning is" --output certificate.json
  octavo verify --prompts prompts.txt --max-tokens 40 --json
"""


@engine_options
def command(
    config: EngineConfig,
    name: Annotated[str | None, typer.Argument(metavar="MODEL", help="short name, folder, .gguf file or Hugging Face id")] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="a prompt instead of ours (may be repeated)", metavar="TEXT")] = None,
    prompts: Annotated[str | None, typer.Option("--prompts", help="prompts, one a line", metavar="FILE")] = None,
    max_tokens: Annotated[
        str | None, typer.Option("--max-tokens", help="tokens generated after each prompt [16; quick: 12]", metavar="INTEGER")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer and shorter prompts")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the certificate as one JSON object")] = False,
    output: Annotated[str | None, typer.Option("--output", help="write the certificate", metavar="FILE.json")] = None,
    plant: Annotated[str | None, typer.Option("--plant", hidden=True, help="plant a fault, to test the verifier", metavar="FAULT")] = None,
) -> int:
    """Prove that no optimisation changes an answer of this model on this machine.

    Every prompt is completed by full recomputation, then with a KV cache, in chunks, in batches, after prefix hits, preemptions and
    forks, with other numbers of threads, as a stream; raw logits are compared bit for bit where that is promised.
    """
    texts = _prompts(prompt, prompts)
    count = None if max_tokens is None else _count(max_tokens)
    from octavo.verify import run

    with LoadingBar() as bar, _progress() as progress:
        report = run(
            config=chosen_model(config, name), prompts=texts, max_tokens=count, quick=quick, plant=plant,
            progress=progress, load_progress=bar.report,
        )  # fmt: skip
    try:
        if output is not None:
            Path(output).write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n", "utf-8")
    finally:  # a file that cannot be written must not take the result with it
        if as_json:
            terminal.write(terminal.as_json(report.to_dict()))
        else:
            _show(report, texts)
    return 0 if report.holds else 1


def _prompts(given: Any, file: str | None) -> list[str] | None:
    """The user's prompts, or None for ours. Raises ConfigError."""
    if given and file is not None:
        raise ConfigError("--prompt and --prompts exclude each other")
    if given:
        return [terminal.check_text(text, "--prompt") for text in given]
    if file is None:
        return None
    with Path(file).open("rb") as stream:
        data = stream.read(terminal.MAX_INPUT_BYTES + 1)
    if len(data) > terminal.MAX_INPUT_BYTES:
        raise ConfigError(f"{file} is longer than {terminal.MAX_INPUT_BYTES >> 20} MiB")
    try:
        lines = [line.strip() for line in data.decode("utf-8").split("\n")]
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not valid UTF-8") from None
    found = [line for line in lines if line]
    if not found:
        raise ConfigError(f"{file} has no prompts")
    return found


def _count(text: str) -> int:
    try:
        return int(coerce(text, int))
    except ValueError as error:
        raise ConfigError(f"--max-tokens {error}") from None


# -- the table -----------------------------------------------------------------------------------------------------
_WORDS = {"holds": "holds", "differs": "DIFFERS", "did not fire": "NOT PROVED", "failed": "FAILED", "does not apply": "-"}


def _show(report: Report, texts: list[str] | None) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if terminal.is_terminal(sys.stdout) else 140)
    console.print(_table(report.rows))
    for row in report.rows:
        if row.status != "holds":
            console.print(f"{row.name}: {row.why}", markup=False)
    if (found := report.first) is not None:
        console.print(_first(found[0], texts), markup=False)
    files = ", ".join(f"{file['name']} sha256 {file['sha256']}" for file in report.model["files"])
    engine = " ".join(str(report.engine[name]) for name in ("octavo", "backend", "isa") if report.engine[name])
    console.print(f"\nmodel     {report.model['name']}: {files}", markup=False)
    console.print(f"engine    octavo {engine}, {report.machine['cpu']}", markup=False)
    baseline = report.baseline
    console.print(
        f"baseline  {len(report.prompts)} prompts, {baseline['choices']} answers by full recomputation, {baseline['logits']} logits"
    )
    console.print(f"logits    {report.logits_digest}\ndigest    {report.digest}")
    compared = sum(row.logits for row in report.rows)
    console.print(_verdict(report, compared), markup=False)


def _verdict(report: Report, compared: int) -> str:
    bad = [row.name for row in report.rows if row.status not in ("holds", "does not apply")]
    what = f"{compared} logits compared in {report.seconds:.0f} s"
    if report.planted is not None:
        what += f"; the fault {report.planted!r} was planted"
    return f"All holds: {what}" if report.holds else f"DOES NOT HOLD: {', '.join(bad) or 'no row applies'}; {what}"


def _table(rows: list[RowReport]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("way of running", "result", "positions", "logits", "largest difference", "seconds"):
        table.add_column(column, justify="left" if column in ("way of running", "result") else "right")
    table.add_column("it did happen", overflow="fold")
    for row in rows:
        if row.status == "does not apply":
            table.add_row(row.name, "does not apply")
            continue
        difference = "none, bit for bit" if row.bitwise else f"{row.largest_difference:.3g}"
        happened = ", ".join(f"{name} {value:g}" for name, value in row.counters.items())
        table.add_row(row.name, _WORDS[row.status], str(row.positions), str(row.logits), difference, f"{row.seconds:.1f}", happened)
    return table


def _first(row: RowReport, texts: list[str] | None) -> str:
    """One line about the first difference: prompt, position, token, layer."""
    first = row.first
    assert first is not None
    text = "" if texts is None else f" ({texts[first.prompt][:40]!r})"
    token = "" if first.token_id is None else f", token {first.token_id}"
    return (
        f"first difference: {row.name}, prompt {first.prompt + 1}{text}, choice {first.choice}, position {first.position} "
        f"({first.kind}{token}), {first.what}: {first.detail}; first layer that differs: {first.layer}"
    )


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on a terminal, gone when the work is done; nothing elsewhere."""
    if not terminal.is_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # seldom redrawn: the bar runs on the cores that compute
    bar = Progress(*columns, console=Console(file=sys.stderr), transient=True, refresh_per_second=2)
    task = bar.add_task("")

    def report(what: str, done: int, total: int) -> None:
        bar.start()  # twice is nothing; the loading bar came first
        bar.update(task, description=what, completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()
