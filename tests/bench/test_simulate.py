"""The simulated scheduler: scenarios worked out by hand, what must hold for every trace, fitted costs, files, the command."""

import gc
import json
from dataclasses import replace
from random import Random

import pytest

from octavo.bench.simulate import calibrate, report
from octavo.bench.simulate import costs as step_costs
from octavo.bench.simulate.costs import CostFile, RowCosts, Sample, StepCosts, Work, fit, load, save
from octavo.bench.simulate.run import simulate
from octavo.bench.simulate.trace import Lengths, Synthetic, TraceRequest, check, read, token_ids, write
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.engine.scheduler_output import ScheduledEntry, TokenKind
from octavo.errors import ConfigError, OctavoError
from octavo.wiring import EngineParts
from tests.engine.fake import FakeExecutor, FakeTokenizer

#: Numbers that no two sums of have in common: 1 s a step, 10 ms a prompt row, 100 ms a generated row, and a little for the rest.
COSTS = StepCosts(1.0, RowCosts((1, 64), (0.1, 6.4)), RowCosts((1, 512), (0.01, 5.12)), 1e-4, 1e-6, 0.003, 0.02)
CONFIG = EngineConfig(policy="fcfs")


def run(requests, config=CONFIG, costs=COSTS, blocks=2000):
    return simulate(requests, costs, config, blocks, 4096)


