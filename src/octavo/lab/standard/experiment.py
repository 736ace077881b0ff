"""Measures decoding step by step: naive, with a KV cache, with native kernels, as a whole reply and as a stream.

Every arm is a process of its own (arm.py); rounds go through all arms in turn. Owner of those processes and of the folder
their logits pass through. Not here: the ways (decoding.py, strategy.py), what theory says (roofline.py).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ConfigError, OctavoError
from octavo.lab import svg, text
from octavo.lab.lessons import Progress, no_progress
from octavo.lab.standard.roofline import Roofline
from octavo.lab.standard.strategy import ATTENTION_TOLERANCE, LOGIT_TOLERANCE, first_difference

METHOD = (
    "greedy, end of text ignored; every arm in a process of its own, rounds through all arms in turn, medians; seconds from the call to"
    " the last token, after two tokens to warm up, loading not counted; ttft: until the caller has the first token; peak: VmHWM of the"
    " process, weights included, reset after loading; logits are compared in a second, untimed run"
)
#: (name, kind, way, backend); the first is what all others are compared with.
ARMS = (
    ("naive, NumPy", "decode", "naive", "reference"),
    ("KV cache, NumPy", "decode", "kv_cache", "reference"),
    ("naive, native", "decode", "naive", "cpu"),
    ("KV cache, native", "decode", "kv_cache", "cpu"),
    ("engine, whole reply", "engine", "whole", "cpu"),
    ("engine, streaming", "engine", "stream", "cpu"),
)
#: (what changes, from, to): both sides differ in that alone.
COMPARISONS = (
    ("the KV cache, on NumPy", "naive, NumPy", "KV cache, NumPy"),
    ("the KV cache, on native kernels", "naive, native", "KV cache, native"),
    ("native kernels, with the cache", "KV cache, NumPy", "KV cache, native"),
    ("the engine around them", "KV cache, native", "engine, whole reply"),
    ("streaming", "engine, whole reply", "engine, streaming"),
)
#: Published elsewhere, for a model of GPT-2's size on another machine.
PUBLISHED = {"tokens": 50, "naive_s": 2.5, "kv_cache_s": 1.2}
#: Seconds for one arm; a user's loop may have no end.
_LIMIT_S = 1800


@dataclass(frozen=True, slots=True)
class Settings:
    prompt: str = "Deep learning is"
    max_tokens: int = 50
    model: str = "smollm2"
    lengths: Sequence[int] = (50, 200, 800)
    runs: int = 3
    #: A user's file (strategy.py).
    strategy: str | None = None
    #: Compute every naive step of the longest length, instead of some of them.
    full: bool = False
    quick: bool = False

    def __post_init__(self) -> None:
        if self.quick:
            object.__setattr__(self, "max_tokens", min(self.max_tokens, 8))
            object.__setattr__(self, "lengths", (4, 8))
            object.__setattr__(self, "runs", 1)
        if not 2 <= self.max_tokens <= 4096:
            raise ConfigError(f"--max-tokens must be between 2 and 4096, got {self.max_tokens}")
        if not self.lengths or not all(2 <= length <= 4096 for length in self.lengths):
            raise ConfigError(f"--lengths must be between 2 and 4096, got {list(self.lengths)}")
        if not 1 <= self.runs <= 1000:
            raise ConfigError(f"--runs must be between 1 and 1000, got {self.runs}")
        if not self.prompt.strip() or len(self.prompt) > 8192:
            raise ConfigError("--prompt must have some text, and at most 8192 characters")
        if self.strategy is not None and not Path(self.strategy).is_file():
            raise ConfigError(f"--strategy {self.strategy}: there is no such file")


def run(settings: Settings, progress: Progress = no_progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="octavo-lab-") as folder:
        return _Run(settings, Path(folder), progress).all()


class ArmError(OctavoError):
    """An arm failed; the message is its own."""


class _Run:
    def __init__(self, settings: Settings, folder: Path, progress: Progress) -> None:
        self.settings, self.folder, self.progress = settings, folder, progress
        self.done = self.total = 0

    def all(self) -> dict[str, Any]:
        s = self.settings
        arms = list(ARMS)
        self.total = 2 + len(arms) * s.runs + 1 + (1 + s.runs if s.strategy else 0)
        user = self.user_attention()
        if user is not None and user.get("defines_generate"):
            arms.append((Path(s.strategy or "").name, "decode", "strategy", "cpu"))
        lines: dict[str, dict[str, Any]] = {"reference": self.child("roofline, NumPy", kind="roofline", backend="reference")}
        native, why = "cpu", None
        try:
            lines["cpu"] = self.child("roofline, native", kind="roofline", backend="cpu")
        except ArmError as error:  # no native kernels here: the user's strategy and the curve run on the reference
            native, why = "reference", str(error)
            arms = [arm if arm[2] != "strategy" else (*arm[:3], native) for arm in arms if arm[3] != "cpu" or arm[2] == "strategy"]
        measured = self.rounds(arms)
        rows = [self.row(arm, measured[arm[0]], lines) for arm in arms]
        self.compare(arms, rows, lines["reference"]["prompt_tokens"])
        curve = self.child(
            f"naive and cached at {', '.join(map(str, s.lengths))} tokens", kind="curve", backend=native, max_tokens=max(s.lengths),
            lengths=sorted(s.lengths), full_below=max(s.lengths) if s.full else min(s.max_tokens, 50), samples=32,
        )  # fmt: skip
        self.progress("done", self.total, self.total)
        return {
            "settings": asdict(s) | {"lengths": sorted(s.lengths)},
            "prompt_tokens": lines["reference"]["prompt_tokens"],
            "arms": rows,
            "comparisons": _speedups(rows),
            "rooflines": lines,
            "curve": curve,
            "published": PUBLISHED,
            "skipped": [] if why is None else [f"the arms on native kernels: {why}"],
            "strategy": self.verdict(rows, user),
        }

    def child(self, words: str, **spec: Any) -> dict[str, Any]:
        """Run one arm.py. Raises ArmError with what it says; kills it on an interrupt."""
        s = self.settings
        self.progress(words, self.done, self.total)
        path = self.folder / "result.json"
        path.unlink(missing_ok=True)
        spec = {"model": s.model, "prompt": s.prompt, "max_tokens": s.max_tokens, "result": str(path)} | spec
        command = [sys.executable, "-m", "octavo.lab.standard.arm"]
        # what a user's file prints must not mix with our own output: it goes to standard error
        try:
            ran = subprocess.run(command, input=json.dumps(spec), text=True, stdout=2, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ArmError(f"{words} took more than {_LIMIT_S} seconds and was ended") from None
        self.done += 1
        if not path.exists():
            raise ArmError(f"the arm {words!r} ended with code {ran.returncode} and no result (out of memory?)")
        answer: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if "error" in answer:
            raise ArmError(answer["error"])
        return answer

    def rounds(self, arms: Sequence[tuple[str, ...]]) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {arm[0]: [] for arm in arms}
        for number in range(self.settings.runs):
            # the user's way first: a mistake in it should not take a minute to show
            for index, (name, kind, way, backend) in sorted(enumerate(arms), key=lambda arm: arm[1][2] != "strategy"):
                words = f"{name}, round {number + 1} of {self.settings.runs}"
                found[name].append(
                    self.child(
                        words, kind=kind, way=way, backend=backend, check=number == 0, logits=str(self.folder / f"{index}.npy"),
                        strategy=str(Path(self.settings.strategy).resolve()) if self.settings.strategy else None,
                    )
                )  # fmt: skip
        return found

    def row(self, arm: tuple[str, ...], runs: list[dict[str, Any]], lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
        name, _, way, backend = arm
        seconds = statistics.median(r["seconds"] for r in runs)
        tokens, line = self.settings.max_tokens, dict(lines[backend])
        line.pop("backend")
        prompt = line.pop("prompt_tokens")
        predicted = None if way == "strategy" else Roofline(**line).predict(way, prompt, tokens)
        peaks = [r["peak_bytes"] for r in runs if r["peak_bytes"] is not None]
        return {
            "arm": name,
            "backend": runs[0]["backend"],
            "seconds": seconds,
            "runs": [r["seconds"] for r in runs],
            "tokens_per_s": tokens / seconds,
            "ttft_s": statistics.median(r["ttft"] for r in runs),
            "steps": runs[0]["steps"],
            "peak_bytes": statistics.median(peaks) if peaks else None,
            "predicted_s": predicted,
            "token_ids": runs[0]["token_ids"],
            "text": runs[0]["text"],
            "pieces": runs[0]["pieces"],
            "repeats": all(r["token_ids"] == runs[0]["token_ids"] for r in runs),
        }

    def compare(self, arms: Sequence[tuple[str, ...]], rows: list[dict[str, Any]], prompt_tokens: int) -> None:
        """Adds how far each arm's logits are from the naive ones, on the same ops and on NumPy, and whether tokens agree."""
        bases = {arm[3]: index for index, arm in reversed(list(enumerate(arms))) if arm[2] == "naive"}
        for index, (arm, row) in enumerate(zip(arms, rows, strict=True)):
            for name, base in (("naive", bases[arm[3]]), ("reference", 0)):
                gaps = _differences(self.logits(index), self.logits(base), row["token_ids"], rows[base]["token_ids"])
                row[f"max_logit_diff_{name}"] = max((gap for _, gap in gaps), default=None)
                row[f"tokens_equal_{name}"] = row["token_ids"] == rows[base]["token_ids"]
            if arm[2] == "strategy":
                base = bases[arm[3]]
                gaps = _differences(self.logits(index), self.logits(base), row["token_ids"], rows[base]["token_ids"])
                first = first_difference(rows[base]["token_ids"], row["token_ids"], self.logits(base), gaps, prompt_tokens)
                if first is not None:
                    first["expected_text"], first["got_text"] = (r["pieces"][first["token"]] for r in (rows[base], row))
                row["first_difference"] = first
        for row in rows:
            del row["pieces"]

    def logits(self, index: int) -> Any:
        return np.load(self.folder / f"{index}.npy", mmap_mode="r", allow_pickle=False)

    def user_attention(self) -> dict[str, Any] | None:
        s = self.settings
        if s.strategy is None:
            return None
        path = str(Path(s.strategy).resolve())
        return self.child(f"checking {Path(path).name}", kind="attention", strategy=path, length=128 if s.quick else 1024, runs=s.runs)

    def verdict(self, rows: list[dict[str, Any]], user: dict[str, Any] | None) -> dict[str, Any] | None:
        if user is None:
            return None
        row = next((r for r in rows if "first_difference" in r), None)
        first = None if row is None else row.pop("first_difference")
        attention = user if "verified" in user else None
        return {
            "file": Path(self.settings.strategy or "").name,
            "generate": None if row is None else {"verified": first is None, "first_difference": first},
            "attention": attention,
            "tolerance": {"logits": LOGIT_TOLERANCE, "attention": ATTENTION_TOLERANCE},
        }


