"""`octavo models`: the short names, what they stand for, and whether they are on this machine.

Stateless. Not here: what a name resolves to (loading/source.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import terminal
from octavo.errors import ModelLoadError

EXAMPLES = """\b
Examples:
  octavo models
  octavo models --json
"""


def command(
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object, for programs")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> int:
    """List the models that have a short name.

    MODEL may also be a folder, a .gguf file or any Hugging Face id of a supported family.
    """
    from octavo.loading.source import SHORT_NAMES

    rows = [describe(name) for name in SHORT_NAMES]
    if as_json:
        terminal.write(terminal.as_json({"models": rows}))
    elif terminal.is_terminal(sys.stdout):
        _table(rows)
    else:
        for row in rows:
            terminal.write(f"{row['name']}\t{row['path'] or 'not here'}\t{row['hub_id']}\t{row['description']}\n")
    return 0


def describe(name: str) -> dict[str, Any]:
    """A short name's row. `path`: where it is on this machine, None if it would have to be fetched."""
    from octavo.loading.source import SHORT_NAMES, embedded_path

    short = SHORT_NAMES[name]
    path = embedded_path(short.distribution) if short.distribution else None
    source = f"package {short.distribution}" if path else "hub"
    path = path or _cached(short.hub_id)
    return {
        "name": name,
        "description": short.description,
        "source": source,
        "hub_id": short.hub_id,
        "local": path is not None,
        "path": None if path is None else str(path),
    }


def _cached(hub_id: str) -> Path | None:
    """The folder of a complete copy in the hub's cache, or None. Never asks the network."""
    from octavo.loading.source import resolve_source

    try:
        return resolve_source(hub_id, offline=True).paths[0].parent
    except ModelLoadError:
        return None


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("NAME", "HERE", "FROM", "WHAT"):
        table.add_column(title)
    for row in rows:
        origin = row["source"] if row["source"] != "hub" else row["hub_id"]
        table.add_row(row["name"], "yes" if row["local"] else "no", origin, row["description"])
    Console(highlight=False).print(table)
