"""`octavo verify` on a tiny random model: everything holds, every planted fault is caught by its row, and nothing passes that
proved nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from octavo import verify
from octavo.cli.main import main
from octavo.errors import ConfigError, InvalidRequestError
from octavo.verify.baseline import Baseline, check_memory
from octavo.verify.comparison import Comparison
from octavo.verify.faults import FAULTS
from octavo.verify.reference import _Divergence
from octavo.verify.report import Report, RowReport
from octavo.verify.rows import KVCache
from octavo.verify.streams import Streamed
from tests.tiny_models import write_tiny

pytest.importorskip("octavo._native", reason="the native module is not built")

LAYERS = {"embed", *(f"layers.{i}.{part}" for i in range(2) for part in ("attn", "mlp"))}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), fmt="gguf", seed=3, max_position_embeddings=512).path)


@pytest.fixture(scope="module")
def clean(tiny):
    return verify.run(tiny, quick=True)


@pytest.fixture(scope="module")
def planted(tiny):
    """Reports with a fault planted, each made once."""
    made: dict[str, Report] = {}

    def run(name: str) -> Report:
        if name not in made:
            made[name] = verify.run(tiny, quick=True, plant=name)
        return made[name]

    return run


def row(report: Report, name: str) -> RowReport:
    return next(one for one in report.rows if one.name == name)


def test_everything_holds(clean):
    assert clean.holds and clean.first is None
    names = [one.name for one in clean.rows]
    for name in ("kv cache", "chunks of 1", "chunks of 7", "chunks of 64", "chunks of all", "batched", "shuffled", "prefix hit",
                 "preemption", "fork n=4", "beams", "together", "replayed", "streamed", "reference"):  # fmt: skip
        assert name in names and row(clean, name).status == "holds", name
    assert any(name.startswith("threads ") for name in names)
    for one in clean.rows:
        if one.status == "holds" and one.name != "reference":
            assert one.bitwise and one.largest_difference == 0 and one.promise == "bitwise"
            assert one.logits == one.positions * 272 > 0


def test_every_position_is_compared(clean):
    """Prompt and answer but its last token, whose logits are never needed."""
    wanted = sum(p["tokens"] + p["max_tokens"] - 1 for p in clean.prompts)
    for name in ("kv cache", "chunks of 1", "chunks of 7", "chunks of 64", "chunks of all", "batched", "shuffled", "reference"):
        assert row(clean, name).positions == wanted, name
    assert row(clean, "kv cache").tokens == sum(p["max_tokens"] for p in clean.prompts)
    assert row(clean, "preemption").positions > wanted  # what was computed twice is compared twice


def test_counters_prove_that_it_happened(clean):
    assert row(clean, "chunks of 7").counters["largest chunk"] == 7
    assert row(clean, "prefix hit").counters["prompt tokens found"] >= 16
    assert row(clean, "prefix hit").counters["blocks copied"] == 1  # the prompt of whole blocks
    assert row(clean, "preemption").counters["preemptions"] >= 4
    forked = row(clean, "fork n=4").counters
    assert forked["forks"] == 8 and forked["blocks copied"] == 6 and forked["blocks shared"] > 8
    assert row(clean, "replayed").counters["steps replayed"] > 0
    assert row(clean, "beams").counters["forks of beams"] > 2 * 3 * 6 and row(clean, "beams").positions > 2 * 3 * 6
    assert row(clean, "beams").counters["rows of forked beams"] > 2 * 3 * 5
    assert row(clean, "streamed").counters["withheld and released"] > 0
    assert row(clean, "reference").largest_difference > 0 and not row(clean, "reference").bitwise


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_planted_fault_is_caught(planted, clean, fault):
    report = planted(fault.name)
    caught = row(report, fault.row)
    if caught.status == "does not apply":
        pytest.skip(f"{fault.row}: {caught.why}")  # one core
    assert not report.holds and caught.status == "differs", caught
    first = caught.first
    prompt = report.prompts[first.prompt]
    assert 0 <= first.position < prompt["tokens"] + prompt["max_tokens"]
    assert first.kind == ("prompt" if first.position < prompt["tokens"] else "generated")
    if first.what == "logits":
        assert caught.largest_difference > 0
        assert first.layer in LAYERS or first.layer.startswith("output")
    if not fault.systematic:
        assert report.logits_digest == clean.logits_digest  # the baseline has nothing of it
        assert row(report, "reference").status == "holds"
    assert report.planted == fault.name and report.digest != clean.digest


@pytest.mark.parametrize(
    ("name", "home", "position", "layer"),
    [
        ("chunk-border", "chunks of 7", 7, "layers.0.attn"),
        ("position-after-hit", "prefix hit", 64, "layers.0.attn"),  # the first of 72 tokens that lies behind four whole blocks
        ("resume", "preemption", 74, "layers.0.attn"),  # behind the three tokens drawn before
        ("batch-arithmetic", "batched", 0, "output (the last norm or the head)"),
    ],
)
def test_the_first_position_and_layer_are_right(planted, name, home, position, layer):
    first = row(planted(name), home).first
    assert (first.prompt, first.choice, first.position, first.what) == (0, 0, position, "logits")
    assert first.layer.startswith(layer)


def test_faults_stay_where_they_belong(planted):
    """A fault of forks is none of prefix hits: rows are about what they say."""
    for name, allowed in (("shared-tail", {"fork n=4", "together"}), ("stale-block", {"prefix hit", "together", "streamed"})):
        report = planted(name)
        assert {one.name for one in report.rows if one.status == "differs"} <= allowed


def test_beams_that_write_into_a_shared_block_are_caught(planted):
    beams = row(planted("shared-tail"), "beams")
    assert beams.status == "failed" and "logits differ" in beams.why and not planted("shared-tail").holds
    assert beams.positions and beams.largest_difference > 0


def test_certificates_of_two_runs_have_one_digest(tiny, clean):
    again = verify.run(tiny, quick=True)
    assert again.digest == clean.digest and again.seconds != clean.seconds
    other = verify.run(tiny, prompts=["something else"], quick=True)
    assert other.digest != clean.digest and other.logits_digest != clean.logits_digest
    certificate = json.dumps(other.to_dict(), allow_nan=False)
    assert "something else" not in certificate and other.to_dict()["digest"] == other.digest


def test_digest_changes_with_a_logit_that_differs(clean):
    changed = replace(clean, rows=[replace(clean.rows[0], largest_difference=1e-9), *clean.rows[1:]])
    assert changed.digest != clean.digest
    assert replace(clean, seconds=1.0, machine={}, rows=[replace(one, seconds=9.0) for one in clean.rows]).digest == clean.digest


def test_rows_that_do_not_apply_say_why(tiny):
    report = verify.run(tiny, prompts=["short"], max_tokens=6)
    assert report.holds
    for name in ("chunks of 7", "chunks of 64", "prefix hit"):
        one = row(report, name)
        assert one.status == "does not apply" and "5 tokens" in one.why.replace("has 5)", "has 5 tokens)"), one
    assert row(report, "batched").counters["largest batch"] == 4  # copies of the one prompt


def test_a_row_that_did_not_fire_fails(tiny, monkeypatch):
    """The KV cache's row without a decode step, streams without a piece."""
    monkeypatch.setattr(KVCache, "required", ("decode steps", "never counted"))
    monkeypatch.setattr(Streamed, "required", ("never counted",))
    report = verify.run(tiny, prompts=["not much"], max_tokens=3)
    assert not report.holds and report.first is None
    assert row(report, "kv cache").status == "did not fire" and "never counted: 0" in row(report, "kv cache").why
    assert row(report, "streamed").status == "did not fire"


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_backends_without_equal_bits_hold_within_the_tolerance(tiny, backend):
    report = verify.run(tiny, backend=backend, quick=True, max_tokens=6)
    assert report.holds, [(one.name, one.why) for one in report.rows]
    assert "within 0.001" in row(report, "batched").promise
    assert row(report, "reference").status == ("does not apply" if backend == "reference" else "holds")


