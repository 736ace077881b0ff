"""`octavo bench` as a user types it: subcommands, figures as JSON and as a table, files, plots, errors of one line."""

import json
import re
import types

import pytest

from octavo.bench import plot
from octavo.bench.client import RequestRecord
from octavo.cli.app import _typer_app, without_conversion
from octavo.cli.main import main
from tests.bench.scripted_server import ScriptedServer


@pytest.fixture(scope="module")
def server():
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def call(capsys, monkeypatch):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["octavo", *arguments])
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


# -- subcommands ---------------------------------------------------------------------------------------------------
def test_help_of_the_group_and_of_each_subcommand(call):
    code, out, err = call("bench")
    assert code == 0 and not err and "\n  serve " in out and "\n  latency " in out and "octavo bench serve" in out.split("Examples:")[1]
    for subcommand in ("serve", "latency", "compare"):
        code, out, err = call("bench", subcommand, "--help")
        assert code == 0 and not err and "Examples:" in out and f"octavo bench {subcommand} [OPTIONS]" in out and "--threads" in out


@pytest.mark.parametrize("arguments", [("bench", "nothing"), ("bench", "serve", "--nothing"), ("bench", "--nothing")])
def test_unknown_words_are_bad_usage(call, arguments):
    code, out, err = call(*arguments)
    assert code == 2 and not out and err.startswith("octavo: ") and err.count("\n") == 1 and "octavo bench" in err


def test_a_module_may_have_several_commands_whose_arguments_stay_text():
    seen = []

    def one(count: int = 3, flag: bool = False) -> int:
        seen.append((count, flag))
        return 7

    module = types.SimpleNamespace(commands={"one": one, "two": lambda: 0}, SUMMARY="Two.", EXAMPLES="Examples: x")
    import typer.main

    group = without_conversion(typer.main.get_command(_typer_app("group", module)))
    with group.make_context("group", ["one", "--count", "x5", "--flag"]) as context:
        assert group.invoke(context) == 7
    assert seen == [("x5", True)]  # typer would have refused x5: converting is for config_sources.coerce


# -- serve ---------------------------------------------------------------------------------------------------------
def test_json_file_and_plot_of_one_run(call, server, tmp_path):
    output, figure = tmp_path / "new" / "run.json", tmp_path / "run.svg"
    count = len(server.requests)
    code, out, err = call(
        "bench", "serve", "--url", server.url, "--model", "steady first=0.02 gap=0.005 tokens=6", "--requests", "9", "--concurrency", "3",
        "--max-tokens", "6", "--warmup", "1", "--json", "--output", str(output), "--plot", str(figure),
    )  # fmt: skip
    assert code == 0 and not err and out.count("\n") == 1
    run = json.loads(out)
    assert (run["requests"], run["succeeded"], run["output_tokens"], run["prompt_tokens"]) == (9, 9, 54, 63)
    assert run["ttft_ms"]["min"] >= 20 and run["e2el_ms"]["min"] >= 45 and run["itl_ms"]["count"] == 45 and run["tpot_ms"]["count"] == 9
    assert run["requests_per_s"] == pytest.approx(9 / run["duration_s"], rel=1e-2)
    assert run["asked"] == {
        "model": "steady first=0.02 gap=0.005 tokens=6", "endpoint": "chat", "prompts": 50, "max_tokens": 6, "temperature": 0.0,
        "ignore_eos": False, "concurrency": 3, "rate": None, "seed": 0, "warm_up": 1,
    }  # fmt: skip
    assert len(server.requests) - count == 10 and len({json.dumps(seen.body["messages"]) for seen in server.requests[count:]}) == 10

    saved = json.loads(output.read_text())
    assert (
        saved["benchmark"] == "serve"
        and saved["results"]["output_tokens"] == 54
        and saved["command"].startswith("octavo bench serve --url")
    )
    assert {"cpu", "cores", "memory", "kernel", "load_average", "packages", "native"} <= saved["machine"].keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", saved["date"]) and "commit" in saved and saved["method"]
    picture = figure.read_text()
    assert picture.startswith("<?xml") and all(words in picture for words in ("time to first token", "between tokens", "whole request"))


def test_a_table_for_people(call, server):
    code, out, err = call("bench", "serve", "--url", server.url, "--model", "steady tokens=3", "--requests", "4", "--warmup", "0")
    assert code == 0 and not err and "4 of 4" in out and "TTFT" in out and "p99" in out and "\x1b" not in out


def test_requests_that_fail_are_counted_and_the_exit_code_says_so(call, server):
    code, out, _ = call("bench", "serve", "--url", server.url, "--model", "status code=429", "--requests", "5", "--warmup", "0", "--json")
    run = json.loads(out)
    assert code == 1 and run["success_rate"] == 0 and run["errors"]["HTTP 429"]["count"] == 5
    code, out, err = call("bench", "serve", "--url", server.url, "--model", "status code=429")
    assert code == 1 and "a first request failed (HTTP 429)" in err and not out


