"""When requests start, and the figures made of what came back, against oracles of their own."""

import asyncio
import re
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench import report
from octavo.bench.client import Client, RequestRecord, RequestSettings
from octavo.bench.load import Load, LoadResult, arrival_times, run_load, warm_up
from octavo.bench.prompts import QUESTIONS, from_file, of_length
from octavo.bench.statistics import distribution, summary
from octavo.errors import ConfigError, OctavoError
from tests.bench.scripted_server import ScriptedServer


def run(server, load, script="steady tokens=3 first=0.02", prompts=("a", "b", "c"), done=None):
    async def main():
        async with Client(server.url) as client:
            return await run_load(client, prompts, RequestSettings(script, timeout=60), load, done)

    return asyncio.run(main())


# -- when ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("requests", "concurrency", "reached"), [(20, 4, 4), (3, 8, 3), (5, 1, 1)])
def test_a_fixed_concurrency_is_reached_and_never_exceeded(requests, concurrency, reached):
    seen = []
    with ScriptedServer() as server:
        result = run(server, Load(requests, concurrency), done=seen.append)
        assert server.most_open == reached and len(server.requests) == requests
        prompts = [request.body["messages"][0]["content"] for request in server.requests]
    assert sorted(prompts) == sorted(("a", "b", "c")[i % 3] for i in range(requests))
    assert len(seen) == requests and all(record.error is None and record.output_tokens == 3 for record in result.records)
    # concurrency x time is at least the sum of the requests' own times
    assert result.duration * concurrency >= 0.99 * sum(record.e2el for record in result.records)
    assert result.duration <= sum(record.e2el for record in result.records) + 20 and result.client_cpu > 0


def test_with_a_rate_requests_start_at_their_times_whatever_the_server_does():
    with ScriptedServer() as server:
        result = run(server, Load(12, None, rate=100.0, seed=3), "steady tokens=1 first=0.4")
        assert server.most_open == 12  # none waited for another
        due = arrival_times(12, 100.0, 3)
        begin = min(record.start for record in result.records)
        late = [record.start - begin - time for record, time in zip(result.records, due, strict=True)]
    # the first one is late too, by what it takes to begin: hence the two milliseconds
    assert min(late) > -0.002 - result.late and max(late) < 20 and result.late >= 0


def test_a_rate_may_have_a_bound_on_open_requests():
    with ScriptedServer() as server:
        run(server, Load(10, 2, rate=1000.0), "steady tokens=1 first=0.03")
        assert server.most_open == 2


@given(st.integers(1, 3000), st.floats(0.01, 1000), st.integers(0, 2**32))
def test_arrival_times(requests, rate, seed):
    times = arrival_times(requests, rate, seed)
    assert len(times) == requests and times[0] == 0 and times == sorted(times) and times == arrival_times(requests, rate, seed)


def test_arrivals_are_a_poisson_process():
    gaps = np.diff(arrival_times(100_001, 4.0, 1))
    assert gaps.mean() == pytest.approx(0.25, rel=0.02) and gaps.std() == pytest.approx(0.25, rel=0.02)
    assert (gaps > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.01)  # memoryless


def test_nothing_is_left_when_a_run_is_cancelled():
    async def main(url):
        async with Client(url) as client:
            task = asyncio.create_task(run_load(client, ["x"], RequestSettings("silent"), Load(8, 4)))
            while server.open < 4:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with ScriptedServer() as server:
        asyncio.run(main(server.url))
        assert len(server.requests) == 4


def test_a_warm_up_that_fails_ends_the_run():
    async def main(url):
        async with Client(url) as client:
            await warm_up(client, "x", RequestSettings("steady tokens=1"), 3)
            await warm_up(client, "x", RequestSettings("status code=503"), 2)

    with ScriptedServer() as server:
        with pytest.raises(OctavoError, match="HTTP 503.*scripted"):
            asyncio.run(main(server.url))
        assert len(server.requests) == 5


# -- figures -------------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(0, 1000), min_size=2, max_size=300))
def test_distributions(values):
    figures = distribution(values)
    hundredths = statistics.quantiles([1000 * value for value in values], n=100, method="inclusive")
    wanted = {"p50": hundredths[49], "p95": hundredths[94], "p99": hundredths[98]}
    wanted |= {"mean": 1000 * statistics.mean(values), "min": 1000 * min(values), "max": 1000 * max(values)}
    for name, value in wanted.items():
        assert figures[name] == pytest.approx(value, abs=1e-3, rel=1e-9)
    assert figures["count"] == len(values)


def test_distributions_of_one_and_of_nothing():
    assert distribution([]) is None
    assert distribution([0.25]) == {"count": 1, "mean": 250.0, "min": 250.0, "max": 250.0, "p50": 250.0, "p95": 250.0, "p99": 250.0}


def test_summary():
    assert summary([3.0, 1.0, 2.26], 1) == {"median": 2.3, "min": 1.0, "max": 3.0, "runs": [3.0, 1.0, 2.3]}


