"""The lab's charts (Altair). Stateless; sizes and colours here, the figures from elsewhere."""

from __future__ import annotations

from typing import Any

import altair as alt

from octavo.lab.ui.answer import Answer
from octavo.lab.ui.race import Lane

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"

WAY_COLOURS = {"naive": RED, "numpy": ORANGE, "native": BLUE, "engine": GREEN, "naive_numpy": "#CC79A7"}


def tokens(answer: Answer) -> alt.VConcatChart:
    """Probability and latency of each token, one above the other."""
    rows = [
        {"token": number, "text": token.text, "probability": token.probability, "ms": token.seconds * 1000}
        for number, token in enumerate(answer.tokens, 1)
    ]
    x = alt.X("token:Q", title=None, scale=alt.Scale(nice=False, domain=[0, len(rows) + 1]), axis=alt.Axis(tickCount=10, tickMinStep=1))
    tips = [alt.Tooltip("token:Q"), alt.Tooltip("text:N"), alt.Tooltip("probability:Q", format=".1%"), alt.Tooltip("ms:Q", format=".1f")]
    chosen = (
        alt.Chart(_data(rows))
        .mark_bar(color=BLUE)
        .encode(
            x=x,
            tooltip=tips,
            y=alt.Y("probability:Q", title="probability", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%", tickCount=3)),
        )
    )
    # without the first token: it waited for the whole prompt, and would flatten the rest
    latency = (
        alt.Chart(_data(rows[1:])).mark_bar(color=RED).encode(x=x, tooltip=tips, y=alt.Y("ms:Q", title="ms", axis=alt.Axis(tickCount=3)))
    )
    return alt.vconcat(chosen.properties(height=90), latency.properties(height=90), spacing=6)


def race_tokens(lanes: list[Lane]) -> alt.LayerChart | alt.FacetChart:
    """Milliseconds of each token, logarithmic, a line for each way."""
    rows = [
        {"token": number, "ms": seconds * 1000, "way": lane.way.name}
        for lane in lanes
        for number, seconds in enumerate(lane.token_times(), 1)
    ]
    base = alt.Chart(_data(rows)).encode(
        x=alt.X("token:Q", title="token", axis=alt.Axis(tickMinStep=1, grid=False)),
        y=alt.Y("ms:Q", title="ms (logarithmic)", scale=alt.Scale(type="log", nice=False), axis=alt.Axis(tickCount=4)),
        color=alt.Color("way:N", title=None, scale=_ways(lanes), legend=alt.Legend(orient="bottom", columns=2)),
        tooltip=[alt.Tooltip("way:N"), alt.Tooltip("token:Q"), alt.Tooltip("ms:Q", format=".1f")],
    )
    return alt.layer(base.mark_line(strokeWidth=2), base.mark_point(size=26, filled=True)).properties(height=260)


def race_totals(lanes: list[Lane]) -> alt.LayerChart | alt.FacetChart:
    """Seconds in all, a bar for each way, with how much faster it is than the slowest."""
    slowest = max(lane.total for lane in lanes)
    rows = [
        {
            "way": lane.way.name,
            "seconds": lane.total,
            "label": f"{lane.total:.2f} s" + (f" · {slowest / lane.total:.1f}×" if lane.total < slowest else ""),
        }
        for lane in lanes
    ]
    base = alt.Chart(_data(rows)).encode(
        y=alt.Y("way:N", title=None, sort=[lane.way.name for lane in lanes], axis=alt.Axis(labelLimit=160)),
        x=alt.X("seconds:Q", title="seconds", scale=alt.Scale(domain=[0, slowest * 1.3]), axis=alt.Axis(tickCount=5)),
    )
    bars = base.mark_bar(cornerRadiusEnd=3, height=24).encode(color=alt.Color("way:N", scale=_ways(lanes), legend=None))
    labels = base.mark_text(align="left", dx=6, fontSize=13, color="#808080").encode(text="label:N")
    return alt.layer(bars, labels).properties(height=260)


def _ways(lanes: list[Lane]) -> alt.Scale:
    return alt.Scale(domain=[lane.way.name for lane in lanes], range=[WAY_COLOURS[lane.key] for lane in lanes])


def _data(rows: list[dict[str, Any]]) -> alt.Data:
    return alt.Data(values=rows)  # type: ignore[no-untyped-call]
