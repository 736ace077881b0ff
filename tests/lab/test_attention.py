"""The attention lesson: every way against a float64 loop of its own, the bound on the differences, and what is measured."""

import json
import math

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.lab.attention import efficient, experiment, flash, naive
from octavo.lab.attention.paged import PagedAttention

SHAPES = [(9, 3, 64), (4, 4, 32), (8, 1, 16), (2, 2, 128)]


def unit_normal(seed, heads, kv_heads, length, dim):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((h, length, dim), dtype=np.float32) for h in (heads, kv_heads, kv_heads)]


def one_by_one(q, k, v):
    """The formula, one head and one row at a time, in Python floats' precision."""
    out = np.zeros(q.shape)
    for head in range(q.shape[0]):
        kv_head = head // (q.shape[0] // k.shape[0])
        for row in range(q.shape[1]):
            scores = [
                float(np.dot(q[head, row].astype(float), k[kv_head, key].astype(float))) / math.sqrt(q.shape[2]) for key in range(row + 1)
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            out[head, row] = sum(w / sum(weights) * v[kv_head, key].astype(float) for key, w in enumerate(weights))
    return out


def every_way(heads, kv_heads, dim, length):
    torch = pytest.importorskip("torch")
    from octavo.lab.attention import in_torch

    def by_torch(function):
        return lambda *arrays: function(*map(torch.from_numpy, arrays)).numpy()

    return {
        "naive": naive.attention,
        "efficient": lambda q, k, v: efficient.attention(q, k, v, chunk=8),
        "flash": lambda q, k, v: flash.attention(q, k, v, tile=8),
        "torch naive": by_torch(in_torch.naive),
        "torch efficient": by_torch(lambda q, k, v: in_torch.efficient(q, k, v, chunk=8)),
        "torch flash": by_torch(lambda q, k, v: in_torch.flash(q, k, v, tile=8)),
        "torch sdpa": by_torch(in_torch.sdpa),
        "paged": PagedAttention(heads, kv_heads, dim, length),
        "paged, reference": PagedAttention(heads, kv_heads, dim, length, backend="reference"),
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 2, 8, 19])
def test_every_way_is_the_formula(shape, length):
    heads, kv_heads, dim = shape
    q, k, v = unit_normal(length, heads, kv_heads, length, dim)
    expected = one_by_one(q, k, v)
    for name, way in every_way(heads, kv_heads, dim, length).items():
        got = way(q, k, v)
        assert got.shape == q.shape and got.dtype == np.float32, name
        assert np.abs(got - expected).max() < 2e-6, name


def test_large_scores_do_not_overflow():
    q, k, v = unit_normal(0, 2, 1, 40, 16)
    expected = one_by_one(q * 100, k * 100, v)
    for name, way in every_way(2, 1, 16, 40).items():
        assert np.abs(way(q * np.float32(100), k * np.float32(100), v) - expected).max() < 2e-2, name


@pytest.mark.parametrize("length", [128, 129, 200, 256, 500, 1024])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_on_the_mean_difference(seed, length):
    """<= 4.1e-08 on unit-normal float32 inputs, and the comparison is between different sums, not the same one twice."""
    q, k, v = unit_normal([seed, length], 9, 3, length, 64)
    expected = naive.attention(q, k, v)
    for way in (efficient.attention, flash.attention):
        assert np.abs(way(q, k, v) - expected).mean(dtype=np.float64) <= experiment.BOUND
    assert np.abs(flash.attention(q, k, v) - expected).any()


@pytest.mark.slow
@pytest.mark.parametrize("length", [2048, 4096])
def test_the_bound_at_the_longest_lengths(length):
    q, k, v = unit_normal(0, 3, 1, length, 64)
    expected = naive.attention(q, k, v)
    for way in (efficient.attention, flash.attention):
        assert np.abs(way(q, k, v) - expected).mean(dtype=np.float64) <= experiment.BOUND


def test_the_paged_table_is_shuffled_and_does_not_matter():
    paged = PagedAttention(9, 3, 64, 100)
    table = paged.batch.block_tables[0][0]
    assert sorted(table) == list(range(7)) and list(table) != sorted(table)
    q, k, v = unit_normal(1, 9, 3, 100, 64)
    shuffled = paged(q, k, v)
    paged.batch.block_tables[0][0, :] = np.arange(7)
    paged.batch.slot_mapping[0][:] = np.arange(100)
    if paged.ops.name == "cpu":
        np.testing.assert_array_equal(paged(q, k, v), shuffled)
    else:
        np.testing.assert_allclose(paged(q, k, v), shuffled, atol=1e-6)


