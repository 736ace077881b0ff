"""The committed experiments end to end with tiny numbers, on real servers; no speed is asserted, only that figures are of what they say."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import batch_sizes, client_overhead, load, python_share
from benchmarks.health_poll import HealthPoll
from benchmarks.process_memory import resident_mib
from octavo.bench.client import RequestRecord
from tests.bench.scripted_server import ScriptedServer


def test_batch_sizes(tmp_path):
    output = tmp_path / "batch_sizes.json"
    arguments = "--rounds 1 --sizes 1,3 --requests 4 --concurrency 3 --max-tokens 8 --kv-cache-memory 64MiB --output"
    assert batch_sizes.main([*arguments.split(), str(output)]) == 0
    saved = json.loads(output.read_text())
    results = saved["results"]
    assert saved["benchmark"] == "batch_sizes" and saved["machine"]["cpu"] and set(results) == {"1", "3", "ratio"}
    for size in ("1", "3"):
        assert results[size]["success_rate"] == 1 and len(results[size]["requests_per_s"]["runs"]) == 1
        assert results[size]["output_tokens_per_s"]["min"] > 0 and results[size]["ttft_ms"]["p50"] > 0
    assert (
        results["1"]["batch_size_steps"].keys() == {"1"} and results["1"]["batch_size_steps"]["1"] >= 4 * 7
    )  # the first token comes with the prompt
    assert min(results["3"]["batch_size_mean"]) > 1
    assert results["ratio"]["sizes"] == [3, 1]
    pairs = zip(results["3"]["requests_per_s"]["runs"], results["1"]["requests_per_s"]["runs"], strict=True)
    assert results["ratio"]["requests_per_s"]["runs"] == pytest.approx([three / one for three, one in pairs], rel=1e-2)
    assert "max_decode_batch_size 3" in output.with_suffix(".svg").read_text()


def test_load(tmp_path):
    output = tmp_path / "load.json"
    arguments = "--streams 12 --stream-tokens 2 --requests 10 --settle 0.05 --posts 1 --window 0.05 --kv-cache-memory 128MiB"
    sizes = "--prompt-bytes 60000 --body-bytes 9000000"
    # 1: a time was over its limit, which a busy machine may do
    assert load.main([*arguments.split(), *sizes.split(), "--output", str(output)]) in (0, 1)
    results = json.loads(output.read_text())["results"]
    streams, memory, prompt = results["streams"], results["memory"], results["prompt"]
    assert streams["succeeded"] == 12 and streams["output_tokens"] == 24 and streams["most_open"] == 12
    assert streams["short_answers"] == streams["questions_with_different_answers"] == 0
    assert memory["failed"] == 0 and [row["requests"] for row in memory["resident_mib"]] == list(range(1, 11))
    assert all(row["core"] > 50 and row["http"] > 10 and row["input"] > 10 and "other" not in row for row in memory["resident_mib"])
    assert (
        prompt["replies"] == {"1 MB prompt": [400], "20 MB body": [413]}
        and prompt["streams_failed"] == 0
        and set(prompt["largest_gap_ms"]) >= {"quiet"}
    )
    assert all(part["health"]["ms"]["count"] > 3 and part["health"]["not_200"] == [] for part in results.values())


def test_client_overhead(tmp_path):
    output = tmp_path / "overhead.json"
    assert client_overhead.main(["--streams", "3", "--tokens", "10", "--rounds", "2", "--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    assert results["seen_after_ms"]["count"] == 60 and results["seen_after_ms"]["min"] >= 0
    assert min(results["cpu_us_per_token"]["runs"]) > 0 and max(results["tokens_per_s"]["runs"]) <= 30 / (0.05 + 0.09)


def test_the_most_requests_open_at_once():
    records = [RequestRecord(start=a, end=b) for a, b in [(0, 10), (1, 2), (2, 5), (3, 4), (11, 12)]]
    assert load.most_open(records) == 3


def test_the_largest_gap_of_each_kind_of_window():
    streams = [RequestRecord(arrivals=[0.0, 1.0, 1.1, 3.0, 3.2]), RequestRecord(arrivals=[0.5, 0.7])]
    windows = [("quiet", 1.02, 1.08), ("post", 2.0, 2.5), ("post", 3.05, 3.1)]
    assert load._largest_gaps(windows, streams) == {"quiet": 100.0, "post": 1900.0}


def test_the_memory_of_a_process_and_its_children():
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(50 << 20); print(flush=True); input()"], stdin=-1, stdout=-1)
    child.stdout.readline()
    mine, other = resident_mib(os.getpid()), resident_mib(child.pid)
    child.communicate(b"\n")
    assert 50 < other["http"] < 90 and other.keys() == {"http"}
    assert mine["other"] == pytest.approx(other["http"], abs=1) and mine["http"] > 20


def test_health_is_polled_by_another_process():
    with ScriptedServer() as server:
        server.pages["/health"] = (200, {"status": "ok"})
        with HealthPoll(server.url) as poll:
            pass
        assert poll.figures["not_200"] == [] and poll.figures["ms"]["count"] >= 1
        server.pages["/health"] = (503, {"status": "restarting"})
        with HealthPoll(server.url) as poll:
            pass
        assert poll.figures["not_200"][0] == "503"


def test_python_share(tmp_path):
    output = tmp_path / "share.json"
    assert python_share.main(["--rounds", "2", "--steps", "3", "--prompt", "5", "--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    assert results["replayed"]["native calls a step"]["runs"] == [1, 1]
    assert min(results["eager"]["native calls a step"]["runs"]) > 30 * 9
    for figures in results.values():
        whole, outside = figures["ms a step"]["runs"], figures["ms outside native calls"]["runs"]
        assert all(0 < part < all_of_it for part, all_of_it in zip(outside, whole, strict=True))
        assert figures["share of Python"]["runs"] == pytest.approx([a / b for a, b in zip(outside, whole, strict=True)], abs=2e-3)
