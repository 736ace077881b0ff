"""Figures from samples: means and percentiles of latencies, medians over repeated runs.

Stateless. Not here: which samples are taken (client.py, latency.py), how figures are shown (report.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

PERCENTILES = (50, 95, 99)


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Count, mean, percentiles (linear between neighbours), smallest and largest in milliseconds; None without samples."""
    if not seconds:
        return None
    import numpy as np

    milliseconds = 1000 * np.asarray(seconds, np.float64)
    figures = {"mean": milliseconds.mean(), "min": milliseconds.min(), "max": milliseconds.max()}
    figures |= {f"p{q}": value for q, value in zip(PERCENTILES, np.percentile(milliseconds, PERCENTILES), strict=True)}
    return {"count": len(seconds), **{name: round(float(value), 3) for name, value in figures.items()}}


def summary(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """What repeated runs of one case gave: median, extremes and the runs themselves, in order."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "runs": [round(value, digits) for value in values],
    }
