"""Figures of a comparison: plain data for JSON, and Markdown for people.

A ratio is ours over a peer's, of the same round; its median over the rounds is what counts, since a machine that is busy
for a while slows down both. Stateless. Not here: measuring (comparison.py), files (record.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.bench.comparison import EngineResult, Plan
from octavo.bench.statistics import summary
from octavo.bench.work import Work

#: An idle engine that takes more of a core than this is said to disturb the others.
IDLE_SHARE = 0.02


def figures(plan: Plan, results: Sequence[EngineResult]) -> dict[str, Any]:
    ours, *peers = results
    return {
        "threads": plan.threads,
        "rounds": plan.rounds,
        "one_at_a_time": plan.one_at_a_time,
        "ours": ours.peer.name,
        "engines": {result.peer.name: _engine(result, ours) for result in results},
        "work": {work.name: _work(work, ours, peers) for work in plan.work},
    }


def _engine(result: EngineResult, ours: EngineResult) -> dict[str, Any]:
    found: dict[str, Any] = {"error": result.error, "versions": result.versions, "options": dict(result.peer.options)}
    for name, values in (("load_s", result.load), ("cold_start_s", result.cold_start)):
        found[name] = summary(values, 3) if values else None
    found["memory_mib"] = result.memory or None
    for name, (cpu, wall) in (("cores_while_working", result.busy), ("cores_while_waiting", result.idle)):
        found[name] = round(cpu / wall, 3) if wall else None
    pairs = [
        (mine, theirs)
        for key, tokens in ours.first_tokens.items()
        for mine, theirs in zip(tokens, result.first_tokens.get(key, ()), strict=False)
    ]
    found["same_first_token"] = round(sum(mine == theirs for mine, theirs in pairs) / len(pairs), 3) if pairs else None
    return found


def _work(work: Work, ours: EngineResult, peers: Sequence[EngineResult]) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens_per_s": {}, "ours_over": {}, "ours_over_best": None, "best_peer": None}
    for result in (ours, *peers):
        if rates := result.rates.get(work):
            found["tokens_per_s"][result.peer.name] = summary([rates[number] for number in sorted(rates)], 2)
    mine, best = ours.rates.get(work, {}), dict[int, float]()
    for peer in peers:
        rates = peer.rates.get(work, {})
        common = sorted(mine.keys() & rates.keys())
        if common:
            found["ours_over"][peer.peer.name] = summary([mine[number] / rates[number] for number in common], 3)
        for number in common:
            best[number] = max(best.get(number, 0.0), rates[number])
    if best:
        found["ours_over_best"] = summary([mine[number] / best[number] for number in sorted(best)], 3)
        medians = {name: values["median"] for name, values in found["tokens_per_s"].items() if name != ours.peer.name}
        found["best_peer"] = max(medians, key=lambda name: medians[name])
    return found


def markdown(figures: dict[str, Any]) -> str:
    """Two tables and what must be said beside them."""
    engines, ours = figures["engines"], figures["ours"]
    names = list(engines)
    rows = [["tokens/s (ours / theirs)", *names, "ours / best peer"]]
    for work, values in figures["work"].items():
        cells = []
        for name in names:
            speed, ratio = values["tokens_per_s"].get(name), values["ours_over"].get(name)
            cells.append("-" if speed is None else f"{speed['median']:.1f}" + (f" ({ratio['median']:.2f})" if ratio else ""))
        best = values["ours_over_best"]
        rows.append([work, *cells, f"{best['median']:.2f} ({values['best_peer']})" if best else "-"])
    processes = [["whole process", *names]]
    for label, key in (("load, s", "load_s"), ("start to first token, s", "cold_start_s")):
        processes.append([label, *(f"{e[key]['median']:.2f}" if e[key] else "-" for e in engines.values())])
    for label, kind in (("peak memory, MiB", "peak"), ("of it not files, MiB", "anonymous")):
        processes.append([label, *(f"{e['memory_mib'][kind]:.0f}" if e["memory_mib"] else "-" for e in engines.values())])
    for label, key in (
        ("cores while working", "cores_while_working"),
        ("cores while waiting", "cores_while_waiting"),
        ("same first token as ours", "same_first_token"),
    ):
        processes.append([label, *("-" if e[key] is None else f"{e[key]:.2f}" for e in engines.values())])
    processes.append(["weights", *(e["versions"].get("weights", "-") for e in engines.values())])
    notes = [f"- {name}: {error}" for name, e in engines.items() if (error := e["error"]) is not None]
    notes += [
        f"- {name} took {share:.2f} cores while others worked: their figures are too low"
        for name, e in engines.items()
        if (share := e["cores_while_waiting"]) is not None and share > IDLE_SHARE
    ]
    how = "each engine alone, started anew each round" if figures["one_at_a_time"] else "engines in turn"
    rounds = "1 round" if figures["rounds"] == 1 else f"medians of {figures['rounds']} rounds"
    head = f"{ours}: {rounds}, {how}, {figures['threads']} threads each."
    return "\n\n".join([head, _table(rows), _table(processes), *(["\n".join(map(_plain, notes))] if notes else [])]) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _plain(text: str) -> str:
    """One line without control characters: it may be what another program said."""
    return "".join(character if character.isprintable() else " " for character in text)
