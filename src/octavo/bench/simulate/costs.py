"""What a step costs: a model of few numbers, none negative, fitted to measured steps and kept as JSON.

seconds = base + G(generated rows) + P(prompt rows) + a * tokens read by generated rows + b * tokens read by prompt rows
          + c * prompt chunks + d * prompts that give a token
G and P are 0 at no rows, linear between knots, and never fall; `base` is what rows of both kinds pay once. Cost per row is far from
constant (one row reads all weights, the next ones share them), so a straight line would not do.
The fit is least squares of relative errors without negative numbers (Lawson & Hanson 1974, chapter 23), with less weight for
outliers (Huber 1964): a machine disturbed for a moment makes single steps slow.
Stateless. Not here: measuring (calibrate.py), what is made of the costs (virtual.py).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.engine.scheduler_output import ScheduledEntry, TokenKind
from octavo.errors import ConfigError, OctavoError, shown

FORMAT = 1
MAX_FILE_BYTES = 1 << 20
MAX_KNOTS = 64
BUILT_IN = Path(__file__).with_name("smollm2_costs.json")
#: Relative errors beyond this count linearly, not as squares.
HUBER = 0.05
ROUNDS = 12
_Floats = npt.NDArray[np.float64]


class Work(NamedTuple):
    """What a step computes, as far as the model of its cost looks."""

    generated_rows: int = 0
    prompt_rows: int = 0
    #: Tokens that attention reads, summed over rows: row at position p reads p + 1.
    generated_context: int = 0
    prompt_context: int = 0
    #: Requests that get prompt tokens, and those of them whose prompt is done: they draw a token.
    prompt_chunks: int = 0
    prompt_samples: int = 0

    @classmethod
    def of(cls, entries: Iterable[ScheduledEntry]) -> Work:
        rows, contexts, chunks, samples = [0, 0], [0, 0], 0, 0
        for _, start, count, kind, _, sample in entries:
            rows[kind] += count
            contexts[kind] += count * start + count * (count + 1) // 2
            if kind is TokenKind.PROMPT:
                chunks += 1
                samples += sample
        generated, prompt = TokenKind.GENERATED, TokenKind.PROMPT
        return cls(rows[generated], rows[prompt], contexts[generated], contexts[prompt], chunks, samples)


class RowCosts(NamedTuple):
    """Seconds for a number of rows: 0 for none, linear between the knots, going on as in the last piece."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: int) -> float:
        if rows <= 0 or not self.rows:
            return 0.0
        right = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        low, below = (self.rows[right - 1], self.seconds[right - 1]) if right else (0, 0.0)
        return below + (self.seconds[right] - below) * (rows - low) / (self.rows[right] - low)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds each."""

    base: float
    generated_rows: RowCosts
    prompt_rows: RowCosts
    generated_context: float = 0.0
    prompt_context: float = 0.0
    prompt_chunk: float = 0.0
    prompt_sample: float = 0.0

    def of(self, work: Work) -> float:
        return (
            self.base
            + self.generated_rows.at(work.generated_rows)
            + self.prompt_rows.at(work.prompt_rows)
            + self.generated_context * work.generated_context
            + self.prompt_context * work.prompt_context
            + self.prompt_chunk * work.prompt_chunks
            + self.prompt_sample * work.prompt_samples
        )

    def scaled(self, factor: float) -> StepCosts:
        """A machine that takes `factor` times as long for everything."""
        generated, prompt = (RowCosts(c.rows, tuple(factor * s for s in c.seconds)) for c in (self.generated_rows, self.prompt_rows))
        return StepCosts(factor * self.base, generated, prompt, **{name: factor * getattr(self, name) for name in _SINGLE})


_SINGLE = ("generated_context", "prompt_context", "prompt_chunk", "prompt_sample")
_WORK_OF = ("generated_context", "prompt_context", "prompt_chunks", "prompt_samples")


@dataclass(frozen=True, slots=True)
class CostFile:
    """Costs, and what they are of."""

    costs: StepCosts
    model: str
    machine: str
    #: Bytes of K and V of one token over all layers, and the longest sequence: they size the pool of the simulated engine.
    kv_token_bytes: int
    max_model_len: int
    #: Where it came from, for people: versions, settings, residuals.
    about: Mapping[str, Any] = field(default_factory=dict)


# Fitting


class Sample(NamedTuple):
    work: Work
    seconds: float


def fit(samples: Sequence[Sample]) -> StepCosts:
    """The costs that explain the samples best. Raises OctavoError where there are too few, or a time is not positive."""
    if len(samples) < 8 or not all(sample.seconds > 0 and math.isfinite(sample.seconds) for sample in samples):
        raise OctavoError(f"{len(samples)} measured steps are too few to fit costs to, or a time is not positive")
    generated = _knots(sample.work.generated_rows for sample in samples)
    prompt = _knots(sample.work.prompt_rows for sample in samples)
    matrix = np.array([_row(sample.work, generated, prompt) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    weights = 1 / seconds
    found = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        found = _non_negative_least_squares(matrix * weights[:, None], seconds * weights)
        error = np.abs(matrix @ found / seconds - 1)
        weights = np.sqrt(HUBER / np.maximum(error, HUBER)) / seconds
    steps, single = found[1 : 1 + len(generated) + len(prompt)].tolist(), found[1 + len(generated) + len(prompt) :].tolist()
    return StepCosts(
        float(found[0]),
        RowCosts(generated, tuple(np.cumsum(steps[: len(generated)]).tolist())),
        RowCosts(prompt, tuple(np.cumsum(steps[len(generated) :]).tolist())),
        *single,
    )


def _knots(rows: Iterable[int]) -> tuple[int, ...]:
    """Powers of two, and the largest number seen; only where something was seen since the knot before."""
    seen = sorted({count for count in rows if count > 0})
    knots: list[int] = []
    for count in seen:
        power = min(1 << (count - 1).bit_length(), seen[-1])
        if not knots or power > knots[-1]:
            knots.append(power)
    return tuple(knots[:MAX_KNOTS])


def _row(work: Work, generated: Sequence[int], prompt: Sequence[int]) -> list[float]:
    """What each unknown counts in a step; those of rows are the rise from one knot to the next."""
    single = [float(getattr(work, name)) for name in _WORK_OF]
    return [1.0, *_rises(work.generated_rows, generated), *_rises(work.prompt_rows, prompt), *single]


def _rises(rows: int, knots: Sequence[int]) -> list[float]:
    lows = [0, *knots[:-1]]
    return [min(max((rows - low) / (high - low), 0.0), 1.0) for low, high in zip(lows, knots, strict=True)]


def _non_negative_least_squares(matrix: _Floats, target: _Floats) -> _Floats:
    """The x >= 0 with the smallest |matrix x - target|: Lawson & Hanson's NNLS, on columns scaled to length 1."""
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1.0
    scaled = matrix / lengths
    x, active = np.zeros(scaled.shape[1]), np.zeros(scaled.shape[1], bool)
    tolerance = 1e-12 * float(np.linalg.norm(target))
    for _ in range(10 * scaled.shape[1]):
        gradient = np.where(active, -np.inf, scaled.T @ (target - scaled @ x))
        if gradient.max() <= tolerance:
            break
        active[int(np.argmax(gradient))] = True
        while True:
            trial = np.zeros_like(x)
            trial[active] = np.linalg.lstsq(scaled[:, active], target, rcond=None)[0]
            negative = active & (trial <= 0)
            if not negative.any():
                break
            step = np.min(x[negative] / np.maximum(x[negative] - trial[negative], 1e-300))
            x += step * (trial - x)
            active &= x > 1e-15
        x = trial
    return np.asarray(x / lengths, np.float64)


