"""Streams as bytes: their form, their errors, their readers that are slow or gone. What is left behind must be nothing."""

from __future__ import annotations

import json
import shlex
import socket
import struct
import threading
import time

import pytest

from octavo.server import sse
from octavo.server.service import ready_text
from tests.server import sse_parser
from tests.server.fake_server import FakeServer, alphabet, alphabet_once, chat, fake_server
from tests.server.real_server import wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATIENCE = 30.0


@pytest.fixture(scope="module")
def server():
    with fake_server() as made:
        yield made


#: A context that no answer fills while a test looks on, also on a busy machine.
ENDLESS = {"max_model_len": 200_000, "num_blocks": 60_000}


@pytest.fixture(scope="module")
def endless():
    """A model that never comes to an end by itself."""
    with fake_server(alphabet, engine={"max_num_seqs": 4} | ENDLESS, send_timeout=1.0) as made:
        yield made


def connect(server: FakeServer, body: dict | None, path: str = CHAT, head: bytes = b"") -> socket.socket:
    """A connection on which a request was sent; without a body, only the beginning of one."""
    connection = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    data = b"" if body is None else json.dumps(body).encode()
    length = len(data) if body is not None else 1000
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode() + head + data)
    return connection


def hang_up(connection: socket.socket, abruptly: bool) -> None:
    if abruptly:  # RST instead of FIN
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# Form


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("fields", "finish"), [({}, "stop"), ({"stop": "jk"}, "stop"), ({"max_tokens": 5}, "length"), ({"max_tokens": 1}, "length")]
)
def test_the_tail_is_always_the_same(server, n, fields, finish):
    with server.client() as client:
        whole = client.post(CHAT, json=chat(n=n, **fields)).json()
        reply = client.post(CHAT, json=chat(n=n, stream=True, **fields))
        with_usage = client.post(CHAT, json=chat(n=n, stream=True, stream_options={"include_usage": True}, **fields))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache" and reply.headers["x-accel-buffering"] == "no"
    chunks = sse_parser.chunks(reply.content)
    assert len({chunk["id"] for chunk in chunks}) == 1 and all(len(chunk["choices"]) == 1 for chunk in chunks)
    for index in range(n):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""} and own[0]["finish_reason"] is None
        assert all(set(choice["delta"]) == {"content"} and choice["finish_reason"] is None for choice in own[1:-1])
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == finish
        assert sse_parser.joined(reply.content, index) == whole["choices"][index]["message"]["content"]
    *others, last = sse_parser.chunks(with_usage.content)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(chunk["usage"] is None for chunk in others)


def test_characters_that_look_like_line_ends():
    text = "a\u2028b\u2029c\u0085d\nе\r\x0b\x0c\x1c\x1d\x1e"
    raw = sse.event(json.dumps({"text": text}, ensure_ascii=False).encode()) + sse.event(b'{"text": "next"}') + sse.DONE
    first, second, done = sse_parser.parse(raw)
    assert json.loads(first)["text"] == text and json.loads(second)["text"] == "next" and done == "[DONE]"


def test_a_prompt_of_several_and_n(server):
    body = {"model": "org/fake", "prompt": ["ab", "cd", "ef"], "n": 2, "max_tokens": 4}
    with server.client() as client:
        whole = client.post(COMPLETIONS, json=body).json()
        reply = client.post(COMPLETIONS, json=body | {"stream": True})
    assert [choice["index"] for choice in whole["choices"]] == list(range(6)) and whole["usage"]["completion_tokens"] == 24
    for choice in whole["choices"]:
        assert sse_parser.joined(reply.content, choice["index"]) == choice["text"] == "abcd"


def test_tokens_that_are_sent_together_make_the_same_events(server):
    """stream_interval changes when events are sent, and nothing in them."""

    def events(one: FakeServer) -> list[object]:
        with one.client() as client:
            reply = client.post(CHAT, json=chat(n=2, stream=True, logprobs=True, stream_options={"include_usage": True}))
        chunks = sse_parser.chunks(reply.content)
        return sorted(json.dumps([chunk["choices"], chunk["usage"]]) for chunk in chunks)

    with fake_server(stream_interval=5) as gathered:
        assert events(gathered) == events(server)


