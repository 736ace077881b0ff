"""Figures of simulated runs: plain data for JSON, tables that set policies side by side, and one plot.

Latencies are of the requests that were finished, in milliseconds on the virtual clock; rates are over the time from the first arrival to
the last end. Definitions: docs/benchmarks.md. Stateless. Not here: running (run.py), files (bench/record.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench.simulate.run import Outcome
from octavo.bench.statistics import PERCENTILES, distribution

if TYPE_CHECKING:
    from rich.table import Table

LATENCIES = {
    "queue_ms": "in the queue",
    "ttft_ms": "time to first token (TTFT)",
    "itl_ms": "between tokens (ITL)",
    "tpot_ms": "time per output token (TPOT)",
    "e2el_ms": "whole request (E2EL)",
}
#: Tenants listed one by one in figures; the index of fairness is over all.
MOST_TENANTS = 100
#: Points of a curve in the plot.
POINTS = 400


def figures(outcome: Outcome) -> dict[str, Any]:
    """Everything one run says; a function of trace, costs and settings alone."""
    done, requests = outcome.finished, outcome.requests
    first, last = outcome.first_token, outcome.last_token
    latencies = {
        "queue_ms": [_since(outcome.first_scheduled[i], requests[i].arrival) for i in done],
        "ttft_ms": [_since(first[i], requests[i].arrival) for i in done],
        "itl_ms": outcome.gaps,
        "tpot_ms": [_since(last[i], first[i]) / (requests[i].output_tokens - 1) for i in done if requests[i].output_tokens > 1],
        "e2el_ms": [_since(last[i], requests[i].arrival) for i in done],
    }
    output, prompt = sum(requests[i].output_tokens for i in done), sum(requests[i].prompt_tokens for i in done)
    duration = max(outcome.end - requests[0].arrival, 1e-9)
    stats = outcome.stats
    return {
        "requests": len(requests),
        "finished": len(done),
        "refused": outcome.refused,
        "failed": outcome.failed,
        "duration_s": round(duration, 4),
        "requests_per_s": round(len(done) / duration, 4),
        "output_tokens_per_s": round(output / duration, 2),
        "total_tokens_per_s": round((output + prompt) / duration, 2),
        "prompt_tokens": prompt,
        "output_tokens": output,
        **{name: distribution(values) for name, values in latencies.items()},
        **_use(outcome, duration),
        "preemptions": stats.preemptions,
        "recomputed_tokens": stats.tokens_recomputed,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "prefix_hit_share": round(stats.prefix_hit_tokens / stats.prefix_query_tokens, 4) if stats.prefix_query_tokens else 0.0,
        "prefix_waits": stats.prefix_waits,
        "promoted": stats.requests_promoted,
        **_tenants(outcome, done),
    }


def _since(later: float | None, earlier: float | None) -> float:
    assert later is not None and earlier is not None, "a finished request has all its times"
    return later - earlier


def _use(outcome: Outcome, duration: float) -> dict[str, Any]:
    executor = outcome.executor
    steps, busy = max(executor.steps, 1), max(executor.busy_seconds, 1e-12)
    return {
        "steps": executor.steps,
        "busy_share": round(executor.busy_seconds / duration, 4),
        "budget_share": round(executor.rows / (steps * outcome.config.max_num_batched_tokens), 4),
        "requests_in_a_step": round(executor.request_seconds / busy, 3),
        "kv_share": round(executor.block_seconds / busy / outcome.num_blocks, 4),
        "kv_share_max": round(executor.most_blocks / outcome.num_blocks, 4),
    }


def _tenants(outcome: Outcome, done: Sequence[int]) -> dict[str, Any]:
    """By tenant, the one with most requests first; and Jain's index (1984) of the mean time per token: 1 is the same for all."""
    groups: dict[str | None, list[int]] = {}
    for number in done:
        groups.setdefault(outcome.requests[number].tenant, []).append(number)
    if len(groups) < 2:
        return {"tenants": {}, "fairness": None}
    found: dict[str, Any] = {}
    paces: list[float] = []
    for tenant, numbers in sorted(groups.items(), key=lambda group: (-len(group[1]), str(group[0]))):
        waits = [_since(outcome.last_token[i], outcome.requests[i].arrival) for i in numbers]
        pace = [wait / outcome.requests[i].output_tokens for wait, i in zip(waits, numbers, strict=True)]
        paces.append(float(np.mean(pace)))
        if len(found) < MOST_TENANTS:
            found["no tenant" if tenant is None else tenant] = {
                "requests": len(numbers),
                "output_tokens": sum(outcome.requests[i].output_tokens for i in numbers),
                "ttft_ms": distribution([_since(outcome.first_token[i], outcome.requests[i].arrival) for i in numbers]),
                "ms_per_token": round(1000 * paces[-1], 3),
            }
    index = sum(paces) ** 2 / (len(paces) * sum(pace * pace for pace in paces))
    return {"tenants": found, "fairness": round(index, 4)}


