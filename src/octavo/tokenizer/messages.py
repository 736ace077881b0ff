"""Chat messages: checking what a caller sent and bringing it into the form a template understands.

Plain functions over plain data (lists of dicts, never changed in place); errors are InvalidRequestError naming the message.
Not here: rendering (chat_template.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from octavo.errors import InvalidRequestError

MAX_DEPTH = 64
ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]


def _fail(index: int, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"messages[{index}]{message}", param=f"messages[{index}]")


def checked(messages: Any) -> list[Message]:
    """Copies with content as str or as a list of text parts ({"type": "text", "text": str}); null becomes ""."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages must be a list of objects with role and content", param="messages")
    if not messages:
        raise InvalidRequestError("messages is empty: send at least one message", param="messages")
    check_plain(messages, "messages")
    return [_checked_message(i, message) for i, message in enumerate(messages)]


def _checked_message(index: int, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise _fail(index, f" must be an object, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise _fail(index, f".role must be one of {', '.join(ROLES)}, got {role!r:.40}")
    result = dict(message)
    result["content"] = _checked_content(index, message.get("content"))
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        value = result.get(key)
        if value is None:
            result.pop(key, None)  # templates ask "is defined"
        elif not isinstance(value, str):
            raise _fail(index, f".{key} must be a string")
    if not result.get("tool_calls"):
        result.pop("tool_calls", None)
    else:
        result["tool_calls"] = _checked_calls(index, result["tool_calls"])
    return result


def _checked_content(index: int, content: Any) -> str | list[Message]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _fail(index, f".content must be a string, a list of text parts or null, got {type(content).__name__}")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text":
            raise _fail(index, f".content has a part of type {kind!r:.40}; this model reads only text parts")
        if not isinstance(part.get("text"), str):
            raise _fail(index, ".content has a text part without a text string")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _checked_calls(index: int, calls: Any) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise _fail(index, ".tool_calls must be a list")
    result = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _fail(index, ".tool_calls: each call must be an object with function.name")
        arguments = _arguments(function.get("arguments"))
        result.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return result


def _arguments(value: Any) -> Any:
    """Arguments of a call: JSON text of an object becomes that object, nothing becomes {}, other text stays text."""
    if isinstance(value, Mapping):
        return dict(value)
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return {}
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    try:
        parsed = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return value
    if not isinstance(parsed, dict):
        return value
    check_plain(parsed, "tool_calls")
    return parsed


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def arguments_as_text(messages: list[Message]) -> list[Message]:
    """For templates that print arguments as they are: every mapping as JSON text again."""

    def call(item: Message) -> Message:
        arguments = item["function"]["arguments"]
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**item, "function": {**item["function"], "arguments": arguments}}

    return [m | {"tool_calls": [call(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in messages]


def joined(content: str | list[Message]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def merge_system(messages: list[Message], *, knows_developer: bool) -> list[Message]:
    """All system texts in one first message, joined by blank lines. A developer message is one unless the template knows the role."""
    roles = {"system"} if knows_developer else {"system", "developer"}
    texts = [joined(m["content"]) for m in messages if m["role"] in roles]
    rest = [m for m in messages if m["role"] not in roles]
    return [{"role": "system", "content": "\n\n".join(t for t in texts if t)}, *rest] if texts else rest


def shape_content(messages: list[Message], *, takes_text: bool, takes_parts: bool) -> list[Message]:
    """Content as the template reads it: strings where it takes them, else parts; parts of a user or assistant stay apart if it can."""
    result = []
    for message in messages:
        content = message["content"]
        keep = takes_parts and message["role"] in ("user", "assistant") and not isinstance(content, str)
        if not keep:
            text = joined(content)
            content = text if takes_text or not takes_parts else [{"type": "text", "text": text}]
        result.append(message | {"content": content})
    return result


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with every string (keys of mappings too) changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(k, change): map_strings(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(v, change) for v in value]
    return value


def check_plain(value: Any, param: str, depth: int = 0) -> None:
    """Raise InvalidRequestError unless `value` is made of JSON's types, not nested too deep."""
    if depth > MAX_DEPTH or not (value is None or isinstance(value, (str, int, float, bool, list, tuple, Mapping))):
        raise InvalidRequestError(f"{param} must hold plain JSON values, nested at most {MAX_DEPTH} deep", param=param)
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        check_plain(item, param, depth + 1)