def test_bf16_in_the_pool_shows():
    q, k, v = unit_normal(2, 9, 3, 64, 64)
    expected = naive.attention(q, k, v)
    rounded = np.abs(PagedAttention(9, 3, 64, 64, "bf16")(q, k, v) - expected).max()
    assert 1e-4 < rounded < 5e-2


def test_a_run_measures_every_way():
    seen = []
    settings = experiment.Settings(lengths=(48, 160), runs=2, heads=4, kv_heads=2, head_dim=32)
    results = experiment.run(settings, lambda what, done, total: seen.append((done, total)))
    json.dumps(results, allow_nan=False)
    assert seen[0] == (0, 2) and seen[-1] == (2, 2)
    rows = {(row["length"], row["way"]): row for row in results["rows"]}
    ways = {way for _, way in rows}
    assert {"naive", "efficient", "flash-style", "sdpa (torch)"} < ways and len([way for way in ways if way.startswith("paged")]) == 2
    assert len(rows) == len(results["rows"]) == 2 * len(ways)
    for row in rows.values():
        assert row["seconds"] > 0 and len(row["runs"]) == 2 and row["max_error"] < (5e-2 if "bf16" in row["way"] else 5e-6)
    assert rows[48, "naive"]["max_diff"] == 0 and results["bound"]["holds"]
    # 4 heads, 4 bytes: the scores of all rows, of 128 rows, of a tile
    assert [rows[160, way]["predicted_score_bytes"] for way in ("naive", "efficient", "flash-style")] == [409600, 327680, 262144]
    text = experiment.report(results)
    assert "flash-style" in text and "bound 4.1e-08: kept" in text and "####" in text
    figure = experiment.figure(results)
    assert figure.startswith("<svg") and figure.count("<polyline") == len(ways)


def test_naive_needs_more_memory_the_longer_it_gets():
    def peaks(length):
        q, k, v = unit_normal(0, 4, 2, length, 32)
        return [experiment._traced(lambda way=way: way(q, k, v)) for way in (naive.attention, efficient.attention, flash.attention)]

    short, long = peaks(256), peaks(1024)
    growth = [b / a for a, b in zip(short, long, strict=True)]
    assert growth[0] > 12 and growth[1] < 6 and growth[2] < 6  # four times the tokens: sixteen times the scores
    assert long[0] > 4 * 1024**2 * 4 > long[1]


def test_torch_memory_is_what_torch_allocates():
    torch = pytest.importorskip("torch")
    experiment_bytes = experiment._profiled(lambda: torch.zeros(1000, 1000) + 1)
    assert 8e6 <= experiment_bytes < 8.1e6


def test_what_cannot_fit_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr(experiment.os, "sysconf", lambda name: 1000)  # a million bytes
    results = experiment.run(experiment.Settings(lengths=(256,), runs=1, heads=2, kv_heads=1, head_dim=16))
    assert not any(row["way"].startswith("naive") for row in results["rows"]) and results["rows"][0]["mean_diff"] is None
    assert len(results["skipped"]) == 1 and "naive at 256" in results["skipped"][0]
    assert "naive at 256" in experiment.report(results) and experiment.failure(results) is None


def test_a_broken_bound_is_a_failure():
    results = {"settings": {"head_dim": 64, "lengths": [128]}, "bound": {"holds": False, "largest": {"flash-style": 1e-3}}}
    assert "4.1e-08" in experiment.failure(results)
    results["settings"]["head_dim"] = 32
    assert experiment.failure(results) is None


@pytest.mark.parametrize(
    "wrong",
    [{"lengths": ()}, {"lengths": (0,)}, {"lengths": (1 << 20,)}, {"heads": 4, "kv_heads": 3}, {"head_dim": 7}, {"head_dim": 512},
     {"runs": 0}, {"seed": -1}, {"kv_heads": 0}],
)  # fmt: skip
def test_settings_are_checked(wrong):
    with pytest.raises(ConfigError):
        experiment.Settings(**wrong)