def test_a_slow_reader_loses_nothing_and_sees_the_same_tail(server):
    """Steps that came while nobody read are sent together."""
    server.gate.clear()
    connection = connect(server, chat(stream=True))
    wait_for(lambda: server.core.has_unfinished_requests(), "request in the engine")
    server.gate.set()
    wait_for(server.is_idle, "idle server")
    time.sleep(0.1)
    raw = read_reply(connection)
    assert sse_parser.joined(raw) == "abcdefghijklmnopqrstuvwxyz"


def read_reply(connection: socket.socket) -> bytes:
    """The body of a chunked reply."""
    with connection:
        connection.settimeout(PATIENCE)
        file = connection.makefile("rb")
        status = file.readline()
        assert status.startswith(b"HTTP/1.1 200 "), status
        while file.readline() not in (b"\r\n", b""):
            pass
        body = b""
        while size := int(file.readline() or b"0", 16):
            body += file.read(size)
            file.readline()
        return body


# Errors


def test_an_error_after_the_first_token_is_the_last_event(server):
    read = threading.Event()

    def fail_later(output):
        for entry in output.entries:
            known = server.executor.known.get(entry.request_id)
            if known is not None and len(known.tokens) - known.num_prompt >= 3:
                read.wait(PATIENCE)
                server.executor.errors[entry.request_id] = "the sampler saw NaN"

    server.executor.before_step = fail_later
    try:
        raw = b""
        with server.client() as client, client.stream("POST", CHAT, json=chat(stream=True)) as reply:
            assert reply.status_code == 200
            for piece in reply.iter_raw():
                raw += piece
                read.set()  # something has come: now it may fail
            whole = client.post(CHAT, json=chat())
    finally:
        server.executor.before_step = lambda output: server.gate.wait(PATIENCE)
        server.executor.errors.clear()
    *events, last = [json.loads(event) for event in sse_parser.parse(raw)]
    assert all("error" not in event for event in events) and any(event["choices"][0]["delta"].get("content") for event in events)
    assert "NaN" in last["error"]["message"] and last["error"]["type"] == "server_error"
    assert whole.status_code == 500 and "NaN" in whole.json()["error"]["message"]
    wait_for(server.is_idle, "idle server")


def test_a_dead_engine_fails_everybody_at_once():
    with fake_server(alphabet, engine=ENDLESS) as server, server.client() as client:
        streams = [connect(server, chat(stream=True)) for _ in range(3)]
        waiting = connect(server, chat())
        wait_for(lambda: server.core.stats.running == 4, "running requests")

        def die(output):
            raise RuntimeError("a wild pointer")

        server.executor.before_step = die
        for stream in streams:
            *_, last = sse_parser.parse(read_reply(stream))
            assert json.loads(last)["error"]["code"] == "engine_unavailable"
        assert waiting.recv(65536).startswith(b"HTTP/1.1 503 ")
        assert client.get("/health").status_code == 503 and client.get("/ready").status_code == 503
        reply = client.post(CHAT, json=chat())
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
        assert reply.json()["error"]["type"] == "service_unavailable_error"


def test_before_it_is_ready():
    """While the core loads: alive enough to say so."""
    with fake_server(alphabet_once) as server, server.client() as client:
        for state, code in (("loading", "engine_loading"), ("restarting", "engine_restarting")):
            server.engine._state = state
            assert client.get("/health").status_code == 503 and client.get("/version").status_code == 200
            ready = client.get("/ready")
            assert ready.status_code == 503 and ready.json()["state"] == state and int(ready.headers["retry-after"]) > 0
            reply = client.post(CHAT, json=chat())
            assert reply.status_code == 503 and reply.json()["error"]["code"] == code and int(reply.headers["retry-after"]) > 0
        server.engine._state, server.state.inputs_loaded = "ready", False
        assert client.get("/ready").json()["state"] == "loading" and client.get("/health").status_code == 200


def test_what_there_is_to_try():
    """The line for a model without a chat template asks for what it can do."""
    with fake_server(alphabet_once, api_key=("sesame",)) as server:
        for takes_chat, path in ((True, CHAT), (False, COMPLETIONS)):
            text = ready_text(server.state, server.url, takes_chat, 1.0)
            command = shlex.split(text.splitlines()[-1])[1:]
            assert "sesame" not in text and command[:2] == ["curl", server.url + path]
            with server.client(headers={"authorization": "Bearer sesame"}) as client:
                assert client.post(path, content=command[-1]).status_code == 200


def test_draining(server):
    server.state.draining = True
    try:
        with server.client() as client:
            assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
            reply = client.post(CHAT, json=chat())
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "shutting_down" and reply.headers["connection"] == "close"
    finally:
        server.state.draining = False


