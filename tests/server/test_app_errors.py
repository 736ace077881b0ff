"""Every error is an OpenAI error object with the right status, whatever makes it; bodies are bounded in size and time."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.server.generation import ignored_header
from tests.server.fake_server import MODEL, FakeServer, chat, fake_server
from tests.server.real_server import wait_for

CHAT = "/v1/chat/completions"
MARKER = "zanzibarzanzibar"


@pytest.fixture(scope="module")
def server():
    with fake_server(max_body=4096, body_timeout=0.5) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with server.client() as made:
        yield made


def error_of(reply: httpx2.Response) -> dict:
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    body = json.loads(reply.content)
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert "Traceback" not in reply.text and ".py" not in reply.text
    return body["error"]


def raw(server: FakeServer, data: bytes, patience: float = 30.0) -> bytes:
    """What comes back for these bytes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), patience) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    return received


def test_a_good_request_passes(server):
    with server.client() as client:
        reply = client.post(CHAT, json=chat(max_tokens=3))
        assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"] == "abc"
        assert reply.headers["x-request-id"].startswith("req-")


BROKEN = {
    "half": b"{", "empty": b"", "list": b"[]", "null": b"null", "number": b"1", "text": b'"hi"', "utf-8": b'{"model": "\xff"}',
    "double": b'{"model": "org/fake", "model": "b", "messages": []}', "nan": b'{"model": "org/fake", "temperature": NaN}',
    "messages text": json.dumps({"model": MODEL, "messages": "x"}).encode(),
    "no messages": json.dumps({"model": MODEL}).encode(), "empty messages": json.dumps({"model": MODEL, "messages": []}).encode(),
    "hot": json.dumps(chat(temperature="hot")).encode(), "n half": json.dumps(chat(n=1.5)).encode(),
    "n": json.dumps(chat(n=10**6)).encode(),
    "n negative": json.dumps(chat(n=-1)).encode(), "stream options": json.dumps(chat(stream_options={"include_usage": True})).encode(),
    "tools": json.dumps(chat(tools=[{"type": "function", "function": {"name": "f"}}])).encode(),
    "deep": b'{"a":' * 300 + b"1" + b"}" * 300, "surrogate": b'{"model": "org/fake", "messages": [{"role": "user", "content": "\\ud800"}]}',
}  # fmt: skip


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_bodies_are_refused(server, name):
    with server.client() as client:
        reply = client.post(CHAT, content=BROKEN[name], headers={"content-type": "application/json"})
        assert reply.status_code == 400
        assert error_of(reply)["type"] == "invalid_request_error"


def test_unknown_model_and_path_and_method(server):
    with server.client() as client:
        reply = client.post(CHAT, json=chat() | {"model": "gpt-9"})
        assert reply.status_code == 404 and error_of(reply)["code"] == "model_not_found"
        for path in (
            "/nope",
            "/v1/models/",
            "/v1/models/nope",
            "/health/",
            "/V1/models",
            "//v1/models",
            "/v1/chat/completions/",
            "/docs",
            "/redoc",
        ):
            assert client.get(path).status_code == 404, path
            error_of(client.get(path))
        reply = client.delete("/v1/models")
        assert reply.status_code == 405 and "GET" in reply.headers["allow"]
        error_of(reply)
        assert client.get(f"/v1/models/{MODEL}").json()["id"] == MODEL


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json; charset=utf-8", "content-encoding": "identity"}, 200),
        ({"content-type": "APPLICATION/JSON"}, 200),
        ({}, 200),
    ],
)
def test_content_type_and_encoding(server, headers, status):
    with server.client() as client:
        reply = client.post(CHAT, content=json.dumps(chat(max_tokens=1)).encode(), headers=headers)
        assert reply.status_code == status
        if status != 200:
            error_of(reply)


