"""A chat of ten turns with SmolLM2: time to the first token of each turn, with the answers of earlier turns computed again as
prompt (the default) and with their blocks reused (`--reuse-generated`).

Usage: .venv/bin/python -m benchmarks.chat_turns [--rounds 5] [--turns 10] [--max-tokens 64] [--output FILE.json] [--plot FILE.svg]
Both engines hold the same conversation, whose answers have a fixed length; turns alternate between them, and each round begins
with an empty cache. Writes results/chat_turns.json and .svg: per turn the prompt's tokens, those found in the cache, and TTFT in ms.
Not here: a server, quality of what is said.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from octavo import LLM, SamplingParams
from octavo.bench import plot, record
from octavo.bench.statistics import summary

QUESTIONS = (
    "What is a river?", "Where does its water come from?", "And where does it go?", "Why is the sea salt?", "Who lives in the sea?",
    "How deep is it?", "What makes the waves?", "What is the tide?", "How far away is the moon?", "What have we talked about?",
)  # fmt: skip
NAMES = {False: "default", True: "reuse_generated"}


def turn(llm: LLM, messages: list[dict[str, str]], question: str, params: SamplingParams) -> dict[str, float]:
    """Ask, put question and answer into `messages`, and say what the turn took."""
    messages.append({"role": "user", "content": question})
    before = llm.stats()
    output = llm.chat(messages, params, progress=False)[0]
    answer = output.outputs[0]
    if answer.metrics is None or answer.metrics.ttft is None:
        raise RuntimeError("the turn has no first token")
    messages.append({"role": "assistant", "content": answer.text})
    cached = llm.stats().prefix_hit_tokens - before.prefix_hit_tokens
    return {"prompt_tokens": len(output.prompt_token_ids), "cached_tokens": cached, "ttft_ms": 1000 * answer.metrics.ttft}


def draw(path: Path, results: dict[str, Any], title: str) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "octavo", "font.size": 9}):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axis = figure.subplots()
        for name, turns in results.items():
            axis.plot(range(1, len(turns) + 1), [one["ttft_ms"]["median"] for one in turns], marker="o", label=name)
        axis.set(title=title, xlabel="turn", ylabel="time to first token, ms", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5); one more goes first")
    parser.add_argument("--turns", type=int, default=len(QUESTIONS))
    parser.add_argument("--max-tokens", type=int, default=64, help="length of every answer (default 64)")
    parser.add_argument("--output", type=Path, default=RESULTS / "chat_turns.json")
    parser.add_argument("--plot", type=Path, default=None, help="default: beside the output")
    options = parser.parse_args(arguments)
    picture = options.plot or options.output.with_suffix(".svg")
    plot.check(picture)
    before = record.machine()
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0, ignore_eos=True)
    llms = {reuse: LLM("smollm2", backend="cpu", kv_cache_memory="512MiB", reuse_generated=reuse) for reuse in (False, True)}
    samples: dict[bool, list[list[dict[str, float]]]] = {reuse: [[] for _ in range(options.turns)] for reuse in llms}
    for number in range(options.rounds + 1):
        conversations: dict[bool, list[dict[str, str]]] = {reuse: [] for reuse in llms}
        for llm in llms.values():
            llm.reset_prefix_cache()
        for index in range(options.turns):
            for reuse, llm in llms.items():
                found = turn(llm, conversations[reuse], QUESTIONS[index % len(QUESTIONS)], params)
                if number:
                    samples[reuse][index].append(found)
    results = {
        NAMES[reuse]: [
            {
                "prompt_tokens": [int(one["prompt_tokens"]) for one in runs],
                "cached_tokens": [int(one["cached_tokens"]) for one in runs],
                "ttft_ms": summary([one["ttft_ms"] for one in runs]),
            }
            for runs in turns
        ]
        for reuse, turns in samples.items()
    }
    method = (
        f"milliseconds to the first token; {options.turns} turns, answers of {options.max_tokens} tokens; {options.rounds} rounds "
        "after one to warm up, each from an empty cache; turns alternate between the two engines"
    )
    command = " ".join(["python -m benchmarks.chat_turns", *(sys.argv[1:] if arguments is None else arguments)])
    record.write(options.output, "chat_turns", command, method, before, results)
    draw(picture, results, f"smollm2, answers of {options.max_tokens} tokens")
    for name, turns in results.items():
        print(f"{name:16} " + " ".join(f"{one['ttft_ms']['median']:7.1f}" for one in turns))
    for llm in llms.values():
        llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
