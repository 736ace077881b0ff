"""A long prompt beside streams that are generating: the longest any stream waits, and the memory it all takes.

Usage: .venv/bin/python -m benchmarks.long_prompt [--tokens 32768] [--streams 4] [--kv bf16 int8] [--model DIR] [--output FILE]
Each KV dtype runs in a process of its own. The model has SmolLM2-135M's shape and random weights, with a context of as many tokens as
the run needs (the real one ends at 8192); `quantize: int4` while loading. --model takes any other, with sliding windows too.
Streams decode alone first, for the pace without the prompt. Then the prompt comes, and until its first token every gap between two
tokens of a stream is noted, in steps and in milliseconds. Not here: speed of long prompts alone (octavo bench latency).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.load_model import Peak, status
from octavo import EngineConfig, SamplingParams
from octavo.bench import record
from octavo.bench.make_model import make, shape_of
from octavo.wiring import EngineParts

#: Tokens each stream draws before the prompt comes, and tokens of context beyond the prompt's.
ALONE, MARGIN = 32, 64


def write_model(folder: Path, tokens: int) -> Path:
    """SmolLM2-135M's shape with a context as long as the run needs."""
    return make(replace(shape_of("smollm2-135m", None), context=tokens + MARGIN), "safetensors-bf16", folder / "model")


def child(model: str, kv_dtype: str, tokens: int, streams: int, settings: dict[str, Any]) -> dict[str, Any]:
    config = EngineConfig(model=model, kv_dtype=kv_dtype, max_model_len=tokens + MARGIN, enable_prefix_caching=False, **settings)
    with Peak() as peak:
        parts = EngineParts.load(config)
        loaded = status()
        core, inputs = parts.core(), parts.input_processor()
        endless = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        names = [f"s{i}" for i in range(streams)]
        for i, name in enumerate(names):
            core.add_request(inputs.process(name, [100 + i, *range(200, 231)], endless))
        alone = _watch(core, names, lambda step, _: step < ALONE)
        prompt = [1000 + (i * 7919) % 40000 for i in range(tokens)]
        core.add_request(inputs.process("long", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
        started = time.perf_counter()
        beside = _watch(core, names, lambda _, served: "long" not in served)
        seconds = time.perf_counter() - started
        blocks = {f"blocks_of_group_{g}": pool.num_blocks for g, pool in enumerate(core.kv.pools)}
        core.abort(names)
    after = status()
    return {
        "alone": alone,
        "beside": beside,
        "prompt_seconds": round(seconds, 3),
        "prompt_tokens_per_second": round(tokens / seconds, 1),
        "loaded_private_mib": loaded["private"],
        "peak_private_mib": max(peak.largest, after["private"]),
        "peak_resident_mib": after["peak_resident"],
        "max_stalled_steps": config.max_stalled_steps,
        "preemptions": core.stats.preemptions,
        "blocks_freed_behind_window": core.stats.blocks_freed_behind_window,
        **blocks,
    }


def _watch(core: Any, names: list[str], goes_on: Any) -> dict[str, Any]:
    """Steps until `goes_on(steps, names served in the last)` is false; gaps between tokens of the same stream."""
    now = time.perf_counter()
    last_step, last_time = dict.fromkeys(names, 0), dict.fromkeys(names, now)
    stalled, step = 0, 0
    gaps: list[float] = []
    served: set[str] = set()
    while step == 0 or goes_on(step, served):
        served = {delta.request_id for delta in core.step()}
        step, now = step + 1, time.perf_counter()
        for name in served.intersection(names):
            stalled = max(stalled, step - last_step[name] - 1)
            gaps.append((now - last_time[name]) * 1e3)
            last_step[name], last_time[name] = step, now
    stalled = max(stalled, *(step - last for last in last_step.values()))
    longest = max([*gaps, *((now - last) * 1e3 for last in last_time.values())])
    gaps.sort()
    median = gaps[len(gaps) // 2] if gaps else longest
    return {"steps": step, "longest_stall_steps": stalled, "longest_gap_ms": round(longest, 2), "median_gap_ms": round(median, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--kv", nargs="+", default=["bf16", "int8"], choices=["f32", "f16", "bf16", "int8"])
    parser.add_argument("--budget", type=int, default=512, help="max_num_batched_tokens")
    parser.add_argument("--memory", default="4GiB", help="kv_cache_memory")
    parser.add_argument("--model", help="instead of the one with random weights; its context must be long enough")
    parser.add_argument("--output", type=Path, default=RESULTS / "long_prompt.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        settings = {"max_num_batched_tokens": options.budget, "kv_cache_memory": options.memory}
        if not options.model.endswith(".gguf"):
            settings["quantize"] = "int4"
        print(json.dumps(child(options.model, options.child, options.tokens, options.streams, settings)))
        return 0
    before, results = record.machine(), {}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(write_model(Path(folder), options.tokens))
        for kv_dtype in options.kv:
            command = [sys.executable, "-m", "benchmarks.long_prompt", "--child", kv_dtype, "--model", model]
            command += ["--tokens", str(options.tokens), "--streams", str(options.streams)]
            command += ["--budget", str(options.budget), "--memory", options.memory]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")
            results[kv_dtype] = found = json.loads(done.stdout)
            print(
                f"{kv_dtype}: {options.tokens} tokens in {found['prompt_seconds']} s, longest stall "
                f"{found['beside']['longest_stall_steps']} steps, {found['beside']['longest_gap_ms']} ms, "
                f"peak {found['peak_private_mib']:.0f} MiB private"
            )
    method = f"one process for each KV dtype; {options.streams} streams, prompt of {options.tokens} tokens, steps of {options.budget}"
    model_name = Path(options.model).name if options.model else "smollm2-135m shape, random weights, int4"
    record.write(options.output, "long_prompt", "python -m benchmarks.long_prompt", f"{method}; {model_name}", before, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