def test_body_too_large_by_length_and_in_chunks(server):
    with server.client() as client:
        for content in (b"x" * 5000, iter([b"x" * 1000] * 6)):
            reply = client.post(CHAT, content=content, headers={"content-type": "application/json"})
            assert reply.status_code == 413 and error_of(reply)["code"] == "body_too_large"
            assert reply.headers["connection"] == "close"


def test_a_body_far_too_large_is_not_waited_for(server):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert raw(server, head + b"Content-Length: 99999999999\r\n\r\n").startswith(b"HTTP/1.1 413 ")
    # a client that asks first is told before it sends anything, and not to go on
    assert raw(server, head + b"Content-Length: 5000\r\nExpect: 100-continue\r\n\r\n").startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come(server):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    answer = raw(server, head + b'{"model')
    assert answer.startswith(b"HTTP/1.1 408 ") and b"body_timeout" in answer
    assert server.inputs.inside == 0


def test_all_bodies_together_have_a_bound(server):
    """Each is small enough, but the number of clients that send slowly is not bounded."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n"
    whole, server.state.bodies.left = server.state.bodies.left, 6000
    try:
        with socket.create_connection(("127.0.0.1", server.port), 30) as first:
            first.sendall(head + b" " * 3500)
            wait_for(lambda: server.state.bodies.left == 2500, "first body")
            answer = raw(server, head + b" " * 4000)
            assert answer.startswith(b"HTTP/1.1 429 ") and b"input_queue_full" in answer and b"retry-after: 1" in answer.lower()
        wait_for(lambda: server.state.bodies.left == 6000, "end of both")
        assert raw(server, head + b" " * 4000 + b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert server.state.bodies.left == 6000
    finally:
        server.state.bodies.left = whole


def test_a_body_is_let_go_once_it_was_read():
    """A server holds thousands of requests that wait or run, and bodies of megabytes."""
    with fake_server() as server, server.client() as client:
        server.gate.clear()
        thread = threading.Thread(target=lambda: client.post(CHAT, json=chat(max_tokens=2)))
        thread.start()
        wait_for(lambda: server.executor.outputs, "step")
        references = sys.getrefcount(server.inputs.seen[-1].body)
        server.gate.set()
        thread.join(30)
    assert references <= 2  # the test's own list of jobs, and the call


@pytest.mark.parametrize(
    "data",
    [b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"],
)  # fmt: skip
def test_broken_http(server, data):
    answer = raw(server, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "invalid_http"


def test_a_head_without_end_is_cut(server):
    answer = raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 200_000)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"headers_too_large" in answer


@pytest.mark.parametrize("rest", [b"0\r\nX-Long: ", b"1;"])
def test_neither_does_a_trailer_or_a_chunk_extension_go_on_for_ever(server, rest):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw(server, head + b"1\r\n{\r\n" + rest + b"a" * 200_000)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"headers_too_large" in answer


def test_a_body_in_many_small_chunks(server):
    data = json.dumps(chat(max_tokens=1, user="x" * 900)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    extension = b";" + b"e" * 200  # in all far more than a head may have
    assert raw(server, head + b"".join(b"1%b\r\n%c\r\n" % (extension, byte) for byte in data) + b"0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_fields_without_effect_are_named_in_a_header(server):
    with server.client() as client:
        reply = client.post(CHAT, json=chat(max_tokens=1, store=True, tempurature=1, **{"evil\r\nSet-Cookie: a=b": 1}))
        assert reply.status_code == 200 and "set-cookie" not in reply.headers
        names = reply.headers["x-octavo-ignored"].split(", ")
        assert "store" in names and "tempurature" in names
    assert len(ignored_header([f"field{number}" * 20 for number in range(1000)])) <= 500
    assert ignored_header(["a\r\nb: c", "ü", ""]) == b"a??b??c, ?, ?"


@pytest.mark.parametrize(("given", "kept"), [("abc-1.2_3:4", True), ("a" * 65, False), ("a b", False), ("", False), ("a\tb", False)])
def test_request_ids_of_clients(server, given, kept):
    with server.client() as client:
        shown = client.get("/health", headers={"x-request-id": given}).headers["x-request-id"]
        assert (shown == given) is kept and (kept or shown.startswith("req-"))


def test_an_unexpected_exception_is_a_500_and_tells_nothing(server, caplog):
    def fail(job):
        raise RuntimeError(f"{MARKER} {job.body!r}")

    real, server.inputs.prepare = server.inputs.prepare, fail
    try:
        with server.client() as client, caplog.at_level(logging.INFO, "octavo.server"):
            reply = client.post(CHAT, json=chat(MARKER))
            assert reply.status_code == 500 and error_of(reply)["type"] == "server_error" and MARKER not in reply.text
    finally:
        server.inputs.prepare = real
    assert "RuntimeError" in caplog.text and MARKER not in caplog.text


def test_a_request_that_the_engine_fails_is_that_request_s_error(server):
    first = server.inputs.seen[-1].request_id if server.inputs.seen else ""
    known = dict(server.executor.errors)
    server.executor.errors = _EveryOne("the sampler saw NaN")
    try:
        with server.client() as client:
            for stream in (False, True):  # nothing has been sent yet: a real status, also for a stream
                reply = client.post(CHAT, json=chat(stream=stream))
                assert reply.status_code == 500 and "NaN" in error_of(reply)["message"]
    finally:
        server.executor.errors = known
    assert server.inputs.seen[-1].request_id != first
    wait_for(server.is_idle, "idle server")


class _EveryOne(dict):
    """An error for every request."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> str:
        return self._message


