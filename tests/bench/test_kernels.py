"""`octavo bench kernels`: the right shapes, memory used in turn, figures that follow from the time, and the command itself."""

import json
import types
from contextlib import nullcontext

import numpy as np
import pytest

from octavo.bench import kernel_shapes, kernels
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.ops.layout import BLOCK, dequantize
from tests.bench.test_limits import MADE_UP
from tests.tiny_models import write_tiny

pytest.importorskip("octavo._native", reason="the native module is not built")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("m"), fmt="gguf", seed=3, quant={"": "Q4_1", "output.weight": "Q8_0"})


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sets that no cache holds are not needed to see that they are used."""
    monkeypatch.setattr(kernels, "_COLD_BYTES", 1 << 16)
    monkeypatch.setattr(kernels, "_MOST_COLD_BYTES", 1 << 18)
    monkeypatch.setattr(kernels, "_BATCH_SECONDS", 0.0001)


def write_limits(folder):
    path = folder / "limits.json"
    path.write_text(json.dumps({"benchmark": "limits", "results": MADE_UP.as_dict()}))
    return path


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_shapes_of_the_real_model():
    """SmolLM2-135M, from its model card: width 576, 9 query and 3 KV heads of 64, 1536 inside, 49152 tokens; the file is Q4_1."""
    shapes = kernel_shapes.of_model(EngineConfig())
    found = {matrix.name: (matrix.columns, matrix.inputs) for matrix in shapes.matrices}
    assert found == {
        "qkv_proj": (960, 576),
        "o_proj": (576, 576),
        "gate_up_proj": (3072, 576),
        "down_proj": (576, 1536),
        "lm_head": (49152, 576),
    }
    assert [matrix.name for matrix in shapes.matrices if matrix.is_head] == ["lm_head"]
    parts = shapes.matrices[0].parts
    assert [part.shape[0] for part in parts] == [576, 192, 192] and all(part.offset and part.zero == 0 for part in parts)


def test_shapes_of_text():
    shapes = kernel_shapes.of_text("4096x32, 8x64", ["q4_b32", "bf16"])
    assert [(m.columns, m.inputs, m.layouts) for m in shapes.matrices] == [
        (4096, 32, "q4_b32"), (4096, 32, "bf16"), (8, 64, "q4_b32"), (8, 64, "bf16"),
    ]  # fmt: skip
    for text, layout in (("4x", "f32"), ("0x32", "f32"), ("99999x99999", "f32"), ("8x33", "q8_b32"), ("8x32", "q5"), ("", "f32")):
        with pytest.raises(ConfigError):
            kernel_shapes.of_text(text, [layout])


@pytest.mark.parametrize("layout", BLOCK)
def test_random_weights_are_valid_and_of_a_weights_size(layout):
    packed = kernel_shapes.random_packed(np.random.default_rng(0), kernel_shapes.part(layout, 64, 256))
    values = dequantize(packed)
    assert values.shape == (64, 256) and np.isfinite(values).all() and 0.001 < values.std() < 2


def test_a_batch_of_sequences_lies_in_blocks_of_its_own():
    batch = kernel_shapes.one_sequence_each([0, 2], 40, 3, None)
    assert batch.positions.tolist() == [37, 38, 39] * 2 and batch.query_start_loc.tolist() == [0, 3, 6]
    assert batch.block_tables[0].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert batch.slot_mapping[0].tolist() == [37, 38, 39, 96 + 37, 96 + 38, 96 + 39]


# -- timing ------------------------------------------------------------------------------------------------------------


def test_calls_are_made_in_turn_and_warmed():
    order = []
    ops = types.SimpleNamespace(arena=types.SimpleNamespace(scope=nullcontext), begin_step=lambda rows: None)
    seconds = kernels.seconds_of_call([lambda number=number: order.append(number) for number in range(5)], ops)
    assert order[:12] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1] and seconds > 0
    assert max(np.bincount(order)) - min(np.bincount(order)) <= 1


def test_weights_are_copied_until_no_cache_holds_them(tiny):
    shapes = kernel_shapes.of_model(EngineConfig(model=str(tiny.path)))
    ops = kernels.make_ops(64, 1, "portable")
    cases = list(kernels._cases(kernels.Wanted(shapes, [1, 100], context=20), ops, 1 << 18))
    assert len(cases) == kernels.count(kernels.Wanted(shapes, [1, 100]))
    for case in cases:
        if case.op.startswith("linear"):
            assert len(case.calls) > 1 and case.cost.streams[0].working_set >= 1 << 18
            assert case.cost.streams[0].size * len(case.calls) == case.cost.streams[0].working_set
    attend = [case for case in cases if case.op == "attend"]
    assert [case.rows for case in attend] == [1, 100] and all(len(case.calls) > 1 for case in attend)
    # 1 row sees 20 keys; 100 rows of one prompt see 1, 2, ... 100
    assert [case.cost.operations / (4 * (4 * 16 + 10)) for case in attend] == [20, 5050]
    assert not any(case.rows == 100 and "lm_head" in case.op for case in cases)


def test_figures_follow_from_the_time(tiny, monkeypatch):
    monkeypatch.setattr(kernels, "seconds_of_call", lambda calls, ops: 1e-3)
    shapes = kernel_shapes.of_text("4096x4096", ["q4_b32"])
    (record,) = kernels.measure(kernels.Wanted(shapes, [8]), ["portable"], MADE_UP, threads=1)
    assert record["us"] == 1000 and record["gop_per_s"] == pytest.approx(2 * 8 * 4096 * 4096 / 1e-3 / 1e9, abs=1e-3)
    # made up: 1 GFLOP/s of the portable level, so 268 ms: in 1 ms it would be 268 times the limit
    assert (
        record["bound"] == "compute"
        and record["limit_us"] == pytest.approx(268435.456)
        and record["share"] == pytest.approx(268.4355, abs=1e-3)
    )


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_on_a_model(tiny, capsys, tmp_path):
    output, plot = tmp_path / "k.json", tmp_path / "k.svg"
    arguments = [
        "bench",
        "kernels",
        str(tiny.path),
        "--rows",
        "1,2",
        "--isa",
        "all",
        "--context",
        "20",
        "--limits",
        str(write_limits(tmp_path)),
        "--json",
    ]
    assert main([*arguments, "--output", str(output), "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert "of another processor (Some CPU)" in err and json.loads(output.read_text())["results"] == figures
    levels = {record["level"] for record in figures["kernels"]}
    ops = {record["op"] for record in figures["kernels"]}
    assert (
        "portable" in levels
        and {"linear qkv_proj", "linear lm_head", "rms_norm", "add_", "silu_mul", "take_rows", "rope_kv_write", "attend"} <= ops
    )
    assert all(record["us"] > 0 and (record["share"] is None) == (record["level"] not in MADE_UP.compute) for record in figures["kernels"])
    assert "linear qkv_proj" in plot.read_text()


def test_the_command_shows_a_table(capsys, tmp_path):
    assert (
        main(
            [
                "bench",
                "kernels",
                "--shape",
                "64x64",
                "--layout",
                "f32,q8_b16",
                "--rows",
                "3",
                "--isa",
                "portable",
                "--limits",
                str(write_limits(tmp_path)),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "level portable" in out and "64x64" in out and "q8_b16" in out and " %" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--isa", "sse9"), "choose from: portable"),
        (("--shape", "8x8", "--layout", "q4_b32"), "blocks of 32"),
        (("--shape", "8"), "COLUMNSxINPUTS"),
        (("--rows", "0"), "--rows must be from 1"),
        (("--limits", "/nonexistent"), "No such file"),
        (("--plot", "x.txt"), "must end in"),
    ],
)
def test_bad_usage_is_one_line(capsys, arguments, words):
    assert main(["bench", "kernels", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and words in err and err.count("\n") == 1
