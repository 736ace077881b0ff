"""Measures the ways to compute attention: time, memory, and how far each is from the formula in float64.

Owner of nothing but what one run allocates. Not here: the ways themselves (naive.py, efficient.py, flash.py, in_torch.py,
paged.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.lab import svg, text
from octavo.lab.attention import efficient, flash, naive
from octavo.lab.attention.naive import Array
from octavo.lab.attention.paged import PagedAttention, fused
from octavo.lab.lessons import Progress, no_progress

#: What the mean absolute difference of efficient and flash-style to naive must not exceed on unit-normal float32 inputs.
BOUND = 4.1e-08
NAIVE, EFFICIENT, FLASH = "naive", "efficient", "flash-style"
METHOD = (
    "unit-normal float32 inputs, causal; seconds: median of runs, all ways in turn within a run, after one to warm up; memory beyond the"
    " inputs, peak of one call: tracemalloc (NumPy), Total Allocated of torch.profiler's trace (torch), counted from shapes (kernel);"
    " differences are to naive, errors to naive in float64; the kernel is timed with its writing of K and V into blocks"
)
_MAX_LENGTH = 1 << 16


@dataclass(frozen=True, slots=True)
class Settings:
    """The shape is SmolLM2's."""

    lengths: Sequence[int] = (128, 256, 512, 1024, 2048, 4096)
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    runs: int = 3
    seed: int = 0
    quick: bool = False

    def __post_init__(self) -> None:
        if self.quick:
            object.__setattr__(self, "lengths", tuple(length for length in self.lengths if length <= 256) or (128,))
            object.__setattr__(self, "runs", 1)
        if not self.lengths or not all(1 <= length <= _MAX_LENGTH for length in self.lengths):
            raise ConfigError(f"--lengths must be between 1 and {_MAX_LENGTH}, got {self.lengths}")
        if not (1 <= self.kv_heads <= self.heads <= 1024) or self.heads % self.kv_heads:
            raise ConfigError(f"--heads must be a multiple of --kv-heads, got {self.heads} and {self.kv_heads}")
        if not 8 <= self.head_dim <= 256 or self.head_dim % 2:
            raise ConfigError(f"--head-dim must be even and between 8 and 256, got {self.head_dim}")
        if not 1 <= self.runs <= 1000 or self.seed < 0:
            raise ConfigError("--runs must be between 1 and 1000, and --seed not negative")


@dataclass(frozen=True, slots=True)
class Way:
    """One way, bound to its inputs: `call` is what is timed, `read` makes [H, L, D] of what it returns."""

    name: str
    call: Callable[[], Any]
    read: Callable[[Any], Array]
    memory: Callable[[Callable[[], Any]], int]


def run(settings: Settings, progress: Progress = no_progress) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for number, length in enumerate(settings.lengths):
        progress(f"attention over {length} tokens", number, len(settings.lengths))
        found, why = _one_length(settings, length)
        rows += found
        skipped += why
    progress("done", len(settings.lengths), len(settings.lengths))
    worst = {
        way: max((r["mean_diff"] for r in rows if r["way"] == way and r["mean_diff"] is not None), default=None)
        for way in (EFFICIENT, FLASH)
    }
    return {
        "settings": asdict(settings) | {"lengths": list(settings.lengths)},
        "threads": {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")},
        "rows": rows,
        "skipped": skipped,
        "bound": {"mean_abs_difference": BOUND, "largest": worst, "holds": all(v is None or v <= BOUND for v in worst.values())},
    }


def failure(results: dict[str, Any]) -> str | None:
    """The bound is a promise for heads of 64 numbers and from 128 tokens on; elsewhere it is only reported."""
    settings, bound = results["settings"], results["bound"]
    if bound["holds"] or settings["head_dim"] != 64 or min(settings["lengths"]) < 128:
        return None
    return f"the mean difference to naive is above {BOUND}: {bound['largest']}"


def inputs(settings: Settings, length: int) -> tuple[Array, Array, Array]:
    """q [H, L, D], k and v [KH, L, D], unit-normal float32."""
    rng = np.random.default_rng([settings.seed, length])
    q, k, v = (
        rng.standard_normal((heads, length, settings.head_dim), dtype=np.float32)
        for heads in (settings.heads, settings.kv_heads, settings.kv_heads)
    )
    return q, k, v


def exact(q: Array, k: Array, v: Array) -> Array:
    """The formula in float64, in chunks so that it fits: rows do not depend on each other."""
    return efficient.attention(q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), chunk=64)


