"""`octavo serve` from its start to its end: what it says, what it survives, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest

from octavo.server.run import NICENESS
from tests.server import sse_parser
from tests.server.real_server import PATIENCE, RealServer, alive, real_server, wait_for

MARKER = "xylophonic"
CHAT = "/v1/chat/completions"


def chat(text: str = "Tell me a story.", **fields) -> dict:
    return {"model": "smollm2", "messages": [{"role": "user", "content": text}], **fields}


class Stream(threading.Thread):
    """A stream that is read in the background, as it comes."""

    def __init__(self, server: RealServer, body: dict, headers: dict | None = None) -> None:
        super().__init__(daemon=True)
        self.raw = b""
        self.status = 0
        self.ended_at = 0.0
        self._request = (server.url + CHAT, body | {"stream": True}, headers or {})
        self.start()

    def run(self) -> None:
        url, body, headers = self._request
        try:
            with httpx2.stream("POST", url, json=body, headers=headers, timeout=PATIENCE, trust_env=False) as reply:
                self.status = reply.status_code
                for piece in reply.iter_raw():
                    self.raw += piece
        finally:
            self.ended_at = time.monotonic()

    def last(self) -> dict:
        self.join(PATIENCE)
        assert not self.is_alive()
        return json.loads(sse_parser.parse(self.raw)[-1])


@pytest.fixture(scope="module")
def keyed(smollm2_path, tmp_path_factory):
    """A server with keys, from a file and from the environment, and with a name of its own for the model."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{MARKER}-key-of-the-file\n")
    file.chmod(0o600)
    names = ("--api-key-file", str(file), "--served-model-name", "team/model's")
    with real_server(*names, OCTAVO_API_KEY=f"{MARKER}-key-of-the-environment") as server:
        yield server


def is_refused(server: RealServer) -> bool:
    try:
        server.get("/health")
    except httpx2.ConnectError:
        return True
    except httpx2.TransportError:  # taken from the queue of the socket, and closed again
        return False
    return False


def test_what_it_says_at_start(keyed, real):
    assert "listening on" in real.log.splitlines()[0] and "loading smollm2" in real.log.splitlines()[0]
    assert "API key    none" in real.log and f"{real.url}/\n" in real.log
    assert "API key    needed" in keyed.log and MARKER not in keyed.log
    # the line to try works as it stands, in a shell, also with that name
    for server, env in ((real, {}), (keyed, {"OCTAVO_API_KEY": f"{MARKER}-key-of-the-file"})):
        line = re.search(r"try +(curl .*)", server.log)[1]
        done = subprocess.run(["bash", "-c", f"{line} -s"], env=os.environ | env, capture_output=True, text=True, timeout=PATIENCE)
        assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert not real.output and not keyed.output


def test_keys_and_the_prefix_cache(keyed):
    keys = [{"authorization": f"Bearer {MARKER}-key-of-the-{place}"} for place in ("file", "environment")]
    body = chat("A long question about the sea and all that lives in it, please.", temperature=0, max_tokens=2) | {"model": "team/model's"}
    cached = [keyed.post(CHAT, body, headers=key).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for key in (*keys, *keys)]
    assert cached[1] == 0 and min(cached[2:]) > 0, "what one key computed must not show in another's timing"
    assert keyed.get("/v1/models").status_code == 401 and keyed.get("/metrics").status_code == 401
    assert keyed.get("/v1/models/team/model's", headers=keys[0]).json()["id"] == "team/model's"


def test_logs_and_metrics_hold_no_text(keyed):
    key = {"authorization": f"Bearer {MARKER}-key-of-the-file"}
    own = chat(MARKER, max_tokens=3) | {"model": "team/model's"}
    keyed.post(CHAT, own, headers=key)
    keyed.post(CHAT, own | {"stream": True, "user": MARKER, MARKER: 1}, headers=key)
    keyed.post(CHAT, own | {"temperature": MARKER}, headers=key)
    keyed.post(CHAT, own | {"model": MARKER}, headers=key)
    keyed.post(CHAT, own | {"tools": [{"type": "function", "function": {"name": MARKER}}]}, headers=key)
    keyed.post(CHAT, own, headers={"authorization": f"Bearer {MARKER}"})
    for content in (f'{{"messages": [{MARKER}'.encode(), MARKER.encode() * 100, b'{"model": "' + MARKER.encode() + b'\xff"}'):
        httpx2.post(
            keyed.url + CHAT, content=content, headers=key | {"content-type": "application/json"}, trust_env=False, timeout=PATIENCE
        )
    keyed.get(f"/{MARKER}?{MARKER}={MARKER}", headers=key | {"user-agent": MARKER, "host": "localhost"})
    keyed.get("/health", headers={"x-request-id": f"{MARKER} not safe"})
    with socket.create_connection(("127.0.0.1", int(keyed.url.rpartition(":")[2])), PATIENCE) as connection:
        connection.sendall(f"{MARKER} rubbish\r\n\r\n".encode())
        connection.recv(1000)
    wait_for(lambda: keyed.log.count(" chat ") >= 8, "log lines")
    others = [keyed.get(path, headers=key).text for path in ("/metrics", "/health", "/ready", "/version", "/v1/models", "/openapi.json")]
    for text in (keyed.log, "".join(keyed.output), *others):
        assert MARKER not in text
    line = next(line for line in keyed.log.splitlines() if " chat whole 200 length " in line and " output=3 " in line)
    assert re.search(r"prompt=\d+ cached=\d+ output=3 queue=[\d.]+ms ttft=[\d.]+ms tpot=[\d.]+ms total=[\d.]+ms$", line)


