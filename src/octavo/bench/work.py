"""What engines are compared by: items of work, and the rate that the times of tokens give.

    decode:P:G:B    B prompts of P tokens at once, G tokens generated for each
    prefill:P:B     B prompts of P tokens at once, one token drawn of each

A prefill's rate is the prompt tokens a second until the last request has its first token. A decode's is the tokens a second
of all requests from the moment when each had its first token to the one when the first of them had its last: every request
is in every step of that time, and prompts are not in it.
Pure functions. Not here: running it (comparison.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from octavo.errors import ConfigError, OctavoError


class Work(NamedTuple):
    kind: str
    prompt_tokens: int
    tokens: int
    batch_size: int

    @property
    def name(self) -> str:
        generated = f", {self.tokens} generated" if self.kind == "decode" else ""
        return f"{self.kind}, B={self.batch_size}, P={self.prompt_tokens}{generated}"


#: Sets of work by name.
SETS: Mapping[str, str] = MappingProxyType(
    {
        "small": "decode:512:64:1,decode:128:64:8,decode:128:64:32,decode:2048:64:1,prefill:512:1,prefill:128:32",
        "large": "decode:64:24:1,decode:64:24:8,prefill:512:1",
    }
)
#: Fewer tokens than this would leave a decode no time that holds every request.
_FEWEST = 4
_MOST = 100_000


def parse(text: str) -> list[Work]:
    """A list separated by commas of items and of names in SETS. Raises ConfigError."""
    items = [item for word in text.split(",") if word.strip() for item in SETS.get(word.strip(), word).split(",")]
    found = [_item(item.strip()) for item in items]
    if not found:
        raise ConfigError("--work is empty")
    return list(dict.fromkeys(found))


def _item(text: str) -> Work:
    match = re.fullmatch(r"decode:(\d{1,6}):(\d{1,6}):(\d{1,4})|prefill:(\d{1,6}):(\d{1,4})", text, re.ASCII)
    if match is None:
        raise ConfigError(
            f"--work: {text!r} is neither decode:PROMPT:GENERATED:REQUESTS, prefill:PROMPT:REQUESTS nor one of {', '.join(SETS)}"
        )
    if text.startswith("decode"):
        work = Work("decode", int(match[1]), int(match[2]), int(match[3]))
    else:
        work = Work("prefill", int(match[4]), 1, int(match[5]))
    if not (1 <= work.prompt_tokens <= _MOST and work.batch_size >= 1 and work.tokens <= _MOST):
        raise ConfigError(f"--work: {text}: every number must be from 1 to {_MOST}")
    if work.kind == "decode" and work.tokens < _FEWEST:
        raise ConfigError(f"--work: {text}: a decode must generate at least {_FEWEST} tokens")
    return work


def rate(work: Work, times: Sequence[Sequence[float]]) -> float:
    """Tokens a second (module docstring) from the seconds of each request's tokens, which rise. Raises OctavoError."""
    begin = max(moments[0] for moments in times)
    if work.kind == "prefill":
        return work.prompt_tokens * work.batch_size / begin
    end = min(moments[-1] for moments in times)
    count = sum(begin < moment <= end for moments in times for moment in moments)
    if end <= begin or not count:
        raise OctavoError("at no time did all requests generate together: generate more tokens")
    return count / (end - begin)