def residuals(costs: StepCosts, samples: Sequence[Sample]) -> dict[str, Any]:
    """Relative errors of the model, by what the steps held: how many steps, median and p95 of |error|, and the mean of the error."""
    kinds: dict[str, list[float]] = {"generated": [], "prompt": [], "mixed": []}
    for work, seconds in samples:
        kind = "mixed" if work.generated_rows and work.prompt_rows else "generated" if work.generated_rows else "prompt"
        kinds[kind].append(costs.of(work) / seconds - 1)
    summary = {}
    every = [error for found in kinds.values() for error in found]
    for kind, errors in {**kinds, "all": every}.items():
        if errors:
            sizes = np.abs(errors)
            summary[kind] = {
                "steps": len(errors),
                "median": round(float(np.median(sizes)), 4),
                "p95": round(float(np.percentile(sizes, 95)), 4),
                "mean": round(float(np.mean(errors)), 4),
            }
    return summary


# Files


def save(path: Path, file: CostFile) -> None:
    costs = file.costs
    seconds: dict[str, Any] = {"base": costs.base}
    seconds |= {name: [list(pair) for pair in zip(*getattr(costs, name), strict=True)] for name in ("generated_rows", "prompt_rows")}
    seconds |= {name: getattr(costs, name) for name in _SINGLE}
    record = {
        "format": FORMAT,
        "model": file.model,
        "machine": file.machine,
        "kv_token_bytes": file.kv_token_bytes,
        "max_model_len": file.max_model_len,
        "seconds": seconds,
        "about": dict(file.about),
    }
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", "utf-8")


def load(path: Path) -> CostFile:
    """Raises ConfigError where it is not what `save` writes."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError("it is too long")
        record = json.loads(data)
        if record["format"] != FORMAT:
            raise ValueError(f"format {shown(record['format'])} is not {FORMAT}")
        seconds = record["seconds"]
        costs = StepCosts(
            _seconds(seconds["base"], "base"),
            _row_costs(seconds["generated_rows"], "generated_rows"),
            _row_costs(seconds["prompt_rows"], "prompt_rows"),
            **{name: _seconds(seconds[name], name) for name in _SINGLE},
        )
        about = record.get("about")
        return CostFile(
            costs,
            _text(record["model"], "model"),
            _text(record["machine"], "machine"),
            _size(record["kv_token_bytes"], "kv_token_bytes"),
            _size(record["max_model_len"], "max_model_len"),
            about if isinstance(about, dict) else {},
        )
    except OSError as error:
        raise ConfigError(f"cannot read the costs {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is no file of step costs ({reason}): write one with octavo bench scheduler --calibrate") from None


def _seconds(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e6:
        raise ValueError(f"{name} is {shown(value)}")
    return float(value)


def _size(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**40:
        raise ValueError(f"{name} is {shown(value)}")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 512:
        raise ValueError(f"{name} is {shown(value)}")
    return value


def _row_costs(value: Any, name: str) -> RowCosts:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_KNOTS:
        raise ValueError(f"{name} has no knots, or too many")
    rows = [_size(pair[0], name) for pair in value]
    seconds = [_seconds(pair[1], name) for pair in value]
    if rows != sorted(set(rows)) or seconds != sorted(seconds):
        raise ValueError(f"{name} does not rise")
    return RowCosts(tuple(rows), tuple(seconds))
