"""A request body in bytes -> a JSON object, with bounds on depth and number of values before anything is built.

Stricter than Python's own reader: UTF-8 only, no NaN or Infinity (written or by overflow), no name twice in an object, no
half of a surrogate pair. Stateless. Not here: what the object may hold (fields.py, protocol.py).
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from octavo.errors import InvalidRequestError

#: Lists and objects in one body; no honest one comes near.
MAX_CONTAINERS = 100_000

# A whole string or one bracket. A string that does not end takes all the rest, so that the scan stays linear.
_PIECE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(body: bytes, max_depth: int) -> dict[str, Any]:
    """Raises InvalidRequestError, code invalid_json."""
    check_nesting(body, max_depth)
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite, parse_int=_integer
        )
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    if not isinstance(value, dict):
        raise _invalid("the body must be a JSON object")
    if _SURROGATE.search(body):
        _check_surrogates(value)
    return value


def check_nesting(body: bytes, max_depth: int) -> None:
    depth = count = 0
    for piece in _PIECE.finditer(body):
        first = body[piece.start()]
        if first in b"[{":
            depth += 1
            count += 1
            if depth > max_depth:
                raise _invalid(f"the body is nested deeper than {max_depth} levels (setting max_json_depth)")
            if count > MAX_CONTAINERS:
                raise _invalid(f"the body holds more than {MAX_CONTAINERS} lists and objects")
        elif first in b"]}":
            depth -= 1


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _invalid("the body has an object with the same name twice")
    return found


def _constant(name: str) -> NoReturn:
    raise _invalid(f"the body is not JSON: {name} is no number of JSON's")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _invalid("the body holds a number that is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > 300:  # still within a float; Python itself refuses to read more than 4300 digits
        raise _invalid("the body holds a number that is too large")
    return int(text)


def _check_surrogates(value: Any) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise _invalid("the body holds half of a surrogate pair, which is no text") from None
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