def test_metrics_count_what_happened(real):
    names = ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "request_latency_seconds_count",
             "request_queue_seconds_count", "request_prompt_tokens_sum", "request_generation_tokens_sum", "generation_tokens_total",
             "decode_batch_size_count", "prefix_cache_query_tokens_total", "engine_steps_replayed_total",
             "engine_steps_eager_total")  # fmt: skip
    before = {name: real.metric(f"octavo_{name}") for name in names}
    usage = real.post(CHAT, chat(max_tokens=9, ignore_eos=True)).json()["usage"]
    wait_for(lambda: real.metric("octavo_generation_tokens_total") > before["generation_tokens_total"], "metrics of the engine")
    change = {name: real.metric(f"octavo_{name}") - before[name] for name in names}
    assert (
        change["time_to_first_token_seconds_count"] == change["request_latency_seconds_count"] == change["request_queue_seconds_count"] == 1
    )
    assert 1 <= change["inter_token_latency_seconds_count"] <= 8  # tokens that came together count as one wait
    assert change["request_prompt_tokens_sum"] == change["prefix_cache_query_tokens_total"] == usage["prompt_tokens"]
    assert change["request_generation_tokens_sum"] == change["generation_tokens_total"] == 9
    assert change["decode_batch_size_count"] == 8
    assert change["engine_steps_replayed_total"] >= 8 and change["engine_steps_eager_total"] <= 1


def test_openapi_describes_the_bodies(real):
    document = real.get("/openapi.json").json()
    for path, name in ((CHAT, "ChatRequest"), ("/v1/completions", "CompletionRequest")):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert {"model", "temperature", "stream"} <= set(document["components"]["schemas"][name]["properties"])
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])


def test_only_one_port_listens_and_only_on_loopback(real):
    """No other door: what its processes say to each other goes through pipes and sockets in a private folder."""
    inodes = set()
    for pid in (real.process.pid, *real.children()):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))) is not None:
                inodes.add(match[1])
    listening = []
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{real.process.pid}/net/{table}").read_text().splitlines()[1:]]
        listening += [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]
    port = int(real.url.rpartition(":")[2])
    assert listening == [f"0100007F:{port:04X}"]


def test_the_http_process_is_nice_and_the_core_is_not(real):
    def niceness(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])

    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert own + NICENESS < 20
    assert niceness(real.process.pid) == NICENESS + own and niceness(real.core_pid()) == own


def test_a_killed_core(smollm2_path):
    with real_server() as server:
        streams = [Stream(server, chat(ignore_eos=True, max_tokens=4000)) for _ in range(3)]
        waiting: list[httpx2.Response] = []
        thread = threading.Thread(target=lambda: waiting.append(server.post(CHAT, chat(ignore_eos=True, max_tokens=4000))))
        thread.start()
        wait_for(lambda: all(stream.raw for stream in streams) and server.metric("octavo_requests_running") == 4, "running requests")
        os.kill(server.core_pid(), signal.SIGKILL)
        killed = time.monotonic()
        thread.join(PATIENCE)
        for stream in streams:
            assert stream.last()["error"]["code"] == "engine_unavailable" and stream.status == 200
            assert stream.ended_at - killed < 5  # a hang limit: the promise is a second, measured where nothing else runs
        assert waiting[0].status_code == 503 and waiting[0].json()["error"]["code"] == "engine_unavailable"
        seen = []
        wait_for(lambda: seen.append(server.get("/health").status_code) or (503 in seen and seen[-1] == 200), "503, then 200, of /health")
        reply = server.post(CHAT, chat("What is the capital of France?", temperature=0, max_tokens=12))
        assert reply.status_code == 200 and "Paris" in reply.json()["choices"][0]["message"]["content"]
        assert server.is_idle() and server.metric("octavo_engine_restarts_total") == 1


