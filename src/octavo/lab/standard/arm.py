"""One arm of the experiment in a process of its own, so that its peak memory is its own and a fault ends only itself.

    python -m octavo.lab.standard.arm < spec.json       started by experiment.py; the answer goes to the file spec["result"]

Owner of the model it loads. Not here: what is compared with what (experiment.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from octavo import LLM, SamplingParams
from octavo.errors import OctavoError
from octavo.lab.attention import efficient, flash, naive
from octavo.lab.standard import decoding, roofline, strategy
from octavo.lab.standard.model import LabModel

Spec = dict[str, Any]
_WAYS = {"naive": decoding.naive, "kv_cache": decoding.kv_cache}
_SPARE_BLOCKS = 8  # of the KV pool, for a strategy that needs a second cache


def main() -> int:
    spec: Spec = json.load(sys.stdin)
    kinds = {"decode": decode, "engine": engine, "curve": curve, "roofline": measure_roofline, "attention": attention}
    try:
        answer = kinds[spec["kind"]](spec)
    except OctavoError as error:
        answer = {"error": str(error), "error_type": type(error).__name__}
    except KeyboardInterrupt:
        return 130
    Path(spec["result"]).write_text(json.dumps(answer), "utf-8")
    return 0


def decode(spec: Spec) -> dict[str, Any]:
    """One of our ways, or the user's generate, on LabModel."""
    model, ids = _open(spec)
    way = _WAYS.get(spec["way"])
    user = strategy.load(Path(spec["strategy"])) if way is None else None

    def run(max_tokens: int) -> list[int]:
        model.begin(len(ids))
        if way is not None:
            return way(model, list(ids), max_tokens)
        assert user is not None and user.generate is not None
        answer = strategy.guarded(user.path, user.generate, model, list(ids), max_tokens)
        return strategy.check_tokens(user.path, answer, max_tokens, model.vocab_size)

    run(2)  # warms up
    reset = forget_peak()
    begin = perf_counter()
    tokens = run(spec["max_tokens"])
    seconds, peak = perf_counter() - begin, memory("VmHWM") if reset else None
    first = model.record[0].done - begin if model.record else seconds
    if spec["check"]:
        model.keep_logits = True
        run(spec["max_tokens"])
        _save_logits(spec, model, ids, tokens)
    return {
        "token_ids": tokens,
        "text": model.tokenizer.decode(tokens),
        "pieces": [model.tokenizer.decode([token]) for token in tokens],
        "backend": model.backend,
        "seconds": seconds,
        "ttft": first,
        "steps": len(model.record),
        "peak_bytes": peak,
    }


def _save_logits(spec: Spec, model: LabModel, ids: list[int], tokens: list[int]) -> None:
    """Row i: the logits that token i was, or could have been, taken from; NaN where none were computed with exactly the
    tokens of the answer before it (guesses that were wrong)."""
    sequence, rows = [*ids, *tokens], np.full((len(tokens), model.vocab_size), np.nan, np.float32)
    for entry in model.record:
        assert entry.logits is not None
        for offset, row in enumerate(entry.logits, len(entry.token_ids) - len(entry.logits)):
            token = entry.first_position + offset + 1 - len(ids)  # that this row is for, if its position is right
            seen = entry.token_ids[: offset + 1]
            if 0 <= token < len(tokens) and seen == sequence[entry.first_position : entry.first_position + len(seen)]:
                rows[token] = row
    np.save(spec["logits"], rows)


def engine(spec: Spec) -> dict[str, Any]:
    """The engine itself: a whole reply, or a stream."""
    with contextlib.closing(LLM(spec["model"], enable_prefix_caching=False, **_settings(spec))) as llm:
        llm.generate(spec["prompt"], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))  # warms up
        params = SamplingParams(temperature=0, max_tokens=spec["max_tokens"], ignore_eos=True)
        reset = forget_peak()
        begin = perf_counter()
        first, answer = None, []
        if spec["way"] == "stream":
            for delta in llm.stream(spec["prompt"], params):
                first = first or perf_counter() - begin
                answer += delta.token_ids
        else:
            answer = llm.generate(spec["prompt"], params)[0].outputs[0].token_ids
        seconds, peak = perf_counter() - begin, memory("VmHWM") if reset else None
        if spec["check"]:
            _save_engine_logits(spec, llm, params)
        backend = str(llm.executor.ops.name)  # type: ignore[attr-defined]
        text = llm.tokenizer.decode(answer)
    return {
        "token_ids": answer, "text": text, "backend": backend, "seconds": seconds, "ttft": first or seconds, "steps": len(answer),
        "peak_bytes": peak, "pieces": [],
    }  # fmt: skip


