"""One request to an OpenAI-compatible server: what came back, and when its pieces arrived.

A time is taken (perf_counter) as soon as bytes of the response are there, before they are parsed. Several tokens may come in
one piece; tokens are then counted by what the server reports (`usage`), and the gaps are gaps between pieces.
Owner of the connections. What a server sends is not trusted: sizes are bounded, wrong shapes are an error of that request.
Not here: when requests start (load.py), figures (report.py).
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

import httptools
import httpx2
import msgspec

from octavo.bench.connection import Connections, CutError
from octavo.errors import ConfigError, OctavoError

Endpoint = Literal["chat", "completions"]
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages

PATHS = {"chat": "/chat/completions", "completions": "/completions"}
#: Bounds on what a server may make the client hold: one event, one reply that is not a stream.
MAX_EVENT_BYTES = 4 << 20
MAX_REPLY_BYTES = 1 << 20
#: SSE lines end with CR LF, LF or CR; a CR that ends the data so far may still be half of CR LF.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What every request of a run has in common."""

    model: str
    endpoint: Endpoint = "chat"
    max_tokens: int = 128
    temperature: float = 0.0
    #: Sent only where it is true: not every server knows the field.
    ignore_eos: bool = False
    #: Seconds for one whole request.
    timeout: float = 600.0

    def body(self, prompt: Prompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are perf_counter, latencies seconds; a latency is None where there was nothing to measure."""

    start: float = 0.0
    #: When each piece with text (or with logprobs of tokens) arrived.
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    #: None: the reply was complete. Otherwise its kind ("HTTP 429", "cut", "timeout", ...) and what the server said.
    error: str | None = None
    detail: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    usage_tokens: int | None = None
    logprob_tokens: int = 0
    #: CRC-32 of the text so far: whether two answers are equal, without keeping either.
    checksum: int = 0

    @property
    def output_tokens(self) -> int:
        """As the server reports; else the tokens with logprobs; else the pieces."""
        if self.usage_tokens is not None:
            return self.usage_tokens
        return self.logprob_tokens or len(self.arrivals)

    @property
    def counted_by(self) -> str:
        return "usage" if self.usage_tokens is not None else "logprobs" if self.logprob_tokens else "pieces"

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0] - self.start if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        if self.output_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def e2el(self) -> float:
        return self.end - self.start

    def fail(self, kind: str, detail: object = "") -> None:
        """The first failure is the one that counts."""
        if self.error is None:
            self.error, self.detail = kind, _one_line(detail)


class StreamParser:
    """Turns the bytes of one event stream into a RequestRecord's figures."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.done = False
        self._finished = False
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes, now: float) -> None:
        """`data` as it arrived at `now`. Raises ValueError where it is no event stream of such a server."""
        if not self.done:
            self.record.end = now
        # nearly always a read holds whole events of one line each
        if not self._rest and not self._data and data.startswith(b"data: ") and data.endswith(b"\n\n") and b"\r" not in data:
            events = data[6:-2].split(b"\n\ndata: ")
            if len(data) <= MAX_EVENT_BYTES and not any(b"\n" in event for event in events):
                for event in events:
                    self._take(event, now)
                return
        self._rest += data
        if b"\n" in data or b"\r" in self._rest[-len(data) - 1 :]:  # else there is no new line, and nothing is searched twice
            *lines, rest = _LINE_END.split(self._rest)
            self._rest = bytearray(rest)
            for line in lines:
                self._line(bytes(line), now)
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")

    def finish(self) -> None:
        """The body has ended as HTTP says it should."""
        if not self.done and not self._finished:
            self.record.fail("cut", "the stream ended without a finish_reason or [DONE]")

    def _line(self, line: bytes, now: float) -> None:
        line = line.removesuffix(b"\r")
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._size += len(line)
        elif not line and self._data:
            event, self._data, self._size = b"\n".join(self._data), [], 0
            self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.done = True
        elif not self.done:
            try:
                value = msgspec.json.decode(event)
            except msgspec.DecodeError:
                value = json.loads(event)  # it takes a little more, such as half of a surrogate pair
            self._event(value, now)

    def _event(self, event: Any, now: float) -> None:
        if not isinstance(event, dict):
            raise ValueError("an event is no JSON object")
        if event.get("error"):
            self.record.fail("error event", error_message(event))
        self._usage(event.get("usage"))
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            logprobs = choice.get("logprobs") or {}
            tokens = len(logprobs.get("content") or logprobs.get("tokens") or ())
            self.record.logprob_tokens += tokens
            self.record.checksum = zlib.crc32(text.encode("utf-8", "surrogatepass"), self.record.checksum) if text else self.record.checksum
            if text or tokens:
                self.record.arrivals.append(now)
            self._finished = self._finished or choice.get("finish_reason") is not None

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details") or {}
        self.record.usage_tokens = _count(usage.get("completion_tokens"), self.record.usage_tokens)
        self.record.prompt_tokens = _count(usage.get("prompt_tokens"), self.record.prompt_tokens)
        self.record.cached_tokens = _count(details.get("cached_tokens"), self.record.cached_tokens)


class _Enough(Exception):
    """Of a reply that is no stream as much has come as is looked at."""


