"""`octavo bench compare` against scripted engines: order, exact rates, ratios, and every way an engine can misbehave."""

import json
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.bench import comparison_report, peer_process
from octavo.bench.comparison import EngineResult, Plan, compare, ended_by_sigterm, steps
from octavo.bench.peer_process import Limits, Peer, PeerError, PeerProcess
from octavo.bench.work import SETS, Work, parse, rate
from octavo.errors import ConfigError, OctavoError

FAKE = Path(__file__).with_name("fake_peer.py")
DECODE, PREFILL = Work("decode", 6, 5, 2), Work("prefill", 40, 1, 1)
LIMITS = Limits(2, 64, 4, 256)


def fake(name, **options):
    return Peer(name, sys.executable, FAKE, "model.gguf", {"name": name, **options})


def run(*peers, work=(DECODE, PREFILL), rounds=2, **settings):
    plan = Plan(peers, work, rounds, threads=2, settle=0.0, load_timeout=60, **{"timeout": 60, **settings})
    calls = []
    results = compare(plan, lambda: calls.append(1))
    assert len(calls) == steps(plan)
    return plan, results, comparison_report.figures(plan, results)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- what is measured ----------------------------------------------------------------------------------------------
def test_rates_ratios_and_the_best_peer_are_those_of_the_script():
    _, _, figures = run(fake("ours", gap=1e-7, first=2e-6), fake("slow", gap=3e-7, first=1e-6), fake("fast", gap=2e-7, first=8e-6))
    decode, prefill = figures["work"][DECODE.name], figures["work"][PREFILL.name]
    # 2 requests, 4 steps after the first token; 40 tokens until the first one
    assert decode["tokens_per_s"]["ours"]["runs"] == pytest.approx([2 / 1e-7] * 2)
    assert prefill["tokens_per_s"]["slow"]["median"] == pytest.approx(40 / 1e-6)
    assert (decode["ours_over"]["slow"]["median"], decode["ours_over"]["fast"]["median"]) == (3, 2)
    assert (decode["ours_over_best"]["median"], decode["best_peer"]) == (2, "fast")
    assert (prefill["ours_over_best"]["median"], prefill["best_peer"]) == (0.5, "slow")
    engines = figures["engines"]
    for engine in engines.values():
        assert engine["error"] is None and engine["same_first_token"] == 1 and engine["versions"]["fake"] == "1.0"
        assert len(engine["load_s"]["runs"]) == 1 and engine["cold_start_s"]["median"] > engine["load_s"]["median"]
        assert engine["memory_mib"]["peak"] > engine["memory_mib"]["anonymous"] > 1
    # room for the largest item, in whole blocks
    assert json.loads(engines["ours"]["versions"]["limits"]) == {"threads": 2, "max_len": 64, "max_batch": 2, "kv_tokens": 64}


def test_engines_take_turns_with_the_same_prompts_which_no_other_round_has(tmp_path):
    log = tmp_path / "log"
    run(*(fake(name, log=str(log)) for name in "abc"), rounds=2)
    asked = [entry for entry in lines(log) if "run" in entry and entry["run"] != [1, 8, 1]]
    assert [entry["name"] for entry in asked] == list("abc") * 2 * 3
    assert [entry["run"] for entry in asked[::3]] == [[2, 6, 5], [1, 40, 1]] * 3
    groups = [asked[i : i + 3] for i in range(0, len(asked), 3)]
    for group in groups:
        assert group[0]["prompts"] == group[1]["prompts"] == group[2]["prompts"]
        assert all(1000 <= token < 4000 for prompt in group[0]["prompts"] for token in prompt)
    prompts = [tuple(prompt) for group in groups for prompt in group[0]["prompts"]]
    assert len(set(prompts)) == len(prompts) == 9 and len({prompt[:4] for prompt in prompts}) == 9
    again = tmp_path / "again"
    run(fake("a", log=str(again)), rounds=2)
    repeated = [entry["prompts"] for entry in lines(again) if "run" in entry and entry["run"] != [1, 8, 1]]
    assert repeated == [group[0]["prompts"] for group in groups]
    run(fake("a", log=str(tmp_path / "other")), rounds=2, seed=1)
    assert lines(tmp_path / "other")[-2]["prompts"] != lines(again)[-2]["prompts"]


