"""The benchmark's client against a server with known delays: counts must be exact, times never less than scripted.

Upper bounds are only there to catch a wrong unit or a wrong clock: the machine may be busy.
"""

import asyncio
import json
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.client import MAX_EVENT_BYTES, Client, RequestRecord, RequestSettings, StreamParser, base_url
from octavo.errors import ConfigError, OctavoError
from tests.bench.scripted_server import ScriptedServer

#: Seconds that nothing here may take longer than scripted, on the slowest machine.
SLACK = 20.0


@pytest.fixture(scope="module")
def server():
    with ScriptedServer() as running:
        yield running


def send(server, script, prompt="Hello", api_key=None, **settings):
    """(the client's record, what the server saw)."""

    async def run():
        async with Client(server.url, api_key) as client:
            return await client.send(prompt, RequestSettings(script, **{"timeout": 60.0, **settings}))

    count = len(server.requests)
    record = asyncio.run(run())
    return record, server.requests[count]


# -- what is measured ----------------------------------------------------------------------------------------------
def test_figures_of_a_steady_stream_are_those_of_the_script(server):
    before = time.perf_counter()
    record, seen = send(server, "steady first=0.05 gap=0.01 tokens=12")
    after = time.perf_counter()
    assert record.error is None and record.counted_by == "usage"
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens, len(record.arrivals)) == (12, 7, 3, 12)
    # no piece is seen before it was written, and its time is not taken long after
    assert all(0 <= arrival - written < SLACK for arrival, written in zip(record.arrivals, seen.written, strict=True))
    assert before < record.start < seen.received and record.arrivals[-1] <= record.end < after
    assert 0.05 <= record.ttft < 0.05 + SLACK
    assert all(arrival - record.start >= 0.05 + 0.01 * i for i, arrival in enumerate(record.arrivals))
    assert record.checksum == zlib.crc32(b"word " * 12)
    assert record.e2el >= 0.05 + 0.11 and len(record.gaps) == 11
    assert sum(record.gaps) == pytest.approx(record.arrivals[-1] - record.arrivals[0])
    assert record.tpot == pytest.approx(sum(record.gaps) / 11) and 0.005 < record.tpot < SLACK


def test_times_are_taken_when_pieces_arrive_and_not_when_the_reply_is_complete(server):
    record, seen = send(server, "steady first=0.0 gap=0.3 tokens=3")
    # each piece was seen before the next one was written
    assert all(arrival < later for arrival, later in zip(record.arrivals, seen.written[1:], strict=False))


@pytest.mark.parametrize(
    ("script", "counted_by", "tokens", "pieces"),
    [
        ("steady tokens=5 each=3", "usage", 15, 5),
        ("steady tokens=5 each=3 usage=0", "pieces", 5, 5),
        ("steady tokens=5 each=3 usage=0 logprobs=1", "logprobs", 15, 5),
        ("steady tokens=5 each=3 usage=1 logprobs=1", "usage", 15, 5),
        ("steady tokens=1", "usage", 1, 1),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_tokens_are_counted_by_the_best_source(server, script, counted_by, tokens, pieces, endpoint):
    record, seen = send(server, script, endpoint=endpoint)
    assert record.error is None and seen.path == ("/v1/chat/completions" if endpoint == "chat" else "/v1/completions")
    assert (record.counted_by, record.output_tokens, len(record.arrivals)) == (counted_by, tokens, pieces)
    if tokens == 1:
        assert record.tpot is None and record.gaps == []
    else:
        assert record.tpot == pytest.approx((record.arrivals[-1] - record.arrivals[0]) / (tokens - 1))


def test_an_empty_answer_is_a_success_without_latencies(server):
    record, _ = send(server, "steady tokens=0")
    assert record.error is None and record.output_tokens == 0
    assert record.ttft is None and record.tpot is None and record.gaps == [] and record.e2el > 0


@pytest.mark.parametrize("script", ["steady done=0", "steady finish=0"])
def test_a_stream_is_complete_with_a_finish_reason_or_done(server, script):
    assert send(server, script)[0].error is None


# -- what is sent --------------------------------------------------------------------------------------------------
def test_the_request_is_what_the_settings_say(server):
    _, seen = send(server, "steady tokens=1", "What?", api_key="secret", max_tokens=9, temperature=0.5)
    assert seen.headers["authorization"] == "Bearer secret" and seen.headers["accept-encoding"] == "identity"
    assert seen.body == {
        "model": "steady tokens=1", "messages": [{"role": "user", "content": "What?"}], "max_tokens": 9, "temperature": 0.5,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    _, seen = send(server, "steady tokens=1", messages, ignore_eos=True)
    assert seen.body["messages"] == messages and seen.body["ignore_eos"] is True and "authorization" not in seen.headers
    _, seen = send(server, "steady tokens=1", "Once", endpoint="completions")
    assert seen.body["prompt"] == "Once" and "messages" not in seen.body and "ignore_eos" not in seen.body


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://localhost/v1/", "http://localhost/v1"),
        ("https://host/api", "https://host/api/v1"),
    ],
)
def test_addresses(url, base):
    assert base_url(url) == base


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://user:hunter2@host", "http://host/?key=1", "http://[::1"]
)
def test_addresses_that_are_refused(url):
    with pytest.raises(ConfigError) as caught:
        base_url(url)
    assert "hunter2" not in str(caught.value)