def _one_length(settings: Settings, length: int) -> tuple[list[dict[str, Any]], list[str]]:
    q, k, v = inputs(settings, length)
    ways, skipped = list(_ways(q, k, v)), []
    needed, limit = 3 * settings.heads * length**2 * 4, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if needed > limit:
        ways = [way for way in ways if not way.name.startswith(NAIVE)]
        skipped = [f"naive at {length}: its scores would take {text.size(needed)}, half of this machine's memory is {text.size(limit)}"]
    truth = exact(q, k, v)
    outputs = {way.name: way.read(way.call()) for way in ways}  # warms up, too
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(settings.runs):
        for way in ways:
            begin = perf_counter()
            way.call()
            times[way.name].append(perf_counter() - begin)
    rows = []
    for way in ways:
        difference = np.abs(outputs[way.name] - outputs[NAIVE]) if NAIVE in outputs else None
        error = np.abs(outputs[way.name] - truth)
        rows.append(
            {
                "length": length,
                "way": way.name,
                "seconds": statistics.median(times[way.name]),
                "runs": times[way.name],
                "peak_bytes": way.memory(way.call),
                "predicted_score_bytes": _score_bytes(way.name, settings.heads, length),
                "mean_diff": None if difference is None else float(difference.mean(dtype=np.float64)),
                "max_diff": None if difference is None else float(difference.max()),
                "mean_error": float(error.mean()),
                "max_error": float(error.max()),
            }
        )
    return rows, skipped


def _score_bytes(way: str, heads: int, length: int) -> int | None:
    """What theory says the scores of one call take; None where a kernel keeps them to itself."""
    kind = way.partition(" (")[0]
    columns = {NAIVE: length * length, EFFICIENT: efficient.CHUNK * length, FLASH: flash.TILE * flash.TILE}.get(kind)
    return None if columns is None else min(columns, length * length) * heads * 4


def _ways(q: Array, k: Array, v: Array) -> Iterator[Way]:
    for name, function in ((NAIVE, naive.attention), (EFFICIENT, efficient.attention), (FLASH, flash.attention)):
        yield Way(name, partial(function, q, k, v), lambda out: out, _traced)
    if importlib.util.find_spec("torch"):
        yield from _torch_ways(q, k, v)
    heads, length, dim = q.shape
    dtypes: tuple[Any, ...] = ("f32", "bf16")
    for dtype in dtypes:
        paged = PagedAttention(heads, len(k), dim, length, dtype)
        name = f"paged, {dtype} KV ({'native' if paged.ops.name == 'cpu' else 'NumPy'})"
        yield Way(name, partial(paged.run, fused(q, k, v)), partial(paged.by_head), paged.memory)


def _torch_ways(q: Array, k: Array, v: Array) -> Iterator[Way]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would announce itself on standard error
    import torch

    from octavo.lab.attention import in_torch

    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    for name, function in ((NAIVE, in_torch.naive), (EFFICIENT, in_torch.efficient), (FLASH, in_torch.flash), ("sdpa", in_torch.sdpa)):
        yield Way(f"{name} (torch)", partial(function, *tensors), lambda out: out.numpy(), _profiled)


def _traced(call: Callable[[], Any]) -> int:
    """NumPy reports its arrays to tracemalloc."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _profiled(call: Callable[[], Any]) -> int:
    """The largest sum of allocations in the trace of torch.profiler, of which the first names what was there before."""
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        profiler.export_chrome_trace(str(path))
        events = [e["args"] for e in json.loads(path.read_text("utf-8"))["traceEvents"] if e.get("name") == "[memory]"]
    if not events:
        return 0
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(int(event["Total Allocated"]) for event in events) - int(before)


def report(results: dict[str, Any]) -> str:
    header = ("tokens", "way", "time", "peak memory", "scores in theory", "mean diff", "max diff", "mean error", "max error")
    rows = results["rows"]
    cells = [
        (str(r["length"]), r["way"], text.seconds(r["seconds"]), text.size(r["peak_bytes"]), text.size(r["predicted_score_bytes"]),
         text.small(r["mean_diff"]), text.small(r["max_diff"]), text.small(r["mean_error"]), text.small(r["max_error"]))
        for r in rows
    ]  # fmt: skip
    longest = max(r["length"] for r in rows)
    last = [r for r in rows if r["length"] == longest]
    bound = results["bound"]
    worst = ", ".join(f"{way} {text.small(value)}" for way, value in bound["largest"].items())
    parts = [
        text.table(header, cells),
        "diff: to naive (NumPy, float32). error: to the formula in float64.",
        f"mean difference to naive, largest over the lengths: {worst}; bound {bound['mean_abs_difference']}: "
        + ("kept" if bound["holds"] else "NOT kept"),
        *results["skipped"],
        text.bars(f"time at {longest} tokens", [(r["way"], r["seconds"], text.seconds(r["seconds"])) for r in last]),
        text.bars(f"peak memory at {longest} tokens", [(r["way"], r["peak_bytes"], text.size(r["peak_bytes"])) for r in last]),
    ]
    return "\n\n".join(parts) + "\n"


def figure(results: dict[str, Any]) -> str:
    names = list(dict.fromkeys(r["way"] for r in results["rows"]))
    series = {name: [(r["length"], r["seconds"]) for r in results["rows"] if r["way"] == name] for name in names}
    return svg.line_chart("Attention, causal, one layer", "tokens", "seconds", series, log_x=True, log_y=True)
