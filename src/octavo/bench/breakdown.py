"""Where the time of a step goes: each op beside its bound, and what Python, scheduler, sampling and detokenising take.

The model's Ops object is wrapped for the time of the measurement (TimedOps), so that an engine that is not measured pays
nothing. The wrapper sees eager calls: it adds some tenths of a microsecond to each, and a step that is replayed as one call
would pass it by, hence `eager`. The time of untouched steps is for the caller to show beside (latency.py measures them).
Owner of the wrapper while it is in place. Not here: bounds (roofline.py), which steps count (latency.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench import roofline
from octavo.bench.latency import Case, full_steps, generate, step_seconds
from octavo.bench.limits import Limits
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo.ops.needs import OP_NAMES

if TYPE_CHECKING:
    from octavo.llm import LLM

#: Settings that make every step call its ops one by one; those this version does not have are left out.
_EAGER: dict[str, Any] = {"replay": False}
#: Copies of blocks run before the model's step begins: they stay in "prepare".
_TIMED = tuple(op for op in OP_NAMES if op != "copy_blocks")
#: What is no op, in the order of a step.
OTHERS = ("schedule", "prepare", "Python between ops", "sampling", "detokenize", "update", "rest")


def eager(config: EngineConfig) -> EngineConfig:
    """The same configuration with steps that call op by op."""
    known = {setting.name for setting in fields(EngineConfig)}
    return replace(config, **{name: value for name, value in _EAGER.items() if name in known})


@dataclass(slots=True)
class OpTimes:
    """Of one op in one step. `limit`: seconds by the roofline, None where it is not known."""

    seconds: float = 0.0
    calls: int = 0
    limit: float | None = 0.0


@dataclass(slots=True)
class StepTimes:
    """Seconds of the ops of one step, by name; of each section of the model, and of the ops inside it."""

    ops: dict[str, OpTimes] = field(default_factory=dict)
    sections: dict[str, float] = field(default_factory=dict)
    inside: dict[str, float] = field(default_factory=dict)
    detokenize: float = 0.0


class TimedOps:
    """An Ops that notes the time of each op in the StepTimes of the current step; all else passes through."""

    def __init__(self, ops: Any, costs: Costs) -> None:
        self._ops = ops
        self._costs = costs
        self.steps: list[StepTimes] = []
        self.section = ""
        for op in _TIMED:
            setattr(self, op, self._timed(op))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def begin_step(self, num_rows: int) -> None:
        self.steps.append(StepTimes())
        self._ops.begin_step(num_rows)

    def _timed(self, op: str) -> Callable[..., Any]:
        call = getattr(self._ops, op)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = perf_counter()
            result = call(*arguments, **named)
            seconds = perf_counter() - begin
            self._note(op, arguments, seconds)
            return result

        return timed

    def _note(self, op: str, arguments: tuple[Any, ...], seconds: float) -> None:
        step = self.steps[-1]
        name, limit = self._costs.of(op, arguments)
        times = step.ops.setdefault(name, OpTimes())
        times.seconds, times.calls = times.seconds + seconds, times.calls + 1
        times.limit = None if limit is None or times.limit is None else times.limit + limit
        step.inside[self.section] = step.inside.get(self.section, 0.0) + seconds

    def in_section(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time noted as that of a section; ops inside it count as inside."""

        def timed(*arguments: Any) -> Any:
            self.section, begin = name, perf_counter()
            try:
                return call(*arguments)
            finally:
                sections = self.steps[-1].sections
                sections[name] = sections.get(name, 0.0) + perf_counter() - begin
                self.section = ""

        return timed

    def detokenizing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = perf_counter()
            result = call(*arguments)
            self.steps[-1].detokenize += perf_counter() - begin
            return result

        return timed


