"""Figures of one run of a load: plain data for JSON, and a table for people.

Definitions follow vLLM's benchmark_serving and are written down in docs/benchmarks.md. Latencies are of the requests that
succeeded, in milliseconds; rates are over the time from the first start to the last end.
Stateless. Not here: plots (plot.py), files (record.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.bench.load import LoadResult
from octavo.bench.statistics import PERCENTILES, distribution

if TYPE_CHECKING:
    from rich.table import Table

LATENCIES = {
    "ttft_ms": "time to first token (TTFT)",
    "tpot_ms": "time per output token (TPOT)",
    "itl_ms": "between tokens (ITL)",
    "e2el_ms": "whole request (E2EL)",
}


def figures(result: LoadResult) -> dict[str, Any]:
    """Everything one run says about the server. A latency nobody had is None."""
    good = [record for record in result.records if record.error is None]
    failed = [record for record in result.records if record.error is not None]
    output, pieces = sum(record.output_tokens for record in good), sum(len(record.arrivals) for record in good)
    reads = sum(len(set(record.arrivals)) for record in good)
    prompt = sum(record.prompt_tokens or 0 for record in good)
    duration = max(result.duration, 1e-9)
    return {
        "requests": len(result.records),
        "succeeded": len(good),
        "success_rate": round(len(good) / len(result.records), 4),
        "errors": {
            kind: {"count": count, "example": next(r.detail for r in failed if r.error == kind)}
            for kind, count in Counter(record.error or "" for record in failed).most_common()
        },
        "duration_s": round(result.duration, 4),
        "requests_per_s": round(len(good) / duration, 4),
        "output_tokens_per_s": round(output / duration, 2),
        "total_tokens_per_s": round((output + prompt) / duration, 2),
        "prompt_tokens": prompt,
        "cached_tokens": sum(record.cached_tokens or 0 for record in good),
        "output_tokens": output,
        "tokens_counted_by": dict(Counter(record.counted_by for record in good)),
        "tokens_per_piece": round(output / pieces, 3) if pieces else None,
        "pieces_per_read": round(pieces / reads, 3) if reads else None,
        "ttft_ms": distribution([record.ttft for record in good if record.ttft is not None]),
        "tpot_ms": distribution([record.tpot for record in good if record.tpot is not None]),
        "itl_ms": distribution([gap for record in good for gap in record.gaps]),
        "e2el_ms": distribution([record.e2el for record in good]),
        "client": {
            "cpu_s": round(result.client_cpu, 3),
            "cpu_share": round(result.client_cpu / duration, 4),
            "late_ms": round(1000 * result.late, 3),
        },
    }


def tables(run: Mapping[str, Any]) -> list[Table]:
    """Totals, latencies, and for a server of ours its batches. `run` is what `figures` returned, with "server" where there is one."""
    steps = (run.get("server") or {}).get("batch_size_steps")
    return [_totals(run), _latencies(run), *([_batches(steps)] if steps else [])]


def _totals(run: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row("succeeded", f"{run['succeeded']} of {run['requests']}", f"{100 * run['success_rate']:.1f} %")
    for kind, error in run["errors"].items():
        table.add_row(f"  {_plain(kind)}", str(error["count"]), _plain(error["example"]))
    table.add_row("duration", f"{run['duration_s']:.2f}", "s")
    table.add_row("requests", f"{run['requests_per_s']:.2f}", "/s")
    table.add_row("output tokens", f"{run['output_tokens_per_s']:.1f}", f"/s ({run['output_tokens']}, {_counted(run)})")
    table.add_row("total tokens", f"{run['total_tokens_per_s']:.1f}", f"/s ({run['prompt_tokens']} of prompts)")
    server = run.get("server") or {}
    for name, words in (
        ("batch_size_mean", "running batch, mean"),
        ("prefix_hit_tokens", "prefix hits, tokens"),
        ("preemptions", "preemptions"),
    ):
        if server.get(name) is not None:
            table.add_row(words, f"{server[name]:g}", "")
    table.add_row("client's CPU", f"{100 * run['client']['cpu_share']:.1f}", "% of a core")
    return table


def _latencies(run: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("milliseconds")
    columns = ("mean", *(f"p{q}" for q in PERCENTILES), "max")
    for column in columns:
        table.add_column(column, justify="right")
    for name, words in LATENCIES.items():
        values = run[name]
        table.add_row(words, *("-" if values is None else f"{values[column]:.1f}" for column in columns))
    return table


def _batches(steps: Mapping[str, int]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("requests in a step")
    table.add_column("steps", justify="right")
    table.add_column()
    total = sum(steps.values())
    for size, count in steps.items():
        table.add_row(size, str(count), "#" * round(40 * count / total))
    return table


def _counted(run: Mapping[str, Any]) -> str:
    return "counted by " + " and ".join(run["tokens_counted_by"]) if run["tokens_counted_by"] else "none"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text[:60])
