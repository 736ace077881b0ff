"""Line charts as SVG text: no plotting library is needed for a dozen points.

Axes may be logarithmic. Readable on light and dark pages: one neutral ink, colours that colour-blind people tell apart
(Okabe & Ito). Pure functions. Not here: what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#7f5fc4", "#b3a100")
_INK = "#808080"
_LEFT, _TOP, _WIDTH, _HEIGHT, _LEGEND = 80, 40, 420, 260, 250


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], log: bool) -> _Axis:
        """From the smallest to the largest value; a linear axis starts at 0."""
        low, high = (min(values), max(values)) if values else (1.0, 1.0)
        low = low if log else min(low, 0.0)
        if low == high:
            low, high = (low / 2, high * 2) if log else (low, low + 1)
        return cls(low, high, log)

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**n for n in range(first, last + 1)] or [self.low, self.high]
        step = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = step / 2 if (self.high - self.low) / step < 3 else step
        return [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Points], *, log_x: bool = False, log_y: bool = False) -> str:
    """An SVG document. On a logarithmic axis points that are not above 0 are left out."""
    drawn = {name: [(x, y) for x, y in points if (x > 0 or not log_x) and (y > 0 or not log_y)] for name, points in series.items()}
    flat = [point for points in drawn.values() for point in points]
    x_axis, y_axis = _Axis.over([x for x, _ in flat], log_x), _Axis.over([y for _, y in flat], log_y)

    def at(x: float, y: float) -> tuple[float, float]:
        return round(_LEFT + x_axis.place(x) * _WIDTH, 1), round(_TOP + (1 - y_axis.place(y)) * _HEIGHT, 1)

    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right + _LEGEND}" height="{bottom + 60}" font-family="sans-serif">',
        _text(_LEFT, 22, title, size=15),
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="{_INK}"/>',
        _text((_LEFT + right) / 2, bottom + 44, x_label, anchor="middle"),
        f'<g transform="translate(18 {(_TOP + bottom) / 2}) rotate(-90)">{_text(0, 0, y_label, anchor="middle")}</g>',
    ]
    for tick in x_axis.ticks() if log_x and len({x for x, _ in flat}) > 9 else sorted({x for x, _ in flat}):
        parts.append(_text(at(tick, y_axis.low)[0], bottom + 20, f"{tick:g}", anchor="middle"))
    for tick in y_axis.ticks():
        y = at(x_axis.low, tick)[1]
        parts.append(f'<path d="M{_LEFT} {y}H{right}" stroke="{_INK}" stroke-opacity="0.25"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{tick:g}", anchor="end"))
    for number, (name, points) in enumerate(drawn.items()):
        parts += _series(name, [at(x, y) for x, y in points], number, right)
    return "\n".join([*parts, "</svg>\n"])


def _series(name: str, places: Points, number: int, right: float) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    dash = ' stroke-dasharray="5 3"' if number >= len(_COLOURS) else ""
    parts = [f'<polyline points="{" ".join(f"{x},{y}" for x, y in places)}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
    y = _TOP + 8 + 20 * number
    parts.append(f'<path d="M{right + 16} {y}h20" stroke="{colour}" stroke-width="3"{dash}/>')
    return [*parts, _text(right + 42, y + 4, name)]


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{_INK}">{escape(words)}</text>'
