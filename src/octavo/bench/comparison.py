"""The same work on our engine and on others, in turn: ours, peer A, peer B, ours, ...

An engine is a process (peer_process.py). One works at a time; the others wait for their input, and the processor time they
take meanwhile is measured, since a thread that spins there would slow down the one that works. Each round has its own
random prompts, the same for every engine, so that nobody's prefix cache knows them.
A round of `compare` is every item of work on every engine; one round goes first and does not count. With `one_at_a_time`
a single process lives at any moment, started anew each round, for models that do not fit into memory twice.
An engine that fails is left out from there on; its error is its result.
Not here: what the flags mean (peer_choice.py), rates (work.py), figures and tables (comparison_report.py).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from octavo.bench.peer_process import Limits, Peer, PeerError, PeerProcess
from octavo.bench.work import Work, rate
from octavo.errors import OctavoError

#: Seconds between two engines' work: threads of an OpenMP runtime spin for up to 0.2 s after the last region.
SETTLE = 0.3
#: Prompt of the first request of a start, tokens.
FIRST_PROMPT = 8
#: A sequence's room is rounded up to this many tokens: no engine here has larger blocks.
_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """The first of `peers` is ours. `starts`: starts that count, each a new process. Limits in seconds."""

    peers: Sequence[Peer]
    work: Sequence[Work]
    rounds: int
    threads: int
    starts: int = 1
    one_at_a_time: bool = False
    seed: int = 0
    load_timeout: float = 900.0
    timeout: float = 600.0
    settle: float = SETTLE

    @property
    def limits(self) -> Limits:
        def length(work: Work) -> int:
            return -(-(work.prompt_tokens + work.tokens) // _BLOCK) * _BLOCK

        return Limits(
            self.threads,
            max(map(length, self.work)),
            max(work.batch_size for work in self.work),
            max(length(work) * work.batch_size for work in self.work),
        )


@dataclass(slots=True)
class EngineResult:
    """What one engine gave. `rates`: tokens a second by work and round; a round it did not reach is missing."""

    peer: Peer
    error: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    vocab_size: int = 0
    load: list[float] = field(default_factory=list)
    #: Seconds from the start of the process to the first token.
    cold_start: list[float] = field(default_factory=list)
    rates: dict[Work, dict[int, float]] = field(default_factory=dict)
    #: First tokens by (work, round), to see that all run the same model.
    first_tokens: dict[tuple[Work, int], list[int]] = field(default_factory=dict)
    #: MiB: highest peak of any of its processes.
    memory: dict[str, float] = field(default_factory=dict)
    #: (processor seconds, wall seconds) while it worked, and while another did.
    busy: list[float] = field(default_factory=lambda: [0.0, 0.0])
    idle: list[float] = field(default_factory=lambda: [0.0, 0.0])


class _Comparison:
    """Owner of the processes while it runs."""

    def __init__(self, plan: Plan, done: Callable[[], object]) -> None:
        self.plan = plan
        self.done = done
        self.results = [EngineResult(peer) for peer in plan.peers]
        self.processes: dict[int, PeerProcess] = {}

    def start(self, number: int, counts: bool) -> None:
        """A new process: load, and one token. Nothing where the engine has failed before."""
        result, plan = self.results[number], self.plan
        if result.error is not None:
            return
        try:
            process = self.processes[number] = PeerProcess(result.peer, plan.threads)
            loaded = process.load(plan.limits, plan.load_timeout)
            result.versions, result.vocab_size = loaded.versions, loaded.vocab_size
            process.run([list(range(1, FIRST_PROMPT + 1))], 1, plan.timeout)
            if counts:
                result.load.append(loaded.seconds)
                result.cold_start.append(time.perf_counter() - process.started)
        except PeerError as error:
            self.fail(number, str(error))

    def stop(self, number: int) -> None:
        process = self.processes.pop(number, None)
        if process is not None:
            memory, seen = process.memory_mib(), self.results[number].memory
            for name in memory:
                seen[name] = max(seen.get(name, 0.0), memory[name])
            process.stop()

    def stop_all(self) -> None:
        for number in list(self.processes):
            self.stop(number)

    def fail(self, number: int, reason: str) -> None:
        self.results[number].error = reason
        process = self.processes.pop(number, None)
        if process is not None:
            process.stop()

    def measure(self, number: int, work: Work, round_number: int, key: str) -> None:
        """One item on one engine; round 0 does not count. Nothing where the engine has failed."""
        process = self.processes.get(number)
        if process is not None:
            prompts = self.prompts(work, round_number, key)
            others = {other: running.cpu_seconds() for other, running in self.processes.items() if other != number}
            before, begin = process.cpu_seconds(), time.perf_counter()
            try:
                answer = process.run(prompts, work.tokens, self.plan.timeout)
                seconds = time.perf_counter() - begin
                value = rate(work, answer.times)
            except OctavoError as error:
                self.fail(number, f"{work.name}: {error}")
            else:
                result = self.results[number]
                if round_number:
                    result.rates.setdefault(work, {})[round_number] = value
                    result.first_tokens[work, round_number] = [ids[0] for ids in answer.ids]
                    _add(result.busy, process.cpu_seconds() - before, seconds)
                    for other, cpu in others.items():
                        _add(self.results[other].idle, self.processes[other].cpu_seconds() - cpu, seconds)
            time.sleep(self.plan.settle)
        self.done()

    def prompts(self, work: Work, round_number: int, key: str) -> list[list[int]]:
        """Random ids without the special ones, which stand at a vocabulary's ends; the same for every engine."""
        vocabulary = min(result.vocab_size for result in self.results if result.vocab_size)
        seed = [self.plan.seed, round_number, self.plan.work.index(work), *key.encode()]
        low, high = min(1000, vocabulary // 4), max(vocabulary * 4 // 5, 2)
        return [row.tolist() for row in np.random.default_rng(seed).integers(low, high, (work.batch_size, work.prompt_tokens))]

    def together(self) -> None:
        numbers, plan = range(len(self.results)), self.plan
        for _ in range(plan.starts - 1):
            for number in numbers:
                self.start(number, counts=True)
                self.stop(number)
        for number in numbers:
            self.start(number, counts=True)
        for round_number in range(plan.rounds + 1):
            for work in plan.work:
                for number in numbers:
                    self.measure(number, work, round_number, "count")

    def one_at_a_time(self) -> None:
        for round_number in range(1, self.plan.rounds + 1):
            for number in range(len(self.results)):
                self.start(number, counts=True)
                for work in self.plan.work:
                    self.measure(number, work, 0, f"warm {round_number}")
                    self.measure(number, work, round_number, "count")
                self.stop(number)

    def first_starts(self) -> None:
        """Files come into the page cache, and an engine that does not start is found before hours are spent."""
        for number in range(len(self.results)):
            self.start(number, counts=False)
            self.stop(number)


def compare(plan: Plan, done: Callable[[], object] = lambda: None) -> list[EngineResult]:
    """Results in the order of `plan.peers`. `done` is called `steps(plan)` times. Every process has ended when it returns."""
    comparison = _Comparison(plan, done)
    try:
        comparison.first_starts()
        if plan.one_at_a_time:
            comparison.one_at_a_time()
        else:
            comparison.together()
    finally:
        comparison.stop_all()
    return comparison.results


def steps(plan: Plan) -> int:
    rounds = 2 * plan.rounds if plan.one_at_a_time else plan.rounds + 1
    return rounds * len(plan.work) * len(plan.peers)


def read_through(path: Path) -> None:
    """Bring a model's files into the page cache, as far as memory goes."""
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with file.open("rb", buffering=0) as data:
            while data.read(1 << 24):
                pass


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM leave the block as Ctrl-C does, so that no engine is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(signum: int, frame: object) -> None:
    raise SystemExit(143)


def _add(pair: list[float], cpu: float, wall: float) -> None:
    pair[0] += cpu
    pair[1] += wall
