"""Limits of the machine: probes that do what they say, a file that survives the round trip, bounds counted by hand."""

import json

import pytest

from octavo.bench import limits, roofline
from octavo.bench.limits import Limits, Speed
from octavo.cli.main import main
from octavo.errors import ConfigError

native = pytest.importorskip("octavo._native", reason="the native module is not built")

#: Round figures: 1 byte or operation is 1 ns, or half of it with all threads.
MADE_UP = Limits(
    "Some CPU", 2, 1 << 20, 1 << 24,
    {"l2": Speed(100e9, 200e9), "l3": Speed(50e9, 80e9), "dram": Speed(10e9, 20e9)},
    {"avx2": {"f32": Speed(100e9, 200e9), "int16": Speed(200e9, 400e9), "int8": Speed(300e9, 600e9)},
     "portable": {"f32": Speed(1e9, 2e9)}},
    1e-6, 1e-7, 1e-6,
)  # fmt: skip


# -- probes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("level", native.probe_levels())
def test_a_probe_reads_every_byte_every_time(level, threads):
    """The buffer holds ones, and what comes back is their sum: a loop that skips some, or is shortened, gives less."""
    probe = native.Limits(threads, 1 << 20)
    for size, passes, ahead in ((1 << 20, 1, 0), (1 << 20, 7, 4096), (threads * 1024, 50, 0)):
        seconds, work = probe.read(level, size, passes, ahead)
        assert work >= size * passes and work - size * passes < passes * threads * 1024 and seconds > 0


@pytest.mark.parametrize("level", native.probe_levels())
@pytest.mark.parametrize("what", limits.KINDS)
def test_a_probe_makes_every_product(level, what):
    """All factors are one, so a sum is the number of products: it must grow exactly with rounds and threads."""
    one, three = native.Limits(1, 1024), native.Limits(3, 1024)
    per_round = one.compute(level, what, 1)[1]
    assert per_round >= 32
    for rounds in (3, 1000, 1 << 20):
        assert one.compute(level, what, rounds)[1] == rounds * per_round
    assert three.compute(level, what, 1000)[1] == 3000 * per_round


def test_probes_refuse_what_they_cannot_do():
    probe = native.Limits(2, 1 << 16)
    for bad in (lambda: probe.read("avx9", 1024, 1), lambda: probe.read("portable", 1 << 30, 1), lambda: probe.read("portable", -1, 1),
                lambda: probe.read("portable", 1024, 0), lambda: probe.read("portable", 1024, 1, -64),
                lambda: probe.compute("portable", "int4", 1), lambda: probe.compute("portable", "f32", 1 << 21),
                lambda: probe.fork_join(0), lambda: native.Limits(0, 1), lambda: native.Limits(1, 1 << 50)):  # fmt: skip
        with pytest.raises(ValueError):
            bad()
    assert probe.fork_join(50)[1] == 50


def test_every_level_that_runs_has_probes_unless_it_is_emulated():
    levels = native.probe_levels()
    assert levels[0] == "portable" and set(levels) <= set(native.isa_levels()) and len(levels) >= len(native.isa_levels()) - 1


def test_cache_sizes_come_from_the_first_core_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5}, raising=False)
    for index, (level, kind, size) in enumerate(
        [(1, "Instruction", "32K"), (1, "Data", "48K"), (2, "Unified", "2048K"), (3, "Unified", "105M")]
    ):
        folder = tmp_path / "cpu3" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    assert [limits.cache_bytes(level, tmp_path) for level in (1, 2, 3, 4)] == [48 << 10, 2 << 20, 105 << 20, 0]
    (tmp_path / "cpu3/cache/index2/size").write_text("many")
    assert limits.cache_bytes(2, tmp_path) == 0 and limits.cache_bytes(2, tmp_path / "nothing") == 0


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "threads", "expected"),
    [
        (1 << 19, 1, 100e9),
        (1 << 20, 1, 50e9),
        (1 << 20, 2, 200e9),
        (1 << 23, 2, 80e9),
        (1 << 24, 2, 20e9),
        (1 << 40, 1, 10e9),
        (1 << 40, 9, 20e9),
    ],
)
def test_bandwidth_is_that_of_the_smallest_memory_that_holds_the_set(size, threads, expected):
    assert MADE_UP.bandwidth(size, threads) == expected


def test_bandwidth_of_a_level_that_was_not_measured_is_that_of_the_next():
    some = Limits("x", 1, 1 << 20, 0, {"dram": Speed(1e9, 1e9)}, {}, 1, 1, 1)
    assert some.bandwidth(10, 1) == 1e9


def test_a_matrix_product_is_bound_by_memory_then_by_arithmetic():
    """4-bit weights of 4096 x 4096 with a scale and an offset: 10.5 MB a 128 MB set, so 0.52 ms at 20 GB/s; 0.1 ms a row at 400 GOP/s."""
    size = 4096 * 4096 * 5 // 8
    one, eight = (roofline.bound(roofline.linear(rows, 0, 4096, 4096, size, 128 << 20), MADE_UP, "avx2", 2) for rows in (1, 8))
    assert one.by == "memory" and one.seconds == pytest.approx(size / 20e9 + 8192 * 4 / 200e9)
    assert eight.by == "compute" and eight.seconds == pytest.approx(8 * 2 * 4096 * 4096 / 400e9)
    alone = roofline.bound(roofline.linear(8, 0, 4096, 4096, size, 128 << 20), MADE_UP, "avx2", 1)
    assert alone.seconds == pytest.approx(2 * eight.seconds)


