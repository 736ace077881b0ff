"""`octavo chat --url`: the client of an OpenAI-compatible server, against good, slow, broken and hostile ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import closing

import pexpect
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cli import event_stream, remote
from octavo.cli.answer import read_answer
from octavo.cli.api_messages import request_body
from octavo.cli.chat_session import ChatSession
from octavo.cli.event_stream import MAX_EVENT_BYTES, event_data
from octavo.cli.remote import RemoteModel, base_url, find_key
from octavo.errors import ConfigError, InvalidRequestError, OctavoError
from octavo.sampling_params import SamplingParams
from tests.unit.scripted_server import DONE, STREAM, Request, ScriptedServer, error, event, piece, reply, usage

KEY = "sk-local-0123456789"
HELLO = [{"role": "user", "content": "hello"}]
MODELS = reply("200 OK", {"data": [{"id": "first", "max_model_len": 64}, {"id": "second"}]})
BAR = "/v1/chat/completions"


@pytest.fixture
def serve():
    """Start a server that sends these parts to every POST (or what a function makes of the request)."""
    started = []

    def start(*parts, answer=None):
        def script(request: Request):
            yield from [MODELS] if request.method == "GET" else answer(request) if answer else parts

        started.append(ScriptedServer(script))
        return started[-1]

    yield start
    for server in started:
        server.close()


def answer_of(server, params=None, **options):
    """(text, the deltas, the model) of one request."""
    with closing(RemoteModel(base_url(server.url), KEY, "m", **options)) as model:
        deltas = list(model.stream_chat(HELLO, params or SamplingParams()))
        return "".join(delta.text for delta in deltas), deltas, model


def failure_of(server, **options):
    with pytest.raises(OctavoError) as caught:
        answer_of(server, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600 and message.isprintable() and KEY not in message
    return caught.value


# -- the URL and the key -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        (" http://127.0.0.1:8000/v1/ ", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/chat/completions", "http://127.0.0.1:8000/v1"),
        ("localhost:8000", "http://localhost:8000/v1"),
        ("https://example.org/some/path", "https://example.org/some/path/v1"),
        ("https://example.org/v1beta/openai/", "https://example.org/v1beta/openai"),
        ("https://example.org/openai/v1", "https://example.org/openai/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_base_url(text, base):
    assert base_url(text) == base


@pytest.mark.parametrize(
    "text",
    ["", " ", "http://", "ftp://example.org", "file:///etc/passwd", "http://user:secret@example.org", "http://example.org/?key=secret",
     "http://example.org/#secret", "http://example.org:port", "http://exa mple.org", "http://\x00", "http://[::1", "http://\ud800"],
)  # fmt: skip
def test_what_is_no_url(text):
    with pytest.raises(ConfigError, match="^--url: ") as caught:
        base_url(text)
    assert "secret" not in str(caught.value)


@given(st.text())
def test_any_text_is_a_url_or_an_error(text):
    try:
        base = base_url(text)
    except ConfigError as caught:
        assert "\n" not in str(caught)
    else:
        assert base.startswith(("http://", "https://")) and base_url(base) == base


LOOPBACK, PLAIN, TLS = "http://127.0.0.1:8000/v1", "http://example.org/v1", "https://example.org/v1"


@pytest.mark.parametrize(
    ("env", "variable", "base", "key"),
    [
        ({}, None, TLS, None),
        ({"OCTAVO_API_KEY": "a", "OPENAI_API_KEY": "b"}, None, PLAIN, "a"),
        ({"OCTAVO_API_KEY": " a , c ", "OPENAI_API_KEY": "b"}, None, LOOPBACK, "a"),
        ({"OCTAVO_API_KEY": "", "OPENAI_API_KEY": "b"}, None, TLS, "b"),
        ({"OPENAI_API_KEY": "b"}, None, LOOPBACK, "b"),
        ({"OPENAI_API_KEY": "b"}, None, "http://localhost/v1", "b"),
        ({"OPENAI_API_KEY": "b"}, None, PLAIN, None),  # a key for another service, in the clear
        ({"OPENAI_API_KEY": "b"}, "OPENAI_API_KEY", PLAIN, "b"),
        ({"OCTAVO_API_KEY": "a", "OTHER": "x,y\n"}, "OTHER", TLS, "x,y"),
    ],
)
def test_which_key_is_sent(env, variable, base, key):
    assert find_key(env, variable, base) == key


@pytest.mark.parametrize(("env", "variable"), [({}, "NONE"), ({"X": " "}, "X"), ({"X": "se\ncret"}, "X"), ({"X": "s\u00e9cret"}, "X"),
                                               ({"OCTAVO_API_KEY": ",secret"}, None)])  # fmt: skip
def test_a_key_that_cannot_be_sent(env, variable):
    with pytest.raises(ConfigError) as caught:
        find_key(env, variable, TLS)
    assert "cret" not in str(caught.value)


# -- what is sent --------------------------------------------------------------------------------------------------
def test_only_what_the_user_set_is_sent():
    body = request_body("m", HELLO, SamplingParams(max_tokens=5), set())
    assert body == {"model": "m", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5}
    body = request_body("m", HELLO, SamplingParams(max_tokens=5), {"stream_options", "max_tokens"})
    assert body == {"model": "m", "messages": HELLO, "stream": True, "max_completion_tokens": 5}


def test_every_sampling_setting_has_a_place():
    params = SamplingParams(
        temperature=0, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.9, repetition_penalty=1.2, presence_penalty=1, frequency_penalty=-1,
        logit_bias={7: 2}, max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[3], include_stop_in_output=True, ignore_eos=True,
        bad_words=["c"], allowed_token_ids=[1, 2], seed=4, skip_special_tokens=False,
    )  # fmt: skip
    sent = json.loads(json.dumps(request_body("m", HELLO, params, {"stream_options"})))
    assert {name: value for name, value in sent.items() if name not in ("model", "messages", "stream")} == {
        "temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": {"7": 2.0}, "max_tokens": 9, "min_tokens": 2, "stop": ["a", "b"], "stop_token_ids": [3],
        "include_stop_str_in_output": True, "ignore_eos": True, "bad_words": ["c"], "allowed_token_ids": [1, 2], "seed": 4,
        "skip_special_tokens": False,
    }  # fmt: skip


def test_a_request_as_the_server_sees_it(serve):
    server = serve(STREAM, piece("hi", "stop"), DONE)
    answer_of(server)
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", BAR)
    assert request.headers["authorization"] == f"Bearer {KEY}" and request.headers["accept-encoding"] == "identity"
    assert request.body["messages"] == HELLO and request.body["stream"] is True


def test_the_first_model_is_taken_where_none_is_named(serve):
    server = serve()
    with closing(RemoteModel(base_url(server.url), None)) as model:
        assert (model.name, model.max_model_len) == ("first", 64)
    (request,) = server.requests
    assert request.path == "/v1/models" and "authorization" not in request.headers


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (reply("200 OK", {"data": []}), "lists no models"),
        (reply("200 OK", {"data": [{"id": ""}, {"id": 3}, 7]}), "lists no models"),
        (reply("200 OK", {"data": {"id": "x"}}), "lists no models"),
        (reply("200 OK", {}), "lists no models"),
        (reply("200 OK", "[]"), "not an object"),
        (reply("200 OK", "nonsense"), "not JSON"),
        (reply("200 OK", "[" * 100_000), "not JSON"),
        (reply("200 OK", "<html>", "text/html"), "not an OpenAI-compatible API"),
        (reply("401 Unauthorized", error("who?")), "needs a key (401): set OCTAVO_API_KEY, or name"),
        (reply("200 OK", b"x" * (5 << 20)), "sent more than"),
        (STREAM[:30], "broke"),
    ],
)
def test_a_list_of_models_that_is_none(listed, words):
    server = ScriptedServer(lambda request: iter([listed]))
    with closing(server), pytest.raises(OctavoError) as caught:
        RemoteModel(base_url(server.url), None)
    assert words in str(caught.value)


# -- good answers --------------------------------------------------------------------------------------------------
def test_an_answer_in_pieces(serve):
    text, deltas, model = answer_of(serve(STREAM, piece(""), piece("Hé"), piece("llo \u2028"), piece(None, "stop"), usage(7, 3, 4), DONE))
    assert text == "Héllo \u2028" and deltas[-1].finish_reason == "stop" and [d.finish_reason for d in deltas[:-1]] == [None, None]
    assert model._usage == (7, 3, 4)


@pytest.mark.parametrize(
    ("parts", "text", "finish", "other"),
    [
        ([piece("a", "length"), DONE], "a", "length", None),
        ([piece("a"), DONE], "a", "stop", None),
        ([piece("a", "stop")], "a", "stop", None),  # no [DONE], but the answer is complete
        ([piece("a", "content_filter"), DONE], "a", "stop", "content_filter"),
        ([piece("b", index=1), piece("a"), DONE], "a", "stop", None),
        ([b": ping\n\n", piece("a").replace(b"\n", b"\r\n"), b"event: x\nid: 1\nretry: 5\n\n", DONE], "a", "stop", None),
        ([b'data: {"choices":\ndata: [{"delta":{"content":"a"}}]}\n\n', b"data:[DONE]"], "a", "stop", None),
        ([event({"choices": [{"delta": {"refusal": "no"}}]}), DONE], "no", "stop", None),
        ([event({"choices": [{"delta": {"content": "\ud83d\ude00\ud83d"}}]}), DONE], "\U0001f600\ufffd", "stop", None),
        ([event({"choices": [{}], "usage": {"prompt_tokens": -1, "completion_tokens": True}}), piece("a"), DONE], "a", "stop", None),
        ([piece("a"), DONE, piece("b")], "a", "stop", None),
    ],
)
def test_answers_servers_give(serve, parts, text, finish, other):
    found, deltas, _ = answer_of(serve(STREAM, *parts))
    assert (found, deltas[-1].finish_reason, deltas[-1].stop_reason) == (text, finish, other)


def test_a_server_that_does_not_stream(serve):
    whole = {"choices": [{"index": 0, "message": {"content": "all at once"}, "finish_reason": "stop"}],
             "usage": {"prompt_tokens": 2, "completion_tokens": 3}}  # fmt: skip
    text, deltas, model = answer_of(serve(reply("200 OK", whole)))
    assert text == "all at once" and deltas[-1].finish_reason == "stop" and model._usage == (2, 3, 0)


def test_fields_a_server_refuses_are_left_out_once_and_for_all(serve):
    def answer(request):
        for field, advice in (("stream_options", "unknown field stream_options"), ("max_tokens", "use max_completion_tokens instead")):
            if field in request.body:
                yield reply("400 Bad Request", error(advice))
                return
        yield from (STREAM, piece("fine", "stop"), DONE)

    server = serve(answer=answer)
    with closing(RemoteModel(base_url(server.url), None, "m")) as model:
        for _ in range(2):
            assert "".join(delta.text for delta in model.stream_chat(HELLO, SamplingParams(max_tokens=5))) == "fine"
    sent = [sorted(set(request.body) - {"model", "messages", "stream"}) for request in server.requests]
    assert sent == [["max_tokens", "stream_options"], ["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"]]


def test_a_field_that_is_refused_for_ever_is_not_tried_for_ever(serve):
    server = serve(reply("400 Bad Request", error("stream_options, always; and max_completion_tokens")))
    assert isinstance(failure_of(server), InvalidRequestError) and len(server.requests) == 2


# -- servers that fail ---------------------------------------------------------------------------------------------
FAILURES = [
    ([reply("401 Unauthorized", error(f"bad key {KEY}"))], "refuses the key (401)"),
    ([reply("403 Forbidden", error(f"not with {KEY}"))], "refuses the request (403): not with ***"),
    ([reply("404 Not Found", error("the model m does not exist"))], "(404): the model m does not exist; check --url and --model"),
    ([reply("404 Not Found", "<html>no</html>", "text/html")], "not an OpenAI-compatible API (404); check --url"),
    ([reply("404 Not Found", {"detail": "Not Found"})], "does not have that (404): Not Found; check --url"),
    ([reply("429 Too Many", error("busy"), headers="Retry-After: 7")], "is busy (429): busy; try again in 7 s"),
    ([reply("429 Too Many", "", headers="Retry-After: Wed, 21 Oct 2026 07:28:00 GMT")], "is busy (429)"),
    ([reply("503 Service Unavailable", error("loading"), headers="Retry-After: 1")], "is not ready (503): loading; try again in 1 s"),
    ([reply("500 Oops", "Traceback")], "failed (500)"),
    ([reply("400 Bad Request", {"error": "plain words"})], "refuses the request (400): plain words"),
    ([reply("422 Unprocessable", {"detail": [{"loc": ["body"], "msg": "wrong"}]})], "wrong"),
    ([reply("400 Bad Request", error("a\n\x1b[31mb\u202e" + "c" * 10_000))], "a \ufffd[31mb\ufffd"),
    ([reply("400 Bad Request", b"\xff" * 1_000_000)], "refuses the request (400)"),
    ([reply("302 Found", "", headers="Location: http://127.0.0.1:1/v1")], "moved to http://127.0.0.1:1/v1"),
    ([STREAM, piece("so"), event(error("the engine died", kind="server_error"))], "gave the request up: the engine died"),
    ([STREAM, event({"error": "short"})], "gave the request up: short"),
    ([STREAM, event({"error": {}, "message": "no error"})], "no choices"),
    ([STREAM, piece("so", "error"), DONE], "gave the request up"),
    ([STREAM, piece("so")], "before the answer was complete"),
    ([STREAM], "before the answer was complete"),
    ([STREAM.replace(b"Connection", b"Content-Length: 900\r\nConnection"), piece("so")], "broke"),
    ([b""], "broke"),
    ([b"SSH-2.0-OpenSSH_9.2\r\n"], "broke"),
    ([reply("200 OK", "<html>hi</html>", "text/html; charset=utf-8")], "not an OpenAI-compatible API (it answers with text/html)"),
    ([reply("200 OK", "hi")], "its answer is not JSON"),
    ([reply("200 OK", '"hi"')], "its answer is not an object"),
    ([STREAM, b"data: {\n\n"], "its answer is not JSON"),
    ([STREAM, b"data: " + b"[" * 100_000 + b"\n\n"], "its answer is not JSON"),
    ([STREAM, b"data: {\"choices\": " + b"9" * 5000 + b"}\n\n"], "its answer is not JSON"),
    ([STREAM, event({"choices": "none"})], "no choices"),
    ([STREAM, event({"choices": [{"delta": {"content": ["a"]}}]})], "not text"),
    ([STREAM, event({"choices": [{"delta": {"content": "a"}, "finish_reason": 3}]})], "not text"),
    ([STREAM, b"data: " + b"x" * (MAX_EVENT_BYTES + 10)], "a line of more than"),
    ([STREAM, *[b"data: " + b"x" * 300_000 + b"\n"] * 4], "an event of more than"),
    ([STREAM.replace(b"Connection", b"Content-Encoding: gzip\r\nConnection"), piece("a")], "compressed"),
    ([b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n"], "broke"),
    ([STREAM, None], "was silent for 0.3 s"),
    ([STREAM, piece("so"), None], "was silent for 0.3 s"),
    ([None], "was silent for 0.3 s"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "words"), FAILURES, ids=range(len(FAILURES)))
def test_a_failure_is_one_line_that_says_what_it_is(serve, parts, words):
    silent = 0.3 if None in parts else remote.SILENT_SECONDS
    assert words in str(failure_of(serve(*parts), silent_seconds=silent))


def test_a_redirect_is_not_followed(serve):
    other = serve(STREAM, piece("a", "stop"), DONE)
    first = serve(reply("307 Temporary Redirect", "", headers=f"Location: {other.url}{BAR}"))
    assert "moved to" in str(failure_of(first)) and not other.requests  # the key stays where it was given


@pytest.mark.parametrize(
    "refusal",
    [
        reply("400 Bad Request", error("too long", "context_length_exceeded")),
        reply("400 Bad Request", error("This model's maximum context length is 64 tokens.", kind="BadRequestError")),
        reply("400 Bad Request", error("the request exceeds the available context size", kind="exceed_context_size_error")),
        STREAM + event(error("too long", "context_length_exceeded")),
    ],
)
def test_a_conversation_that_is_too_long_has_a_code(serve, refusal):
    caught = failure_of(serve(refusal))
    assert isinstance(caught, InvalidRequestError) and caught.code == "context_length_exceeded"


def test_too_long_is_no_reason_to_begin_again_once_there_is_text(serve):
    caught = failure_of(serve(STREAM, piece("so"), event(error("too long", "context_length_exceeded"))))
    assert not isinstance(caught, InvalidRequestError)


def test_nobody_listens():
    server = ScriptedServer(lambda request: iter([]))
    server.close()
    message = str(failure_of(server))
    assert "cannot be reached: Connection refused; is the server running?" in message


def test_an_answer_without_an_end_is_ended(serve, monkeypatch):
    def endless(request):
        yield STREAM
        while True:
            yield piece("more " * 100)

    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 100_000)
    server = serve(answer=endless)
    assert "sent more than 100000 bytes" in str(failure_of(server))
    assert server.hung_up.acquire(timeout=20)


def test_an_answer_that_trickles_is_ended(serve, monkeypatch):
    def trickle(request):
        yield STREAM
        while True:
            yield b": still here\n\n"
            yield 0.01

    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.2)
    assert "did not come to an end in time" in str(failure_of(serve(answer=trickle)))


def test_closing_the_answer_closes_the_connection(serve):
    server = serve(STREAM, piece("one "), None)
    with closing(RemoteModel(base_url(server.url), KEY, "m")) as model:
        deltas = model.stream_chat(HELLO, SamplingParams())
        assert next(deltas).text == "one "
        deltas.close()
        assert server.hung_up.acquire(timeout=20)


junk = st.one_of(
    st.binary(max_size=80),
    st.sampled_from([piece("a"), piece("b", "stop"), DONE, b"data: ", b"\n", b"\r\n", b"\xef\xbb\xbf", b": c\n\n", usage(1, 2)]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["choices", "delta", "content", "error", "message", "code", "usage", "finish_reason", "index",
                                           "prompt_tokens", "completion_tokens", "prompt_tokens_details"]), inner, max_size=4),
        max_leaves=12,
    ).map(event),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(junk, max_size=6))
def test_any_stream_is_an_answer_or_one_line(parts):
    server = ScriptedServer(lambda request: iter([STREAM, *parts]))
    with closing(server), closing(RemoteModel(base_url(server.url), None, "m")) as model:
        try:
            deltas = list(model.stream_chat(HELLO, SamplingParams()))
        except OctavoError as caught:
            assert "\n" not in str(caught)
        else:
            assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            "".join(delta.text for delta in deltas).encode()


# -- events --------------------------------------------------------------------------------------------------------
def events_of(stream: bytes) -> list[str]:
    """The same by the letter of the specification, from the whole text."""
    found, data = [], []
    for line in [*re.split("\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")), ""]:
        if line == "":
            found += ["\n".join(data)] if data else []
            data = []
        elif line.partition(":")[0] == "data":
            value = line.partition(":")[2]
            data.append(value[1:] if value.startswith(" ") else value)
    return found


@given(
    st.lists(
        st.sampled_from([b"data", b"data:", b"data: x", b": c", b"event: e", b"", b"\r", b"\n", b"\r\n", b"\xc3\xa9", b"\xff", b" ", b":"])
    ),
    st.lists(st.integers(0, 60)),
)
def test_events_do_not_depend_on_how_they_were_cut(parts, cuts):
    stream = b"".join(parts)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert list(event_data(pieces)) == events_of(stream)
    assert list(event_data([stream[i : i + 1] for i in range(len(stream))])) == events_of(stream)


def test_a_line_is_never_kept_beyond_its_limit(monkeypatch):
    monkeypatch.setattr(event_stream, "MAX_EVENT_BYTES", 1000)
    taken = 0

    def pieces():
        nonlocal taken
        while True:
            taken += 100
            yield b"x" * 100

    with pytest.raises(OctavoError, match="a line of more than 1000 bytes"):
        list(event_data(pieces()))
    assert taken == 1100


# -- the command ---------------------------------------------------------------------------------------------------
def chat_script(request: Request):
    """What the user says decides what happens."""
    said, size = request.said, sum(len(message["content"].split()) for message in request.body["messages"])
    if said == "slow":
        yield STREAM
        for i in range(10_000):
            yield piece(f"{i} ")
            yield 0.02
    elif said == "wait":
        yield None
    elif said == "busy":
        yield reply("429 Too Many", error("busy"), headers="Retry-After: 3")
    elif said == "die":
        yield from (STREAM, piece("half "), event(error("the engine died")))
    elif said == "escape":
        yield from (STREAM, piece("\x1b[31mred\x07", "stop"), DONE)
    elif said == "long":
        yield from (STREAM, piece("word", "length"), usage(1, request.body["max_tokens"]), DONE)
    elif said == "filtered":
        yield from (STREAM, piece("word", "content_filter"), DONE)
    elif size > 10:
        yield reply("400 Bad Request", error("too long", "context_length_exceeded"))
    else:
        yield from (STREAM, *[piece(f"{word} ") for word in f"you said {said}".split()], piece(None, "stop"), usage(size, 9), DONE)


def environment(**extra):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "OPENAI_"))}
    return {**clean, "TERM": "dumb", "PYTHONUNBUFFERED": "1", **extra}


def octavo(*arguments, stdin="", **extra):
    result = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *arguments],
        input=stdin, capture_output=True, text=True, timeout=60, check=False, env=environment(**extra),
    )  # fmt: skip
    return result.returncode, result.stdout, result.stderr


class Chat:
    def __init__(self, *arguments):
        self.process = pexpect.spawn(
            sys.executable, ["-m", "octavo.cli.main", "chat", *arguments], env=environment(OCTAVO_API_KEY=KEY), encoding="utf-8",
            timeout=20, dimensions=(40, 200),
        )  # fmt: skip
        self.process.delaybeforesend = None
        self.greeting = self.until(">>> ")

    def until(self, text):
        self.process.expect_exact(text)
        return self.process.before

    def say(self, text):
        self.process.sendline(text)
        return self.until(">>> ").replace(text, "", 1).strip()


@pytest.fixture
def chat(serve):
    """(a chat on a terminal, its server)"""
    started = []

    def start(*arguments):
        server = serve(answer=chat_script)
        started.append(Chat("--url", server.url, *arguments))
        return started[-1], server

    yield start
    for one in started:
        one.process.close(force=True)


def test_a_conversation_with_a_server(chat, tmp_path):
    it, server = chat("--system", "Be brief.", "--temperature", "0.5")
    assert f"first at {server.url}/v1. /help lists commands." in it.greeting
    shown = it.say("hello")
    assert shown.startswith("you said hello") and "9 tokens" in shown and "tokens/s, first after" in shown
    it.say("/set top_k 5")
    it.say("again")
    last = server.requests[-1]
    assert last.headers["authorization"] == f"Bearer {KEY}"
    assert [(m["role"], m["content"].strip()) for m in last.body["messages"]] == [
        ("system", "Be brief."), ("user", "hello"), ("assistant", "you said hello"), ("user", "again"),
    ]  # fmt: skip
    sent = {name: value for name, value in last.body.items() if name not in ("messages", "stream", "stream_options")}
    assert sent == {"model": "first", "temperature": 0.5, "top_k": 5, "max_tokens": 1024}
    stats = it.say("/stats")
    assert "answers 2, tokens 18" in stats and f"server: {server.url}/v1" in stats
    it.say(f"/save {tmp_path / 'chat.json'}")
    assert json.loads((tmp_path / "chat.json").read_text())["model"] == "first"
    assert "the server ended it: content_filter" in it.say("filtered")
    assert it.say("escape").startswith("\ufffd[31mred\ufffd")
    it.say("/set max_tokens 5")
    assert "5 tokens" in (shown := it.say("long")) and "max_tokens ended it" in shown
    it.say("/set max_tokens 200")
    assert "the context is full" in it.say("long")  # 1 + 200 tokens, and the server has 64
    it.process.sendeof()
    it.process.expect(pexpect.EOF)
    it.process.close()
    assert it.process.exitstatus == 0


def test_ctrl_c_ends_the_answer_and_the_request(chat):
    it, server = chat()
    it.process.sendline("slow")
    it.until("3 4 ")
    it.process.sendintr()
    assert "stopped: " in (shown := it.until(">>> ")) and "chunks/s" in shown  # its tokens were not told
    assert server.hung_up.acquire(timeout=20)
    it.process.sendline("wait")  # before the first word, while the server says nothing
    end = time.monotonic() + 20
    while server.requests[-1].said != "wait":
        assert time.monotonic() < end
        time.sleep(0.01)
    it.process.sendintr()
    it.until("stopped: the question was taken back")
    it.until(">>> ")
    assert server.hung_up.acquire(timeout=20)
    assert "you said hello" in it.say("hello")
    kept = server.requests[-1].body["messages"]
    assert "wait" not in [message["content"] for message in kept] and kept[-1]["content"] == "hello"


def test_the_oldest_turns_go_when_the_server_says_so(chat):
    it, server = chat("--model", "first")  # nothing is asked about it, so nothing is known of its context
    shown = [it.say(f"number {i}") for i in range(4)]
    assert [text.count("(the oldest turn went, to fit the context)") for text in shown] == [0, 0, 1, 1]
    assert all(f"you said number {i}" in text for i, text in enumerate(shown))
    last = server.requests[-1].body["messages"]
    assert [message["content"].strip() for message in last] == ["number 2", "you said number 2", "number 3"]
    refused = it.say("word " * 20)  # alone too long: nothing goes for it
    assert "too long" in refused and "oldest" not in refused
    it.say("x")  # the conversation is as it was before
    assert [len(request.body["messages"]) for request in server.requests[-5:]] == [5, 3, 1, 5, 3]


def test_room_is_kept_for_an_answer_by_the_length_of_the_last_one(serve):
    server = serve(STREAM, piece("x" * 10, "stop"), usage(5, 10), DONE)  # a token a character
    with closing(RemoteModel(base_url(server.url), None)) as model:  # its context has 64 tokens: 16 are kept for the answer
        session = ChatSession(SamplingParams(), "m")
        session.turns = [{"role": role, "content": "y" * 8} for role in ("user", "assistant") * 4]
        session.add_user("hello")
        assert model.make_room(session) == 0  # nothing is known yet
        answer = read_answer(lambda: model.stream_chat(HELLO, session.params), 1, lambda text: None, at_once=True)
        model.complete(answer)
        assert (answer.num_prompt_tokens, answer.num_tokens, answer.unit) == (5, 10, "token")
        assert model.make_room(session) == 2  # 69 characters, then 53, then 37 + 16 <= 64
        assert len(session.turns) == 5 and model.make_room(session) == 0


def test_what_fails_is_one_line_and_the_chat_goes_on(chat):
    it, server = chat()
    assert it.say("busy").splitlines()[-1] == f"octavo: {server.url}/v1 is busy (429): busy; try again in 3 s"
    shown = it.say("die")
    assert shown.startswith("half ") and shown.splitlines()[-1].endswith("gave the request up: the engine died")
    it.say("hello")
    assert [message["content"] for message in server.requests[-1].body["messages"]] == ["hello"]


def test_piped_input_is_answered(serve):
    server = serve(answer=chat_script)
    code, out, err = octavo("chat", "--url", server.url, stdin="hello\n")
    assert (code, out) == (0, "you said hello \n") and re.fullmatch(r"9 tokens, [\d.]+ tokens/s, first after [\d.]+ s\n", err)
    code, out, err = octavo("chat", "--url", server.url, "--model", "named", stdin="escape")
    assert (code, out) == (0, "\x1b[31mred\x07\n")  # a pipe gets what was said
    assert server.requests[-1].body["model"] == "named" and [request.method for request in server.requests] == ["GET", "POST", "POST"]
    code, out, err = octavo("chat", "--url", server.url, "positional", stdin="die")
    assert code == 1 and out == "half " and err.startswith("octavo: ") and err.count("\n") == 1
    assert server.requests[-1].body["model"] == "positional"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:1", "--threads", "2"], "--threads is the server's business"),
        (["--url", "http://127.0.0.1:1", "--no-enable-prefix-caching"], "--enable-prefix-caching is the server's business"),
        (["--url", "nonsense://x"], "--url: must begin with http"),
        (["--url", "http://127.0.0.1:1", "--api-key-env", "NO_SUCH_NAME"], "--api-key-env: there is no such variable"),
        (["--api-key-env", "HOME"], "--api-key-env needs --url"),
    ],
)
def test_bad_usage(arguments, words):
    code, out, err = octavo("chat", *arguments, stdin="hello")
    assert code == 2 and not out and words in err and err.count("\n") == 1


def test_a_named_key_is_sent_and_settings_of_the_engine_are_left_alone(serve, tmp_path):
    server = serve(answer=chat_script)
    (tmp_path / "octavo.yaml").write_text("threads: 2\nport: 9000\nmodel: some/model\n")
    extra = {"MY_KEY": "abc", "OPENAI_API_KEY": "not this one", "OCTAVO_CONFIG": str(tmp_path / "octavo.yaml")}
    code, _, err = octavo("chat", "--url", server.url, "--api-key-env", "MY_KEY", stdin="hello", **extra)
    assert code == 0, err
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer abc"] * 2
    assert server.requests[-1].body["model"] == "first"


def test_nothing_heavy_is_imported(serve):
    server = serve(answer=chat_script)
    program = (
        "import sys; from octavo.cli.main import main; code = main(['chat', '--url', sys.argv[1]]); "
        "heavy = ('numpy', 'tokenizers', 'jinja2', 'torch', 'pydantic', 'zmq', 'octavo.llm', 'octavo.wiring', 'octavo._native'); "
        "print(code, [n for n in sys.modules if n in heavy or n.startswith(('octavo.engine', 'octavo.worker', 'octavo.ops'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, server.url],
        input="hello",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(),
    )
    assert result.stdout == "you said hello \n0 []\n"
