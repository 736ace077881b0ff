"""What the server holds under load: many streams at once, thousands of requests, a huge prompt beside running streams.

Usage: .venv/bin/python -m benchmarks.load [--only streams,memory,prompt] [--streams 500] [--requests 5000] [--output FILE]
Three parts, each on a server of its own, /health polled every 100 ms throughout:
  streams   so many open at once with a queue bound of 1,000: all complete, equal questions get equal answers
  memory    short requests in ten portions; resident memory of each process after every portion
  prompt    1 MB of prompt, and 20 MB of body, posted while four streams run: the largest gap between their tokens
Writes results/server_load.json; the exit code is 1 when something that must hold does not.
Not here: speed (batch_sizes.py, speed.py), how requests are sent (octavo.bench).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import RESULTS
from benchmarks.health_poll import HealthPoll
from benchmarks.process_memory import resident_mib
from octavo.bench import record
from octavo.bench.client import Client, RequestRecord, RequestSettings
from octavo.bench.load import Load, LoadResult, run_load
from octavo.bench.own_server import OwnServer
from octavo.bench.prompts import QUESTIONS, of_length
from octavo.bench.report import figures
from octavo.bench.serving import api_key
from octavo.config import EngineConfig

#: What must hold.
MAX_HEALTH_MS, MAX_EXTRA_GAP_MS = 100.0, 200.0
#: Growth of one process's memory from the first tenth of the requests to the last that still counts as flat.
FLAT_SHARE, FLAT_MIB = 0.03, 4.0
PORTIONS = 10


def run(url: str, prompts: Sequence[str], settings: RequestSettings, load: Load) -> LoadResult:
    async def main() -> LoadResult:
        async with Client(url, api_key(url)) as client:
            return await run_load(client, prompts, settings, load)

    return asyncio.run(main())


def most_open(records: Sequence[RequestRecord]) -> int:
    """The most requests that were between their start and their end at one time."""
    changes = sorted([(r.start, 1) for r in records] + [(r.end, -1) for r in records])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def streams(options: argparse.Namespace) -> dict[str, Any]:
    """All streams start at once; the tenth that asks a question must get what the first got."""
    config = EngineConfig(model=options.model, max_waiting_requests=1000, kv_cache_memory=options.kv_cache_memory)
    settings = RequestSettings(options.model, max_tokens=options.stream_tokens, ignore_eos=True, timeout=options.timeout)
    with OwnServer(config) as server, HealthPoll(server.url) as poll:
        result = run(server.url, QUESTIONS, settings, Load(options.streams, options.streams))
    answers: dict[int, set[int]] = {}
    for number, one in enumerate(result.records):
        answers.setdefault(number % len(QUESTIONS), set()).add(one.checksum)
    short = sum(one.output_tokens != options.stream_tokens for one in result.records)
    found = {
        **figures(result),
        "most_open": most_open(result.records),
        "short_answers": short,
        "questions_with_different_answers": sum(len(each) > 1 for each in answers.values()),
        "health": poll.figures,
    }
    lost = found["succeeded"] < options.streams or short or found["questions_with_different_answers"]
    return {**found, "holds": not lost and found["most_open"] == options.streams and _healthy(poll.figures)}


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Ten portions; every fifth goes through the chat template. The pool is small enough to be touched whole by the first."""
    config = EngineConfig(model=options.model, kv_cache_memory="64MiB")
    size, sizes, failed = max(1, options.requests // PORTIONS), [], 0
    with OwnServer(config) as server, HealthPoll(server.url) as poll:
        for portion in range(PORTIONS):
            endpoint: Any = "chat" if portion % 5 == 0 else "completions"
            settings = RequestSettings(options.model, endpoint, options.short_tokens, ignore_eos=True, timeout=options.timeout)
            result = run(server.url, list(map(str, of_length(6, size, seed=portion))), settings, Load(size, 16))
            failed += sum(one.error is not None for one in result.records)
            time.sleep(options.settle)  # aborts, closed connections and the like
            sizes.append({"requests": size * (portion + 1), **resident_mib(server.pid)})
            print(f"  {sizes[-1]}", flush=True)
    roles = [role for role in sizes[0] if role != "requests"]
    growth = {role: round(sizes[-1][role] - sizes[0][role], 2) for role in roles}
    thousands = size * (PORTIONS - 1) / 1000
    flat = all(growth[role] <= max(FLAT_MIB, FLAT_SHARE * sizes[0][role]) for role in roles)
    return {
        "requests": size * PORTIONS,
        "failed": failed,
        "resident_mib": sizes,
        "growth_mib": growth,
        "growth_mib_per_1000_requests": {role: round(value / thousands, 3) for role, value in growth.items()},
        "health": poll.figures,
        "holds": flat and not failed and _healthy(poll.figures),
    }


def prompt(options: argparse.Namespace) -> dict[str, Any]:
    """Four streams; quiet windows and posts in turn. A gap belongs to every window it touches."""
    config = EngineConfig(model=options.model, kv_cache_memory=options.kv_cache_memory)
    with OwnServer(config) as server, HealthPoll(server.url) as poll:
        gaps, replies, records = asyncio.run(_beside_streams(server.url, options))
    extra = {kind: round(gap - gaps["quiet"], 1) for kind, gap in gaps.items() if kind != "quiet"}
    refused = all(400 <= status < 500 for statuses in replies.values() for status in statuses)
    return {
        "largest_gap_ms": gaps,
        "extra_gap_ms": extra,
        "replies": replies,
        "streams_failed": sum(one.error is not None for one in records),
        "health": poll.figures,
        "holds": refused and not any(one.error for one in records) and max(extra.values()) <= MAX_EXTRA_GAP_MS and _healthy(poll.figures),
    }


async def _beside_streams(url: str, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, list[int]], list[RequestRecord]]:
    settings = RequestSettings(options.model, max_tokens=options.long_tokens, ignore_eos=True, timeout=options.timeout)
    bodies = {"1 MB prompt": _body(options.model, options.prompt_bytes), "20 MB body": _body(options.model, options.body_bytes)}
    windows: list[tuple[str, float, float]] = []
    replies: dict[str, list[int]] = {kind: [] for kind in bodies}
    records: list[RequestRecord] = []
    tasks: list[asyncio.Task[RequestRecord]] = []
    async with Client(url, api_key(url)) as client, asyncio.TaskGroup() as group:
        for question in QUESTIONS[:4]:
            records.append(RequestRecord())
            tasks.append(group.create_task(client.send(question, settings, records[-1])))
        while not all(len(one.arrivals) >= 10 or one.error for one in records):
            await asyncio.sleep(0.01)
        for _ in range(options.posts):
            for kind, body in bodies.items():
                await _window("quiet", windows, asyncio.sleep(options.window))
                replies[kind].append(await _window(kind, windows, asyncio.to_thread(post, url, body, options.timeout)))
        if any(one.error is None and one.usage_tokens is not None for one in records):
            raise SystemExit("a stream ended before the last post: raise --long-tokens or lower --posts")
        for task in tasks:  # enough was seen
            task.cancel()
    return _largest_gaps(windows, records), replies, records


