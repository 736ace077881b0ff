"""Fuzzes scheduler and KV manager: random lives of engines, every operation followed by a full account (engine_life.py).

    python tests/fuzz/fuzz_engine.py [--operations N] [--seed S]
    python tests/fuzz/fuzz_engine.py --seed S --life K [--keep 3,17,40]

An operation is one request added (or refused), one step, one abort, preemption, reset of the cache, fault or interrupt that
had something to do.
A life has random settings, down to pools of one block of one token and steps of one token; it ends when nothing is left, and
its blocks are counted.
What fails is repeated with ever fewer of its operations, and printed as a command.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from octavo.config import PolicyName  # noqa: E402
from tests.fuzz.engine_life import Life  # noqa: E402

#: What a long run must have brought about, or it has tested less than it says.
MUST_HAPPEN = (
    "preemptions", "forks", "prefix_hit_tokens", "prefix_waits", "blocks_copied", "blocks_evicted", "tokens_recomputed",
    "requests_promoted", "requests_refused", "requests_aborted", "requests_failed", "beams",
)  # fmt: skip
OPERATIONS = ("add", "refuse", "step", "abort", "abort in flight", "preempt", "reset", "fail", "interrupt")
#: Seconds spent on making a failure smaller.
SHRINK_SECONDS = 60


class FuzzFailure(AssertionError):
    """What was found, and the command that repeats it."""


def draw_settings(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice([1, 1, 2, 3, 4, 8])
    tokens = rng.choice([rng.randint(1, 4), rng.randint(5, 60), rng.randint(5, 60), rng.randint(60, 200)])
    return {
        "num_blocks": -(-tokens // block_size),
        "block_size": block_size,
        "groups": rng.choice([1, 1, 2]),
        "window": rng.choice([None, None, rng.randint(1, 12)]),
        "max_num_batched_tokens": rng.choice([1, 2, 3, 7, 16, 64]),
        "max_num_seqs": rng.choice([1, 2, 4, 8, 16]),
        "max_prefill_batch_size": rng.randint(1, 4),
        "max_decode_batch_size": rng.choice([1, 2, 8, 16]),
        "max_stalled_steps": rng.randint(1, 8),
        "max_waiting_requests": rng.choice([1, 3, 10, 30]),
        "max_waiting_tokens": rng.choice([1, 40, 10**6, 10**6]),
        "promote_after_steps": rng.choice([1, 10, 1000]),
        "enable_prefix_caching": rng.random() < 0.85,
        "reuse_generated": rng.random() < 0.25,
        "policy": rng.choice(get_args(PolicyName)),
    }


def draw_request(rng: random.Random) -> dict[str, Any]:
    """Prompts of a few families with long common beginnings; now and then a whole earlier prompt again."""
    family, length = rng.randrange(3), rng.randint(1, 24)
    prompt = [5 + (family * 11 + i * i) % 25 for i in range(length)] + [rng.randint(5, 29) for _ in range(rng.choice([0, 0, 1, 3]))]
    most = rng.choice([1, rng.randint(1, 14), rng.randint(1, 30)])
    wanted: dict[str, Any] = {
        "prompt": prompt,
        "n": rng.choice([1, 1, 1, 1, 2, 3, 5]),
        "max_tokens": most,
        "min_tokens": rng.choice([0, 0, 0, min(3, most)]),
        "temperature": rng.choice([0.0, 1.0]),
        "eos": rng.random() < 0.7,
        "stop": rng.choice([(), (), (), ("ab",), ("e",), ("e", "de")]),
        "stop_token_ids": rng.choice([(), (), (7, 9)]),
        "priority": rng.choice([0, 0, 0, 1, -1]),
        "logprobs": rng.choice([None, None, 0]),
        "cache_salt": rng.choice([None, None, None, "s", "t"]),
        "adapter": rng.choice([None, None, None, "s"]),
        "tenant": rng.choice([None, "t", "u"]),
    }
    if rng.random() < 0.08:
        width = rng.randint(1, 4)
        wanted |= {"beam_width": width, "n": rng.randint(1, width), "max_tokens": min(most, 8), "early_stopping": rng.random() < 0.5}
        wanted |= {"min_tokens": min(wanted["min_tokens"], 2), "temperature": 0.0, "logprobs": None, "stop": ()}
    elif rng.random() < 0.1:
        wanted |= {"prompt_logprobs": 0, "max_tokens": rng.choice([0, most])}
        wanted["min_tokens"] = min(wanted["min_tokens"], wanted["max_tokens"])
    return wanted


def operate(life: Life, seed: int, adding: float) -> None:
    """One operation, which depends on `seed` and on where the life is."""
    rng = random.Random(seed)
    if rng.random() < adding or not life.core.has_unfinished_requests():
        life.add(**draw_request(rng))
        return
    number = rng.randrange(1 << 16)
    kind = rng.random()
    if kind < 0.06:
        life.abort(number)
    elif kind < 0.09:
        life.abort_in_flight(number)
    elif kind < 0.16:
        life.preempt(number)
    elif kind < 0.17:
        life.reset()
    elif kind < 0.175:
        life.fail(number)
    elif kind < 0.177:
        life.interrupt(rng.choice(["before", "after", "update"]))
    else:
        life.step()


def plan(seed: int, number: int) -> tuple[dict[str, Any], float, list[int]]:
    """Settings, rate of new requests, and the operations of one life."""
    rng = random.Random(f"{seed}/{number}")
    count = rng.choice([20, 100, 300, 1000])
    return draw_settings(rng), rng.choice([0.1, 0.2, 0.4]), [rng.randrange(1 << 32) for _ in range(count)]


def live(settings: dict[str, Any], adding: float, operations: Iterable[int]) -> Life:
    life = Life(**settings)
    for seed in operations:
        operate(life, seed, adding)
    life.end()
    return life


def _error_of(settings: dict[str, Any], adding: float, operations: Iterable[int]) -> Exception | None:
    try:
        live(settings, adding, operations)
    except Exception as error:
        return error
    return None


def shrink(fails: Callable[[list[int]], bool], items: list[int], seconds: float = SHRINK_SECONDS) -> list[int]:
    """Fewer items that still fail: leaves out ever smaller pieces (Zeller & Hildebrandt 2002, the complements of ddmin)."""
    end, size = time.monotonic() + seconds, max(1, len(items) // 2)
    while time.monotonic() < end:
        at, before = 0, len(items)
        while at < len(items) and time.monotonic() < end:
            fewer = items[:at] + items[at + size :]
            if fails(fewer):
                items = fewer
            else:
                at += size
        if size == 1 and len(items) == before:
            break
        size = max(1, size // 2)
    return items


def report(seed: int, number: int, error: Exception, seconds: float = SHRINK_SECONDS) -> FuzzFailure:
    settings, adding, operations = plan(seed, number)

    def fails(places: list[int]) -> bool:
        return _error_of(settings, adding, [operations[place] for place in places]) is not None

    keep = shrink(fails, list(range(len(operations))), seconds)
    smallest = _error_of(settings, adding, [operations[place] for place in keep]) or error
    places = ",".join(map(str, keep))
    command = f"python tests/fuzz/fuzz_engine.py --seed {seed} --life {number} --keep {places}"
    cause = smallest.__cause__ or smallest
    return FuzzFailure(f"{type(cause).__name__}: {cause}\nsettings: {settings}\n{len(keep)} of {len(operations)} operations: {command}")


def fuzz(
    operations: int, seed: int, *, progress: Callable[[int], None] = lambda done: None, shrink_for: float = SHRINK_SECONDS
) -> Counter[str]:
    """Lives until so many operations are done; returns how often what happened. Raises FuzzFailure."""
    counts: Counter[str] = Counter()
    done = number = 0
    while done < operations:
        try:
            life = live(*plan(seed, number))
        except Exception as error:
            raise report(seed, number, error, shrink_for) from error
        done += life.operations
        number += 1
        counts += life.counts + life.totals()
        progress(done)
    return counts + Counter({"lives": number, "operations": done})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=20_000, help="as many at least (default 20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--life", type=int, help="only this one")
    parser.add_argument("--keep", help="only these of its operations")
    options = parser.parse_args()
    logging.getLogger("octavo").setLevel(logging.CRITICAL)
    if options.life is not None:
        settings, adding, seeds = plan(options.seed, options.life)
        print(settings)
        live(settings, adding, seeds if options.keep is None else [seeds[int(place)] for place in options.keep.split(",") if place])
        return 0
    begun = said = time.monotonic()

    def progress(done: int) -> None:
        nonlocal said
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"{done} of {options.operations} operations, {done / (said - begun):.0f} a second", flush=True)

    try:
        counts = fuzz(options.operations, options.seed, progress=progress)
    except FuzzFailure as failure:
        print(failure)
        return 1
    seconds = time.monotonic() - begun
    print(f"seed {options.seed}: {counts['operations']} operations in {counts['lives']} lives, {seconds:.0f} s: nothing found")
    print("  " + ", ".join(f"{name} {counts[name]}" for name in OPERATIONS))
    print("  " + ", ".join(f"{name} {counts[name]}" for name in MUST_HAPPEN))
    missing = [name for name in (*OPERATIONS, *MUST_HAPPEN) if not counts[name]]
    if missing and options.operations >= 20_000:
        print(f"never happened: {', '.join(missing)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
