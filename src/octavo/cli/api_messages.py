"""What the bodies of an OpenAI-compatible API hold, as far as a chat needs it: the request, and what servers say in return.

Stateless. Nothing a server sends is taken for what it claims to be.
Not here: connections and what a status means (remote.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from octavo.sampling_params import SamplingParams

MAX_MESSAGE = 300
#: How servers name a request that is longer than the context.
CONTEXT_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
#: SamplingParams field -> name in a request, where it has another one there.
_OTHER_NAMES = {"include_stop_in_output": "include_stop_str_in_output"}


def request_body(model: str, messages: list[dict[str, str]], params: SamplingParams, without: set[str]) -> dict[str, Any]:
    """The request; sampling fields that are at their defaults are left out, since strict servers refuse what they do not know."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    if "stream_options" not in without:
        body["stream_options"] = {"include_usage": True}
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        if value == field.default or field.name in ("n", "logprobs", "prompt_logprobs", "logprobs_mode"):
            continue
        name = "max_completion_tokens" if field.name == "max_tokens" and "max_tokens" in without else field.name
        body[_OTHER_NAMES.get(name, name)] = {str(key): bias for key, bias in value.items()} if isinstance(value, Mapping) else value
    return body


def explanation(reply: str | dict[str, Any]) -> tuple[str, str]:
    """(message, code) of an error body in one of the shapes servers use; empty where it says nothing."""
    try:
        content = json.loads(reply) if isinstance(reply, str) else reply
    except (ValueError, RecursionError):
        return "", ""
    error = content.get("error", content) if isinstance(content, dict) else content
    if isinstance(error, str):
        return one_line(error), ""
    if not isinstance(error, dict):
        return "", ""
    message = error.get("message") or error.get("detail") or ""
    codes = [error[name] for name in ("code", "type") if isinstance(error.get(name), str)]
    code = next((code for code in codes if code in CONTEXT_CODES), codes[0] if codes else "")
    return one_line(message if isinstance(message, str) else json.dumps(message)), code


def token_counts(usage: Any) -> tuple[int, int, int] | None:
    """(prompt, completion, cached) tokens; None where they are not told."""
    if not isinstance(usage, dict):
        return None
    prompt, completion = count(usage.get("prompt_tokens")), count(usage.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    details = usage.get("prompt_tokens_details")
    return prompt, completion, count(details.get("cached_tokens") if isinstance(details, dict) else 0) or 0


def count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def valid_unicode(text: str) -> str:
    """`text` with the surrogates that JSON can smuggle in joined or replaced: it will be sent back, and may be saved."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def one_line(text: str) -> str:
    """A server's words as one short line without control characters."""
    words = " ".join(valid_unicode(text[: 4 * MAX_MESSAGE]).split())
    shown = "".join(character if character.isprintable() else "\ufffd" for character in words)
    return shown if len(shown) <= MAX_MESSAGE else shown[: MAX_MESSAGE - 3] + "..."