def test_a_rate_lengths_and_the_other_endpoint(call, server):
    count = len(server.requests)
    code, out, _ = call(
        "bench", "serve", "--url", server.url, "--model", "steady tokens=2", "--requests", "5", "--rate", "50", "--prompt-tokens", "11",
        "--endpoint", "completions", "--ignore-eos", "--temperature", "0.5", "--seed", "4", "--warmup", "0", "--json",
    )  # fmt: skip
    assert code == 0 and json.loads(out)["asked"]["concurrency"] is None
    seen = server.requests[count:]
    assert all(len(one.body["prompt"].split()) == 11 and one.body["ignore_eos"] and one.body["temperature"] == 0.5 for one in seen)


def test_prompts_from_a_file(call, server, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("one\ntwo\n")
    count = len(server.requests)
    arguments = ("bench", "serve", "--url", server.url, "--model", "steady", "--requests", "4", "--warmup", "0", "--prompt-file", str(path))
    assert call(*arguments)[0] == 0
    assert sorted(seen.body["messages"][0]["content"] for seen in server.requests[count:]) == ["one", "one", "two", "two"]
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    assert call(*arguments)[0] == 0 and call(*arguments, "--endpoint", "completions")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--requests", "0"), "--requests must be from 1"),
        (("--requests", "x"), "--requests must be an integer"),
        (("--concurrency", "1000000"), "--concurrency must be from 1 to 10000"),
        (("--rate", "0"), "--rate must be"),
        (("--endpoint", "embeddings"), "--endpoint must be chat or completions"),
        (("--url", "localhost:8000"), "no server's address"),
        (("--prompt-tokens", "3", "--prompt-file", "x"), "exclude each other"),
        (("--prompt-file", "/nonexistent/file"), "/nonexistent/file"),
        (("--plot", "x.txt"), "must end in"),
        (("smollm2", "--url", "http://h"), "named by --model"),
        (("--rate", "nan"), "--rate must be"),
    ],
)
def test_bad_usage_is_one_line(call, arguments, words):
    code, out, err = call("bench", "serve", *arguments)
    assert code in (1, 2) and not out and words in err and err.count("\n") == 1


def test_a_plot_without_matplotlib_says_how_to_get_it(call, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, _, err = call("bench", "serve", "--url", "http://127.0.0.1:9", "--plot", "x.svg")
    assert code == 2 and "octavo[bench]" in err


def test_a_figure_of_several_runs(tmp_path):
    records = [RequestRecord(0.0, [0.1, 0.2 + i / 100], 0.5 + i / 10) for i in range(5)]
    for name in ("a.png", "a.svg"):
        plot.save(tmp_path / name, "title", [("batch 1", records, {"1": 5}), ("batch 8", records, {"1": 2, "5-8": 3}), ("none", [], None)])
    picture = (tmp_path / "a.svg").read_text()
    assert all(words in picture for words in ("batch 1", "batch 8", "5-8", "title")) and (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


# -- latency -------------------------------------------------------------------------------------------------------
def test_latency_of_the_real_model(call, tmp_path):
    output = tmp_path / "latency.json"
    code, out, err = call(
        "bench", "latency", "smollm2", "--prompt-tokens", "8,16", "--tokens", "4", "--batch-size", "1,2", "--rounds", "2", "--breakdown",
        "--kv-cache-memory", "64MiB", "--json", "--output", str(output),
    )  # fmt: skip
    assert code == 0 and not err
    cases = json.loads(out)["cases"]
    assert list(cases) == [f"{b} request{'s' * (b > 1)}, {p} prompt tokens, 4 generated" for p in (8, 16) for b in (1, 2)]
    for figures in cases.values():
        assert len(figures["prefill_tokens_per_s"]["runs"]) == len(figures["decode_tokens_per_s"]["runs"]) == 2
        for kind in ("prefill_step_ms", "decode_step_ms"):
            parts = figures[kind]
            assert parts["forward"] > 0.5 * parts["step"] > 0
            assert {"schedule", "prepare", "forward", "sample", "update", "other", "step"} == parts.keys()
    assert json.loads(output.read_text())["results"] == cases


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt-tokens", "9000"), "longer than the model's"),
        (("--batch-size", "65"), "--max-num-seqs"),
        (("--batch-size", ","), "--batch-size is empty"),
        (("--tokens", "1,x"), "--tokens must be an integer"),
        (("--batch-size", "8", "--num-kv-blocks", "40"), "KV blocks"),
        (("--prompt-tokens", "4", "--tokens", "12", "--event-history", "10"), "--event-history"),
    ],
)
def test_cases_that_would_not_measure_what_they_say(call, arguments, words):
    code, out, err = call("bench", "latency", *arguments, "--rounds", "1")
    assert code == 2 and not out and words in err and err.count("\n") == 1