def _differences(logits: Any, base: Any, tokens: list[int], base_tokens: list[int]) -> list[tuple[int, float]]:
    """(token, largest difference of its logits) up to and with the first token that differs: later ones have seen other
    tokens and cannot be compared. Logits an arm did not compute (NaN) are left out."""
    found = []
    for index, (token, expected) in enumerate(zip(tokens, base_tokens, strict=True)):
        if not np.isnan(logits[index, 0]):
            found.append((index, float(np.abs(logits[index] - base[index]).max())))
        if token != expected:
            break
    return found


def _speedups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {row["arm"]: row for row in rows}
    return [
        {"what": what, "from": a, "to": b, "speedup": by_name[a]["seconds"] / by_name[b]["seconds"]}
        for what, a, b in COMPARISONS
        if a in by_name and b in by_name
    ]


def failure(results: dict[str, Any]) -> str | None:
    """Why the run counts as failed: an arm of ours with other text, or a strategy that is not greedy decoding."""
    found = results["strategy"]
    user = found["file"] if found is not None else None
    for row in results["arms"]:
        if row["arm"] != user and not row["tokens_equal_naive"]:
            return f"{row['arm']} gives other tokens than the naive way on the same ops"
    if found is None:
        return None
    if found["generate"] is not None and not found["generate"]["verified"]:
        return _told(found["file"], found["generate"]["first_difference"])
    if found["attention"] is not None and not found["attention"]["verified"]:
        first = found["attention"]["first_difference"]
        got = first["got"] if isinstance(first["got"], str) else f"{first['got']:.6g}"
        return (
            f"{found['file']}: attention over {first['length']} tokens first differs at token {first['token']}, head {first['head']},"
            f" column {first['column']}: expected {first['expected']:.6g}, got {got} (tolerance {ATTENTION_TOLERANCE})"
        )
    return None


