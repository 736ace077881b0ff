"""The benchmark's own HTTP: the same figures whatever the framing and however the bytes are cut; every end has its name.

The server is a script of bytes on a plain socket.
"""

import asyncio
import ssl
import subprocess

import pytest

from octavo.bench.client import MAX_REPLY_BYTES, Client, RequestSettings
from octavo.bench.connection import MAX_HEAD_BYTES, Connections
from octavo.errors import ConfigError

EVENTS = (
    b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
)
KIND = b"Content-Type: text/event-stream\r\n"
PATIENCE = 30.0


def framed(body=EVENTS, size=10**6):
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return (
        b"HTTP/1.1 200 OK\r\n"
        + KIND
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces)
        + b"0\r\n\r\n"
    )


WHOLE = b"HTTP/1.1 200 OK\r\n" + KIND + b"content-length: %d\r\n\r\n" % len(EVENTS) + EVENTS
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n" + KIND + b"\r\n" + EVENTS
CLOSE = None


class Server:
    """`scripts`: what each connection answers to its requests, one after the other; CLOSE: it hangs up."""

    def __init__(self, *scripts, step=10**9, tls=None):
        self.scripts, self.step, self.tls = list(scripts), step, tls
        self.connections, self.requests = 0, []
        self.closed = asyncio.Event()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=self.tls)
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info):
        self.server.close()

    async def serve(self, reader, writer):
        script = self.scripts[self.connections]
        self.connections += 1
        for answer in script:
            if answer is CLOSE:
                break
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            self.requests.append(head + await reader.readexactly(length))
            for i in range(0, len(answer), self.step):
                writer.write(answer[i : i + self.step])
                await writer.drain()
                if self.step < 100:
                    await asyncio.sleep(0)
        else:
            await reader.read()  # until the client goes
        writer.close()
        self.closed.set()


def ask(*scripts, times=1, pause=False, **options):
    """The records of `times` requests one after the other, and the server."""

    async def main():
        async with Server(*scripts, **options) as server, Client(server.url) as client:
            records = []
            for _ in range(times):
                records.append(await client.send("Hello", RequestSettings("m", timeout=PATIENCE)))
                if pause:
                    await server.closed.wait()
                    await asyncio.sleep(0.05)
            return records, server

    return asyncio.run(main())


@pytest.mark.parametrize("step", [1, 7, 10**9])
@pytest.mark.parametrize(
    "answer",
    [framed(), framed(size=1), framed(size=40), WHOLE, UNTIL_CLOSE, b"HTTP/1.1 100 Continue\r\n\r\n" + framed(),
     framed()[:-2] + b"Trailer-Field: x\r\n\r\n"],
)  # fmt: skip
def test_framing_does_not_matter(answer, step):
    script = [answer, CLOSE] if answer is UNTIL_CLOSE else [answer]
    (record,), _ = ask(script, step=step)
    assert record.error is None and len(record.arrivals) == 1 and record.arrivals[0] <= record.end


def test_a_connection_is_used_again():
    records, server = ask([framed(), WHOLE, framed()], times=3)
    assert [record.error for record in records] == [None] * 3 and server.connections == 1
    assert all(request.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:") for request in server.requests)


def test_one_that_the_server_has_closed_or_will_close_is_not():
    closing = framed().replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    for first in ([framed(), CLOSE], [closing]):
        records, server = ask(first, [framed()], times=2, pause=len(first) == 2)
        assert [record.error for record in records] == [None] * 2 and server.connections == 2


def test_a_kept_one_that_is_closed_when_the_request_comes_is_replaced_once():
    """The server takes the second request and hangs up without a byte, as one does whose patience ends at that moment."""
    records, server = ask([framed(), b"", CLOSE], [framed()], times=2)
    assert [record.error for record in records] == [None] * 2 and (server.connections, len(server.requests)) == (2, 3)
    records, server = ask([framed(), b"", CLOSE], [b"", CLOSE], times=2)
    assert [record.error for record in records] == [None, "cut"] and server.connections == 2
    records, server = ask([framed(), b"HTTP/1.1 200", CLOSE], times=2)  # it has begun to answer: that request is lost
    assert records[1].error == "cut" and server.connections == 1


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (b"", "cut", "closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Ty", "cut", "closed"),
        (WHOLE[:-1], "cut", "closed"),
        (framed()[: -len("data: [DONE]\n\n") - 20], "cut", "closed"),
        (UNTIL_CLOSE[:130], "cut", ""),
        (b"SSH-2.0-OpenSSH_9\r\n", "malformed", "no HTTP"),
        (framed().replace(b"\r\n\r\n", b"\r\n\r\nzz\r\n", 1), "malformed", "no HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "malformed", "protocol"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * MAX_HEAD_BYTES, "malformed", "head"),
        (b"HTTP/1.1 503 X\r\ncontent-length: 5\r\n\r\nsorry", "HTTP 503", "sorry"),
        (b"HTTP/1.1 500 X\r\n\r\n" + b"x" * (2 * MAX_REPLY_BYTES), "HTTP 500", "xxx"),
        (b"HTTP/1.1 204 X\r\n\r\n", "HTTP 204", ""),
    ],
)  # fmt: skip
def test_every_bad_end_has_its_name(answer, kind, detail):
    (record,), _ = ask([answer, CLOSE])
    assert record.error == kind and detail in record.detail


def test_two_answers_to_one_request_are_no_answer():
    (record,), _ = ask([framed() + framed()])
    assert record.error == "malformed" and "more than one" in record.detail


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=x",
    ]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command + files, check=True, capture_output=True)
    return folder


def test_tls(certificate, monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    (record,), server = ask([framed()], tls=context)
    assert record.error == "connection" and "certificate" in record.detail.lower() and not server.requests
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    records, server = ask([framed(size=20), framed()], times=2, tls=context)
    assert [record.error for record in records] == [None] * 2 and server.connections == 1


def test_what_becomes_a_header_is_looked_at():
    with pytest.raises(ConfigError, match="key"):
        Client("http://127.0.0.1:9", "se\r\ncret: 1")
    for url in ("http://127.0.0.1:99999", "http://" + "x" * 70):
        with pytest.raises(ConfigError):
            Client(url)
    head = Connections("http://[::1]:80/a b\u00e9/v1", {}, None)
    assert head._path == "/a%20b%C3%A9/v1" and "host: [::1]:80\r\n" in head._head
