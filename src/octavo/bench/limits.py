"""What this machine can do at most: memory and cache bandwidth, multiply-adds, and what it costs to start work.

`measure` runs the probes of the native module (native/src/probes.h) and keeps the best of several tries, since a limit is
asked for; `octavo doctor --full` shows and stores the result, `load` reads it back for whatever is compared with it.
Stateless. Not here: what an op should take by these figures (roofline.py), the loops themselves.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from octavo.errors import ConfigError

#: In the file; goes up when a figure changes its meaning.
FORMAT = 1
#: The results file's "benchmark".
NAME = "limits"
METHOD = "best of several tries of loops that only read or only multiply; a multiply-add counts as two operations"
READS = ("l2", "l3", "dram")
KINDS = ("f32", "int16", "int8")
_TRIES = 6
_SECONDS = 0.02  # of one try
_AHEAD = (0, 4096, 8192)
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one thread alone, and of all threads together; a second."""

    one: float
    all: float

    def of(self, threads: int) -> float:
        """Of some threads: as many times the one, but never more than all."""
        return min(self.one * threads, self.all)


@dataclass(frozen=True, slots=True)
class Limits:
    cpu: str
    threads: int
    #: Bytes: of one core's second level, of the third; 0 where the system does not tell.
    l2_bytes: int
    l3_bytes: int
    #: "l2", "l3", "dram" -> bytes a second. What could not be measured is missing.
    read: dict[str, Speed]
    #: Level -> "f32", "int16", "int8" -> operations a second.
    compute: dict[str, dict[str, Speed]]
    #: Seconds: to give one item to every thread and wait for it; of a call from Python without and with two arrays.
    fork_join_s: float
    call_s: float
    call_arrays_s: float

    def bandwidth(self, working_set: float, threads: int) -> float:
        """Bytes a second of reading a working set over and over: from the smallest memory that holds it."""
        l2 = self.l2_bytes * min(threads, self.threads)
        held = "l2" if working_set <= 0.75 * l2 else "l3" if working_set <= 0.75 * self.l3_bytes else "dram"
        place = next(name for name in READS[READS.index(held) :] if name in self.read)
        return self.read[place].of(threads)

    def as_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def from_dict(values: Mapping[str, Any]) -> Limits:
    """Raises ValueError, KeyError or TypeError for anything but what as_dict gave."""
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']!r}, this version reads {FORMAT}")

    def speed(of: Mapping[str, Any]) -> Speed:
        one, every = float(of["one"]), float(of["all"])
        if not (0 < one < float("inf") and 0 < every < float("inf")):
            raise ValueError("a speed must be positive")
        return Speed(one, every)

    read = {name: speed(values["read"][name]) for name in READS if name in values["read"]}
    if "dram" not in read:
        raise KeyError("dram")
    compute = {str(level): {str(kind): speed(of) for kind, of in kinds.items()} for level, kinds in values["compute"].items()}
    threads, l2, l3 = (int(values[name]) for name in ("threads", "l2_bytes", "l3_bytes"))
    times = [float(values[name]) for name in ("fork_join_s", "call_s", "call_arrays_s")]
    return Limits(str(values["cpu"]), threads, l2, l3, read, compute, *times)


