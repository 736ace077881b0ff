"""A server of ours under measurement: its counters as it really writes them, and its process, which must not outlive the run."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from octavo.bench import server_metrics
from octavo.bench.own_server import OwnServer, flags
from octavo.bench.serving import Load, Measurement, api_key, measure
from octavo.config import EngineConfig
from octavo.config_sources import load_config
from octavo.engine.metrics import EngineStats
from octavo.errors import OctavoError
from octavo.server.metrics import EngineView, ServerMetrics
from tests.bench.scripted_server import ScriptedServer


def page(restarts=0, **counters):
    stats = EngineStats(**counters)
    return ServerMetrics("m", EngineView(stats=lambda: stats, restarts=lambda: restarts, healthy=lambda: True)).expose()


def test_what_happened_between_two_pages_of_our_own_server():
    before = server_metrics.parse(page(steps=10, preemptions=1, prefix_hit_tokens=16, decode_batch_sizes={1: 5, 8: 2}).decode())
    after = server_metrics.parse(
        page(steps=50, preemptions=4, prefix_hit_tokens=48, prompt_tokens_computed=7, decode_batch_sizes={1: 9, 8: 32, 2: 1}).decode()
    )
    changes = server_metrics.between(before, after)
    assert (changes["steps"], changes["preemptions"], changes["prefix_hit_tokens"], changes["restarts"]) == (40, 3, 32, 0)
    assert changes["prompt_tokens_computed"] == 7
    # whatever the server's buckets are: 4 steps of one, 1 of two, 30 of eight
    assert sum(changes["batch_size_steps"].values()) == 35
    assert (changes["batch_size_steps"]["1"], changes["batch_size_steps"]["2"]) == (4, 1)
    assert changes["batch_size_mean"] == pytest.approx((4 + 2 + 240) / 35, abs=1e-3)


def test_every_counter_we_read_is_on_the_page():
    found = server_metrics.parse(page().decode())
    for counter in server_metrics.COUNTERS.values():
        assert (counter, "") in found
    assert any(name == f"{server_metrics.BATCH_SIZE}_bucket" for name, _ in found)


def test_ranges_of_batch_sizes():
    def samples(**cumulative):
        return {
            (f"{server_metrics.BATCH_SIZE}_bucket", bound.replace("_", ".").removeprefix("b")): float(n) for bound, n in cumulative.items()
        }

    before = samples(b1_0=1, b2_0=1, b4_0=1, **{"+Inf": 1})
    after = samples(b1_0=3, b2_0=3, b4_0=8, **{"+Inf": 9})
    assert server_metrics.batch_steps(before, after) == {"1": 2, "3-4": 5, "more than 4": 1}
    assert server_metrics.batch_steps(after, after) == {}


@pytest.mark.parametrize("text", ["", "<html>octavo_</html>", "octavo_x{le=", "octavo_x one\n", "\x00"])
def test_a_page_of_something_else_has_no_samples(text):
    assert not any(name in server_metrics.COUNTERS.values() for name, _ in server_metrics.parse(text))


def test_a_server_of_ours_is_told_from_another():
    what = Measurement(Load(4, 2), model="steady tokens=2", warm_up=1)
    with ScriptedServer() as server:
        other = measure(server.url, what)
        assert other.figures["server"] is None and other.batches is None
        assert all("ignore_eos" not in seen.body for seen in server.requests)
        server.pages["/metrics"] = (200, page(decode_batch_sizes={1: 2}))
        server.pages["/version"] = (200, {"version": "9"})
        ours = measure(server.url, what)
        assert ours.figures["server"]["version"] == {"version": "9"} and ours.figures["server"]["steps"] == 0
        assert all(seen.body["ignore_eos"] for seen in server.requests[5:]) and len(server.requests) == 10
        assert ours.figures["succeeded"] == 4  # the warm-up does not count
        measure(server.url, Measurement(Load(1, 1), model="steady", warm_up=0, ignore_eos=False))
        assert "ignore_eos" not in server.requests[-1].body


def test_the_key_comes_from_the_environment():
    here, there = "http://127.0.0.1:8000", "http://models.example:8000"
    assert api_key(here, {}) is None
    assert api_key(here, {"OCTAVO_API_KEY": "a, c", "OPENAI_API_KEY": "b"}) == "a" == api_key(there, {"OCTAVO_API_KEY": "a"})
    # a key for another service perhaps: not in the clear to another machine
    for url in (here, "http://localhost:1/v1", "http://[::1]:1", "https://models.example"):
        assert api_key(url, {"OPENAI_API_KEY": "b"}) == "b"
    for url in (there, "http://127.0.0.1.example:1"):
        assert api_key(url, {"OPENAI_API_KEY": "b"}) is None


# -- the process ---------------------------------------------------------------------------------------------------
def program(tmp_path, source):
    path = tmp_path / "program.py"
    path.write_text("import http.server, os, signal, sys, time\n" + textwrap.dedent(source))
    return [sys.executable, str(path)]


READY = """
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/ready" else 404)
            self.end_headers()
        def log_message(self, *arguments):
            pass
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    print("a line before", "x" * 100_000, flush=True)
    print(f"listening on http://127.0.0.1:{server.server_port} (Ctrl-C ends it)", file=sys.stderr, flush=True)