def test_a_backend_without_equal_bits_is_still_caught(tiny):
    report = verify.run(tiny, backend="reference", quick=True, max_tokens=6, plant="block-table")
    assert row(report, "kv cache").status == "differs" and row(report, "kv cache").first.layer in LAYERS


@pytest.mark.parametrize(
    ("count", "differing", "mean", "holds"),
    [(6, 3, 0.001, True), (6, 4, 0.001, False), (200, 6, 0.001, True), (200, 7, 0.001, False), (200, 0, 0.02, False),
     (200, 0, float("nan"), False)],
)  # fmt: skip
def test_limits_of_the_reference(baseline, count, differing, mean, holds):
    comparison = Comparison(baseline)
    divergence = _Divergence(SimpleNamespace(cases=[None]), comparison)
    divergence.divergences = [(mean, 0, position) for position in range(count)]
    divergence.agreed = count - differing
    divergence.judge()
    assert (comparison.first is None) == holds


# -- the comparison alone ------------------------------------------------------------------------------------------
@pytest.fixture
def baseline():
    """Case 0: a prompt of 2 tokens, answer 5 6 7; logits after positions 0 to 3."""
    made = Baseline()
    made._prompt_lengths[0] = 2
    made.tokens[0, 0] = [5, 6, 7]
    for position in range(4):
        made.keep(0, 0, position, np.array([position, 1.0, -2.0], np.float32))
    return made