def load(path: Path) -> Limits:
    """The limits in a file that `octavo doctor --full --output` wrote. Raises ConfigError."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError("too large")
        record = json.loads(path.read_text("utf-8"))
        if record["benchmark"] != NAME:
            raise ValueError(f"it holds {record['benchmark']!r}")
        return from_dict(record["results"])
    except OSError as error:
        raise ConfigError(f"--limits {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"--limits {path} is not what `octavo doctor --full --output FILE` writes: {' '.join(why.split())}") from None


def measure(cpu: str, done: Callable[[], object] | None = None) -> Limits:
    """About three seconds, all threads busy. `done` is called after each of `count()` figures. Raises ConfigError without kernels."""
    native = _native()
    threads = native.available_threads()
    l2, l3 = cache_bytes(2), cache_bytes(3)
    sets = _sets(l2, l3, threads)
    probes = {number: native.Limits(number, max(sets.values())) for number in dict.fromkeys((1, threads))}
    tell = done or (lambda: None)
    levels = native.probe_levels()

    def both(figure: Callable[[Any], float]) -> Speed:
        found = {number: figure(probe) for number, probe in probes.items()}
        tell()
        # what one thread does, all can do: a busy machine must not say otherwise
        return Speed(found[1], max(found.values()))

    read = {name: both(lambda probe, name=name: _read(probe, levels[-1], name, sets[name])) for name in sets}  # type: ignore[misc]
    compute = {
        level: {kind: both(lambda probe, level=level, kind=kind: _compute(probe, level, kind)) for kind in KINDS}  # type: ignore[misc]
        for level in levels
    }
    call, call_arrays = _calls(native)
    fork_join = min(_ratio(probes[threads].fork_join(200)) for _ in range(_TRIES))
    tell()
    return Limits(cpu, threads, l2, l3, read, compute, fork_join, call, call_arrays)


def count() -> int:
    """How many figures `measure` takes."""
    native = _native()
    sets = _sets(cache_bytes(2), cache_bytes(3), native.available_threads())
    return len(sets) + len(KINDS) * len(native.probe_levels()) + 1


def isa_levels() -> tuple[list[str], str]:
    """The levels this machine can run, weakest first, and the one in force. Raises ConfigError."""
    native = _native()
    try:
        return list(native.isa_levels()), str(native.isa())
    except ValueError as error:
        raise ConfigError(str(error)) from None


def cache_bytes(level: int, root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Size of the data cache of a level, as the kernel lists it for the first processor this process may use; 0: unknown."""
    first = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    for folder in sorted((root / f"cpu{first}" / "cache").glob("index*")):
        try:
            kind, number, size = ((folder / name).read_text("ascii").strip() for name in ("type", "level", "size"))
            if int(number) == level and kind in ("Unified", "Data"):
                return int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1:], 0)
        except (OSError, ValueError):
            continue
    return 0


def _sets(l2: int, l3: int, threads: int) -> dict[str, int]:
    """Place -> bytes read of it by all threads together: well inside the cache, or well beyond the last one."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    sets = {"dram": max(16 << 20, min(max(256 << 20, 4 * l3), 1 << 30, available // 4))}
    if l2:
        sets["l2"] = l2 // 4 * threads
    if l3 // 4 > 2 * l2 * threads:
        sets["l3"] = l3 // 4
    return {name: sets[name] for name in READS if name in sets}


def _read(probe: Any, level: str, place: str, total: int) -> float:
    """Bytes a second. In the second level every thread reads as much as if all did."""
    size = total // (_native().available_threads() // probe.threads) if place == "l2" else total
    seconds, _ = probe.read(level, size, 1)
    passes = max(1, min(1 << 16, round(_SECONDS / max(seconds, 1e-7))))
    aheads = _AHEAD if place == "dram" else (0,)
    return max(1 / _ratio(probe.read(level, size, passes, ahead)) for _ in range(_TRIES) for ahead in aheads)


def _compute(probe: Any, level: str, kind: str) -> float:
    """Operations a second, two for each product: it is also added."""
    rounds = 1 << 10
    while rounds < 1 << 20 and probe.compute(level, kind, rounds)[0] < _SECONDS / 4:
        rounds *= 2
    return max(2 / _ratio(probe.compute(level, kind, rounds)) for _ in range(_TRIES))


def _calls(native: Any) -> tuple[float, float]:
    import numpy as np

    context, x, y = native.Context(1), np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32)
    return _per_call(lambda: native.nothing(context)), _per_call(lambda: context.add(x, y))


def _per_call(call: Callable[[], object], times: int = 5000) -> float:
    def tries() -> Iterator[float]:
        for _ in range(_TRIES):
            begin = perf_counter()
            for _ in range(times):
                call()
            yield (perf_counter() - begin) / times

    return min(tries())


def _ratio(timed: tuple[float, int]) -> float:
    seconds, work = timed
    return max(seconds, 1e-9) / work


def _native() -> Any:
    try:
        return importlib.import_module("octavo._native")
    except ImportError as error:
        raise ConfigError(f"limits are measured by the native module, which is not usable here ({error}): reinstall it") from None
