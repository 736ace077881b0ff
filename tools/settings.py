"""The tables of docs/settings.md, made from the dataclasses so that no setting is missing there.

Usage: python tools/settings.py [--write]; without --write it fails when the document says something else.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.config_sources import describe, field_types
from octavo.server_config import ServerConfig

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
TABLES = {"EngineConfig": EngineConfig, "ServerConfig": ServerConfig}


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: made by tools/settings.py -->\n", f"<!-- END {name} -->\n"


def table(cls: type) -> str:
    rows = [
        f"| `{field.name}` | {_default(field.default)} | {_type(cls, field.name)} | {field.metadata['help']} |" for field in fields(cls)
    ]
    return "\n".join(["| setting | default | value | what it is |", "|---|---|---|---|", *rows]) + "\n"


def _default(value: Any) -> str:
    if value in (None, "", ()):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(cls: type, name: str) -> str:
    words = describe(field_types(cls)[name])
    return "a size, like 512MiB" if words == "an integer or text" else words


def document(text: str) -> str:
    """`text` with its tables made anew."""
    for name, cls in TABLES.items():
        begin, end = marks(name)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table(cls)}\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    text = DOCUMENT.read_text("utf-8")
    wanted = document(text)
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(wanted, "utf-8")
    elif text != wanted:
        print("docs/settings.md is not what the dataclasses say: run python tools/settings.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
