"""Which backend runs which op: the choice, its reasons, and the one log line that states it.

Stateless: a plan is computed from the configuration and the model's needs, and `make_ops` builds what it says.
Not here: any op, and the limits of a backend (each answers `supports` itself).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.ops.api import OpNeeds, Ops
from octavo.ops.needs import OP_GROUPS, OP_NAMES

BACKENDS = ("cpu", "reference", "torch")
#: Backends whose arrays are NumPy's: their ops can be mixed.
_NUMPY_BACKENDS = ("cpu", "reference")


_MOST_ROWS_AT_FIRST = 4096


@dataclass(frozen=True, slots=True)
class OpPlan:
    """Who computes what, and why."""

    #: The backend of everything that is not overridden.
    backend: str
    #: op -> backend, every op of needs.OP_NAMES.
    choices: dict[str, str]
    #: backend -> why it was not taken (empty: it could have been), for those that were looked at.
    reasons: dict[str, list[str]]
    #: The instances looked at, ready to use.
    built: dict[str, Ops] = field(repr=False)


class MixedOps:
    """Ops of two NumPy backends behind one face: each op is the bound method of the backend that was chosen for it."""

    def __init__(self, main: Ops, others: Mapping[str, Ops], choices: Mapping[str, str]) -> None:
        by_name = {main.name: main, **others}
        self.name = main.name
        # One arena for all: a scope a layer opens must hold whatever either of them returns.
        native = next((ops for ops in by_name.values() if ops.name != "reference"), main)
        for ops in by_name.values():
            ops.arena = native.arena
        self.arena = native.arena
        self.choices = dict(choices)
        self._main, self._parts = main, tuple(by_name.values())
        self.to_device, self.to_numpy = main.to_device, main.to_numpy
        self.sampling_kernels = main.sampling_kernels
        for op, backend in choices.items():
            setattr(self, op, getattr(by_name[backend], op))

    def supports(self, op: str, needs: OpNeeds) -> list[str]:
        owner = next((ops for ops in self._parts if ops.name == self.choices.get(op)), self._main)
        return owner.supports(op, needs)

    def describe(self) -> dict[str, Any]:
        return {**self._main.describe(), "overrides": {op: name for op, name in self.choices.items() if name != self.name}}

    def replayer(self) -> None:
        logging.getLogger("octavo").info(
            "steps run eagerly: with ops of %s they are not recorded", " and ".join(ops.name for ops in self._parts)
        )
        return None

    def begin_step(self, num_rows: int) -> None:
        for ops in self._parts:
            ops.begin_step(num_rows)


def make_ops(config: EngineConfig, needs: OpNeeds) -> Ops:
    """The ops object of this configuration; says what was chosen in one log line (logger "octavo").

    Raises ConfigError naming every reason when a backend that was asked for cannot run.
    """
    plan = plan_ops(config, needs)
    main = plan.built[plan.backend]
    others = {name: plan.built[name] for name in set(plan.choices.values()) - {plan.backend}}
    _log(plan, main)
    return cast(Ops, MixedOps(main, others, plan.choices)) if others else main


def plan_ops(config: EngineConfig, needs: OpNeeds) -> OpPlan:
    """The choice without the log line; errors as make_ops."""
    if config.device != "cpu" and config.backend != "torch":
        raise ConfigError(f"device {config.device!r} needs backend torch (backend is {config.backend!r})")
    overrides = parse_overrides(config.op_backends)
    built: dict[str, Ops] = {}
    reasons: dict[str, list[str]] = {}
    backend = _main_backend(config, needs, built, reasons)
    for name in sorted(set(overrides.values()) - {backend}):
        if backend not in _NUMPY_BACKENDS or name not in _NUMPY_BACKENDS:
            raise ConfigError(f"op_backends: ops of {name} and {backend} cannot be mixed, their arrays differ")
        ops = [op for op, chosen in overrides.items() if chosen == name]
        why = _try_build(name, config, needs, built, ops)
        reasons.setdefault(name, why)
        if why:
            raise ConfigError(f"op_backends: {name} cannot run {', '.join(ops)}: {'; '.join(why)}")
    choices = {op: overrides.get(op, backend) for op in OP_NAMES}
    return OpPlan(backend, choices, reasons, built)


def available_backends(needs: OpNeeds) -> dict[str, list[str]]:
    """For `doctor`: every backend, with the reasons why it cannot run a model with these needs (none: it can).

    Torch is only looked for, not loaded: that alone takes longer than the rest of the program.
    """
    config = EngineConfig(max_num_batched_tokens=1, threads=1)
    found = {name: _try_build(name, config, needs, {}) for name in BACKENDS if name != "torch"}
    return {**found, "torch": _torch_missing()}


def parse_overrides(text: str) -> dict[str, str]:
    """op -> backend from "rms_norm=reference,attend=reference"; naming one op of a group moves the whole group.

    Raises ConfigError for unknown names and for a group pulled two ways.
    """
    chosen: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, _, backend = (part.strip() for part in item.partition("="))
        if op not in OP_NAMES:
            raise ConfigError(f"op_backends: there is no op {op!r} (ops: {', '.join(OP_NAMES)})")
        if backend not in BACKENDS:
            raise ConfigError(f"op_backends: {item!r} must name one of the backends {', '.join(BACKENDS)}")
        for member in next(group for group in OP_GROUPS if op in group):
            if chosen.setdefault(member, backend) != backend:
                raise ConfigError(f"op_backends: {op} and {member} share private data and must come from one backend")
    return chosen


def _main_backend(config: EngineConfig, needs: OpNeeds, built: dict[str, Ops], reasons: dict[str, list[str]]) -> str:
    if config.backend != "auto":
        why = reasons[config.backend] = _try_build(config.backend, config, needs, built)
        if why:
            raise ConfigError(f"backend {config.backend} cannot run this model here: {'; '.join(why)}")
        return config.backend
    for name in _NUMPY_BACKENDS:  # fastest first
        reasons[name] = _try_build(name, config, needs, built)
        if not reasons[name]:
            return name
    raise ConfigError(f"no backend can run this model: {'; '.join(reasons['reference'])}")


def _try_build(
    name: str, config: EngineConfig, needs: OpNeeds, built: dict[str, Ops], ops: tuple[str, ...] | list[str] = OP_NAMES
) -> list[str]:
    """Why backend `name` cannot run `ops`; put into `built` if it can."""
    missing = {"cpu": _native_missing, "torch": _torch_missing, "reference": list}[name]()
    if missing:
        return missing
    made = built.get(name) or _build(name, config)
    # One reason may concern many ops: said once.
    why = list(dict.fromkeys(reason for op in ops for reason in made.supports(op, needs)))
    if not why:
        built[name] = made
    return why


def _build(name: str, config: EngineConfig) -> Ops:
    # Room to begin with: it grows when a step has more, and a limit of billions of tokens is only a limit.
    rows = min(config.max_num_batched_tokens, _MOST_ROWS_AT_FIRST)
    if name == "cpu":
        cpu = importlib.import_module("octavo.ops.cpu")
        return cast(Ops, cpu.CpuOps(rows, threads=config.threads))
    if name == "torch":
        from octavo.ops.torch import TorchOps

        return cast(Ops, TorchOps(rows, device=config.device))  # its batches are TorchBatch, as to_device makes them
    from octavo.ops.reference import ReferenceOps

    return ReferenceOps(rows)


def _native_missing() -> list[str]:
    try:
        importlib.import_module("octavo._native")
    except ImportError as error:
        return [f"the native module is not usable ({error}); reinstall with a working C++ compiler"]
    return []


def _torch_missing() -> list[str]:
    return [] if importlib.util.find_spec("torch") else ["torch is not installed (pip install 'octavo[torch]')"]


def _log(plan: OpPlan, main: Ops) -> None:
    """One line. A fallback is a warning: the user may wonder why it is slow."""
    facts = main.describe()
    detail = ", ".join(f"{key} {facts[key]}" for key in ("device", "isa", "threads") if key in facts)
    line = f"backend {plan.backend}" + (f" ({detail})" if detail else "")
    overridden = sorted(f"{op}={name}" for op, name in plan.choices.items() if name != plan.backend)
    if overridden:
        line += f"; overridden: {', '.join(overridden)}"
    declined = [f"{name} not used: {'; '.join(why)}" for name, why in plan.reasons.items() if why]
    if declined:
        line += f"; {', '.join(declined)}"
    logging.getLogger("octavo").log(logging.WARNING if declined else logging.INFO, line)