class Costs:
    """What a call is named, and what it should take. Remembers by shape: the same calls come back layer after layer."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        runner: Any = _runner(llm)
        self._native = runner.ops.name == "cpu"
        facts = runner.ops.describe()
        self._limits, self._level, self._threads = limits, facts.get("isa", ""), facts.get("threads", 1)
        weights = {id(weight): (weight, name) for name, weight in _weights(runner.model)}
        self._names = {key: name for key, (_, name) in weights.items()}
        self._all_weights = sum(int(getattr(weight, "nbytes", 0)) for weight, _ in weights.values())
        self._token_bytes = sum(llm.executor.info.block_bytes) / llm.config.block_size
        self._known: dict[tuple[Any, ...], tuple[str, float | None]] = {}
        self._batch: Any = None

    def of(self, op: str, arguments: tuple[Any, ...]) -> tuple[str, float | None]:
        if op in ("attend", "rope_kv_write") and (batch := arguments[2 if op == "attend" else 3]) is not self._batch:
            self._batch = batch  # other sequences: other costs
            self._known = {key: value for key, value in self._known.items() if key[0] not in ("attend", "rope_kv_write")}
        shapes = tuple(getattr(argument, "shape", None) for argument in arguments[:2])
        key: tuple[Any, ...] = (op, shapes, (id(arguments[1]), arguments[2]) if op == "linear" else arguments[5:])
        found = self._known.get(key)
        if found is None:
            name = f"linear {self._names.get(id(arguments[1]), '')}".strip() if op == "linear" else op
            cost = self._cost(op, arguments) if self._native else None
            least = None if cost is None else roofline.bound(cost, self._limits, self._level, self._threads)
            found = self._known[key] = (name, None if least is None else least.seconds)
        return found

    def _cost(self, op: str, arguments: tuple[Any, ...]) -> roofline.Cost | None:
        first = arguments[0]
        if op == "linear":
            weight = arguments[1]
            return roofline.linear(first.shape[0], arguments[2], weight.columns, weight.k, weight.nbytes, self._all_weights)
        if op == "rms_norm":
            return roofline.rms_norm(*first.shape)
        if op == "add_rms_norm":
            return roofline.add_rms_norm(*first.shape)
        if op == "add_":
            return roofline.add(*first.shape)
        if op == "silu_mul":
            return roofline.silu_mul(first.shape[0], first.shape[1] // 2)
        if op == "take_rows":
            return roofline.copy_rows(len(arguments[1]), first.shape[1])
        if op == "embedding":
            return roofline.copy_rows(len(first), arguments[1].k)
        if op == "rope_kv_write":
            kv = arguments[3].kv[arguments[4]]
            return roofline.rope_kv_write(first.shape[0], arguments[5], kv.kv_heads, kv.head_dim, self._kv_item(kv))
        return self._attend(*arguments) if op == "attend" else None

    def _attend(self, q: Any, layer: int, batch: Any, group: int, scale: float, window: int | None = None, *more: Any) -> roofline.Cost:
        kv = batch.kv[group]
        rows = np.diff(batch.query_start_loc)
        seen = batch.positions.astype(np.int64) + 1
        keys = batch.seq_lens.astype(np.int64)
        if window is not None:
            seen, keys = np.minimum(seen, window), np.minimum(keys, window + rows - 1)
        return roofline.attend(
            int(seen.sum()), int(keys.sum()), q.shape[1], kv.kv_heads, kv.head_dim, self._kv_item(kv), self._all_weights, q.shape[0]
        )  # fmt: skip

    def _kv_item(self, kv: Any) -> float:
        """Bytes of one number in the pool, padding included."""
        return float(self._token_bytes / (2 * kv.layers * kv.kv_heads * kv.head_dim))


def measure(
    llm: LLM, wanted: Sequence[Case], rounds: int, limits: Limits, seed: int = 1, done: Callable[[], object] | None = None
) -> dict[Case, dict[str, Any]]:
    """Case -> "prefill" and "decode": the breakdown of a mean step of the median round. `llm` must be eager. `done`: after each case."""
    rng = np.random.default_rng(seed)
    found: dict[Case, dict[str, list[dict[str, Any]]]] = {case: {} for case in wanted}
    with timed(llm, limits) as ops:
        for number in range(rounds + 1):
            for case in wanted:
                for kind, one in (("prefill", case._replace(tokens=1)), ("decode", case)):
                    if kind == "prefill" or case.tokens > 1:
                        shares = _run(llm, one, rng, ops, kind)
                        found[case].setdefault(kind, []).append(shares)
                if number == 0:
                    found[case].clear()
                if done is not None:
                    done()
    return {case: {kind: _median(every) for kind, every in kinds.items()} for case, kinds in found.items()}


@contextmanager
def timed(llm: LLM, limits: Limits) -> Iterator[TimedOps]:
    """The wrapper in the place of the model's Ops; afterwards everything is as it was."""
    runner: Any = _runner(llm)
    ops, outputs = TimedOps(runner.ops, Costs(llm, limits)), llm._core.outputs
    holders = [runner, *(part for _, part in _parts(runner.model) if hasattr(part, "ops"))]
    patched = {"forward": runner.model, "logits": runner.model, "add_token": outputs}
    own = {name: vars(owner)[name] for name, owner in patched.items() if name in vars(owner)}  # none, but for other wrappers
    try:
        for holder in holders:
            holder.ops = ops
        for name in ("forward", "logits"):
            setattr(runner.model, name, ops.in_section(name, getattr(runner.model, name)))
        outputs.add_token = ops.detokenizing(outputs.add_token)  # type: ignore[method-assign]
        yield ops
    finally:
        for holder in holders:
            holder.ops = ops._ops
        for name, owner in patched.items():
            vars(owner).pop(name, None)
            if name in own:
                setattr(owner, name, own[name])


