"""Runs the randomised tests again and again with new seeds, until the time is up or one of them fails: those written with
hypothesis, and the programs tests/fuzz/fuzz_*.py.

Usage: .venv/bin/python tools/fuzz.py [--minutes 10] [arguments for pytest]
       .venv/bin/python tools/fuzz.py --operations 1000000 [--seed 0]      one long run of tests/fuzz/fuzz_engine.py instead
Stateless; hypothesis keeps what failed in .hypothesis/, so the next `make test` tries it first.
Not here: the tests; they are the ones of `make test`.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="no new round after this long (default 10)")
    parser.add_argument("--operations", type=int, help="only fuzz scheduler and KV manager, with so many operations")
    parser.add_argument("--seed", type=int, help="of that run (default: a new one)")
    options, rest = parser.parse_known_args()
    if options.operations is not None:
        seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
        command = ["tests/fuzz/fuzz_engine.py", "--operations", str(options.operations), "--seed", str(seed)]
        print(" ".join(command), flush=True)
        return subprocess.run([sys.executable, *command], check=False).returncode
    end = time.monotonic() + 60 * options.minutes
    rounds = 0
    while rounds == 0 or time.monotonic() < end:
        seed = str(secrets.randbelow(1 << 32))
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "hypothesis and not slow", f"--hypothesis-seed={seed}", *rest]
        scripts = [] if rest else sorted(Path("tests/fuzz").glob("fuzz_*.py"))
        for command in [pytest, *([sys.executable, str(script), "--seed", seed] for script in scripts)]:
            print(f"round {rounds + 1}: {' '.join(command[1:])}", flush=True)
            code = subprocess.run(command, check=False).returncode
            if code:
                print(f"failed in round {rounds + 1}; the command above repeats it")
                return code
        rounds += 1
    print(f"{rounds} rounds, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