def _told(file: str, first: dict[str, Any]) -> str:
    where = f"{file} first differs from naive decoding at position {first['position']} (token {first['token'] + 1} of the answer)"
    if first["expected"] == first["got"]:
        return f"{where}: same token, but its logits are off by {first['logit_difference']:.3g} (tolerance {LOGIT_TOLERANCE})"
    expected, got = (f"{first[name]} {first[name + '_text']!r}" for name in ("expected", "got"))
    return f"{where}: expected token {expected}, got {got}, whose logit is {first['logit_gap']:.3g} lower in the naive run"


def report(results: dict[str, Any]) -> str:
    rows, settings = results["arms"], results["settings"]
    header = ("arm", "latency", "tokens/s", "first token", "peak memory", "roofline", "x roofline", "logits vs naive",
              "vs NumPy", "same tokens")  # fmt: skip
    cells = [
        (r["arm"], text.seconds(r["seconds"]), f"{r['tokens_per_s']:.1f}", text.seconds(r["ttft_s"]), text.size(r["peak_bytes"]),
         text.seconds(r["predicted_s"]),
         "-" if r["predicted_s"] is None else f"{r['seconds'] / r['predicted_s']:.1f}", text.small(r["max_logit_diff_naive"]),
         text.small(r["max_logit_diff_reference"]), "yes" if r["tokens_equal_reference"] else "no")
        for r in rows
    ]  # fmt: skip
    parts = [
        f"{settings['max_tokens']} tokens after {settings['prompt']!r} ({results['prompt_tokens']} tokens), greedy, {settings['model']}",
        text.table(header, cells),
        "logits: largest difference over all positions, to the naive way on the same ops, and to it on NumPy.",
        "roofline: the larger of bytes / bandwidth and operations / matmul speed, over all steps, from "
        + _speeds(results["rooflines"])
        + ".",
        text.bars("latency", [(r["arm"], r["seconds"], text.seconds(r["seconds"])) for r in rows]),
        "\n".join(f"{c['what']}: {c['speedup']:.2f} x ({c['from']} -> {c['to']})" for c in results["comparisons"]),
        _curve(results),
        *results["skipped"],
        *_verdict(results["strategy"]),
        "text: " + " ".join(rows[0]["text"].split()),
    ]
    return "\n\n".join(parts) + "\n"