# -- by hand -------------------------------------------------------------------------------------------------------
def test_one_request_takes_what_its_chunks_and_its_tokens_cost():
    """600 prompt tokens with a budget of 512 are a chunk of 512 and one of 88; then two tokens are generated alone."""
    outcome = run([TraceRequest(2.0, 600, 3)])
    first = 1 + 5.12 + 1e-6 * (512 * 513 // 2) + 0.003
    second = 1 + 0.88 + 1e-6 * (600 * 601 // 2 - 512 * 513 // 2) + 0.003 + 0.02
    third, fourth = (1 + 0.1 + 1e-4 * read_tokens for read_tokens in (601, 602))
    assert outcome.first_scheduled[0] == pytest.approx(2.0)  # nothing ran, so the clock went straight to its arrival
    assert outcome.first_token[0] == pytest.approx(2 + first + second)
    assert outcome.last_token[0] == outcome.end == pytest.approx(2 + first + second + third + fourth)
    assert list(outcome.gaps) == pytest.approx([third, fourth], rel=1e-5)
    assert outcome.stats.steps == 4 and outcome.stats.prompt_tokens_computed == 600
    found = report.figures(outcome)
    assert found["ttft_ms"]["p50"] == pytest.approx(1000 * (first + second), abs=0.01) and found["busy_share"] == 1
    assert found["budget_share"] == pytest.approx((512 + 88 + 1 + 1) / (4 * 512), abs=1e-4)
    assert found["kv_share_max"] == pytest.approx(38 / 2000, abs=1e-4)  # ceil(602 / 16)


def test_a_request_that_finds_no_place_waits_for_the_one_before():
    """One sequence at a time: the second begins when the first has ended, though it arrived during its first step."""
    outcome = run([TraceRequest(0.0, 10, 2), TraceRequest(0.5, 20, 1)], replace(CONFIG, max_num_seqs=1))
    first = (1 + 0.1 + 55e-6 + 0.003 + 0.02) + (1 + 0.1 + 11e-4)
    assert outcome.last_token[0] == pytest.approx(first)
    assert outcome.first_scheduled[1] == pytest.approx(first)
    assert outcome.first_token[1] == pytest.approx(first + 1 + 0.2 + 210e-6 + 0.003 + 0.02)


def test_a_request_that_arrives_in_a_step_shares_the_next_one():
    outcome = run([TraceRequest(0.0, 10, 3), TraceRequest(0.5, 20, 1)])
    first = 1 + 0.1 + 55e-6 + 0.003 + 0.02
    mixed = 1 + 0.1 + 11e-4 + 0.2 + 210e-6 + 0.003 + 0.02
    assert outcome.first_token[1] == pytest.approx(first + mixed)
    assert list(outcome.gaps) == pytest.approx([mixed, 1 + 0.1 + 12e-4], rel=1e-5)


def test_a_prefix_computed_before_is_not_paid_again():
    together = [TraceRequest(0.0, 80, 1, "p", 64), TraceRequest(50.0, 90, 1, "p", 64), TraceRequest(100.0, 90, 1, "q", 64)]
    outcome = run(together)
    assert outcome.stats.prefix_hit_tokens == 64 and outcome.stats.prompt_tokens_computed == 80 + 26 + 90
    assert outcome.first_token[1] - 50 == pytest.approx(1 + 0.26 + 1e-6 * (90 * 91 // 2 - 64 * 65 // 2) + 0.003 + 0.02)
    assert run(together, replace(CONFIG, enable_prefix_caching=False)).stats.prompt_tokens_computed == 80 + 90 + 90


def test_a_full_pool_preempts_and_pays_again():
    """Two requests of 32 + 40 tokens need 5 blocks each; there are 8. The later one is preempted and computed again, none is lost."""
    outcome = run([TraceRequest(0.0, 32, 40), TraceRequest(0.0, 32, 40)], blocks=8)
    assert outcome.finished == [0, 1] and outcome.stats.preemptions > 0
    found = report.figures(outcome)
    assert found["preemptions"] == outcome.stats.preemptions and found["recomputed_tokens"] == outcome.stats.tokens_recomputed
    assert found["kv_share_max"] <= 1


# -- for every trace -----------------------------------------------------------------------------------------------
MADE = Synthetic(
    200, 0.5, Lengths.parse("--p", "lognormal:40:1"), Lengths.parse("--o", "zipf:1.2:60"), burst=3, prefixes=3, prefix_tokens=40,
    tenants=4, priorities=3, most_tokens=512,
)  # fmt: skip


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill", "longest-prefix", "fair"])
def test_every_request_ends_with_all_its_tokens_and_the_same_again(policy):
    requests = MADE.make()
    outcomes = [run(requests, replace(CONFIG, policy=policy), blocks=120) for _ in range(2)]
    found = report.figures(outcomes[0])
    assert found == report.figures(outcomes[1])
    tokens = sum(request.output_tokens for request in requests)
    assert found["finished"] == len(requests) and found["output_tokens"] == tokens == outcomes[0].stats.tokens_sampled
    assert found["itl_ms"]["count"] == tokens - len(requests) and outcomes[0].stats.blocks_used == 0
    prompts = sum(request.prompt_tokens for request in requests)
    stats = outcomes[0].stats
    assert stats.prompt_tokens_computed + stats.generated_tokens_computed >= prompts + tokens - len(requests) - stats.prefix_hit_tokens
    for number, request in enumerate(requests):
        assert request.arrival <= outcomes[0].first_scheduled[number] < outcomes[0].first_token[number] <= outcomes[0].last_token[number]
    assert sum(tenant["requests"] for tenant in found["tenants"].values()) == len(requests) and 0 < found["fairness"] <= 1


def test_half_the_cost_is_half_the_time_and_a_bit_less_is_never_slower():
    at_once = replace(MADE, burst=0).make()  # without arrivals the schedule does not depend on speed
    slow, fast = run(at_once), run(at_once, costs=COSTS.scaled(0.5))
    assert fast.end == pytest.approx(slow.end / 2)
    requests = MADE.make()
    ends = [run(requests, costs=COSTS.scaled(factor)).end for factor in (0.01, 0.1, 1.0)]
    assert ends == sorted(ends)


def test_the_fair_policy_shields_a_small_tenant_from_a_large_one():
    large = [TraceRequest(0.0, 100, 20, tenant="large") for _ in range(60)]
    requests = [*large, *(TraceRequest(1.0 + i, 100, 20, tenant="small") for i in range(4))]
    waits = {}
    for policy in ("fcfs", "fair"):
        outcome = run(requests, replace(CONFIG, policy=policy, max_num_seqs=8))
        waits[policy] = report.figures(outcome)["tenants"]["small"]["ttft_ms"]["mean"]
    assert waits["fair"] < waits["fcfs"] / 2


def test_a_full_queue_refuses_and_the_rest_goes_on():
    outcome = run([TraceRequest(0.0, 10, 5) for _ in range(20)], replace(CONFIG, max_waiting_requests=6))
    assert outcome.refused == 14 and len(outcome.finished) == 6 and report.figures(outcome)["refused"] == 14


def test_what_an_engine_would_not_run_is_an_error():
    with pytest.raises(ConfigError, match="request 2 .* 600 tokens"):
        check([TraceRequest(0, 5, 5), TraceRequest(0, 300, 300)], 512, 10_000)
    with pytest.raises(ConfigError, match="KV pool holds 320"):
        run([TraceRequest(0, 300, 300)], blocks=20)


def test_what_breaks_a_run_off_leaves_the_garbage_collector_as_it_was():
    def broken():
        raise KeyboardInterrupt

    before = gc.get_freeze_count()
    with pytest.raises(KeyboardInterrupt):
        simulate([TraceRequest(0.0, 10, 5)], COSTS, CONFIG, 2000, 4096, broken)
    assert gc.get_freeze_count() <= before


# -- costs ---------------------------------------------------------------------------------------------------------
PLANTED = StepCosts(
    0.004, RowCosts((1, 2, 4, 8, 16), (0.006, 0.009, 0.013, 0.02, 0.03)),
    RowCosts((1, 2, 4, 8, 16, 32, 64), (0.005, 0.006, 0.009, 0.02, 0.03, 0.07, 0.1)),
    2e-7, 3e-8, 4e-4, 2e-3,
)  # fmt: skip


def made_steps(count=600, seed=3):
    draw = Random(seed)
    for _ in range(count):
        generated = draw.choice([0, 0, 1, 2, 3, 5, 8, 12, 16])
        chunks = draw.randrange(0 if generated else 1, 4)
        prompt = chunks * draw.choice([1, 2, 3, 5, 11, 16, 21]) if chunks else 0
        yield Work(
            generated, prompt, generated * draw.randrange(1, 900), prompt * draw.randrange(1, 900), chunks, draw.randrange(chunks + 1)
        )


def test_the_fit_finds_planted_costs():
    samples = [Sample(work, PLANTED.of(work)) for work in made_steps()]
    found = fit(samples)
    assert found.generated_rows.rows == PLANTED.generated_rows.rows and found.prompt_rows.rows == PLANTED.prompt_rows.rows[:6] + (63,)
    assert found.base == pytest.approx(PLANTED.base, rel=1e-6)
    assert found.generated_rows.seconds == pytest.approx(PLANTED.generated_rows.seconds, rel=1e-6)
    assert found.prompt_rows.seconds[:6] == pytest.approx(PLANTED.prompt_rows.seconds[:6], rel=1e-6)
    for name in ("generated_context", "prompt_context", "prompt_chunk", "prompt_sample"):
        assert getattr(found, name) == pytest.approx(getattr(PLANTED, name), rel=1e-6)
    assert step_costs.residuals(found, samples)["all"]["p95"] < 1e-6


def test_slow_outliers_hardly_move_the_fit_and_nothing_gets_negative():
    draw = Random(5)
    samples = [Sample(work, PLANTED.of(work) * draw.uniform(0.97, 1.03) * (3 if draw.random() < 0.1 else 1)) for work in made_steps()]
    found = fit(samples)
    for work in made_steps(100, seed=9):
        assert found.of(work) == pytest.approx(PLANTED.of(work), rel=0.12)
    singles = [found.base, found.generated_context, found.prompt_context, found.prompt_chunk, found.prompt_sample]
    assert min(singles) >= 0 and list(found.prompt_rows.seconds) == sorted(found.prompt_rows.seconds)


def test_a_fit_to_almost_nothing_is_refused():
    with pytest.raises(OctavoError, match="too few"):
        fit([Sample(Work(1), 0.1)] * 3)


def test_row_costs_go_on_beyond_their_last_knot():
    rows = RowCosts((1, 4), (2.0, 5.0))
    assert [rows.at(n) for n in (0, 1, 2, 4, 6)] == [0, 2, 3, 5, 7]


def test_work_counts_what_rows_read():
    entries = [
        ScheduledEntry("a", 99, 1, TokenKind.GENERATED, (), True),
        ScheduledEntry("b", 10, 3, TokenKind.GENERATED, (), False),
        ScheduledEntry("c", 4, 2, TokenKind.PROMPT, (), True),
        ScheduledEntry("d", 0, 3, TokenKind.PROMPT, (), False),
    ]
    assert Work.of(entries) == Work(4, 5, 100 + 11 + 12 + 13, 5 + 6 + 1 + 2 + 3, 2, 1)


def test_costs_survive_their_file_and_a_bad_file_is_one_line(tmp_path):
    path = tmp_path / "costs.json"
    save(path, CostFile(PLANTED, "m", "cpu", 100, 2048, {"samples": 3}))
    assert load(path) == CostFile(PLANTED, "m", "cpu", 100, 2048, {"samples": 3})
    good = json.loads(path.read_text())
    for change in (
        {"format": 2}, {"kv_token_bytes": 0}, {"model": None}, {"seconds": {}}, {"seconds": {**good["seconds"], "base": -1}},
        {"seconds": {**good["seconds"], "prompt_rows": [[2, 1.0], [1, 2.0]]}}, {"seconds": {**good["seconds"], "prompt_chunk": 1e400}},
    ):  # fmt: skip
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ConfigError, match="--calibrate"):
            load(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "none.json")


def test_the_costs_that_come_with_the_package_are_usable():
    file = load(step_costs.BUILT_IN)
    assert file.machine and file.model == "smollm2" and 1000 < file.kv_token_bytes < 100_000
    assert 0 < file.costs.of(Work(1, generated_context=100)) < file.costs.of(Work(32, generated_context=3200)) < 5


def test_calibration_measures_every_kind_of_step():
    """On an executor without a model: the batches are what is tested, not the times."""
    executor = FakeExecutor(num_blocks=400, block_size=4, max_model_len=256)
    config = EngineConfig(block_size=4, policy="fcfs", max_num_batched_tokens=32)
    calls = []
    rounds = calibrate.Rounds(1, (1, 16), ((2, 8),), (70,), ((6, 4),), repeats=2)
    parts = EngineParts(executor, FakeTokenizer(), config=config)
    samples = calibrate.measure(parts, config, rounds, lambda: calls.append(1))
    works = [sample.work for sample in samples]
    assert len(calls) == rounds.count and all(sample.seconds > 0 for sample in samples)
    assert {1, 2, 3, 4} <= {work.generated_rows for work in works if not work.prompt_rows}
    assert {work.prompt_rows for work in works if not work.generated_rows} >= {1, 16, 32, 6}
    assert any(work.generated_rows and work.prompt_rows for work in works)
    assert any(work.prompt_rows == 32 and work.prompt_samples == 0 and work.prompt_context > 32 * 32 for work in works)
    file = calibrate.cost_file(parts, config, samples, "here")
    assert file.max_model_len == 256 and file.about["samples"] == len(samples) and file.about["residuals"]["all"]["steps"] == len(samples)


# -- traces --------------------------------------------------------------------------------------------------------
def test_prompts_share_their_prefix_and_nothing_else():
    prompts = [token_ids(TraceRequest(0, 100, 1, name, 40 if name else 0), i) for i, name in enumerate(["a", "a", "b", None])]
    assert prompts[0][:40] == prompts[1][:40] != prompts[2][:40]
    assert prompts[0] == token_ids(TraceRequest(0, 100, 1, "a", 40), 0)
    starts = {tuple(prompt[at : at + 16]) for prompt in prompts for at in (40,)} | {tuple(prompts[3][:16])}
    assert len(starts) == 5 and all(len(prompt) == 100 and 1000 <= min(prompt) <= max(prompt) < 31_000 for prompt in prompts)
    assert len({tuple(token_ids(TraceRequest(0, 16, 1), i)) for i in range(4_000)}) == 4_000


def test_a_trace_has_the_shape_that_was_asked_for():
    made = Synthetic(
        20_000, 4.0, Lengths.parse("p", "20-40"), Lengths.parse("o", "lognormal:50:0.5"), prefixes=4, prefix_tokens=10, tenants=3, seed=1
    )
    requests = made.make()
    assert requests == made.make() != replace(made, seed=2).make()
    assert len(requests) / requests[-1].arrival == pytest.approx(4, rel=0.05)
    assert {request.prompt_tokens for request in requests} == set(range(30, 51))
    answers = sorted(request.output_tokens for request in requests)
    assert answers[10_000] == pytest.approx(50, abs=2) and answers[int(0.8413 * 20_000)] == pytest.approx(50 * 2.71828**0.5, rel=0.05)
    shares = [sum(request.tenant == f"tenant {k}" for request in requests) / 20_000 for k in range(3)]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)
    longer = [(r.arrival, r.output_tokens) for r in replace(made, prompt_tokens=Lengths.parse("p", "99")).make()]
    assert longer == [(r.arrival, r.output_tokens) for r in requests]  # one part changed, the others stay


def test_bursts_arrive_together_and_cut_lengths_fit():
    requests = replace(MADE, burst=5, most_tokens=128).make()
    times = [request.arrival for request in requests]
    assert times == sorted(times) and len(set(times)) == 40 and all(times[i] == times[i - i % 5] for i in range(200))
    assert max(request.prompt_tokens + request.output_tokens for request in requests) <= 128
    assert {request.arrival for request in replace(MADE, burst=0).make()} == {0.0}


@pytest.mark.parametrize(
    "text", ["", "0", "5-2", "x", "lognormal:5", "zipf:0:5", "zipf:1:5.5", "lognormal:nan:1", "1e9", "normal:1:2", "1-2-3"]
)
def test_bad_lengths_name_the_flag(text):
    with pytest.raises(ConfigError, match="--prompt-tokens must be"):
        Lengths.parse("--prompt-tokens", text)


def test_a_trace_survives_its_file_and_is_sorted(tmp_path):
    path = tmp_path / "trace.jsonl"
    requests = MADE.make()
    write(path, reversed(requests))
    assert sorted(read(path)) == sorted(requests) and [r.arrival for r in read(path)] == [r.arrival for r in requests]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"prompt_tokens": 0, "output_tokens": 1}', '{"prompt_tokens": 5, "output_tokens": true}', '{"prompt": "secret"}',
     '{"prompt_tokens": 5, "output_tokens": 1, "arrival": -1}', '{"prompt_tokens": 5, "output_tokens": 1, "arrival": NaN}',
     '{"prompt_tokens": 5, "output_tokens": 1, "prefix": "a", "prefix_tokens": 6}',
     '{"prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 2}',
     '{"prompt_tokens": 5, "output_tokens": 1, "tenant": 3}', "[" * 100_000],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_tokens": 5, "output_tokens": 1}\n\n' + line)
    with pytest.raises(ConfigError, match="trace.jsonl:3: ") as error:
        read(path)
    assert "secret" not in str(error.value) and len(str(error.value)) < 400