@pytest.mark.parametrize("setting", ["max_waiting_requests", "max_waiting_tokens"])
def test_full_queue_is_a_429_with_an_honest_delay(setting):
    replies: dict[int, httpx2.Response] = {}
    with fake_server(engine={setting: 1, "max_num_seqs": 1}) as server, server.client() as client:

        def ask(number: int) -> None:
            if number < 2:
                replies[number] = client.post(CHAT, json=chat(max_tokens=2))
                return
            official = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            with pytest.raises(openai.RateLimitError) as caught:
                official.chat.completions.create(**chat(max_tokens=2))
            replies[number] = caught.value.response

        server.gate.clear()
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for number, thread in enumerate(threads):
            thread.start()
            wait_for(lambda number=number: len(server.inputs.seen) == number + 1 and server.inputs.inside == 0, "request")
            server.call(lambda: None)  # now it is on its way to the core, which takes it after the step that waits
            if number == 0:
                wait_for(lambda: server.executor.outputs, "step")
        server.gate.set()
        for thread in threads:
            thread.join(30)
    assert [replies[number].status_code for number in range(3)] == [200, 200, 429]
    error = error_of(replies[2])
    assert error["type"] == "rate_limit_error" and error["code"] == "queue_full" and setting in error["message"]
    assert 1 <= int(replies[2].headers["retry-after"]) <= 30


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ("messages", "n", "temperature", "top_p", "max_tokens", "stop", "logprobs", "top_logprobs", "logit_bias", "seed",
          "stream", "stream_options", "user", "tools", "response_format", "min_tokens",
          "bad_words", "prompt_logprobs", "cache_salt", "priority")  # fmt: skip


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5), st.booleans(), st.sampled_from([CHAT, "/v1/completions"]))
def test_no_body_makes_a_5xx(client, fields, keep_messages, path):
    body = chat("hi", max_tokens=2) | fields
    if keep_messages:
        body["messages"] = [{"role": "user", "content": "hi"}]
    if path != CHAT:
        body["prompt"] = body.pop("messages") if not keep_messages else "hi"
    reply = client.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"), headers={"content-type": "application/json"})
    assert reply.status_code < 500, (body, reply.text)
    if reply.status_code != 200:
        error_of(reply)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200))
def test_no_bytes_make_a_5xx(client, data):
    reply = client.post(CHAT, content=data, headers={"content-type": "application/json"})
    assert 400 <= reply.status_code < 500
    error_of(reply)
