"""When requests start: so many at once, or at random times; and everything that came back.

With a fixed concurrency a request starts when another ends, so a slow server is asked less. With a rate, requests arrive
as in a Poisson process, whatever the server does; `concurrency` then only bounds how many are open.
Owner of a run's tasks: none is left when `run_load` returns or raises. Not here: one request (client.py), figures (report.py).
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.bench.client import Client, Prompt, RequestRecord, RequestSettings
from octavo.errors import OctavoError

Done = Callable[[RequestRecord], object]


@dataclass(frozen=True, slots=True)
class Load:
    requests: int = 50
    #: Most requests open at once; None: no limit (only with a rate).
    concurrency: int | None = 8
    #: Requests a second, arriving at random; None: as fast as the concurrency allows.
    rate: float | None = None
    seed: int = 0


@dataclass(slots=True)
class LoadResult:
    #: In the order they were started.
    records: list[RequestRecord]
    #: From the first start to the last end, seconds.
    duration: float
    #: CPU time this process used meanwhile, seconds: the client's own cost.
    client_cpu: float
    #: With a rate: the longest a request started after its time, seconds.
    late: float = 0.0


async def run_load(
    client: Client, prompts: Sequence[Prompt], settings: RequestSettings, load: Load, done: Done | None = None
) -> LoadResult:
    """Send `load.requests` requests, prompt i of the run being prompts[i modulo their number]. `done` is called after each."""
    records = [RequestRecord() for _ in range(load.requests)]
    late = [0.0]

    async def one(number: int) -> None:
        records[number] = await client.send(prompts[number % len(prompts)], settings)
        if done is not None:
            done(records[number])

    with _quiet_collector():
        cpu = time.process_time()
        if load.rate is None:
            await _closed_loop(one, load.requests, load.concurrency or 1)
        else:
            late[0] = await _arrivals(one, load, load.rate)
        cpu = time.process_time() - cpu
    duration = max(record.end for record in records) - min(record.start for record in records)
    return LoadResult(records, duration, cpu, late[0])


async def warm_up(client: Client, prompt: Prompt, settings: RequestSettings, count: int) -> None:
    """`count` requests at once that do not count. Raises OctavoError when one fails: the run would only repeat it."""
    for record in await asyncio.gather(*(client.send(prompt, settings) for _ in range(count))):
        if record.error is not None:
            raise OctavoError(f"a first request failed ({record.error}): {record.detail}")


async def _closed_loop(one: Callable[[int], Awaitable[None]], requests: int, concurrency: int) -> None:
    numbers = iter(range(requests))

    async def worker() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, requests)):
            group.create_task(worker())


async def _arrivals(one: Callable[[int], Awaitable[None]], load: Load, rate: float) -> float:
    """Start each request at its time; the longest delay of a start that was free to happen."""
    room = asyncio.Semaphore(load.concurrency or load.requests)
    late = 0.0

    async def guarded(number: int) -> None:
        async with room:
            await one(number)

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, due in enumerate(arrival_times(load.requests, rate, load.seed)):
            await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
            late = max(late, time.perf_counter() - begin - due)
            group.create_task(guarded(number))
    return late


def arrival_times(requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start: the gaps are exponential with mean 1/rate, the first request comes at once."""
    rng, now, times = random.Random(seed), 0.0, [0.0]
    for _ in range(requests - 1):
        now += rng.expovariate(rate)
        times.append(now)
    return times[:requests]


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """What is alive now is never looked at by the garbage collector, so that its pauses stay far below a gap."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
