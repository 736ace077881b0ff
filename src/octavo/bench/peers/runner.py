"""The loop of an engine under comparison: requests as lines of JSON on standard input, one answer a line on standard output.

Usage: python -I runner.py ENGINE_FILE, where that file has a class `Engine`:

    Engine(model: str, limits: dict, options: dict)   load; limits: threads, max_len (tokens of a sequence), max_batch (sequences
                                                      at once), kv_tokens (of all sequences together)
    .versions -> dict of text                         what runs: packages, format of the weights
    .vocab_size -> int                                ids below it may be asked for
    .prepare(batch, prompt_tokens, tokens)            before the clock starts: contexts, caches
    .generate(prompts, tokens) -> iterator of [(request, token id), ...]
                                                      greedy, no end token; what one step gave, as soon as the caller could have it

Requests: {"op": "load", "model", "limits", "options"} and {"op": "run", "prompts", "tokens"}. Answers: {"versions", "vocab_size",
"seconds"}; {"ids": one list a request, "times": seconds from the start, one list a request}; {"error": text}, after which the
process ends. Whatever else is written to standard output goes to standard error.
Plain Python 3.9 without imports from elsewhere. Not here: rates and ratios (comparison.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO


def load_engine(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("engine_under_comparison", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Engine


def run(engine: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    engine.prepare(len(prompts), len(prompts[0]), tokens)
    ids: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    begin = time.perf_counter()
    for step in engine.generate(prompts, tokens):
        now = time.perf_counter() - begin
        for request, token in step:
            ids[request].append(int(token))
            times[request].append(now)
    return {"ids": ids, "times": times}


def serve(requests: Iterable[str], answers: TextIO, path: str) -> None:
    engine: Any = None
    for line in requests:
        request = json.loads(line)
        if request["op"] == "load":
            begin = time.perf_counter()
            engine = load_engine(path)(request["model"], request["limits"], request["options"])
            seconds = time.perf_counter() - begin
            answer = {"versions": engine.versions, "vocab_size": int(engine.vocab_size), "seconds": seconds}
        else:
            answer = run(engine, request["prompts"], request["tokens"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    try:
        serve(sys.stdin, answers, sys.argv[1])
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        raise


if __name__ == "__main__":
    main()