def test_one_at_a_time_never_has_two_processes(tmp_path):
    log = tmp_path / "log"
    _, _, figures = run(*(fake(name, log=str(log)) for name in "ab"), rounds=2, one_at_a_time=True)
    alive, most, starts = set(), 0, []
    for entry in lines(log):
        if "load" in entry:
            alive.add(entry["pid"])
            starts.append(entry["name"])
        elif "end" in entry:
            alive.remove(entry["pid"])
        most = max(most, len(alive))
    assert most == 1 and not alive and starts == list("ab") * 3
    assert all(len(engine["load_s"]["runs"]) == 2 and engine["error"] is None for engine in figures["engines"].values())
    assert all(len(values["ours_over_best"]["runs"]) == 2 for values in figures["work"].values())


def test_more_starts_are_more_processes(tmp_path):
    log = tmp_path / "log"
    _, _, figures = run(fake("a", log=str(log)), rounds=1, starts=3)
    assert len([entry for entry in lines(log) if "load" in entry]) == 4 and len(figures["engines"]["a"]["cold_start_s"]["runs"]) == 3


def test_what_an_engine_is_given(tmp_path, monkeypatch):
    for name in ("PYTHONPATH", "OPENAI_API_KEY", "OCTAVO_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    run(fake("a", log=str(tmp_path / "log")), rounds=1)
    first = lines(tmp_path / "log")[0]
    assert first["load"] == "model.gguf" and first["isolated"] == 1 and first["environment"]["OMP_NUM_THREADS"] == "2"
    assert "secret" not in first["environment"].values() and first["environment"]["HF_HUB_OFFLINE"] == "1"


def test_threads_that_spin_while_others_work_are_seen():
    _, _, figures = run(fake("ours", sleep=0.7), fake("spinner", spin=True), work=(PREFILL,), rounds=1)
    spinner, ours = figures["engines"]["spinner"], figures["engines"]["ours"]
    assert spinner["cores_while_waiting"] > comparison_report.IDLE_SHARE > ours["cores_while_waiting"]
    assert "spinner took" in comparison_report.markdown(figures) and "ours took" not in comparison_report.markdown(figures)


# -- engines that misbehave ----------------------------------------------------------------------------------------
def broken(tmp_path, script):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return Peer("bad", str(path), FAKE, "model.gguf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"load_error": "no room | for\nthis"}, "ValueError: no room | for this"),
        ({"hang": "load"}, "no answer to load within 5 s"),
        ({"hang": "run"}, "decode, B=2, P=6, 5 generated: no answer to run within 5 s"),
        ({"tokens": 4}, "4 tokens where 5 were asked for"),
        ({"tokens": 6}, "6 tokens where 5 were asked for"),
        ({"slow_clock": True}, "outside the"),
        ({"die_at": 1}, "the engine fell over"),
        ({"die_at": 4}, "the engine fell over"),
        ({"gap": 0.0}, "generate more tokens"),
        ({"first": float("nan")}, "times that do not rise"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_peer_that_fails_is_a_line_of_the_table_and_the_others_go_on(options, words):
    peers = [fake("ours"), fake("bad", **options), fake("good", gap=2e-7)]
    limit = {"load": {"load_timeout": 5}, "run": {"timeout": 5}}.get(options.get("hang"), {})
    plan = Plan(peers, (DECODE, PREFILL), 1, 2, settle=0.0, **limit)
    results = compare(plan)
    figures = comparison_report.figures(plan, results)
    assert words in figures["engines"]["bad"]["error"] and results[0].error is results[2].error is None
    assert figures["work"][DECODE.name]["ours_over"]["good"]["median"] == 2 and "bad" not in figures["work"][PREFILL.name]["ours_over"]
    assert f"- bad: {figures['engines']['bad']['error']}" in comparison_report.markdown(figures)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 7", "exit code 7"),
        ("echo first >&2; echo last words >&2; exit 1", "last words"),
        ("read line; echo '{bad'; sleep 600", "no JSON"),
        ("read line; echo '[1]'; sleep 600", "no object"),
        ("read line; echo '{\"versions\": 1}'; sleep 600", "an answer to load"),
        ('read line; echo \'{"versions": {}, "vocab_size": 1e9, "seconds": 0}\'; sleep 600', "an answer to load"),
        ("read line; printf '[[[[[[%.0s' $(seq 20000); echo; sleep 600", "no JSON"),
        ("yes | tr -d '\\n'", "more than 1 MiB"),
    ],
)
def test_answers_that_are_none(tmp_path, monkeypatch, script, words):
    monkeypatch.setattr(peer_process, "MAX_ANSWER", 1 << 20)
    process = PeerProcess(broken(tmp_path, script), 1)
    with pytest.raises(PeerError, match=words.replace("[", r"\[")):
        process.load(LIMITS, 60)
    with pytest.raises(PeerError, match="has ended"):
        process.run([[1]], 1, 60)


def test_a_peer_that_reads_nothing_is_ended_at_its_limit(tmp_path):
    process = PeerProcess(broken(tmp_path, "sleep 600"), 1)
    begin = time.monotonic()
    with pytest.raises(PeerError, match="no answer to run within 1 s"):
        process.run([[5] * 100_000] * 32, 1, 1)  # more than a socket holds
    assert time.monotonic() - begin < 60


def test_an_interpreter_that_is_none(tmp_path):
    for path in ("/nonexistent/python", str(tmp_path)):
        with pytest.raises(PeerError, match="does not start"):
            PeerProcess(Peer("x", path, FAKE, "m"), 1)


@pytest.mark.parametrize("hang", [None, "run"])
def test_nothing_is_left_behind(tmp_path, hang):
    log = tmp_path / "log"
    options = {"hang": hang} if hang else {}
    run(fake("ours"), fake("bad", log=str(log), child=True, **options), rounds=1, **({"timeout": 5} if hang else {}))
    pids = {entry["pid"] for entry in lines(log)} | {entry["child"] for entry in lines(log) if "child" in entry}
    assert len(pids) == 4  # two starts, each with a child
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_what_a_library_prints_is_no_answer():
    _, results, _ = run(fake("ours", noise=True), rounds=1)
    assert results[0].error is None and results[0].rates.keys() == {DECODE, PREFILL}


def test_sigterm_ends_the_engines_too(tmp_path):
    log = tmp_path / "log"
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from octavo.bench.comparison import *\nfrom octavo.bench.peer_process import Peer\nfrom octavo.bench.work import parse\n"
        f"peer = Peer('a', sys.executable, {str(FAKE)!r}, 'm', {{'log': sys.argv[1], 'sleep': 600}})\n"
        "with ended_by_sigterm():\n    compare(Plan([peer], parse('prefill:4:1'), 1, 1))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(log), *sys.path])
    deadline = time.monotonic() + 60
    while not (log.exists() and any("run" in entry for entry in lines(log))) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = lines(log)[0]["pid"]
    assert is_running(pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143 and not is_running(pid)


def test_the_handler_of_sigterm_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with ended_by_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


# -- work and tables -----------------------------------------------------------------------------------------------
def test_work_as_it_is_written():
    assert parse("decode:512:64:8, prefill:100:2") == [Work("decode", 512, 64, 8), Work("prefill", 100, 1, 2)]
    assert parse("small,prefill:512:1,") == parse(SETS["small"]) and len(parse("small")) == 6 and len(parse("large")) == 3
    for text in (
        "",
        ",",
        "decode:1:2",
        "decode:0:8:1",
        "decode:8:0:1",
        "decode:8:3:1",
        "prefill:8:0",
        "prefill:1000000:1",
        "Small",
        "x:1:1:1",
    ):
        with pytest.raises(ConfigError, match="--work"):
            parse(text)


def test_a_rate_counts_only_the_time_when_all_generate():
    work = Work("decode", 10, 4, 2)
    # the second request begins at 3, the first ends at 4: of (3, 4] the first has one token, the second two
    assert rate(work, [[1, 2, 3, 4], [3, 3.5, 4, 5]]) == pytest.approx(3 / 1)
    assert rate(Work("prefill", 10, 1, 2), [[1.0], [4.0]]) == pytest.approx(5)
    with pytest.raises(OctavoError, match="more tokens"):
        rate(work, [[1, 2, 3, 4], [5, 6, 7, 8]])


def test_ratios_are_of_the_same_round_and_a_table_is_safe_to_print():
    plan = Plan([fake("ours"), fake("a"), fake("b")], (PREFILL,), 3, 2)
    results = [EngineResult(peer) for peer in plan.peers]
    results[0].rates[PREFILL] = {1: 100.0, 2: 50.0, 3: 10.0}
    results[1].rates[PREFILL] = {1: 50.0, 2: 10.0}
    results[2].rates[PREFILL] = {1: 200.0, 2: 5.0}
    results[2].error = "it\x1b[2Jsaid | this"
    results[2].versions = {"weights": "a|b"}
    figures = comparison_report.figures(plan, results)
    work = figures["work"][PREFILL.name]
    assert work["ours_over"]["a"]["runs"] == [2, 5] and work["ours_over"]["b"]["runs"] == [0.5, 10]
    assert work["ours_over_best"]["runs"] == [0.5, 5] and work["ours_over_best"]["median"] == 2.75
    text = comparison_report.markdown(figures)
    assert "\x1b" not in text and "a\\|b" in text and "- b: it [2Jsaid | this" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables[:3]} == {6} and {
        line.replace("\\|", "").count("|") for line in tables[3:]
    } == {5}
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