"""


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_server_is_started_with_every_setting_and_ended(tmp_path):
    config = EngineConfig(max_decode_batch_size=3, enable_prefix_caching=False, kv_cache_memory="64MiB")
    with OwnServer(config, ["--drain-timeout", "1"], program(tmp_path, READY + "    server.serve_forever()\n")) as server:
        assert server.url.startswith("http://127.0.0.1:") and not is_gone(server.pid)
        pid = server.pid
    assert is_gone(pid)
    command = server.command
    assert command[2] == "serve" and command[-8:] == ["--host", "127.0.0.1", "--port", "0", "--drain-timeout", "1", "--", "smollm2"]
    assert command[command.index("--max-decode-batch-size") + 1] == "3" and "--no-enable-prefix-caching" in command


def test_the_flags_make_the_same_configuration():
    config = EngineConfig(model="x.gguf", threads=3, max_model_len=77, enable_prefix_caching=False, seed=-5, kv_cache_memory="1.5GiB")
    words, given = iter(flags(config)), {}
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        switch = name.removeprefix("no_")
        if isinstance(getattr(config, switch), bool):
            given[switch] = switch == name
        else:
            given[name] = next(words)
    assert "model" not in given and load_config(None, {}, given | {"model": "x.gguf"}) == config


def test_a_server_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.bench.own_server.STOP_TIMEOUT", 0.3)
    stubborn = "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "    server.serve_forever()\n"
    with OwnServer(EngineConfig(), (), program(tmp_path, stubborn)) as server:
        pid = server.pid
    assert is_gone(pid)


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(OctavoError, match="octavo serve ended while it started: .*no such model"):
        OwnServer(EngineConfig(), (), program(tmp_path, "    sys.exit('octavo: no such model')\n")).__enter__()


def test_a_server_that_is_never_ready_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.bench.own_server.START_TIMEOUT", 0.5)
    server = OwnServer(EngineConfig(), (), program(tmp_path, "    time.sleep(600)\n"))
    with pytest.raises(OctavoError, match="not ready"):
        server.__enter__()
    assert is_gone(server.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_measurement_that_is_interrupted_ends_its_server(tmp_path, number):
    script = f"""
    sys.path[:0] = {[str(Path(__file__).parents[2])]!r}
    from octavo.bench.own_server import OwnServer
    from octavo.config import EngineConfig
    with OwnServer(EngineConfig(), (), {program(tmp_path, READY + "    server.serve_forever()" + chr(10))!r}) as server:
        print(server.pid, flush=True)
        time.sleep(600)
    """
    path = tmp_path / "measurement.py"
    path.write_text("import sys, time\n" + textwrap.dedent(script))
    process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(60) != 0
    deadline = time.monotonic() + 20
    while not is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.stdout.close()


def test_scraping_somebody_who_is_not_there():
    async def main():
        from octavo.bench.client import Client

        async with Client("http://127.0.0.1:9") as client:
            return await server_metrics.scrape(client), await server_metrics.version(client)

    assert asyncio.run(main()) == (None, None)