async def _window(kind: str, windows: list[tuple[str, float, float]], work: Any) -> Any:
    begin = time.perf_counter()
    result = await work
    windows.append((kind, begin, time.perf_counter()))
    return result


def _largest_gaps(windows: Sequence[tuple[str, float, float]], records: Sequence[RequestRecord]) -> dict[str, float]:
    """Milliseconds of the largest gap of any stream by kind of window."""
    largest: dict[str, float] = {}
    for kind, begin, end in windows:
        for one in records:
            for earlier, later in zip(one.arrivals, one.arrivals[1:], strict=False):
                if earlier < end and later > begin:
                    largest[kind] = max(largest.get(kind, 0.0), round(1000 * (later - earlier), 1))
    return largest


def _body(model: str, size: int) -> bytes:
    words = "the time of the year and the people in it "
    text = (words * (size // len(words) + 1))[:size]
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}).encode()


def post(url: str, body: bytes, timeout: float) -> int:
    """The status of the answer to `body`, 0 where none came; from a thread, so that sending it does not hold up the streams' reader."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    key = api_key(url)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused while it was sent: the answer may be there
            connection.request("POST", "/v1/chat/completions", body, headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _healthy(found: dict[str, Any]) -> bool:
    return bool(found.get("ms")) and not found["not_200"] and found["ms"]["max"] < MAX_HEALTH_MS


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"streams": streams, "memory": memory, "prompt": prompt}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-cache-memory", default="512MiB")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--stream-tokens", type=int, default=16)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--short-tokens", type=int, default=4)
    parser.add_argument("--long-tokens", type=int, default=4000, help="of each of the four streams")
    parser.add_argument("--posts", type=int, default=3, help="posts of each size")
    parser.add_argument("--prompt-bytes", type=int, default=1_000_000)
    parser.add_argument("--body-bytes", type=int, default=20_000_000)
    parser.add_argument("--settle", type=float, default=1.0, help="seconds between a portion of requests and the look at memory")
    parser.add_argument("--window", type=float, default=1.5, help="seconds of each quiet window")
    parser.add_argument("--output", type=Path, default=RESULTS / "server_load.json")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    if not set(chosen) <= PARTS.keys():
        parser.error(f"--only: the parts are {', '.join(PARTS)}")
    before = record.machine()
    results = {}
    for name in chosen:
        print(f"{name} ...", flush=True)
        results[name] = PARTS[name](options)
        print(json.dumps(results[name], indent=2), flush=True)
    method = (
        "each part on a server of its own, /health polled every 100 ms by a process of its own; a part holds where nothing failed, "
        f"/health stayed under {MAX_HEALTH_MS:g} ms, memory grew by at most {FLAT_SHARE:.0%} or {FLAT_MIB:g} MiB, and a post added at most "
        f"{MAX_EXTRA_GAP_MS:g} ms to the largest gap between tokens"
    )
    record.write(options.output, "server_load", "python -m benchmarks.load", method, before, results)
    for name, result in results.items():
        print(f"{name}: {'holds' if result['holds'] else 'DOES NOT HOLD'}")
    return 0 if all(result["holds"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
