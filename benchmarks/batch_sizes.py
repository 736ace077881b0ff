"""Batch sizes matter: requests a second of a server whose decode batch holds 1, 4 or 8 requests, under the same load.

Usage: .venv/bin/python -m benchmarks.batch_sizes [--rounds 3] [--sizes 1,4,8] [--requests 50] [--concurrency 8]
                                                  [--max-tokens 128] [--stream-interval 1] [--output FILE.json] [--plot FILE.svg]
Each round starts a new server for each size, in turn (1, 4, 8, 1, 4, 8, ...), so that a machine that is busy for a while
disturbs all sizes alike and no prefix is left from the round before. Writes results/batch_sizes.json and .svg.
Not here: how a server is loaded and measured (octavo.bench.serving); speed without a server (speed.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from octavo.bench import plot, record
from octavo.bench.client import RequestRecord
from octavo.bench.load import Load
from octavo.bench.own_server import OwnServer
from octavo.bench.serving import Measured, Measurement, measure
from octavo.bench.statistics import summary
from octavo.config import EngineConfig

#: Figures of single runs that are kept beside the rates, in milliseconds.
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def of_size(runs: list[Measured]) -> dict[str, Any]:
    """What all runs with one batch size say: rates with their runs, latencies as medians over runs, histograms added up."""
    figures = [run.figures for run in runs]
    steps: dict[str, int] = {}
    for run in runs:
        for size, count in (run.batches or {}).items():
            steps[size] = steps.get(size, 0) + count
    found: dict[str, Any] = {
        "requests_per_s": summary([run["requests_per_s"] for run in figures]),
        "output_tokens_per_s": summary([run["output_tokens_per_s"] for run in figures], 2),
        "success_rate": min(run["success_rate"] for run in figures),
        "batch_size_steps": steps,
        "batch_size_mean": [run["server"]["batch_size_mean"] for run in figures],
        "client_cpu_share": max(run["client"]["cpu_share"] for run in figures),
    }
    for name in LATENCIES:
        found[name] = {q: round(statistics.median(run[name][q] for run in figures), 3) for q in ("mean", "p50", "p95", "p99")}
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="1,4,8", help="values of max_decode_batch_size (default 1,4,8)")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-cache-memory", default="512MiB")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens the server gathers before it sends them on (default 1)")
    parser.add_argument("--output", type=Path, default=RESULTS / "batch_sizes.json")
    parser.add_argument("--plot", type=Path, default=None, help="default: beside the output")
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.sizes.split(",")]
    figure = options.plot or options.output.with_suffix(".svg")
    plot.check(figure)
    before = record.machine()
    what = Measurement(Load(options.requests, options.concurrency), max_tokens=options.max_tokens)
    runs: dict[int, list[Measured]] = {size: [] for size in sizes}
    for number in range(options.rounds):
        for size in sizes:
            config = EngineConfig(model=options.model, max_decode_batch_size=size, kv_cache_memory=options.kv_cache_memory)
            with OwnServer(config, ["--stream-interval", str(options.stream_interval)]) as server:
                run = measure(server.url, what)
            runs[size].append(run)
            print(f"round {number + 1}, batch {size}: {run.figures['requests_per_s']:.3f} requests/s", flush=True)
            if run.figures["success_rate"] < 1:
                print(f"requests failed: {run.figures['errors']}", file=sys.stderr)
                return 1
    results: dict[str, Any] = {str(size): of_size(found) for size, found in runs.items()}
    first, last = results[str(min(sizes))], results[str(max(sizes))]
    ratios = [b / a for a, b in zip(first["requests_per_s"]["runs"], last["requests_per_s"]["runs"], strict=True)]
    results["ratio"] = {"sizes": [max(sizes), min(sizes)], "requests_per_s": summary(ratios, 3)}
    method = (
        f"requests/s; {options.requests} requests at concurrency {options.concurrency}, {options.max_tokens} tokens each; {options.rounds} "
        f"rounds, the sizes in turn, a new server each; stream_interval {options.stream_interval}; "
        "the ratio is of the two runs of one round"
    )
    command = " ".join(["python -m benchmarks.batch_sizes", *(sys.argv[1:] if arguments is None else arguments)])
    record.write(options.output, "batch_sizes", command, method, before, results)
    series: list[plot.Series] = []
    for size in sizes:
        records: list[RequestRecord] = [one for run in runs[size] for one in run.records]
        series.append((f"max_decode_batch_size {size}", records, results[str(size)]["batch_size_steps"]))
    plot.save(figure, f"{options.model}, concurrency {options.concurrency}, {options.max_tokens} tokens", series)
    print(f"{max(sizes)} against {min(sizes)}: {results['ratio']['requests_per_s']['median']:.2f} times the requests a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