@pytest.mark.parametrize(("number", "host"), [(signal.SIGTERM, "127.0.0.1"), (signal.SIGINT, "0.0.0.0")])
def test_an_orderly_end(smollm2_path, number, host):
    with real_server("--host", host) as server:
        assert ("without an API key" in server.log) is (host == "0.0.0.0")
        assert (server.get("/health", headers={"host": "any.example"}).status_code == 200) is (host == "0.0.0.0")
        children = server.children()
        assert any("core_process" in words for words in children.values())
        stream = Stream(server, chat(max_tokens=150, ignore_eos=True))
        wait_for(lambda: stream.raw, "first event")
        server.process.send_signal(number)
        wait_for(lambda: "stopping; 1 running" in server.log, "line in the log")
        wait_for(lambda: is_refused(server), "refused connection")
        stream.join(PATIENCE)
        assert sum(bool(chunk["choices"][0]["finish_reason"]) for chunk in sse_parser.chunks(stream.raw)) == 1  # it came to its end
        assert server.end() == 0
        assert not alive(children)


@pytest.mark.parametrize("second", [False, True])
def test_who_does_not_finish_in_time_gets_an_error(smollm2_path, second):
    with real_server("--drain-timeout", "60" if second else "0.3") as server:
        children = server.children()
        stream = Stream(server, chat(max_tokens=8000, ignore_eos=True))
        wait_for(lambda: stream.raw, "first event")
        server.process.send_signal(signal.SIGTERM)
        if second:
            wait_for(lambda: "stopping" in server.log, "line in the log")
            server.process.send_signal(signal.SIGTERM)
            stream.join(PATIENCE)
        else:
            assert stream.last()["error"]["message"] == "the server is shutting down"
        assert server.process.wait(PATIENCE) == 0
        assert not alive(children)


def test_a_log_that_nobody_reads_any_more_ends_nothing(smollm2_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--port", str(port), "--kv-cache-memory", "256MiB"]
    answers: list[httpx2.Response] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert any(" try " in line for line in process.stderr)
        process.stderr.close()
        url = f"http://127.0.0.1:{port}{CHAT}"
        body = chat(max_tokens=150, ignore_eos=True)
        thread = threading.Thread(target=lambda: answers.append(httpx2.post(url, json=body, timeout=PATIENCE, trust_env=False)))
        thread.start()
        metrics = f"http://127.0.0.1:{port}/metrics"
        wait_for(lambda: 'running{model="smollm2"} 1.0' in httpx2.get(metrics, trust_env=False).text, "running request")
        process.terminate()
        thread.join(PATIENCE)
        assert process.wait(PATIENCE) == 0
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 150


def test_a_server_that_was_stopped_with_its_core_goes_on(smollm2_path):
    """As by Ctrl-Z and fg: for so long the core did not step, but it does not hang."""
    with real_server("--step-timeout", "2") as server:
        stream = Stream(server, chat(max_tokens=100, ignore_eos=True))
        wait_for(lambda: stream.raw, "first event")
        family = [server.process.pid, *server.children()]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in family:
                os.kill(pid, number)
            time.sleep(4 if number == signal.SIGSTOP else 0)
        stream.join(PATIENCE)
        assert sse_parser.chunks(stream.raw)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.metric("octavo_engine_restarts_total") == 0


def test_a_signal_while_loading(smollm2_path):
    server = RealServer()
    wait_for(lambda: "listening on" in server.log, "first line")
    assert server.end() == 0
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["no-such-model-here"], 1, "no-such-model-here"),
        (["--api-key-file", "/nonexistent"], 2, "api_key_file"),
        (["--host", "no.such.host.invalid"], 1, "cannot listen"),
        (["--allowed-origins", "*"], 2, "--allowed-origins"),
    ],
)
def test_what_cannot_begin_is_one_line(arguments, status, words):
    server = RealServer(*arguments, HF_HUB_OFFLINE="1")
    assert server.process.wait(PATIENCE) == status
    server.end()
    *_, last = server.log.splitlines()
    assert last.startswith("octavo: ") and words in last and "Traceback" not in server.log


def test_a_taken_port_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = RealServer("--port", str(port))
        assert server.process.wait(PATIENCE) == 1
    server.end()
    assert server.log.splitlines() == [f"octavo: 127.0.0.1 port {port} is in use; choose another with --port (0: a free one)"]
