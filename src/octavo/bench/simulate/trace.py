"""Traces: which requests come when, how long they are, and whose they are. Made up from distributions, or read from a file.

A file holds one JSON object a line (docs/benchmarks.md). Token ids are made from a request's number and the name of its prefix,
the same for the simulator and for a real engine; they mean nothing, but share exactly the beginnings the trace says.
Stateless. Not here: running one (run.py).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError, shown

MAX_FILE_BYTES = 1 << 30
MAX_REQUESTS = 1_000_000
#: Of one prompt or answer, and of all answers together: the simulator keeps a number for each generated token.
MAX_TOKENS = 1_000_000
MAX_OUTPUT_TOKENS = 500_000_000
MAX_SECONDS = 1e9
MAX_NAME = 256
_FIELDS = frozenset({"arrival", "prompt_tokens", "output_tokens", "prefix", "prefix_tokens", "tenant", "priority"})
_Ints = npt.NDArray[np.int64]


class TraceRequest(NamedTuple):
    #: Seconds after the beginning of the trace.
    arrival: float
    #: The whole prompt, with its shared beginning.
    prompt_tokens: int
    output_tokens: int
    #: Prompts that name the same prefix begin alike, as far as both have it.
    prefix: str | None = None
    prefix_tokens: int = 0
    tenant: str | None = None
    priority: int = 0


def token_ids(request: TraceRequest, number: int, low: int = 1000, high: int = 31_000) -> list[int]:
    """The prompt of request `number` of a trace: ids from `low` to below `high`, different from the first token that is its own."""
    shared = _ids(zlib.crc32((request.prefix or "").encode("utf-8", "surrogatepass")) | 1 << 40, request.prefix_tokens, low, high)
    return [*shared, *_ids(number, request.prompt_tokens - request.prefix_tokens, low, high)]


def _ids(key: int, count: int, low: int, high: int) -> list[int]:
    """Pseudo-random ids, a pure function of `key` and place (the finaliser of SplitMix64, Steele et al. 2014)."""
    mixed = np.arange(count, dtype=np.uint64) + np.uint64((key * 0x9E3779B97F4A7C15) & (2**64 - 1))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    ids: list[int] = (low + (mixed >> np.uint64(33)) % np.uint64(high - low)).astype(np.int64).tolist()
    return ids


# Made up


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts or answers are: a number, A-B (uniform), lognormal:MEDIAN:SIGMA, or zipf:EXPONENT:MOST (a power law)."""

    kind: str
    first: float
    second: float

    @classmethod
    def parse(cls, flag: str, text: str) -> Lengths:
        """Raises ConfigError naming the flag."""
        kind, *numbers = text.strip().lower().split(":")
        try:
            if not numbers and "-" in kind:
                low, high = (int(part) for part in kind.split("-"))
                found, good = cls("uniform", low, high), 1 <= low <= high <= MAX_TOKENS
            elif not numbers:
                found = cls("uniform", int(kind), int(kind))
                good = 1 <= found.first <= MAX_TOKENS
            else:
                first, second = map(float, numbers)
                found = cls(kind, first, second)
                good = kind == "lognormal" and 1 <= first <= MAX_TOKENS and 0 <= second <= 10
                good = good or (kind == "zipf" and 0 < first <= 10 and second == int(second) and 1 <= second <= MAX_TOKENS)
        except ValueError:
            good = False
        if not good:
            raise ConfigError(f"{flag} must be N, A-B, lognormal:MEDIAN:SIGMA or zipf:EXPONENT:MOST, got {shown(text)}")
        return found

    def draw(self, rng: np.random.Generator, count: int, most: int = MAX_TOKENS) -> _Ints:
        """int64 [count] from 1 to `most`: longer ones are cut to it."""
        if self.kind == "uniform":
            values = rng.integers(int(self.first), int(self.second) + 1, count)
        elif self.kind == "lognormal":
            values = np.rint(np.minimum(self.first * np.exp(self.second * rng.standard_normal(count)), float(MAX_TOKENS))).astype(np.int64)
        else:
            values = 1 + _zipf(rng, count, int(self.second), self.first)
        cut: _Ints = np.clip(values, 1, most).astype(np.int64)
        return cut


def _zipf(rng: np.random.Generator, count: int, choices: int, exponent: float = 1.0) -> _Ints:
    """int64 [count] from 0 to below `choices`: number k as often as 1 / (k + 1) ** exponent says."""
    weights = np.cumsum(1.0 / np.arange(1, choices + 1) ** exponent)
    found: _Ints = np.searchsorted(weights, rng.random(count) * weights[-1], side="right").astype(np.int64)
    return found