# Hanging up


@pytest.mark.parametrize("abruptly", [False, True])
@pytest.mark.parametrize("phase", ["body", "input", "queued", "prefill", "whole", "stream"])
def test_a_client_that_hangs_up_leaves_nothing(endless, phase, abruptly):
    server = endless
    crowd = []
    if phase == "input":
        server.inputs.hold.set()
    elif phase == "prefill":
        server.gate.clear()
    elif phase == "queued":  # more than run at once
        crowd = [connect(server, chat(stream=True)) for _ in range(4)]
        wait_for(lambda: server.core.stats.running == 4, "full engine")
    before, finished = len(server.inputs.seen), server.metrics_of("octavo_requests_total", status="499")
    connection = connect(server, None if phase == "body" else chat(stream=phase == "stream"), head=b'{"mod' if phase == "body" else b"")
    if phase == "body":
        wait_for(lambda: server.http.server_state.tasks, "request")
    else:
        wait_for(lambda: len(server.inputs.seen) > before, "request")
    if phase == "queued":
        wait_for(lambda: server.core.stats.waiting == 1, "queued request")
    elif phase == "prefill":
        wait_for(lambda: server.core.has_unfinished_requests(), "request in the engine")
    elif phase == "whole":
        wait_for(lambda: server.core.stats.running == 1, "running request")
    elif phase == "stream":
        assert connection.recv(10) == b"HTTP/1.1 2"
    hang_up(connection, abruptly)
    if phase == "input":
        wait_for(lambda: server.inputs.inside == 0, "end of the job")
        server.inputs.hold.clear()
    if phase == "queued":
        wait_for(lambda: server.core.stats.waiting == 0, "empty queue")
        assert server.core.stats.running == 4  # nobody else was touched
    server.gate.set()
    for other in crowd:
        other.close()
    wait_for(server.is_idle, "idle server")
    assert server.metrics_of("octavo_requests_total", status="499") == finished + 1 + len(crowd)


def test_a_client_that_sends_ahead_and_hangs_up(endless):
    """With the next request already in the socket, the end of the connection is behind it."""
    finished = endless.metrics_of("octavo_requests_total", status="499")
    for stream in (False, True):
        connection = connect(endless, chat(stream=stream))
        wait_for(lambda: endless.core.stats.running == 1, "running request")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        time.sleep(0.05)
        connection.close()
        wait_for(endless.is_idle, "idle server")
    with connect(endless, chat()) as connection:  # there is an end to it
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        assert connection.recv(100) == b""
    wait_for(endless.is_idle, "idle server")
    assert endless.metrics_of("octavo_requests_total", status="499") == finished + 3  # none was answered to the end for nobody


def test_hanging_up_often_leaves_a_server_that_answers(endless):
    with endless.client() as client:
        for number in range(20):
            pair = [connect(endless, chat(stream=True)) for _ in range(2)]
            for connection in pair:
                connection.recv(64)
            hang_up(pair[0], number % 2 == 0)
            hang_up(pair[1], number % 2 == 1)
            reply = client.post(CHAT, json=chat(max_tokens=2))
            assert reply.json()["choices"][0]["message"]["content"] == "ab"
    wait_for(endless.is_idle, "idle server")


def test_a_client_that_reads_nothing_is_dropped():
    """Its buffers fill up; after send_timeout its request is aborted and its connection cut, with what was never read."""
    with fake_server(alphabet, send_timeout=0.3, engine={"max_num_seqs": 200, "num_blocks": 60_000}) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps(chat(stream=True, n=100, logprobs=True, top_logprobs=2)).encode()
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: server.core.stats.running > 0, "running request")
        wait_for(server.is_idle, "idle server")
        assert server.metrics_of("octavo_requests_total", status="499") == 1
        wait_for(lambda: not server.http.server_state.connections, "closed connection")
        connection.close()


def test_many_streams_at_once(server):
    results: dict[int, bytes] = {}

    def ask(number: int) -> None:
        with server.client() as client:
            results[number] = client.post(CHAT, json=chat("ab" * (number % 7 + 1), stream=True, n=1 + number % 2)).content

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(results) == 40
    for number, raw in results.items():
        for index in range(1 + number % 2):
            assert sse_parser.joined(raw, index) == "abcdefghijklmnopqrstuvwxyz"
    wait_for(server.is_idle, "idle server")
