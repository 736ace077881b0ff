"""A server that does exactly what it is told, when it is told, and remembers what it did: the oracle of the benchmark client.

A request's model is its script, "name key=value ...": for example "steady first=0.05 gap=0.01 tokens=5". Times are
perf_counter, which is one clock for all threads and processes. Run as a program it prints its address and serves until
standard input ends. Written on asyncio streams alone, so that it shares no code with what it tests.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from dataclasses import dataclass, field


@dataclass
class Seen:
    """One request as the server saw it."""

    path: str
    headers: dict[str, str]
    body: dict
    received: float
    #: When each token piece was handed to the operating system.
    written: list[float] = field(default_factory=list)
    #: The client went away before the reply was complete.
    hung_up: bool = False


class ScriptedServer:
    """`with ScriptedServer() as server:` serves from a thread; without `with`, `await server.start()` in a loop of one's own."""

    def __init__(self):
        self.requests: list[Seen] = []
        self.open = self.most_open = 0
        self.pages = {"/v1/models": (200, {"object": "list", "data": [{"id": "steady"}]})}
        self._ready = threading.Event()
        self._loop = self._stopping = None

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self):
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc_info):
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _run(self):
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        await self.start()
        self._ready.set()
        await self._stopping.wait()
        self._server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _serve(self, reader, writer):
        try:
            while (request := await self._read(reader)) is not None:
                await self._answer(*request, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @staticmethod
    async def _read(reader):
        head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
        if not head:
            return None
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return first.split()[1], headers, json.loads(body) if body else {}

    async def _answer(self, path, headers, body, writer):
        if not path.endswith("completions"):
            status, page = self.pages.get(path, (404, {"error": {"message": "no such page"}}))
            return await self._page(writer, status, page)
        seen = Seen(path, headers, body, time.perf_counter())
        self.requests.append(seen)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            name, *settings = body["model"].split()
            await getattr(self, f"_{name}")(seen, writer, **{k: float(v) for k, v in (one.split("=") for one in settings)})
        except ConnectionError:
            seen.hung_up = True
            raise
        finally:
            self.open -= 1

    @staticmethod
    async def _page(writer, status, page, extra=""):
        data = page if isinstance(page, bytes) else json.dumps(page).encode()
        kind = "text/plain" if isinstance(page, bytes) else "application/json"
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n{extra}\r\n".encode() + data)
        await writer.drain()

    # -- scripts -------------------------------------------------------------------------------------------------------
    async def _stream(self, seen, writer, first, gap, tokens, each=1, logprobs=0, role=True):
        """The head and the pieces: `tokens` of them after `first` seconds and `gap` apart, `each` tokens in a piece."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")
        if role:
            self._chunk(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number in range(int(tokens)):
            await until(seen.received + first + number * gap)
            text = "word " * int(each)
            choice = {"index": 0, "finish_reason": None}
            choice |= {"text": text} if seen.path == "/v1/completions" else {"delta": {"content": text}}
            if logprobs:
                choice["logprobs"] = {"content": [{"token": "word ", "logprob": -1.0}] * int(each)}
            seen.written.append(time.perf_counter())
            self._chunk(writer, {"choices": [choice], "usage": None})
            await writer.drain()

    @staticmethod
    def _chunk(writer, event):
        data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _end(self, writer, usage=None, done=True, reason="length"):
        if reason:
            self._chunk(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if usage is not None:
            self._chunk(writer, {"choices": [], "usage": usage})
        if done:
            self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    async def _steady(self, seen, writer, first=0.0, gap=0.0, tokens=4, each=1, usage=1, logprobs=0, done=1, finish=1, role=1):
        await self._stream(seen, writer, first, gap, tokens, each, logprobs, role)
        count = {"prompt_tokens": 7, "completion_tokens": int(tokens * each), "prompt_tokens_details": {"cached_tokens": 3}}
        self._end(writer, count if usage else None, bool(done), "length" if finish else None)
        await writer.drain()

    async def _status(self, seen, writer, code=500):
        error = {"error": {"message": f"scripted {int(code)}\nsecond line", "type": "x"}}
        await self._page(writer, int(code), error, "retry-after: 1\r\n" if code == 429 else "")

    async def _cut(self, seen, writer, tokens=2):
        await self._stream(seen, writer, 0, 0, tokens)
        raise ConnectionAbortedError  # closed in the middle of the chunked body

    async def _stall(self, seen, writer, tokens=2):
        await self._stream(seen, writer, 0, 0, tokens)
        await asyncio.sleep(600)

    async def _silent(self, seen, writer):
        await asyncio.sleep(600)

    async def _refusing(self, seen, writer, tokens=2):
        await self._stream(seen, writer, 0, 0, tokens)
        self._chunk(writer, {"error": {"message": "the engine died", "code": 500}})
        writer.write(b"0\r\n\r\n")

    async def _nonsense(self, seen, writer):
        await self._stream(seen, writer, 0, 0, 1)
        self._chunk(writer, b"data: {not json\n\n")
        writer.write(b"0\r\n\r\n")

    async def _shapes(self, seen, writer):
        await self._stream(seen, writer, 0, 0, 1)
        self._chunk(writer, {"choices": ["no object"]})
        writer.write(b"0\r\n\r\n")

    async def _nested(self, seen, writer):
        await self._stream(seen, writer, 0, 0, 1)
        self._chunk(writer, b"data: " + b"[" * 100_000 + b"\n\n")
        writer.write(b"0\r\n\r\n")

    async def _endless(self, seen, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(100):
            self._chunk(writer, b"x" * (1 << 16))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def _whole(self, seen, writer):
        await self._page(writer, 200, {"choices": [{"message": {"content": "not streamed"}}]})


async def until(due):
    """Never returns before `due`."""
    while (left := due - time.perf_counter()) > 0:
        await asyncio.sleep(left)


async def _main():
    server = ScriptedServer()
    await server.start()
    print(server.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps([{"received": seen.received, "written": seen.written} for seen in server.requests]), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