def test_float_weights_are_bound_by_float_arithmetic():
    cost = roofline.linear(512, 0, 1000, 1000, 2 * 10**6, 0)
    assert cost.kind == "f32" and roofline.bound(cost, MADE_UP, "avx2", 1).seconds == pytest.approx(512 * 2e6 / 100e9)
    assert roofline.bound(cost, MADE_UP, "amx", 1) is None


@pytest.mark.parametrize(
    ("bytes_per_number", "generated", "kind"),
    [(5 / 8, 8, "integer8"), (5 / 8, 0, "integer15"), (5 / 8, 3, "integer15"), (9 / 8, 8, "integer15"), (2, 8, "f32"), (4, 0, "f32")],
)
def test_the_arithmetic_follows_weights_and_kind_of_row(bytes_per_number, generated, kind):
    """docs/numerics.md: activations of 8 bits where generated rows meet 4-bit weights, of 15 for other quantised ones."""
    cost = roofline.linear(8, generated, 64, 64, int(64 * 64 * bytes_per_number), 0)
    assert cost.kind == kind


def test_integer_products_take_the_fastest_of_what_fits():
    assert roofline.bound(roofline.Cost((), 1e9, "integer8"), MADE_UP, "avx2", 1).seconds == pytest.approx(1 / 300)
    cost = roofline.Cost((), 1e9, "integer15")
    assert roofline.bound(cost, MADE_UP, "avx2", 1).seconds == pytest.approx(1 / 200)  # int16, not half of int8
    assert roofline.bound(cost, MADE_UP, "portable", 1).seconds == pytest.approx(1)  # nothing but floats


def test_attention_reads_keys_and_values_once_and_counts_pairs():
    cost = roofline.attend(pairs=1000, keys=1000, heads=8, kv_heads=2, head_dim=64, kv_item=2, kv_in_turn=1 << 30, rows=1)
    assert cost.streams[0] == (1000 * 2 * 2 * 64 * 2, 1 << 30) and cost.operations == 1000 * 8 * (4 * 64 + 10)


# -- the file ----------------------------------------------------------------------------------------------------------


def stored(tmp_path, **changes):
    path = tmp_path / "limits.json"
    path.write_text(json.dumps({"benchmark": "limits", "results": {**MADE_UP.as_dict(), **changes}}))
    return path


def test_limits_survive_the_file(tmp_path):
    assert limits.load(stored(tmp_path)) == MADE_UP


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"read": {}},
        {"read": {"dram": {"one": -1, "all": 1}}},
        {"read": {"dram": {"one": float("inf"), "all": 1}}},
        {"compute": 3},
        {"threads": "two"},
        {"call_s": None},
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, changes):
    with pytest.raises(ConfigError, match="doctor --full"):
        limits.load(stored(tmp_path, **changes))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"benchmark": "speed"}', "[" * 100_000, '{"benchmark": "limits", "results": []}', "x" * (2 << 20)]
)
def test_a_file_that_is_no_such_file_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        limits.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        limits.load(tmp_path / "none")


# -- the command -------------------------------------------------------------------------------------------------------


def test_doctor_full_measures_and_keeps_the_figures(tmp_path, capsys, monkeypatch):
    """One real measurement, shortened: every figure is there and what is kept is what was shown."""
    monkeypatch.setattr(limits, "_TRIES", 1)
    monkeypatch.setattr(limits, "_SECONDS", 0.001)
    output = tmp_path / "limits.json"
    assert main(["doctor", "--full", "--json", "--output", str(output)]) == 0
    shown = json.loads(capsys.readouterr().out)["limits"]
    found = limits.load(output)
    assert found.as_dict() == shown
    assert set(found.compute) == set(native.probe_levels()) and all(set(kinds) == set(limits.KINDS) for kinds in found.compute.values())
    assert found.threads == native.available_threads() and "dram" in found.read and min(found.fork_join_s, found.call_s) > 0


def test_progress_is_counted(monkeypatch):
    monkeypatch.setattr(limits, "_TRIES", 1)
    monkeypatch.setattr(limits, "_SECONDS", 0.0001)
    monkeypatch.setattr(limits, "_sets", lambda l2, l3, threads: {"l2": 1 << 16, "dram": 1 << 20})
    calls = []
    limits.measure("x", lambda: calls.append(1))
    assert len(calls) == limits.count()


def test_output_without_full_is_bad_usage(capsys):
    assert main(["doctor", "--output", "x.json"]) == 2 and "--full" in capsys.readouterr().err


def test_doctor_survives_a_level_that_cannot_run(capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_CPU_ISA", "avx9")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "OCTAVO_CPU_ISA=avx9 cannot run on this machine; choose one of: portable" in out and "no backend can run" in out
