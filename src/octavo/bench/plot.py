"""One figure of a run: how TTFT, ITL and E2EL are distributed, and how full the running batch was.

Needs matplotlib (the `bench` extra), imported only here. Stateless. Not here: the figures (report.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.client import RequestRecord
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png", ".pdf")

#: What is drawn of one run: its label, its requests, and {batch size: steps} where the server is ours.
Series = tuple[str, Sequence[RequestRecord], Mapping[str, int] | None]


def check(path: Path) -> None:
    """Raises ConfigError where no figure could be written, so that nobody finds out after a long run."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'octavo[bench]'") from None


def save(path: Path, title: str, series: Sequence[Series]) -> None:
    """Draw every run of `series` into one figure of four parts."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # text stays text, and nothing in the file depends on the day
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "octavo", "font.size": 9}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        axes = figure.subplots(2, 2).flatten()
        figure.suptitle(title)
        for label, records, _ in series:
            good = [record for record in records if record.error is None]
            _cdf(axes[0], [r.ttft for r in good if r.ttft is not None], label)
            _cdf(axes[1], [gap for r in good for gap in r.gaps], label)
            _cdf(axes[2], [r.e2el for r in good], label)
        for axis, words in zip(axes, ("time to first token", "between tokens", "whole request"), strict=False):
            axis.set(title=words, xlabel="ms", ylabel="share of samples", ylim=(0, 1), xlim=(0, None))
            axis.grid(alpha=0.3)
        _batches(axes[3], series)
        handles, labels = axes[2].get_legend_handles_labels()
        if len(labels) > 1:
            figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _cdf(axis: Axes, seconds: Sequence[float], label: str) -> None:
    values = sorted(1000 * value for value in seconds)
    axis.step(values, [(i + 1) / len(values) for i in range(len(values))], where="post", label=label)


def _batches(axis: Axes, series: Sequence[Series]) -> None:
    axis.set(title="running batch", xlabel="requests in a step", ylabel="share of steps")
    known = [(label, batches) for label, _, batches in series if batches]
    if not known:
        axis.text(0.5, 0.5, "only known for our own server", ha="center", transform=axis.transAxes)
        axis.set(xticks=[], yticks=[])
        return
    names = list(dict.fromkeys(name for _, batches in known for name in batches))
    width = 0.8 / len(known)
    for number, (label, batches) in enumerate(known):
        total = sum(batches.values()) or 1
        places: list[Any] = [names.index(name) + (number - (len(known) - 1) / 2) * width for name in batches]
        axis.bar(places, [count / total for count in batches.values()], width, label=label)
    axis.set_xticks(range(len(names)), names)
