"""What the benchmark's own client costs: how late it sees a token, and how much of a core it needs for each.

Usage: .venv/bin/python -m benchmarks.client_overhead [--streams 8] [--tokens 200] [--gap 0.01] [--rounds 5] [--output FILE]
A scripted server (tests/bench/scripted_server.py) in a process of its own writes tokens at known times, and reports
them; both processes read the same clock. Needs the checkout, not the engine. Not here: measuring a real server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from octavo.bench import record
from octavo.bench.client import Client, RequestSettings
from octavo.bench.load import Load, LoadResult, run_load
from octavo.bench.statistics import distribution, summary


def one_round(streams: int, tokens: int, gap: float) -> tuple[LoadResult, list[float]]:
    """The client's result, and for every token the seconds from its being written to its being seen."""
    command = [sys.executable, "-m", "tests.bench.scripted_server"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    settings = RequestSettings(f"steady first=0.05 gap={gap} tokens={tokens}")

    async def main() -> LoadResult:
        async with Client(url) as client:
            return await run_load(client, ["Hello"], settings, Load(streams, streams))

    try:
        result = asyncio.run(main())
    finally:
        out, _ = server.communicate(timeout=60)
    # requests reach the server in the order of their start, or nearly: match each with the one whose first token fits
    seen = sorted(json.loads(out), key=lambda one: one["written"][0])
    known = sorted(result.records, key=lambda one: one.arrivals[0])
    return result, [
        a - w for one, server_side in zip(known, seen, strict=True) for a, w in zip(one.arrivals, server_side["written"], strict=True)
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--gap", type=float, default=0.01, help="seconds between the tokens of one stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "client_overhead.json")
    options = parser.parse_args(arguments)
    before = record.machine()
    runs = [one_round(options.streams, options.tokens, options.gap) for _ in range(options.rounds)]
    tokens = options.streams * options.tokens
    results: dict[str, Any] = {
        "tokens_per_s": summary([tokens / result.duration for result, _ in runs], 1),
        "cpu_us_per_token": summary([1e6 * result.client_cpu / tokens for result, _ in runs], 1),
        "cpu_share": summary([result.client_cpu / result.duration for result, _ in runs], 4),
        "seen_after_ms": distribution([late for _, each in runs for late in each]),
    }
    method = (
        f"{options.rounds} rounds of {options.streams} streams, a token every {1000 * options.gap:g} ms each; sending requests included"
    )
    record.write(options.output, "client_overhead", "python -m benchmarks.client_overhead", method, before, results)
    print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