def shares(steps: Sequence[Any], times: Sequence[StepTimes]) -> dict[str, Any]:
    """Of the mean step: milliseconds, share, calls and limit of every op and of the rest; the shares add up to 1."""
    count = len(steps)
    ops: dict[str, OpTimes] = {}
    for step in times:
        for name, one in step.ops.items():
            sum_of = ops.setdefault(name, OpTimes())
            sum_of.seconds, sum_of.calls = sum_of.seconds + one.seconds, sum_of.calls + one.calls
            sum_of.limit = None if one.limit is None or sum_of.limit is None else sum_of.limit + one.limit

    def total(part: str) -> float:
        return float(sum(step.timings.get(part, 0.0) for step in steps))

    sections = {name: sum(step.sections.get(name, 0.0) for step in times) for name in ("forward", "logits")}
    inside = {name: sum(step.inside.get(name, 0.0) for step in times) for name in ("forward", "logits", "")}
    detokenize, whole = sum(step.detokenize for step in times), sum(map(step_seconds, steps))
    others = {
        "schedule": total("schedule"),
        "prepare": total("prepare"),
        "Python between ops": sum(sections.values()) - inside["forward"] - inside["logits"],
        # the runner counts the output matrix with either
        "sampling": total("forward") + total("sample") - sum(sections.values()) - inside[""],
        "detokenize": detokenize,
        "update": total("update") - detokenize,
    }
    others["rest"] = whole - sum(others.values()) - sum(one.seconds for one in ops.values())

    def row(seconds: float, **more: Any) -> dict[str, Any]:
        return {"ms": 1000 * seconds / count, "share": seconds / whole, **more}

    parts = {
        name: row(one.seconds, calls=one.calls / count, limit_ms=None if one.limit is None else 1000 * one.limit / count)
        for name, one in sorted(ops.items(), key=lambda item: -item[1].seconds)
    }
    return {"step_ms": 1000 * whole / count, "parts": {**parts, **{name: row(others[name]) for name in OTHERS}}}


def _run(llm: LLM, case: Case, rng: np.random.Generator, ops: TimedOps, kind: str) -> dict[str, Any]:
    ops.steps.clear()
    steps, _ = generate(llm, case, rng)
    executed = [step for step in steps if step.entries]
    if len(executed) != len(ops.steps) or not all(step.ops and step.sections for step in ops.steps):
        raise OctavoError("some steps did not call their ops one by one: the breakdown cannot see them")
    times = dict(zip(map(id, executed), ops.steps, strict=True))
    counted = executed if kind == "prefill" else full_steps(executed, case)
    return shares(counted, [times[id(step)] for step in counted])


def _median(every: list[dict[str, Any]]) -> dict[str, Any]:
    """The round in the middle: its parts add up, which medians of parts would not."""
    return sorted(every, key=lambda one: float(one["step_ms"]))[(len(every) - 1) // 2]


def _runner(llm: LLM) -> Any:
    runner = getattr(llm.executor, "runner", None)
    if runner is None:
        raise ConfigError("--breakdown needs a model that runs in this process")
    return runner


def _parts(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(attribute's name, object) of a model and every layer in it."""
    yield name, part
    for key, value in vars(part).items():
        for one in value if isinstance(value, list) else (value,):
            if type(one).__module__.startswith(("octavo.layers", "octavo.models")):
                yield from _parts(one, key)


def _weights(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, weight); a matrix the embedding shares with the output comes last under the output's name."""
    found = [(name, part.weight) for name, part in _parts(model) if getattr(part, "weight", None) is not None]
    yield from sorted(found, key=lambda item: item[0] == "lm_head")
