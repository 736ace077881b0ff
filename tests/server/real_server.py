"""`octavo serve` as a user runs it: a process, its children, its log, its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx2

T = TypeVar("T")

#: A hang limit, never a measure.
PATIENCE = 60.0


def wait_for(condition: Callable[[], T], what: str, timeout: float = PATIENCE) -> T:
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"no {what} within {timeout:.0f} s"
        time.sleep(0.02)
    return value


class RealServer:
    def __init__(self, *arguments: str, **environment: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_") or name == "OCTAVO_ALLOW_REFERENCE"}
        command = [sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0", "--kv-cache-memory", "256MiB", *arguments]
        self.process = subprocess.Popen(command, env=env | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.output: list[str] = []
        self._readers = [
            threading.Thread(target=lambda stream=stream, lines=lines: lines.extend(iter(stream.readline, "")), daemon=True)
            for stream, lines in ((self.process.stderr, self.lines), (self.process.stdout, self.output))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        def found() -> re.Match[str] | None:
            assert self.process.poll() is None or "listening on" in self.log, f"it ended: {self.log}"
            return re.search(r"listening on (http://\S+)", self.log)

        return wait_for(found, "URL in the log")[1]

    def wait_ready(self) -> RealServer:
        def ready() -> bool:
            assert self.process.poll() is None, f"it ended: {self.log}"
            return "is ready after" in self.log

        wait_for(ready, "ready line in the log")
        return self

    def get(self, path: str, **kwargs) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=PATIENCE, trust_env=False, **kwargs)

    def post(self, path: str, body: object, **kwargs) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=PATIENCE, trust_env=False, **kwargs)

    def metric(self, name: str) -> float:
        """The sum of the samples of this exact name."""
        page = self.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))

    def is_idle(self) -> bool:
        names = ("octavo_requests_running", "octavo_requests_waiting", "octavo_kv_cache_usage_ratio")
        return all(self.metric(name) == 0 for name in names)

    def children(self) -> dict[int, str]:
        """pid -> command line of the processes it started and that are alive."""
        found = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words:
                    found[pid] = words
        return found

    def core_pid(self) -> int:
        return next(pid for pid, words in self.children().items() if "octavo.core_process" in words)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return status


@contextmanager
def real_server(*arguments: str, **environment: str) -> Iterator[RealServer]:
    server = RealServer(*arguments, **environment)
    try:
        yield server.wait_ready()
    finally:
        children = server.children() if server.process.poll() is None else {}
        server.end()
        assert not alive(children), "it left processes behind"


def alive(pids: object) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