class _Reply:
    """What becomes of a reply: a stream goes to the parser, anything else is kept, for its message."""

    def __init__(self, parser: StreamParser) -> None:
        self.parser = parser
        self._status = 0
        self._is_stream = False
        self._page = b""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        kind = headers.get("content-type", "")
        self._status, self._is_stream = status, status == 200 and "text/event-stream" in kind
        if status == 200 and not self._is_stream:
            self.parser.record.fail("malformed", f"no event stream, but {kind!r}")
            raise _Enough

    def on_data(self, data: bytes, now: float) -> None:
        if self._is_stream:
            return self.parser.feed(data, now)
        self._page += data
        if len(self._page) > MAX_REPLY_BYTES:
            raise _Enough

    def finish(self) -> None:
        if self._is_stream:
            self.parser.finish()
        else:
            self.parser.record.end = time.perf_counter()
            self.parser.record.fail(f"HTTP {self._status}", _reply_message(self._page[:MAX_REPLY_BYTES]))


class Client:
    """Connections to one server. Use as `async with Client(url, api_key) as client`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.base = base_url(url)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key holds a character that no header may hold")
        headers = {"accept-encoding": "identity", "user-agent": "octavo-bench"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        # reading the certificates takes a tenth of a second, and plain HTTP has no use for them
        tls = httpx2.create_ssl_context() if self.base.startswith("https:") else None
        self._connections = Connections(self.base, headers, tls)
        #: For pages. As the streams, it goes straight to the server: a proxy would be measured too.
        self.http = httpx2.AsyncClient(headers=headers, timeout=None, verify=tls or False, trust_env=False, follow_redirects=False)

    async def __aenter__(self) -> Client:
        await self.http.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connections.close()
        await self.http.__aexit__(kind, error, trace)

    async def get(self, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
        """Status and body of a small page; `path` begins at the server's root. Raises OctavoError when it cannot be had."""
        url = self.base.removesuffix("/v1") + path
        try:
            async with asyncio.timeout(timeout), self.http.stream("GET", url) as response:
                return response.status_code, await _read(response)
        except TimeoutError:
            raise OctavoError(f"{url} did not answer within {timeout:g} s") from None
        except httpx2.HTTPError as error:
            raise OctavoError(f"{url} cannot be reached ({_one_line(error) or type(error).__name__}); is the server running?") from None

    async def first_model(self) -> str:
        """The model the server lists first. Raises OctavoError where it lists none."""
        status, body = await self.get("/v1/models")
        if status != 200:
            raise OctavoError(f"{self.base}/models answered {status}: {_reply_message(body)}")
        try:
            name = json.loads(body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            name = None
        if not isinstance(name, str):
            raise OctavoError(f"{self.base}/models lists no model; name one with --model")
        return name

    async def send(self, prompt: Prompt, settings: RequestSettings, record: RequestRecord | None = None) -> RequestRecord:
        """One request, streamed, to its end. A failure is in the record; only cancellation raises.

        Who passes a new `record` can watch the request while it runs.
        """
        record = record or RequestRecord()
        reply = _Reply(StreamParser(record))
        body = json.dumps(settings.body(prompt)).encode()
        record.start = record.end = time.perf_counter()
        try:
            async with asyncio.timeout(settings.timeout):
                await self._connections.post(PATHS[settings.endpoint], body, reply.on_head, reply.on_data)
            reply.finish()
        except TimeoutError:
            self._broken(reply.parser, "timeout", f"after {settings.timeout:g} s")
        except CutError as error:
            self._broken(reply.parser, "cut", error)
        except OSError as error:
            self._broken(reply.parser, "connection", error)
        except httptools.HttpParserError as error:
            self._broken(reply.parser, "malformed", f"no HTTP: {error}")
        except _Enough:
            reply.finish()
        except (ValueError, AttributeError, TypeError, RecursionError) as error:  # JSON of another shape than such a server's
            self._broken(reply.parser, "malformed", error)
        return record

    def _broken(self, parser: StreamParser, kind: str, detail: object) -> None:
        if not parser.done:  # after [DONE] nothing can be missing
            parser.record.end = time.perf_counter()
            parser.record.fail(kind, detail)


def base_url(url: str) -> str:
    """`url` with /v1 and without a slash at its end. Raises ConfigError where it is no such address."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, a name is too long, a bracket does not close
        parts, is_address = urlsplit(""), False
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError("the address may hold no password, query or fragment; put the key into OCTAVO_API_KEY")
    if not is_address:
        raise ConfigError(f"{url!r} is no server's address (write for example http://127.0.0.1:8000)")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else path + '/v1'}"


def error_message(reply: Any) -> str:
    """The message in an OpenAI error object, or the nearest thing to one."""
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _reply_message(body: bytes) -> str:
    try:
        return error_message(json.loads(body))
    except ValueError:
        return body[:200].decode("utf-8", "replace")


async def _read(response: httpx2.Response) -> bytes:
    """The body, up to MAX_REPLY_BYTES of it."""
    body = b""
    async for data in response.aiter_raw():
        body += data
        if len(body) > MAX_REPLY_BYTES:
            break
    return body[:MAX_REPLY_BYTES]


def _count(value: Any, before: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else before


def _one_line(text: object) -> str:
    """At most 200 printable characters."""
    line = " ".join(str(text).split())
    return "".join(character if character.isprintable() else "?" for character in line)[:200]