def _names(word: str, rng: np.random.Generator, count: int, choices: int) -> list[str | None]:
    """ "prefix 0", ...: the k-th 1/k as often as the first; None where there is no choice."""
    return [f"{word} {k}" for k in _zipf(rng, count, choices).tolist()] if choices else [None] * count


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A trace by distributions. Every part has random numbers of its own, so that changing one leaves the others alone."""

    requests: int
    #: Requests a second on average.
    rate: float
    prompt_tokens: Lengths
    output_tokens: Lengths
    #: Requests that arrive together; the groups arrive at random times. 0: all at the beginning.
    burst: int = 1
    #: Shared beginnings, the k-th asked for 1/k as often as the first, each `prefix_tokens` long. Prompts come after them.
    prefixes: int = 0
    prefix_tokens: int = 0
    #: Tenants, the k-th asking 1/k as often as the first.
    tenants: int = 1
    #: Priorities 0, 1, ..., equally often.
    priorities: int = 1
    seed: int = 0
    #: Longest prompt and answer together; longer ones are cut, the prompt first to half of it.
    most_tokens: int = MAX_TOKENS

    def make(self) -> list[TraceRequest]:
        """Raises ConfigError where a prefix leaves no room."""
        own_room = self.most_tokens // 2 - self.prefix_tokens * bool(self.prefixes)
        if own_room < 1:
            raise ConfigError(f"a prefix of {self.prefix_tokens} tokens takes more than half of the {self.most_tokens} a sequence may have")
        arrivals, own, out, prefix, tenant, priority = map(np.random.default_rng, np.random.SeedSequence(self.seed).spawn(6))
        times = self._arrivals(arrivals)
        prompts = self.prompt_tokens.draw(own, self.requests, own_room)
        answers = self.output_tokens.draw(out, self.requests)
        names = _names("prefix", prefix, self.requests, self.prefixes)
        tenants = _names("tenant", tenant, self.requests, self.tenants if self.tenants > 1 else 0)
        levels = priority.integers(0, self.priorities, self.requests).tolist()
        shared = self.prefix_tokens if self.prefixes else 0
        return [
            TraceRequest(time, length + shared, min(answer, self.most_tokens - length - shared), name, shared, whose, level)
            for time, length, answer, name, whose, level in zip(
                times.tolist(), prompts.tolist(), answers.tolist(), names, tenants, levels, strict=True
            )
        ]

    def _arrivals(self, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        if self.burst == 0:
            return np.zeros(self.requests)
        groups = -(-self.requests // self.burst)
        times = np.cumsum(rng.exponential(self.burst / self.rate, groups))
        return np.repeat(times - times[0], self.burst)[: self.requests]


# Files


def read(path: Path) -> list[TraceRequest]:
    """By time of arrival. Raises ConfigError naming the line."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_FILE_BYTES >> 20} MiB")
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if not 1 <= len(lines) <= MAX_REQUESTS:
        raise ConfigError(f"{path} has {len(lines)} requests; a trace has from 1 to {MAX_REQUESTS}")
    found = [_request(line, f"{path}:{number}") for number, line in lines]
    return sorted(found, key=lambda request: request.arrival)


def _request(line: bytes, where: str) -> TraceRequest:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: not valid JSON") from None
    if not isinstance(entry, dict) or not entry.keys() <= _FIELDS:
        raise ConfigError(f"{where}: a request is an object with some of {', '.join(sorted(_FIELDS))}, and nothing else")
    arrival = entry.get("arrival", 0)
    if not isinstance(arrival, int | float) or isinstance(arrival, bool) or not 0 <= arrival <= MAX_SECONDS:
        raise ConfigError(f"{where}: arrival must be seconds from 0 to {MAX_SECONDS:g}, got {shown(arrival)}")
    prompt = _count(entry, "prompt_tokens", 1, MAX_TOKENS, where)
    output = _count(entry, "output_tokens", 1, MAX_TOKENS, where)
    prefix = _name(entry, "prefix", where)
    shared = _count(entry, "prefix_tokens", 0, prompt, where, 0)
    if shared and prefix is None:
        raise ConfigError(f"{where}: prefix_tokens without a prefix")
    priority = _count(entry, "priority", -(2**31), 2**31, where, 0)
    return TraceRequest(float(arrival), prompt, output, prefix, shared, _name(entry, "tenant", where), priority)


def _count(entry: dict[str, Any], name: str, low: int, high: int, where: str, default: int | None = None) -> int:
    value = entry.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{where}: {name} must be an integer from {low} to {high}, got {shown(value)}")
    return value


def _name(entry: dict[str, Any], name: str, where: str) -> str | None:
    value = entry.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > MAX_NAME):
        raise ConfigError(f"{where}: {name} must be text of at most {MAX_NAME} characters")
    return value


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """As `read` takes it; fields at their defaults are left out."""
    defaults = TraceRequest._field_defaults
    with path.open("w", encoding="utf-8") as stream:
        for request in requests:
            fields = request._asdict()
            stream.write(json.dumps({k: v for k, v in fields.items() if k not in defaults or v != defaults[k]}) + "\n")


def check(requests: Sequence[TraceRequest], most_tokens: int, pool_tokens: int) -> None:
    """Raises ConfigError naming the first request that the engine would refuse or cut."""
    for number, request in enumerate(requests, 1):
        total = request.prompt_tokens + request.output_tokens
        if total > most_tokens:
            raise ConfigError(f"request {number} of the trace has {total} tokens, prompt and answer; a sequence may have {most_tokens}")
        if total - 1 > pool_tokens:
            raise ConfigError(f"request {number} of the trace has {total} tokens; the KV pool holds {pool_tokens}: raise kv_cache_memory")
    if (total := sum(request.output_tokens for request in requests)) > MAX_OUTPUT_TOKENS:
        raise ConfigError(f"the answers of the trace have {total} tokens, at most {MAX_OUTPUT_TOKENS} can be simulated")


def describe(requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """What a report says of a trace."""
    prompts = np.array([request.prompt_tokens for request in requests])
    answers = np.array([request.output_tokens for request in requests])
    span = requests[-1].arrival - requests[0].arrival
    return {
        "requests": len(requests),
        "arrivals_s": round(span, 3),
        "requests_per_s": round(len(requests) / span, 4) if span and math.isfinite(len(requests) / span) else None,
        "prompt_tokens": {"total": int(prompts.sum()), "median": float(np.median(prompts)), "max": int(prompts.max())},
        "output_tokens": {"total": int(answers.sum()), "median": float(np.median(answers)), "max": int(answers.max())},
        "prefixes": len({request.prefix for request in requests if request.prefix_tokens}),
        "tenants": len({request.tenant for request in requests}),
    }
