"""A server for the tests of clients: it answers with whatever bytes a test wants, and remembers what it was sent.

What a connection gets is decided by a function of the request, which yields bytes to send, seconds to wait, or None to
wait until the client hangs up. Nothing here knows HTTP beyond where a request ends, so that broken answers can be played.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Script = Iterator[bytes | float | None]
HANG_LIMIT = 30


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any

    @property
    def said(self) -> str:
        return self.body["messages"][-1]["content"]


class ScriptedServer:
    """Listens on a free port of loopback until `close`; every answer ends its connection."""

    def __init__(self, answer: Callable[[Request], Script]) -> None:
        self._answer = answer
        self.requests: list[Request] = []
        #: One for each client that went away before its answer was complete.
        self.hung_up = threading.Semaphore(0)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(HANG_LIMIT)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(HANG_LIMIT)
            try:
                request = read_request(connection)
                self.requests.append(request)
                for part in self._answer(request):
                    if isinstance(part, bytes):
                        connection.sendall(part)
                    elif not self._wait(connection, HANG_LIMIT if part is None else part):
                        raise ConnectionError
            except (ConnectionError, TimeoutError):
                self.hung_up.release()

    def _wait(self, connection: socket.socket, seconds: float) -> bool:
        """False once the client has hung up."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._closing.is_set():
            connection.settimeout(0.02)
            try:
                if not connection.recv(1):
                    return False
            except TimeoutError:
                continue
            finally:
                connection.settimeout(HANG_LIMIT)
        return True


def read_request(connection: socket.socket) -> Request:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += _more(connection)
    method, path, _ = first.split(" ", 2)
    return Request(method, path, headers, json.loads(body) if body else None)


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionError
    return data


def reply(status: str, body: bytes | str | dict[str, Any] = b"", kind: str = "application/json", headers: str = "") -> bytes:
    """A whole answer; `headers` are lines without the last end."""
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
    return (head + (f"{headers}\r\n" if headers else "") + "\r\n").encode("latin-1") + data


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def piece(text: str | None = None, finish: str | None = None, index: int = 0) -> bytes:
    """An event with a bit of an answer."""
    return event({"choices": [{"index": index, "delta": {} if text is None else {"content": text}, "finish_reason": finish}]})


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": counts})


def error(message: str, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