# For people


def tables(results: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """`results`: policy -> its figures."""
    from rich.table import Table

    totals = Table(box=None, pad_edge=False)
    totals.add_column("policy")
    words = ("req/s", "tokens/s", "busy", "budget", "KV mean", "KV max", "in a step", "preempted", "recomputed", "prefix hits", "fairness")
    for column in words:
        totals.add_column(column, justify="right")
    for name, run in results.items():
        shares = (f"{100 * run[key]:.1f} %" for key in ("busy_share", "budget_share", "kv_share", "kv_share_max"))
        totals.add_row(
            name,
            f"{run['requests_per_s']:.2f}",
            f"{run['output_tokens_per_s']:.1f}",
            *shares,
            f"{run['requests_in_a_step']:.1f}",
            str(run["preemptions"]),
            str(run["recomputed_tokens"]),
            f"{100 * run['prefix_hit_share']:.1f} %",
            "-" if run["fairness"] is None else f"{run['fairness']:.3f}",
        )
    latencies = Table(box=None, pad_edge=False)
    latencies.add_column("milliseconds")
    latencies.add_column("policy")
    columns = ("mean", *(f"p{q}" for q in PERCENTILES), "max")
    for column in columns:
        latencies.add_column(column, justify="right")
    for key, label in LATENCIES.items():
        for name, run in results.items():
            values = run[key]
            latencies.add_row(label, name, *("-" if values is None else f"{values[column]:.1f}" for column in columns))
            label = ""
    lost = [f"{name}: {run['refused']} refused, {run['failed']} failed" for name, run in results.items() if run["refused"] + run["failed"]]
    found = [totals, latencies]
    if lost:
        found.append(_lines("requests without an answer", lost))
    return found


def _lines(title: str, lines: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title, box=None, pad_edge=False)
    for line in lines:
        table.add_row(line)
    return table


def residual_table(residuals: Mapping[str, Mapping[str, float]]) -> Table:
    """How far the fitted costs are from the measured steps."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("steps with")
    for column in ("steps", "median error", "p95 error", "mean"):
        table.add_column(column, justify="right")
    for kind, values in residuals.items():
        shares = (f"{100 * values[key]:.1f} %" for key in ("median", "p95"))
        table.add_row(kind, str(values["steps"]), *shares, f"{100 * values['mean']:+.1f} %")
    return table


def save_plot(path: Path, title: str, outcomes: Mapping[str, Outcome], results: Mapping[str, Mapping[str, Any]]) -> None:
    """Distributions of TTFT, ITL and E2EL of each policy, and how full budget and KV pool were. Needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # text stays text, and nothing in the file depends on the day
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "octavo", "font.size": 9}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        axes = figure.subplots(2, 2).flatten()
        figure.suptitle(title)
        for name, outcome in outcomes.items():
            done, requests = outcome.finished, outcome.requests
            samples = (
                [_since(outcome.first_token[i], requests[i].arrival) for i in done],
                outcome.gaps,
                [_since(outcome.last_token[i], requests[i].arrival) for i in done],
            )
            for axis, seconds in zip(axes, samples, strict=False):
                if len(seconds):
                    shares = np.linspace(0, 1, POINTS)
                    axis.plot(1000 * np.quantile(np.asarray(seconds), shares), shares, label=name)
        for axis, words in zip(axes, ("time to first token", "between tokens", "whole request"), strict=False):
            axis.set(title=words, xlabel="ms", ylabel="share of samples", ylim=(0, 1), xscale="log")
            axis.grid(alpha=0.3)
        bars = {"busy": "busy_share", "token budget": "budget_share", "KV, mean": "kv_share", "KV, max": "kv_share_max"}
        width = 0.8 / len(results)
        for number, (name, run) in enumerate(results.items()):
            places = [place + (number - (len(results) - 1) / 2) * width for place in range(len(bars))]
            axes[3].bar(places, [run[key] for key in bars.values()], width, label=name)
        axes[3].set_xticks(range(len(bars)), list(bars))
        axes[3].set(title="how full", ylim=(0, 1))
        handles, labels = axes[3].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
