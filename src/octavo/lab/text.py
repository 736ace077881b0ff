"""Tables and bar charts in plain text, for terminals and files.

Pure functions. Not here: figures (svg.py).
"""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH = 40


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def bars(title: str, values: Sequence[tuple[str, float, str]]) -> str:
    """One bar for each (label, value, the value in words), the longest as long as the largest value."""
    largest = max((value for _, value, _ in values), default=0.0) or 1.0
    label_width = max((len(label) for label, _, _ in values), default=0)
    lines = [title]
    for label, value, words in values:
        length = max(round(value / largest * _WIDTH), 1 if value > 0 else 0)
        lines.append(f"  {label.ljust(label_width)}  {'#' * length} {words}")
    return "\n".join(lines)


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.2f} ms" if value < 1 else f"{value:.2f} s"


def size(count: float | None) -> str:
    """Bytes in MB of 10^6."""
    if count is None:
        return "-"
    return f"{count / 1e6:.2f} MB" if count < 10e6 else f"{count / 1e6:.0f} MB"


def small(value: float | None) -> str:
    """A difference."""
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"