def record(start, arrivals, end, tokens=None, prompt=None, error=None):
    return RequestRecord(start, arrivals, end, error, "why" if error else "", prompt, 2, tokens)


def test_figures_of_records_written_by_hand():
    records = [
        record(10.0, [10.1, 10.2, 10.4], 10.5, tokens=3, prompt=4),
        record(10.0, [10.3, 10.7], 11.0, tokens=5, prompt=6),
        record(11.0, [11.5], 11.5, tokens=1, prompt=4),
        record(10.0, [10.9], 14.0, error="timeout"),
        record(10.0, [], 10.1, error="HTTP 429"),
        record(10.0, [], 10.1, error="HTTP 429"),
    ]
    run = report.figures(LoadResult(records, 4.0, 0.2, 0.003))
    assert (run["requests"], run["succeeded"], run["success_rate"]) == (6, 3, 0.5)
    assert run["errors"] == {"HTTP 429": {"count": 2, "example": "why"}, "timeout": {"count": 1, "example": "why"}}
    assert (run["requests_per_s"], run["output_tokens_per_s"], run["total_tokens_per_s"]) == (0.75, 2.25, 5.75)
    assert (run["prompt_tokens"], run["output_tokens"], run["cached_tokens"], run["tokens_per_piece"]) == (14, 9, 6, 1.5)
    assert run["tokens_counted_by"] == {"usage": 3} and run["pieces_per_read"] == 1.0
    together = report.figures(LoadResult([record(0.0, [1.0, 1.0, 1.0, 2.0], 2.0, tokens=4)], 2.0, 0.0))
    assert together["pieces_per_read"] == 2.0 and together["itl_ms"]["p50"] == 0.0
    # of the failed ones no latency counts, not even a first token that came
    assert run["ttft_ms"]["count"] == 3 and run["ttft_ms"]["mean"] == pytest.approx(300) and run["ttft_ms"]["max"] == pytest.approx(500)
    assert run["tpot_ms"]["count"] == 2 and run["tpot_ms"]["mean"] == pytest.approx((150 + 100) / 2)
    assert run["itl_ms"]["count"] == 3 and run["itl_ms"]["p50"] == pytest.approx(200)
    assert run["e2el_ms"]["mean"] == pytest.approx((500 + 1000 + 500) / 3)
    assert run["client"] == {"cpu_s": 0.2, "cpu_share": 0.05, "late_ms": 3.0}


def test_figures_where_everything_failed():
    run = report.figures(LoadResult([record(1.0, [], 1.0, error="connection")], 0.0, 0.0))
    assert run["success_rate"] == 0 and run["requests_per_s"] == 0 and run["ttft_ms"] is None and run["e2el_ms"] is None
    assert run["tokens_per_piece"] is None
    assert text(report.tables(run)).count("-") >= 4


def test_the_tables_say_what_the_figures_say():
    run = report.figures(LoadResult([record(0.0, [0.123], 0.5, tokens=7, prompt=3), record(0.0, [], 0.1, error="[bold]x")], 0.5, 0.1))
    shown = text(report.tables(run | {"server": {"batch_size_mean": 3.25, "preemptions": 0}}))
    for words in ("1 of 2", "50.0 %", "[bold]x", "123.0", "500.0", "counted by usage", "3.25", "preemptions"):
        assert words in shown, words
    assert "requests in a step" not in shown
    shown = text(report.tables(run | {"server": {"batch_size_steps": {"1": 10, "3-4": 30}}}))
    assert re.search(r"requests in a step +steps *\n1 +10 +#{10} *\n3-4 +30 +#{30} *\n", shown)


def text(tables):
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=150)
    for table in tables:
        console.print(table)
    return console.file.getvalue()


# -- prompts -------------------------------------------------------------------------------------------------------
def test_the_built_in_questions_differ():
    assert len(set(QUESTIONS)) == len(QUESTIONS) == 50
    assert all(10 < len(question) < 100 for question in QUESTIONS)


def test_prompts_of_a_length():
    prompts = of_length(40, 20, seed=1)
    assert len(prompts) == len(set(prompts)) == 20 and {len(prompt.split()) for prompt in prompts} == {40}
    assert prompts == of_length(40, 20, seed=1) != of_length(40, 20, seed=2)


def test_prompts_from_a_file(tmp_path):
    path = tmp_path / "prompts"
    path.write_text('Hello?\n\n{"prompt": "\\u4f60"}\r\n{"messages": [{"role": "user", "content": "x"}]}\n', "utf-8")
    assert from_file(path) == ["Hello?", "\u4f60", [{"role": "user", "content": "x"}]]


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "no prompts"), (b"\xff", "UTF-8"), (b"ok\n{", ":2: not valid JSON"), (b'{"prompt": 5}', ":1: an object needs"),
     (b'{"messages": ["x"]}', "needs"), (b'{"a": ' + b"[" * 100_000, "not valid JSON")],
)  # fmt: skip
def test_files_that_are_refused(tmp_path, data, words):
    path = tmp_path / "prompts"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        from_file(path)
