"""Choice of backend: reasons, overrides, errors that name what to do, and exactly one log line."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.ops import registry
from octavo.ops.api import OpNeeds
from octavo.ops.needs import OP_GROUPS, OP_NAMES
from octavo.ops.reference import ReferenceOps

NEEDS = OpNeeds(64, 9, 3, 64, "f32", 16, layouts=frozenset({"f32"}))
KV_GROUP = next(group for group in OP_GROUPS if "attend" in group)


class FakeCpuOps(ReferenceOps):
    """Stands in for the native backend: counts its calls, and declines what the test says."""

    name = "cpu"
    declines: dict[str, list[str]] = {}

    def __init__(self, capacity_rows: int, threads: int = 0, isa: str | None = None) -> None:
        super().__init__(capacity_rows)
        self.threads = threads
        self.calls: list[str] = []

    def supports(self, op, needs):
        return super().supports(op, needs) + self.declines.get(op, [])

    def describe(self):
        return {"backend": "cpu", "device": "cpu", "isa": "imagined", "threads": self.threads}

    def rms_norm(self, x, weight, eps):
        self.calls.append("rms_norm")
        return super().rms_norm(x, weight, eps)


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setitem(sys.modules, "octavo._native", types.ModuleType("octavo._native"))
    module = types.ModuleType("octavo.ops.cpu")
    module.CpuOps = type("CpuOps", (FakeCpuOps,), {"declines": {}})
    monkeypatch.setitem(sys.modules, "octavo.ops.cpu", module)
    return module.CpuOps


@pytest.fixture
def no_native(monkeypatch):
    monkeypatch.setitem(sys.modules, "octavo._native", None)


def make(caplog, **settings):
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "octavo"):
        ops = registry.make_ops(EngineConfig(**settings), NEEDS)
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
    return ops, caplog.records[0]


def test_every_op_of_the_protocol_is_in_one_group():
    from octavo.ops.api import Ops

    infrastructure = {"supports", "describe", "replayer", "begin_step", "to_device", "to_numpy"}
    methods = {name for name in vars(Ops) if not name.startswith("_")} - infrastructure
    assert methods - {"name", "arena"} == set(OP_NAMES) and len(set(OP_NAMES)) == len(OP_NAMES)


def test_auto_takes_native(native, caplog):
    ops, record = make(caplog, threads=2, max_num_batched_tokens=33)
    assert type(ops) is native and ops.threads == 2 and ops.arena.capacity_rows == 33
    assert record.levelno == logging.INFO and "cpu" in record.getMessage() and "imagined" in record.getMessage()


def test_auto_without_native_says_why_once(no_native, caplog):
    ops, record = make(caplog)
    assert type(ops) is ReferenceOps
    assert record.levelno == logging.WARNING
    assert "backend reference" in record.getMessage() and "native module is not usable" in record.getMessage()


def test_auto_falls_back_when_native_declines_one_op(native, caplog):
    native.declines = {"attend": ["head size 64 is not built"], "rms_norm": ["head size 64 is not built"]}
    ops, record = make(caplog)
    assert type(ops) is ReferenceOps
    assert record.getMessage().count("head size 64 is not built") == 1  # one reason of two ops


def test_a_backend_asked_for_must_run(native, no_native):
    with pytest.raises(ConfigError, match=r"backend cpu cannot run.*native module is not usable"):
        registry.make_ops(EngineConfig(backend="cpu"), NEEDS)


def test_a_backend_asked_for_names_all_reasons(native):
    native.declines = {"attend": ["no windows"], "linear": ["no f32"]}
    with pytest.raises(ConfigError, match="no f32; no windows"):
        registry.make_ops(EngineConfig(backend="cpu"), NEEDS)


def test_reference_is_not_a_fallback_when_asked_for(native, caplog):
    ops, record = make(caplog, backend="reference")
    assert type(ops) is ReferenceOps and record.levelno == logging.INFO


@pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
def test_impossible_needs_are_refused(native, backend):
    needs = OpNeeds(64, 8, 3, 64, "f32", 16)
    with pytest.raises(ConfigError, match="8 query heads cannot share 3 KV heads"):
        registry.make_ops(EngineConfig(backend=backend), needs)


@pytest.mark.parametrize("main", ["cpu", "reference"])
def test_override_of_one_op(native, caplog, main):
    other = {"cpu": "reference", "reference": "cpu"}[main]
    ops, record = make(caplog, backend=main, op_backends=f" silu_mul = {other} ,")
    assert "overridden: silu_mul=" + other in record.getMessage()
    assert ops.choices == {op: other if op == "silu_mul" else main for op in OP_NAMES}
    assert ops.silu_mul.__self__.name == other and ops.linear.__self__.name == main and ops.name == main
    assert ops.describe()["overrides"] == {"silu_mul": other}


def test_overridden_ops_run_and_share_one_arena(native, caplog):
    ops, _ = make(caplog, backend="cpu", op_backends="rms_norm=reference,silu_mul=reference", max_num_batched_tokens=8)
    x = np.ones((2, 6), np.float32)
    weight = ops.pack_vector(np.full(6, 2, np.float32))
    ops.begin_step(2)
    with ops.arena.scope():
        first = ops.rms_norm(x, weight, 0.0)
        second = ops.take_rows(x, np.array([0, 1], np.int32))
        assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(ops.rms_norm(x, weight, 0.0), 2 * x)
    assert np.shares_memory(ops.take_rows.__self__.arena.take(0, 1).base, first.base)
    assert ops.take_rows.__self__.calls == []  # the native rms_norm never ran
    ops.begin_step(100)
    assert ops.arena.capacity_rows >= 100


def test_override_moves_the_whole_group(native, caplog):
    ops, _ = make(caplog, backend="cpu", op_backends="attend=reference")
    assert {op for op, name in ops.choices.items() if name == "reference"} == set(KV_GROUP)


def test_override_equal_to_the_backend_changes_nothing(native, caplog):
    ops, _ = make(caplog, backend="cpu", op_backends="attend=cpu")
    assert type(ops) is native


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rms_nrm=cpu", "there is no op 'rms_nrm'"),
        ("rms_norm=gpu", "must name one of the backends"),
        ("rms_norm", "must name one of the backends"),
        ("attend=cpu,rope_kv_write=reference", "must come from one backend"),
        ("linear=cpu,embedding=reference", "must come from one backend"),
        ("rms_norm=cpu,rms_norm=reference", "must come from one backend"),
        ("silu_mul=torch", "cannot be mixed"),
    ],
)
def test_bad_overrides(native, text, message):
    with pytest.raises(ConfigError, match=message):
        registry.make_ops(EngineConfig(backend="cpu", op_backends=text), NEEDS)


def test_override_to_a_backend_that_cannot(native, no_native):
    with pytest.raises(ConfigError, match=r"cpu cannot run.*silu_mul.*native module"):
        registry.make_ops(EngineConfig(backend="reference", op_backends="silu_mul=cpu"), NEEDS)
    assert registry.make_ops(EngineConfig(backend="reference", op_backends="silu_mul=reference"), NEEDS)


def test_override_only_asks_for_the_ops_it_moves(native, caplog):
    native.declines = {"attend": ["no windows"]}
    ops, _ = make(caplog, backend="reference", op_backends="silu_mul=cpu")
    assert ops.choices["silu_mul"] == "cpu"
    with pytest.raises(ConfigError, match="no windows"):
        registry.make_ops(EngineConfig(backend="reference", op_backends="attend=cpu"), NEEDS)


def test_plan_shows_choices_and_reasons(no_native):
    plan = registry.plan_ops(EngineConfig(), NEEDS)
    assert plan.backend == "reference" and set(plan.choices) == set(OP_NAMES)
    assert "native module" in plan.reasons["cpu"][0] and plan.reasons["reference"] == []


def test_available_backends(native):
    native.declines = {"attend": ["no windows"]}
    found = registry.available_backends(NEEDS)
    assert set(found) == {"cpu", "reference", "torch"}
    assert found["cpu"] == ["no windows"] and found["reference"] == []


def test_missing_torch_is_a_reason(monkeypatch):
    real = registry.importlib.util.find_spec
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    assert "octavo[torch]" in registry.available_backends(NEEDS)["torch"][0]
    with pytest.raises(ConfigError, match=r"backend torch cannot run.*pip install 'octavo\[torch\]'"):
        registry.make_ops(EngineConfig(backend="torch"), NEEDS)


def test_torch_backend_and_devices(caplog):
    pytest.importorskip("torch", reason="the torch extra is not installed")
    ops, _ = make(caplog, backend="torch")
    assert ops.name == "torch"
    for device in ("cuda:99", "nonsense", "meta:x"):
        with pytest.raises(ConfigError, match=f"torch cannot use device '{device}'"):
            registry.make_ops(EngineConfig(backend="torch", device=device), NEEDS)
    with pytest.raises(ConfigError, match="device 'cuda' needs backend torch"):
        registry.make_ops(EngineConfig(device="cuda"), NEEDS)


def test_torch_is_never_loaded_unless_asked_for():
    code = (
        "import sys; from octavo.ops import registry; from octavo.config import EngineConfig; from octavo.ops.api import OpNeeds;"
        "needs = OpNeeds(64, 9, 3, 64, 'f32', 16); registry.available_backends(needs); registry.make_ops(EngineConfig(), needs);"
        "assert 'torch' not in sys.modules"
    )
    source = Path(registry.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)}, timeout=60)
