"""Fuzzes the GGUF reader: mutated files must load or raise ModelLoadError, never anything else.

    python tests/fuzz/fuzz_gguf.py [--iterations N] [--seed S]

A failing input is written beside the message, to be added to tests/unit/test_gguf_reader.py.
"""

from __future__ import annotations

import argparse
import logging
import random
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from octavo.errors import ModelLoadError  # noqa: E402
from octavo.loading.model_files import gguf_model  # noqa: E402
from octavo.loading.tensor_source import GGUFSource  # noqa: E402
from octavo.ops.layout import dequantize  # noqa: E402
from tests.fuzz.gguf_bytes import tiny_llama  # noqa: E402

INTERESTING = [0, 1, 7, 8, 31, 33, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to six edits: flipped bits, interesting integers, cut or repeated or removed pieces. Mostly in the header."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        if len(out) < 16:
            break
        at = rng.randrange(len(out)) if rng.random() < 0.3 else rng.randrange(min(len(out), 1600))
        choice = rng.randrange(6)
        if choice == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif choice == 1:
            out[at] = rng.randrange(256)
        elif choice == 2:
            out[at : at + 8] = struct.pack("<Q", rng.choice(INTERESTING))
        elif choice == 3:
            out[at : at + 4] = struct.pack("<I", rng.choice(INTERESTING) & 0xFFFFFFFF)
        elif choice == 4:
            piece = out[at : at + rng.randint(1, 64)]
            out[at:at] = piece
        else:
            del out[at : at + rng.randint(1, 64) if rng.random() < 0.8 else len(out)]
    return bytes(out)


def check(path: Path) -> str:
    """Reads everything a load would read of one file; "loaded", or the beginning of the error."""
    try:
        files = gguf_model(path, "fuzzed")
    except ModelLoadError as error:
        assert "\n" not in str(error)
        return str(error).removeprefix(f"{path}: ").split(":")[0][:40]
    source = GGUFSource(files.gguf_file)
    for name, tensor in files.gguf_file.tensors.items():
        if len(tensor.shape) <= 2:
            try:
                assert dequantize(source.matrix(name)).size == _size(tensor.shape)
            except ModelLoadError:
                continue  # a type that is not supported
    source.close()
    return "loaded"


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else shape[0] * shape[1]


def fuzz(iterations: int, seed: int, folder: Path) -> Counter[str]:
    """How often each outcome came up. Raises what the reader should not have raised, naming the saved input."""
    rng = random.Random(seed)
    original, path, outcomes = tiny_llama(), folder / "fuzzed.gguf", Counter[str]()
    for i in range(iterations):
        path.write_bytes(mutate(original, rng))
        try:
            outcomes[check(path)] += 1
        except Exception as error:
            kept = folder / f"crash-{seed}-{i}.gguf"
            path.rename(kept)
            raise AssertionError(f"{type(error).__name__} on {kept}: {error}") from error
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # a mutated key is an unknown key
    print(f"seed {args.seed}")
    for outcome, count in fuzz(args.iterations, args.seed, Path(tempfile.mkdtemp(prefix="fuzz_gguf_"))).most_common():
        print(f"{count:8} {outcome}")


if __name__ == "__main__":
    main()
