"""An engine under comparison in a process of its own: started, asked, watched and ended.

Owner of that process and of everything below it: gone when `stop` returns, however it behaved. Every wait has a limit, and
what it answers is checked like any other foreign input. Not here: what runs in it (peers/), what is asked (comparison.py).
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from octavo.errors import OctavoError

PEERS = Path(__file__).with_name("peers")
#: An answer longer than this is none: the times and ids of 1000 sequences of 1000 tokens take less.
MAX_ANSWER = 64 << 20
#: Seconds a process has to end by itself when its input ends.
STOP_TIMEOUT = 5.0
#: Variables that would let one engine see another's packages, or hand it a secret.
_WITHHELD = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD", "OCTAVO_API_KEY", "OPENAI_API_KEY", "HF_TOKEN")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class PeerError(OctavoError):
    """What kept an engine from being measured, in one line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: its name in the tables, the interpreter that has it, the file of peers/ that drives it, what it loads."""

    name: str
    python: str
    script: Path
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine must be able to hold. kv_tokens: of all sequences together."""

    threads: int
    max_len: int
    max_batch: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """seconds: imports and loading, as measured inside; start: from the start of the process to ready, as seen from here."""

    versions: dict[str, str]
    vocab_size: int
    seconds: float
    start: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one batch: token ids and seconds from its start, one list a request."""

    ids: list[list[int]]
    times: list[list[float]]


class PeerProcess:
    """A running engine. Every method raises PeerError; after one the process is gone."""

    def __init__(self, peer: Peer, threads: int) -> None:
        self.peer = peer
        self.started = time.perf_counter()
        environment = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
        environment |= dict.fromkeys(_THREADS, str(threads))
        environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._socket, theirs = socket.socketpair()
        self._buffer = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        command = [peer.python, "-I", str(PEERS / "runner.py"), str(peer.script)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._errors, env=environment, start_new_session=True
                )
        except OSError as error:
            self.stop()
            raise PeerError(f"{peer.python} does not start: {error.strerror}") from None

    def load(self, limits: Limits, timeout: float) -> Loaded:
        wanted = {name: getattr(limits, name) for name in Limits.__slots__}
        answer = self._ask({"op": "load", "model": self.peer.model, "limits": wanted, "options": dict(self.peer.options)}, timeout)
        start = time.perf_counter() - self.started
        versions, vocab, seconds = answer.get("versions"), answer.get("vocab_size"), answer.get("seconds")
        if not isinstance(versions, dict) or not _is_int(vocab, 2, 1 << 24) or not _is_seconds(seconds, start):
            raise self._refused("an answer to load that is none")
        texts = {str(name)[:50]: str(value)[:400] for name, value in list(versions.items())[:20]}
        return Loaded(texts, vocab, float(seconds), start)

    def run(self, prompts: Sequence[Sequence[int]], tokens: int, timeout: float) -> Answer:
        """Every request must have got exactly `tokens` tokens, at times that rise and fit into the time it took from here."""
        begin = time.perf_counter()
        answer = self._ask({"op": "run", "prompts": prompts, "tokens": tokens}, timeout)
        took = time.perf_counter() - begin
        ids, times = answer.get("ids"), answer.get("times")
        if not isinstance(ids, list) or not isinstance(times, list) or len(ids) != len(prompts) or len(times) != len(prompts):
            raise self._refused("an answer to run that is none")
        for own, moments in zip(ids, times, strict=True):
            if not isinstance(own, list) or not isinstance(moments, list) or len(own) != tokens or len(moments) != tokens:
                count = len(own) if isinstance(own, list) else "no"
                raise self._refused(f"{count} tokens where {tokens} were asked for: not the same work")
            if not all(_is_int(token, 0, 1 << 24) for token in own):
                raise self._refused("tokens that are none")
            if not all(_is_seconds(moment, took) for moment in moments) or sorted(moments) != moments:
                raise self._refused(f"times that do not rise, or lie outside the {took:.3f} s it took")
        return Answer(ids, times)

    def memory_mib(self) -> dict[str, float]:
        """Peak resident memory of the process and those below it, and what of it is its own now (not pages of mapped files)."""
        peak = own = 0
        for pid in self._pids():
            fields = _status(pid)
            peak += fields.get("VmHWM", 0)
            own += fields.get("RssAnon", 0)
        return {"peak": round(peak / 1024, 1), "anonymous": round(own / 1024, 1)}

    def cpu_seconds(self) -> float:
        """Processor time taken so far by the process and those below it."""
        return sum(_cpu_seconds(pid) for pid in self._pids())

    def stop(self) -> None:
        """End it: by the end of its input, else by force, its children with it. Stopping twice is nothing."""
        self._socket.close()
        process, self._process = self._process, None
        if process is not None:
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT)
            finally:
                with suppress(ProcessLookupError):  # the group outlives its leader where a child was left behind
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._errors.close()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        if self._process is None:
            raise PeerError("it has ended")
        deadline = time.monotonic() + timeout
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._read_line(deadline)
        except TimeoutError:
            raise self._refused(f"no answer to {request['op']} within {timeout:g} s: ended") from None
        except OSError:
            raise self._refused(f"it ended: {self._last_words()}") from None
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise self._refused("an answer that is no JSON") from None
        if not isinstance(answer, dict):
            raise self._refused("an answer that is no object")
        if "error" in answer:
            raise self._refused(_one_line(str(answer["error"])))
        return answer

    def _read_line(self, deadline: float) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_ANSWER:
                raise self._refused(f"an answer of more than {MAX_ANSWER >> 20} MiB")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise ConnectionResetError
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _refused(self, reason: str) -> PeerError:
        self._kill()
        self.stop()
        return PeerError(reason)

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        lines = [line.strip() for line in self._errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
        code = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1)
        return _one_line(lines[-1]) if lines else f"exit code {code}"

    def _pids(self) -> list[int]:
        """The process and its descendants, found by their session, which it leads."""
        if self._process is None:
            return []
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                # "pid (name) state ppid pgrp session ...": the name may hold spaces and brackets
                if int(entry.read_text("utf-8", "replace").rpartition(")")[2].split()[3]) == self._process.pid:
                    found.append(int(entry.parent.name))
            except (OSError, ValueError, IndexError):
                continue
        return found


def _status(pid: int) -> dict[str, int]:
    """KiB by name, from /proc/PID/status."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines) if value.endswith(" kB")}


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_int(value: Any, low: int, high: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_seconds(value: Any, most: float) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and 0 < value <= most


def _one_line(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
