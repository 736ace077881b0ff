"""A strict reader of server-sent events, after the specification: every byte must be accounted for."""

from __future__ import annotations

import json
from typing import Any


def parse(raw: bytes) -> list[str]:
    """The data of each event. Fails for anything but `data: <one line>` and an empty line, in UTF-8, one after the other."""
    text = raw.decode("utf-8", "strict")
    assert "\r" not in text
    assert text == "" or text.endswith("\n\n"), f"the last event is not ended: {text[-80:]!r}"
    events = text.split("\n\n")[:-1]
    for event in events:
        assert event.startswith("data: "), f"not an event: {event!r}"
        assert len(event.splitlines()) == 1, f"some clients see several lines here: {event!r}"
    return [event.removeprefix("data: ") for event in events]


def chunks(raw: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    *events, last = parse(raw)
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def joined(raw: bytes, index: int = 0) -> str:
    """The text of one choice."""
    parts = [choice for chunk in chunks(raw) for choice in chunk["choices"] if choice["index"] == index]
    return "".join(part["delta"].get("content") or "" if "delta" in part else part["text"] for part in parts)
