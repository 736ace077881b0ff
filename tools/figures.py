"""The table of figures in README.md, made from results/*.json so that a number there always has its file.

Usage: python tools/figures.py [--write]; without --write it fails when the README says something else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- FIGURES: made by tools/figures.py from results/*.json -->\n", "<!-- END FIGURES -->\n"


def load(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))
    return record


def table() -> str:
    cold, speed, quality = load("cold_start"), load("speed"), load("quality")
    machine = speed["machine"]
    first = next(name for name in cold["results"] if name.startswith("octavo run"))
    rows = [(f"`{first}`, the whole process", f"{cold['results'][first]['median']:.2f} s", "cold_start")]
    rows += [(name, f"{values['median']:.0f} tokens/s", "speed") for name, values in speed["results"].items()]
    rows += server_rows(load("batch_sizes")["results"], load("server_load")["results"])
    for kind in ("prompt rows", "generated rows", "prompt rows, int8 KV", "generated rows, int8 KV"):
        values = quality["results"][kind]
        change = 100 * (values["perplexity"] / values["perplexity_float32"] - 1)
        rows.append((f"perplexity of {kind} against float32, {values['tokens']} tokens of English", f"{change:+.2f} %", "quality"))
        rows.append((f"same most probable token as float32, {kind}", f"{100 * values['agreement']:.1f} %", "quality"))
    lines = [
        f"SmolLM2-135M-Instruct (Q4_1), native kernels ({machine['native']['isa'].upper()}, {machine['cores']['usable']} cores of an "
        f"{machine['cpu']['model']}), medians; `make bench` repeats them.",
        "",
        "| what | figure | file |",
        "|---|---|---|",
        *(f"| {what} | {figure} | `results/{file}.json` |" for what, figure, file in rows),
        *comparison("SmolLM2-135M-Instruct (Q4_1)", "compare"),
        *comparison("the shape of Qwen2.5-7B, random weights (Q4_0), an engine at a time", "compare_7b"),
    ]
    return "\n".join(lines) + "\n"


def comparison(model: str, file: str) -> list[str]:
    """Tokens a second of all engines of one run, and by how much ours is ahead of (or behind) the best other."""
    results = load(file)["results"]
    engines = [name for name, engine in results["engines"].items() if engine["error"] is None]
    weights = [results["engines"][name]["versions"].get("weights", "not said") for name in engines]
    by_weights = [(kind, [name for name, its in zip(engines, weights, strict=True) if its == kind]) for kind in dict.fromkeys(weights)]
    lines = [
        "",
        f"Tokens a second beside other engines, {model}, {results['threads']} threads each, medians of {results['rounds']} rounds in turn"
        f" (`results/{file}.json`, with versions; [how](docs/benchmarks.md)):",
        "",
        f"| work | {' | '.join(engines)} | ours / best other |",
        "|---" * (len(engines) + 2) + "|",
    ]
    for work, values in results["work"].items():
        rates = values["tokens_per_s"]
        cells = [f"{rates[name]['median']:.0f}" if rates[name]["median"] >= 20 else f"{rates[name]['median']:.1f}" for name in engines]
        lines.append(f"| {work} | {' | '.join(cells)} | {values['ours_over_best']['median']:.2f} |")
    said = "; ".join(f"{', '.join(names)}: {kind}" for kind, names in by_weights)
    return [*lines, "", f"Weights, {said}."]


def server_rows(sizes: dict[str, Any], under_load: dict[str, Any]) -> list[tuple[str, str, str]]:
    rate = {size: sizes[size]["requests_per_s"]["median"] for size in ("1", "4", "8")}
    streams, memory, prompt = (under_load[name] for name in ("streams", "memory", "prompt"))
    health = max(part["health"]["ms"]["max"] for part in (streams, memory, prompt))
    gap = max(0.0, *prompt["extra_gap_ms"].values())
    return [
        (
            "server, 8 clients, 128 tokens each: decode batch of 1, 4, 8",
            ", ".join(f"{rate[size]:.2f}" for size in ("1", "4", "8")) + " requests/s",
            "batch_sizes",
        ),
        (f"{streams['requests']} streams open at once: complete", f"{100 * streams['success_rate']:.0f} %", "server_load"),
        (f"growth of the HTTP process over {memory['requests']} requests", f"{memory['growth_mib']['http']:.1f} MiB", "server_load"),
        ("slowest answer of `/health` under those loads", f"{health:.0f} ms", "server_load"),
        ("longest extra gap of other streams beside a 1 MB prompt", f"{gap:.0f} ms", "server_load"),
    ]


def main() -> int:
    text = README.read_text("utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--write" in sys.argv[1:]:
        README.write_text(wanted, "utf-8")
    elif text != wanted:
        print("README.md: the figures are not those of results/*.json: run python tools/figures.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