# -- what goes wrong -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("script", "kind", "detail"),
    [
        ("status code=500", "HTTP 500", "scripted 500 second line"),
        ("status code=429", "HTTP 429", "scripted 429 second line"),
        ("status code=302", "HTTP 302", "scripted 302 second line"),
        ("cut", "cut", ""),
        ("steady done=0 finish=0", "cut", "finish_reason"),
        ("refusing", "error event", "the engine died"),
        ("nonsense", "malformed", ""),
        ("shapes", "malformed", ""),
        ("nested", "malformed", ""),
        ("endless", "malformed", "longer than"),
        ("whole", "malformed", "application/json"),
    ],
)
def test_each_kind_of_failure_has_its_name(server, script, kind, detail):
    record, _ = send(server, script)
    assert record.error == kind and detail in record.detail and "\n" not in record.detail


@pytest.mark.parametrize(("script", "pieces"), [("stall tokens=2", 2), ("silent", 0)])
def test_a_server_that_stalls_is_left_after_the_timeout(server, script, pieces):
    record, _ = send(server, script, timeout=0.3)
    assert record.error == "timeout" and len(record.arrivals) == pieces and 0.3 <= record.e2el < SLACK


def test_a_failed_request_does_not_spoil_the_connections(server):
    async def run():
        async with Client(server.url) as client:
            return [(await client.send("x", RequestSettings(script, timeout=1.0))).error
                    for script in ("cut", "steady", "stall", "steady", "endless", "steady", "status", "steady")]  # fmt: skip

    assert asyncio.run(run())[1::2] == [None] * 4


def test_nobody_there():
    async def run():
        async with Client("http://127.0.0.1:9") as client:
            with pytest.raises(OctavoError, match="cannot be reached"):
                await client.first_model()
            return await client.send("x", RequestSettings("m"))

    assert asyncio.run(run()).error == "connection"


def test_the_first_model_is_asked_for(server):
    async def run():
        async with Client(server.url) as client:
            return await client.first_model()

    assert asyncio.run(run()) == "steady"


@pytest.mark.parametrize(
    "page", [(200, {"data": []}), (200, b"no json"), (200, {"data": [{"id": 5}]}), (401, {"error": {"message": "no key"}})]
)
def test_a_server_without_models(page):
    async def run(url):
        async with Client(url) as client:
            await client.first_model()

    with ScriptedServer() as server:
        server.pages["/v1/models"] = page
        with pytest.raises(OctavoError, match="no key" if page[0] == 401 else "--model"):
            asyncio.run(run(server.url))


# -- the parser ----------------------------------------------------------------------------------------------------
EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "h\u00e9 \u2028\u4f60\U0001f600"}}]},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "thinking"}}]},
    {"choices": [{"index": 0, "delta": {"content": "b"}}, {"index": 1, "delta": {"content": "c"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6}},
]


@given(st.lists(st.integers(1, 2000), max_size=30), st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
def test_how_the_bytes_are_cut_does_not_matter(cuts, end, comments):
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}{end}{end}" for event in EVENTS] + [f"data:[DONE]{end}{end}"]
    comment = f": ping{end}{end}event: message{end}id: 7{end}" if comments else ""
    data = comment.join(["", *lines]).encode() + (b"" if end != "\r" else b":")  # a last CR alone ends its line when more comes
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    record = RequestRecord(start=0.0)
    parser = StreamParser(record)
    for number, (begin, stop) in enumerate(zip(places, places[1:], strict=False)):
        parser.feed(data[begin:stop], float(number + 1))
    parser.finish()
    assert parser.done and record.error is None
    assert (record.prompt_tokens, record.output_tokens, len(record.arrivals)) == (5, 6, 4)
    assert record.arrivals == sorted(record.arrivals) and record.arrivals[0] >= 1 and record.end <= len(places)


def test_what_one_event_may_take_is_bounded():
    parser = StreamParser(RequestRecord())
    with pytest.raises(ValueError, match="longer"):
        for _ in range(MAX_EVENT_BYTES // 1000 + 2):
            parser.feed(b"data: " + b"x" * 1000 + b"\n", 0.0)


@pytest.mark.parametrize("count", [-1, True, 1.5, "3", 10**12, None])
def test_a_count_that_is_none_is_not_believed(count):
    record = RequestRecord()
    StreamParser(record).feed(b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": count}}).encode() + b"\n\n", 0.0)
    assert record.usage_tokens is None
