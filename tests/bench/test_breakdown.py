"""The breakdown of a step: times of known length end up where they belong, add up to the step, and nothing stays behind."""

import json
import time
import types

import pytest

from octavo import LLM, SamplingParams
from octavo.bench import breakdown, roofline
from octavo.bench.breakdown import OTHERS, OpTimes, StepTimes, eager, shares, timed
from octavo.bench.latency import Case
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from tests.bench.test_kernels import write_limits
from tests.bench.test_limits import MADE_UP
from tests.engine.fake import EOS, FakeExecutor, FakeTokenizer
from tests.tiny_models import write_tiny

pytest.importorskip("octavo._native", reason="the native module is not built")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("m"), fmt="gguf", seed=3, quant="Q8_0")


@pytest.fixture
def llm(tiny):
    with LLM(config=eager(EngineConfig(model=str(tiny.path), kv_cache_memory="8MiB", threads=1))) as llm:
        yield llm


def event(**timings):
    return types.SimpleNamespace(timings=timings, entries=[1])


# -- the sums ----------------------------------------------------------------------------------------------------------


def test_every_part_of_known_steps():
    """Two steps, added up by hand: 40 ms in all."""
    steps = [event(schedule=0.001, execute=0.016, update=0.003, prepare=0.002, forward=0.008, sample=0.005)] * 2
    ops = {"linear a": OpTimes(0.004, 3, 0.001), "add_": OpTimes(0.001, 2, None)}
    times = [StepTimes(ops, {"forward": 0.0075, "logits": 0.001}, {"forward": 0.0045, "logits": 0.0005}, 0.001)] * 2
    found = shares(steps, times)
    assert found["step_ms"] == pytest.approx(20)
    ms = {name: part["ms"] for name, part in found["parts"].items()}
    assert [ms.pop("linear a"), ms.pop("add_")] == pytest.approx([4, 1])
    wanted = {"schedule": 1, "prepare": 2, "Python between ops": 3.5, "sampling": 4.5, "detokenize": 1, "update": 2, "rest": 1}
    assert ms == pytest.approx(wanted)
    assert sum(part["share"] for part in found["parts"].values()) == pytest.approx(1)
    assert found["parts"]["linear a"] == {"ms": pytest.approx(4), "share": 0.2, "calls": 3, "limit_ms": pytest.approx(1)}
    assert found["parts"]["add_"]["limit_ms"] is None


# -- a real engine -----------------------------------------------------------------------------------------------------


def test_shares_add_up_and_every_op_is_seen(llm):
    case = Case(20, 6, 2)
    found = breakdown.measure(llm, [case], rounds=1, limits=MADE_UP)[case]
    layers = 2
    for kind in ("prefill", "decode"):
        parts = found[kind]["parts"]
        assert sum(part["share"] for part in parts.values()) == pytest.approx(1, abs=1e-9)
        assert sum(part["ms"] for part in parts.values()) == pytest.approx(found[kind]["step_ms"])
        assert min(part["ms"] for part in parts.values()) > -1e-3
        calls = {name: part["calls"] for name, part in parts.items() if "calls" in part}
        linears = {f"linear {name}": layers for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}
        assert calls == {**linears, "linear lm_head": 1, "rms_norm": layers + 1, "add_rms_norm": layers, "add_": layers, "silu_mul": layers,
                         "rope_kv_write": layers, "attend": layers, "embedding": 1, "take_rows": 1}  # fmt: skip
        assert list(parts)[-len(OTHERS) :] == list(OTHERS)


def test_limits_of_ops_are_those_of_their_shapes(llm):
    """Against the rooflines of the same shapes, made by hand: 64 wide, 96 inside, 4 and 2 heads of 16, 2 rows at about 20 tokens."""
    case, level = Case(20, 4, 2), llm.executor.ops.describe()["isa"]
    if level not in MADE_UP.compute:
        pytest.skip(f"the made-up limits have no level {level}")
    parts = breakdown.measure(llm, [case], rounds=1, limits=MADE_UP)[case]["decode"]["parts"]
    weights = {id(w): w for _, w in breakdown._weights(llm.executor.runner.model)}.values()
    weight = llm.executor.runner.model.layers[0].mlp.gate_up_proj.weight
    cost = roofline.linear(2, 2, 192, 64, weight.nbytes, sum(w.nbytes for w in weights))
    assert cost.kind == "integer15"  # Q8_0
    assert parts["linear gate_up_proj"]["limit_ms"] == pytest.approx(2 * 1e3 * roofline.bound(cost, MADE_UP, level, 1).seconds)
    norm = roofline.bound(roofline.rms_norm(2, 64), MADE_UP, level, 1).seconds
    assert parts["rms_norm"]["limit_ms"] == pytest.approx(3 * 1e3 * norm)
    fused = roofline.bound(roofline.add_rms_norm(2, 64), MADE_UP, level, 1).seconds
    assert parts["add_rms_norm"]["limit_ms"] == pytest.approx(2 * 1e3 * fused)
    # steps with 21, 22 and 23 keys each; two sequences, two layers; the one that comes with the last token is left out where one ended
    keys = [roofline.bound(roofline.attend(2 * n, 2 * n, 4, 2, 16, 2, 1e6, 2), MADE_UP, level, 1).seconds for n in (21, 23)]
    assert 2 * 1e3 * keys[0] <= parts["attend"]["limit_ms"] <= 2 * 1e3 * keys[1]


