"""The record of steps over HTTP: bounded, in pieces, without text, for this machine only; and its client."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx2
import pytest

from octavo.cli import trace_client
from octavo.cli.main import main
from octavo.errors import OctavoError
from octavo.server import recorded
from octavo.trace import explain, read
from tests.server.fake_server import chat, fake_server

PATH = "/v1/octavo/steps"


@pytest.fixture(scope="module")
def server():
    with fake_server(api_key=("sesame",)) as made:
        with made.client(headers={"authorization": "Bearer sesame"}) as client:
            assert client.post("/v1/chat/completions", json=chat("a secret", max_tokens=20)).status_code == 200
        yield made


def get(server, path: str = PATH) -> httpx2.Response:
    with server.client(headers={"authorization": "Bearer sesame"}) as client:
        return client.get(path)


def test_steps_come_in_pieces_that_join_to_the_record(server, monkeypatch):
    everything = get(server)
    assert everything.status_code == 200 and "secret" not in everything.text
    body = everything.json()
    assert (body["object"], body["model"], body["block_size"], body["num_blocks"]) == ("octavo.steps", "org/fake", 4, [512])
    numbers = [step["step"] for step in body["steps"]]
    assert numbers == list(range(1, 21))
    assert [step["step"] for step in get(server, PATH + "?limit=3").json()["steps"]] == numbers[-3:]
    joined, last = [], 0
    while piece := get(server, f"{PATH}?after={last}&limit=7").json()["steps"]:
        joined += piece
        last = piece[-1]["step"]
        assert len(piece) <= 7
    assert joined == body["steps"]
    monkeypatch.setattr(recorded, "MOST_STEPS", 5)
    assert len(get(server, PATH + "?limit=400").json()["steps"]) == 5


@pytest.mark.parametrize("query", ["limit=-1", "limit=x", "after=1.5", "after=9999999999999999999", "limit=\u0663"])
def test_a_bad_number_is_refused(server, query):
    answer = get(server, f"{PATH}?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == query.split("=")[0]


def test_other_machines_are_refused_whatever_their_key(server):
    sent = []

    async def ask():
        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer sesame")]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": PATH, "scheme": "http"}
        scope |= {"raw_path": PATH.encode(), "query_string": b"", "headers": headers, "root_path": ""}
        scope |= {"client": ("192.0.2.7", 5), "server": ("127.0.0.1", 1)}
        await server.app(scope, receive, send)

    asyncio.run_coroutine_threadsafe(ask(), server._loop).result(30)
    assert sent[0]["status"] == 403 and json.loads(sent[1]["body"])["error"]["code"] == "loopback_only"


def test_the_client_records_what_runs_meanwhile(server, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OCTAVO_API_KEY", "sesame")
    file = tmp_path / "server.octrace.json"
    before = server.core.stats.steps

    def ask():
        time.sleep(0.3)
        with server.client(headers={"authorization": "Bearer sesame"}) as client:
            client.post("/v1/chat/completions", json=chat(max_tokens=20))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        assert main(["trace", "server", "--url", server.url, "--seconds", "1.5", "--output", str(file)]) == 0
    finally:
        asking.join(30)
    trace = read(file)
    assert [event.step for event in trace.steps] == list(range(before + 1, before + 21)) and trace.model == "org/fake"
    found = explain(trace)
    assert found.num_output_tokens == 20 and sum(found.parts.values()) == pytest.approx(found.total)
    assert "20 steps" in capsys.readouterr().out


def test_servers_that_cannot_be_used_are_one_clear_error(server, monkeypatch):
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for url, words in (
        (server.url, "OCTAVO_API_KEY"),
        ("http://127.0.0.1:9", "is the server running"),
        ("http://192.0.2.1:80", "own machine only"),
    ):
        with pytest.raises(OctavoError, match=words):
            trace_client.record(url, None, 0.1)
