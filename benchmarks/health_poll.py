"""How long /health takes to answer while a server is busy with other things, as a process of its own sees it.

Usage: python -m benchmarks.health_poll URL [--every 0.1]; polls until standard input ends, then prints one JSON object.
Not here: the load (load.py).
"""

from __future__ import annotations

import argparse
import http.client
import json
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.statistics import distribution


class HealthPoll:
    """`with HealthPoll(url) as poll:` polls meanwhile; `poll.figures` is there afterwards."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.figures: dict[str, Any] = {}

    def __enter__(self) -> HealthPoll:
        command = [sys.executable, "-m", "benchmarks.health_poll", self._url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has had its first answer
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        out, _ = self._process.communicate(timeout=60)
        self.figures = json.loads(out) if out.strip() else {"failed": "the poll ended with an error"}


def poll(url: str, every: float) -> dict[str, Any]:
    """Milliseconds of each answer until standard input ends, and what did not answer 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    seconds: list[float] = []
    bad: list[str] = []
    due = time.perf_counter()
    while True:
        begin = time.perf_counter()
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                bad.append(str(response.status))
        except (OSError, http.client.HTTPException) as error:
            bad.append(type(error).__name__)
            connection.close()
        seconds.append(time.perf_counter() - begin)
        if len(seconds) == 1:
            print("polling", flush=True)
        due = max(due + every, time.perf_counter())
        if select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
            return {"ms": distribution(seconds), "not_200": bad[:20]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--every", type=float, default=0.1)
    options = parser.parse_args()
    print(json.dumps(poll(options.url, options.every)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