def _save_engine_logits(spec: Spec, llm: LLM, params: SamplingParams) -> None:
    """The same request again, with a copy taken of what the model hands to the sampler."""
    runner: Any = llm.executor.runner  # type: ignore[attr-defined]
    rows: list[Any] = []
    runner.read_logits = lambda request_id, position, logits: rows.append(np.array(logits[-1]))
    llm.generate(spec["prompt"], params)
    np.save(spec["logits"], np.array(rows))


def curve(spec: Spec) -> dict[str, Any]:
    """Seconds of naive and cached decoding at several lengths. The naive step at token i is a forward pass of all before
    it, whatever came of the others: where not all are computed, those between are interpolated."""
    model, ids = _open(spec)
    most = max(spec["lengths"])
    model.begin(len(ids))
    decoding.kv_cache(model, list(ids), 2)
    model.begin(len(ids))
    begin = perf_counter()
    tokens = decoding.kv_cache(model, list(ids), most)
    cached = [entry.done - begin for entry in model.record]
    picked = sorted({*range(min(spec["full_below"], most)), *np.linspace(0, most - 1, spec["samples"]).round().astype(int).tolist()})
    times, agree = [], 0
    for i in picked:
        begin = perf_counter()
        logits = model.forward([*ids, *tokens[:i]])
        times.append(perf_counter() - begin)
        agree += int(logits[-1].argmax()) == tokens[i]
    naive_total = np.cumsum(np.interp(np.arange(most), picked, times))
    return {
        "backend": model.backend,
        "lengths": spec["lengths"],
        "naive": [float(naive_total[n - 1]) for n in spec["lengths"]],
        "kv_cache": [cached[n - 1] for n in spec["lengths"]],
        "naive_steps_computed": len(picked),
        "naive_steps_agreeing": agree,
    }


def measure_roofline(spec: Spec) -> dict[str, Any]:
    model, ids = _open(spec)
    return {"backend": model.backend, "prompt_tokens": len(ids), **roofline.measure(model).as_dict()}


def attention(spec: Spec) -> dict[str, Any]:
    """The user's attention: checked, then timed beside ours. {} where the file has none."""
    user = strategy.load(Path(spec["strategy"]))
    if user.attention is None:
        return {"defines_generate": user.generate is not None}
    found = strategy.check_attention(user)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, spec["length"], 64), dtype=np.float32) for heads in (9, 3, 3))
    ways = {"naive": naive.attention, "efficient": efficient.attention, "flash-style": flash.attention, user.path.name: user.attention}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(spec["runs"]):
        for name, way in ways.items():
            begin = perf_counter()
            strategy.guarded(user.path, way, q, k, v)
            times[name].append(perf_counter() - begin)
    seconds = {name: float(np.median(values)) for name, values in times.items()}
    return {"defines_generate": user.generate is not None, "length": spec["length"], "seconds": seconds, **found}


def _open(spec: Spec) -> tuple[LabModel, list[int]]:
    model = LabModel.load(spec["model"], **_settings(spec))
    ids = model.tokenizer.encode(spec["prompt"])
    if not ids:
        raise OctavoError("the prompt has no tokens")
    return model, list(ids)


def _settings(spec: Spec) -> dict[str, Any]:
    """The same for every arm; a pool that holds what the longest run needs."""
    tokens = len(spec["prompt"].encode()) + 8 + spec["max_tokens"]
    return {"backend": spec["backend"], "num_kv_blocks": -(-tokens // 16) * 2 + _SPARE_BLOCKS}


def end_with_parent() -> None:
    """Whoever started this ends it; where that one is killed itself, a strategy that never returns must not go on for ever."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def memory(field: str) -> int | None:
    """VmRSS (now) or VmHWM (the most so far) of this process in bytes; None where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def forget_peak() -> bool:
    """Let VmHWM begin again from now: loading a model takes more for a moment than running it. False where it cannot be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    end_with_parent()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: a thread that the user's file has left behind would be waited for