# -- the command ---------------------------------------------------------------------------------------------------
def test_the_command_reports_policies_and_writes_its_trace(capsys, tmp_path, monkeypatch):
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "plot.svg"
    arguments = ["bench", "scheduler", "--requests", "60", "--rate", "3", "--tenants", "3", "--policy", "fcfs,fair", "--json"]
    assert main([*arguments, "--save-trace", str(trace), "--plot", str(plot)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["policies"]) == ["fcfs", "fair"] and all(run["finished"] == 60 for run in found["policies"].values())
    assert found["trace"]["requests"] == 60 and found["costs"]["machine"] and "time to first token" in plot.read_text()
    assert main(["bench", "scheduler", "--trace", str(trace), "--policy", "fcfs"]) == 0
    out = capsys.readouterr().out
    assert "req/s" in out and f"{found['policies']['fcfs']['requests_per_s']:.2f}" in out  # the same trace, the same result


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--policy", "lifo"], "--policy lifo"), (["--requests", "0"], "--requests"), (["--trace", "/no/such"], "cannot read"),
     (["--costs", "/no/such"], "cannot read"), (["smollm2"], "--calibrate"), (["--prefixes", "2", "--prefix-tokens", "100000"], "prefix"),
     (["--plot", "x.txt"], "--plot")],
)  # fmt: skip
def test_bad_usage_is_one_line(capsys, arguments, words):
    assert main(["bench", "scheduler", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_refused_requests_are_exit_code_1(capsys):
    arguments = ["--requests", "30", "--burst", "0", "--max-waiting-requests", "5", "--policy", "fcfs"]
    assert main(["bench", "scheduler", *arguments]) == 1
    assert "25 refused" in capsys.readouterr().out