def test_time_lands_in_its_part(llm, monkeypatch):
    """Delays of known length, put into one op, one section between ops, the sampler and the detokenizer: each shows up there."""
    runner = llm.executor.runner
    slow = runner.ops.silu_mul
    monkeypatch.setattr(runner.ops, "silu_mul", lambda x: (time.sleep(0.01), slow(x))[1])
    forward = runner.model.forward
    monkeypatch.setattr(runner.model, "forward", lambda batch: (time.sleep(0.03), forward(batch))[1])
    sample = runner._sample
    monkeypatch.setattr(runner, "_sample", lambda *a: (time.sleep(0.05), sample(*a))[1])
    token = llm._core.outputs.add_token
    monkeypatch.setattr(llm._core.outputs, "add_token", lambda *a: (time.sleep(0.04), token(*a))[1])
    case = Case(8, 3, 1)
    parts = breakdown.measure(llm, [case], rounds=1, limits=MADE_UP)[case]["decode"]["parts"]
    for name, least in {"silu_mul": 20, "Python between ops": 30, "sampling": 50, "detokenize": 40}.items():
        assert parts[name]["ms"] >= least, name
    assert sum(part["ms"] for part in parts.values()) < 5 * 140  # nothing is counted many times


def test_nothing_stays_behind_and_answers_do_not_change(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    runner, before = llm.executor.runner, llm.generate("hello", params)[0].outputs[0].token_ids
    ops, layer = runner.ops, runner.model.layers[0]
    with pytest.raises(RuntimeError, match="stop here"), timed(llm, MADE_UP) as wrapper:
        assert layer.ops is layer.attn.ops is layer.attn.qkv_proj.ops is runner.ops is wrapper is not ops
        assert llm.generate("hello", params)[0].outputs[0].token_ids == before
        assert len(wrapper.steps) == 8 and all(step.ops["attend"].calls == 2 for step in wrapper.steps)
        raise RuntimeError("stop here")
    assert layer.ops is layer.attn.ops is layer.attn.qkv_proj.ops is runner.ops is runner.model.embed.ops is ops
    assert not {"forward", "logits"} & vars(runner.model).keys() and "add_token" not in vars(llm._core.outputs)
    assert llm.generate("hello", params)[0].outputs[0].token_ids == before


def test_replayed_steps_are_an_error(tiny):
    """The wrapper cannot see into a step that is replayed by one call: it must not pretend to."""
    with LLM(str(tiny.path), kv_cache_memory="8MiB", threads=1) as llm, pytest.raises(OctavoError, match="one by one"):
        breakdown.measure(llm, [Case(4, 6, 1)], rounds=1, limits=MADE_UP)


def test_an_engine_without_a_model_of_its_own_is_refused():
    llm = LLM.from_parts(FakeExecutor(400), FakeTokenizer(), eos_token_ids=frozenset({EOS}), config=EngineConfig())
    with pytest.raises(ConfigError, match="in this process"):
        breakdown.measure(llm, [Case(4, 3, 1)], rounds=1, limits=MADE_UP)


def test_the_reference_has_times_but_no_limits(tiny):
    with LLM(str(tiny.path), backend="reference", kv_cache_memory="8MiB") as llm:
        parts = breakdown.measure(llm, [Case(4, 3, 1)], rounds=1, limits=MADE_UP)[Case(4, 3, 1)]["decode"]["parts"]
    assert parts["attend"]["calls"] == 2 and parts["attend"]["limit_ms"] is None
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1, abs=1e-9)


def test_the_command(tiny, capsys, tmp_path):
    arguments = ["bench", "latency", str(tiny.path), "--prompt-tokens", "8", "--tokens", "4", "--rounds", "1", "--breakdown",
                 "--kv-cache-memory", "8MiB", "--limits", str(write_limits(tmp_path))]  # fmt: skip
    assert main([*arguments, "--json"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)["cases"].values()
    for kind in ("prefill", "decode"):
        step = figures[f"{kind}_breakdown"]
        assert step["untouched_step_ms"] == figures[f"{kind}_step_ms"]["step"]
        assert sum(part["share"] for part in step["parts"].values()) == pytest.approx(1, abs=1e-9)
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "when left alone" in out and "linear qkv_proj" in out and "100.0 %" in out and "detokenize" in out
