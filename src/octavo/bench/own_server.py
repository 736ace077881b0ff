"""A server of ours in a process of its own, started for a measurement and stopped after it.

Owner of that process: it is gone when the `with` block is left, however it is left.
Not here: the server (server/), the load (load.py).
"""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from types import TracebackType
from typing import IO, Any

from octavo.bench.record import OCTAVO
from octavo.config import EngineConfig
from octavo.errors import OctavoError

#: The server prints its address when it listens.
_ADDRESS = re.compile(r"https?://[\w.\-]+:\d+|https?://\[[0-9a-fA-F:]+\]:\d+")
#: Seconds to load a model and become ready, and to end after SIGTERM.
START_TIMEOUT, STOP_TIMEOUT = 600.0, 40.0


def flags(config: EngineConfig) -> list[str]:
    """The configuration but for the model as flags, every setting named: nothing is left to the new process's environment."""
    found = []
    for field in fields(EngineConfig):
        if field.name == "model":  # an argument
            continue
        value, flag = getattr(config, field.name), "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else "--no-" + flag[2:])
        elif value not in (None, ""):
            found += [flag, str(value)]
    return found


class OwnServer:
    """`with OwnServer(config) as server:` runs `octavo serve` on a free port of 127.0.0.1 and waits until it is ready."""

    def __init__(self, config: EngineConfig, extra: Sequence[str] = (), program: Sequence[str] = OCTAVO) -> None:
        self.command = [*program, "serve", *flags(config), "--host", "127.0.0.1", "--port", "0", *extra, "--", config.model]
        self.url = ""
        self._process: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=50)
        self._address = threading.Event()
        self._previous: Any = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> OwnServer:
        # A session of its own: Ctrl-C reaches this process, which then ends the server. SIGTERM is made to do the same.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, _exit)
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            assert self._process.stdout is not None
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
            self._wait(time.monotonic() + START_TIMEOUT)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server: politely, then not. Stopping twice is nothing."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _read(self, stream: IO[str]) -> None:
        """Keep the last lines, for an error; find the address. Reads to the end, or the server would block on a full pipe."""
        for line in stream:
            self._lines.append(line.rstrip())
            found = None if self._address.is_set() else _ADDRESS.search(line)
            if found:
                self.url = found[0]
                self._address.set()

    def _wait(self, deadline: float) -> None:
        while not (self._address.wait(0.05) and self._is_ready()):
            assert self._process is not None
            if self._process.poll() is not None:
                raise OctavoError(f"octavo serve ended while it started: {' | '.join(list(self._lines)[-3:]) or 'it said nothing'}")
            if time.monotonic() > deadline:
                raise OctavoError(f"octavo serve was not ready within {START_TIMEOUT:g} s")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.url + "/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _exit(signum: int, frame: object) -> None:
    raise SystemExit(143)