def feed(comparison, rows, tokens):
    comparison.names["0.0"] = 0
    for position, values in rows:
        comparison.logits("0.0", position, np.array([values], np.float32))
    comparison.finish("0.0", 0, tokens)


GOOD = [(p, [p, 1.0, -2.0]) for p in range(4)]


def test_comparison_of_equals(baseline):
    comparison = Comparison(baseline)
    feed(comparison, GOOD, [5, 6, 7])
    assert (comparison.positions, comparison.logits_compared, comparison.tokens_compared) == (4, 12, 3)
    assert comparison.bitwise and comparison.first is None


@pytest.mark.parametrize(
    ("rows", "tokens", "what", "position"),
    [
        ([*GOOD[:2], (2, [2.0, np.nextafter(np.float32(1), np.float32(2)), -2.0]), GOOD[3]], [5, 6, 7], "logits", 2),
        ([(0, [-0.0, 1.0, -2.0]), *GOOD[1:]], [5, 6, 7], "logits", 0),  # minus zero is another bit
        ([(0, [np.nan, 1.0, -2.0]), *GOOD[1:]], [5, 6, 7], "logits", 0),
        (GOOD, [5, 9, 7], "token", 3),
        (GOOD, [5, 6], "token", 4),
        (GOOD, [5, 6, 7, 8], "token", 5),
        ([GOOD[0], *GOOD[2:]], [5, 6, 7], "missing", 1),
        (GOOD[:3], [5, 6, 7], "missing", 3),
    ],
)
def test_comparison_finds(baseline, rows, tokens, what, position):
    comparison = Comparison(baseline)
    feed(comparison, rows, tokens)
    assert (comparison.first.what, comparison.first.position) == (what, position)
    assert not comparison.bitwise or what == "missing"


def test_what_follows_another_token_is_not_compared(baseline):
    comparison = Comparison(baseline, tolerance=0.01)
    feed(comparison, [*GOOD[:3], (3, [99.0, 0.0, 0.0])], [5, 9, 9])
    assert comparison.parted == 1 and comparison.first is None and comparison.positions == 3


def test_tolerance_has_an_end(baseline):
    comparison = Comparison(baseline, tolerance=0.01)
    feed(comparison, [*GOOD[:3], (3, [3.02, 1.0, -2.0])], [5, 6, 7])
    assert comparison.first is None and comparison.largest_difference == pytest.approx(0.02, rel=1e-3)
    comparison = Comparison(baseline, tolerance=0.01)
    feed(comparison, [*GOOD[:3], (3, [3.04, 1.0, -2.0])], [5, 6, 7])
    assert comparison.first.what == "logits"


# -- usage ---------------------------------------------------------------------------------------------------------
def test_bad_usage_is_refused(tiny):
    for settings, word in (
        ({"plant": "nothing"}, "block-table"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"prompts": []}, "prompts"),
        ({"prompts": ["x" * 505]}, "shorten"),
        ({"num_kv_blocks": 4}, "KV blocks"),
        ({"wrong_setting": 1}, "wrong_setting"),
    ):
        with pytest.raises(ConfigError, match=word):
            verify.run(tiny, **settings)
    with pytest.raises(InvalidRequestError, match="context"):
        verify.run(tiny, prompts=["x" * 5000])
    with pytest.raises(ConfigError, match="MiB"):
        check_memory(100_000, 150_000)


def test_command(tiny, tmp_path, capsys):
    file, prompts = tmp_path / "certificate.json", tmp_path / "prompts.txt"
    prompts.write_text("One prompt of more than sixteen tokens\n\nanother\n")
    assert main(["verify", tiny, "--prompts", str(prompts), "--max-tokens", "4", "--output", str(file)]) == 0
    out = capsys.readouterr().out
    certificate = json.loads(file.read_text())
    assert "All holds" in out and certificate["digest"] in out and certificate["model"]["files"][0]["sha256"] in out
    assert [p["tokens"] for p in certificate["prompts"]] == [38, 6] and certificate["holds"] is True
    assert main(["verify", tiny, "--prompt", "an answer in two blocks", "--max-tokens", "4", "--plant", "block-table"]) == 1
    out = capsys.readouterr().out
    assert "DOES NOT HOLD: kv cache" in out and "'block-table' was planted" in out
    assert "first difference: kv cache, prompt 1 ('an answer in two blocks')" in out and "layers.0.attn" in out
    assert main(["verify", tiny, "--prompt", "abc", "--max-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True


@pytest.mark.parametrize(
    "arguments",
    [["--plant", "x"], ["--max-tokens", "0"], ["--max-tokens", "many"], ["--prompt", ""], ["--prompt", "a", "--prompts", "b"]],
)
def test_command_refuses(tiny, arguments, capsys):
    assert main(["verify", tiny, *arguments]) == 2
    assert capsys.readouterr().err.startswith("octavo: ")
