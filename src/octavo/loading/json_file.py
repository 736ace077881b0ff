"""Reads the small JSON files beside a model (config, generation, index), which are as untrusted as the model.

Pure functions. Not here: what the values mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.errors import ModelLoadError, shown
from octavo.loading.mapped_file import read_start

#: An index of 10^5 tensors takes about 10 MB.
MAX_JSON_BYTES = 1 << 26


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text`; ModelLoadError, beginning with `where`, for anything else, a repeated key included."""

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ModelLoadError(f"{where}: the key {shown(key)} is there twice")
            found[key] = value
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ModelLoadError(f"{where}: not valid JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where}: not a JSON object")
    return value


def read_bytes(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """The content of a file of at most `most` bytes."""
    data = read_start(path, most + 1)
    if len(data) > most:
        raise ModelLoadError(f"{path}: more than the limit of {most} bytes long")
    return data


def read_json_object(path: Path) -> dict[str, Any]:
    return parse_json_object(read_bytes(path), str(path))


def read_text(path: Path) -> str:
    try:
        return str(read_bytes(path), "utf-8")
    except UnicodeDecodeError:
        raise ModelLoadError(f"{path}: not UTF-8 text") from None
