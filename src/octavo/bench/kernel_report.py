"""Kernels and the parts of a step beside their limits: tables for people, and one figure.

Needs matplotlib for the figure only. Stateless. Not here: the figures themselves (kernels.py, breakdown.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("op", "shape", "layout", "rows", "us", "GB/s", "GOP/s", "limit us", "bound by", "share")


def tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    """One table a level."""
    from rich.table import Table

    found = []
    for level in dict.fromkeys(record["level"] for record in records):
        table = Table(box=None, pad_edge=False, title=f"level {level}", title_justify="left")
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column in ("op", "shape", "layout", "bound by") else "right", no_wrap=True)
        for record in records:
            if record["level"] == level:
                table.add_row(*_cells(record))
        found.append(table)
    return found


def _cells(record: dict[str, Any]) -> list[str]:
    known = record["share"] is not None
    return [
        record["op"],
        record["shape"],
        record["layout"],
        str(record["rows"]),
        f"{record['us']:.1f}",
        f"{record['gb_per_s']:.1f}",
        f"{record['gop_per_s']:.1f}",
        f"{record['limit_us']:.1f}" if known else "-",
        record["bound"] if known else "-",
        f"{100 * record['share']:.0f} %" if known else "-",
    ]


def breakdown_table(title: str, step: Mapping[str, Any]) -> Table:
    """Parts of one step (breakdown.py); they add up to the step that was taken apart."""
    from rich.table import Table

    caption = f"timed call by call: {step['step_ms']:.2f} ms a step, {step['untouched_step_ms']:.2f} when left alone"
    table = Table(box=None, pad_edge=False, title=title, caption=caption, title_justify="left", caption_justify="left")
    for column in ("part of the step", "calls", "ms", "share", "limit ms", "share of limit"):
        table.add_column(column, justify="left" if column == "part of the step" else "right", no_wrap=True)
    for name, part in step["parts"].items():
        least, calls = part.get("limit_ms"), part.get("calls")
        cells = (f"{least:.3f}", f"{100 * least / part['ms']:.0f} %") if least is not None and part["ms"] > 0 else ("", "")
        table.add_row(name, "" if calls is None else f"{calls:.0f}", f"{part['ms']:.3f}", f"{100 * part['share']:.1f} %", *cells)
    known = [part["limit_ms"] for part in step["parts"].values() if part.get("limit_ms") is not None]
    whole = (f"{sum(known):.3f}", f"{100 * sum(known) / step['step_ms']:.0f} %") if known else ("", "")
    table.add_row("the whole step", "", f"{step['step_ms']:.3f}", "100.0 %", *whole)
    return table


def save_plot(path: Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """Share of the limit against rows, one line an op and shape, one panel a level. plot.check(path) comes before the measurement."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    levels = list(dict.fromkeys(record["level"] for record in records))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "octavo", "font.size": 9}):
        figure = Figure(figsize=(5 + 4 * len(levels), 5), layout="constrained")
        figure.suptitle(title)
        panels = figure.subplots(1, len(levels), squeeze=False, sharey=True)[0]
        for axis, level in zip(panels, levels, strict=True):
            axis.set(title=level, xlabel="rows", xscale="log")
            axis.grid(alpha=0.3)
            axis.axhline(100, color="0.5", linewidth=0.8)
            lines: dict[str, list[tuple[int, float]]] = {}
            for record in records:
                if record["level"] == level and record["share"] is not None:
                    # row counts are in the shape of the ops without a weight
                    name = record["op"] if record["op"].startswith("linear ") else f"{record['op']} {record['layout']}"
                    name = f"linear {record['shape']} {record['layout']}" if record["op"] == "linear" else name
                    lines.setdefault(name, []).append((record["rows"], 100 * record["share"]))
            for number, (name, points) in enumerate(lines.items()):
                points.sort()
                xs, ys = zip(*points, strict=True)
                axis.plot(xs, ys, marker="o", markersize=3, label=name, linestyle=("-", "--", ":")[number // 10 % 3])
            rows = sorted({record["rows"] for record in records})
            axis.set_xticks(rows, [str(r) for r in rows])
            axis.minorticks_off()
        panels[0].set(ylabel="% of the limit", ylim=(0, None))
        handles, labels = panels[-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
