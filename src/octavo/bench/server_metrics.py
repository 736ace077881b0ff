"""What a server of ours says of itself: its counters before and after a run, and what happened between.

Stateless. Not here: what the counters mean (the server's /metrics page says), latencies as the client saw them (client.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.bench.client import Client
from octavo.errors import OctavoError

#: Result -> counter on the server's /metrics page.
COUNTERS = {
    "steps": "octavo_engine_steps_total",
    "prompt_tokens_computed": "octavo_prompt_tokens_total",
    "generation_tokens": "octavo_generation_tokens_total",
    "prefix_query_tokens": "octavo_prefix_cache_query_tokens_total",
    "prefix_hit_tokens": "octavo_prefix_cache_hit_tokens_total",
    "preemptions": "octavo_preemptions_total",
    "restarts": "octavo_engine_restarts_total",
}
BATCH_SIZE = "octavo_decode_batch_size"

#: (name, value of its "le" label or "") -> value, summed over all other labels.
Samples = dict[tuple[str, str], float]


async def scrape(client: Client) -> Samples | None:
    """The /metrics page of a server of ours; None where it is another's or has no such page."""
    try:
        status, page = await client.get("/metrics")
    except OctavoError:
        return None
    return parse(page.decode("utf-8", "replace")) if status == 200 and b"octavo_" in page else None


async def version(client: Client) -> Any:
    """What /version answers (JSON), None without one."""
    try:
        status, page = await client.get("/version")
        return json.loads(page) if status == 200 else None
    except (OctavoError, ValueError, RecursionError):
        return None


def parse(page: str) -> Samples:
    """Samples of a page in Prometheus' text format. A page that is none has no samples."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Samples = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                key = (sample.name, sample.labels.get("le", ""))
                found[key] = found.get(key, 0.0) + sample.value
    except (ValueError, KeyError, IndexError):
        return {}
    return found


def between(before: Samples, after: Samples) -> dict[str, Any]:
    """What the server did from one page to the next. After a restart of its engine the counters begin again: `restarts` tells."""
    changes: dict[str, Any] = {}
    for name, counter in COUNTERS.items():
        if (counter, "") in after:
            changes[name] = round(after[counter, ""] - before.get((counter, ""), 0.0))
    steps = batch_steps(before, after)
    if steps:
        total = _change(before, after, f"{BATCH_SIZE}_sum")
        changes["batch_size_steps"] = steps
        changes["batch_size_mean"] = round(total / sum(steps.values()), 3) if total else None
    return changes


def batch_steps(before: Samples, after: Samples) -> dict[str, int]:
    """Steps by the number of requests that got one token in them: {"1": 12, "2": 3, "3-4": 40, ...}, empty ranges left out."""
    bounds = sorted(float(bound) for name, bound in after if name == f"{BATCH_SIZE}_bucket")
    texts = {float(bound): bound for name, bound in after if name == f"{BATCH_SIZE}_bucket"}
    steps: dict[str, int] = {}
    below, reached = 0.0, 0.0
    for bound in bounds:
        count = _change(before, after, f"{BATCH_SIZE}_bucket", texts[bound])
        if count > reached:
            steps[_range(below, bound)] = round(count - reached)
        below, reached = bound, max(reached, count)
    return steps


def _range(below: float, bound: float) -> str:
    """Sizes above `below` up to `bound`."""
    if bound == float("inf"):
        return f"more than {below:.0f}"
    return f"{bound:.0f}" if bound - below <= 1 else f"{below + 1:.0f}-{bound:.0f}"


def _change(before: Mapping[tuple[str, str], float], after: Mapping[tuple[str, str], float], name: str, bound: str = "") -> float:
    return after.get((name, bound), 0.0) - before.get((name, bound), 0.0)