def _speeds(lines: dict[str, dict[str, Any]]) -> str:
    return "; ".join(
        f"{'native' if name == 'cpu' else 'NumPy'} {line['bandwidth'] / 1e9:.1f} GB/s, {line['matmul'] / 1e9:.0f} GFLOP/s,"
        f" weights {text.size(line['weight_bytes'])}"
        for name, line in lines.items()
    )


def _curve(results: dict[str, Any]) -> str:
    curve = results["curve"]
    cells = [
        (str(n), text.seconds(a), text.seconds(b), f"{a / b:.2f} x")
        for n, a, b in zip(curve["lengths"], curve["naive"], curve["kv_cache"], strict=True)
    ]
    computed = curve["naive_steps_computed"]
    notes = [f"{computed} naive steps computed ({curve['naive_steps_agreeing']} chose the cached way's token), those between interpolated"]
    if computed == max(curve["lengths"]):
        notes = ["every naive step computed"]
    published = results["published"]
    notes.append(
        f"published elsewhere, another model and machine: {published['naive_s']} s -> {published['kv_cache_s']} s"
        f" at {published['tokens']} tokens"
    )
    bars = [(f"{n} tokens", a / b, f"{a / b:.2f} x") for n, a, b in zip(curve["lengths"], curve["naive"], curve["kv_cache"], strict=True)]
    header = ("tokens", "naive", "KV cache", "speed-up")
    return "\n\n".join([text.table(header, cells), "\n".join(notes), text.bars(f"speed-up of the cache ({curve['backend']} ops)", bars)])


def _verdict(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    parts = []
    if found["generate"] is not None:
        words = "verified: the same tokens" if found["generate"]["verified"] else "NOT verified"
        parts.append(f"{found['file']}: generate {words}")
    if found["attention"] is not None:
        attention = found["attention"]
        words = "verified" if attention["verified"] else "NOT verified"
        parts.append(f"{found['file']}: attention {words}, largest difference {text.small(attention['largest_difference'])}")
        timed = attention["seconds"]
        parts.append(text.bars(f"attention over {attention['length']} tokens", [(n, t, text.seconds(t)) for n, t in timed.items()]))
    return parts


def figure(results: dict[str, Any]) -> str:
    curve = results["curve"]
    series = {
        "naive": list(zip(curve["lengths"], curve["naive"], strict=True)),
        "KV cache": list(zip(curve["lengths"], curve["kv_cache"], strict=True)),
        "speed-up (times)": [(n, a / b) for n, a, b in zip(curve["lengths"], curve["naive"], curve["kv_cache"], strict=True)],
    }
    title = f"Decoding with and without a KV cache ({curve['backend']} ops)"
    return svg.line_chart(title, "tokens generated", "seconds, or times", series, log_x=True, log_y=True)
