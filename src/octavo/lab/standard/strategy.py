"""A user's own file: loading it, calling what it defines, and comparing the result with the naive way.

The file is Python of the user's own and runs with the user's rights, as any script would; nothing here confines it.
Errors inside it are reported with its own line. It defines one of these, or both:

    def generate(model, prompt_ids, max_tokens): ...    -> list of max_tokens token ids; model is a LabModel
    def attention(q, k, v): ...                         -> [H, L, D] from q [H, L, D] and k, v [KH, L, D], float32, causal

Stateless. Not here: the process it runs in (arm.py), the measurements (experiment.py).
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.errors import OctavoError, shown
from octavo.lab.attention import naive
from octavo.lab.standard.model import StrategyError

#: Largest difference of a logit to the naive run's. Where batches of another shape are computed by a BLAS, or generated
#: tokens as prompt, sums are rounded in another order; a wrong position or mask is off by whole units.
LOGIT_TOLERANCE = 2e-3
#: Largest difference of attention to the naive one, on unit-normal inputs.
ATTENTION_TOLERANCE = 1e-5
#: Lengths attention is checked at: one token, odd ones, and some on either side of a tile.
ATTENTION_LENGTHS = (1, 2, 17, 128, 300)


class Strategy(NamedTuple):
    path: Path
    generate: Callable[..., Any] | None
    attention: Callable[..., Any] | None


def load(path: Path) -> Strategy:
    """Run the file and take its functions. Raises StrategyError."""
    if not path.is_file():
        raise StrategyError(f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location("user_strategy", path)
    if spec is None or spec.loader is None:
        raise StrategyError(f"{path}: the name of a strategy must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # what lies beside it can be imported, as for any script
    guarded(path, spec.loader.exec_module, module)
    functions = {name: getattr(module, name, None) for name in ("generate", "attention")}
    if not any(callable(function) for function in functions.values()):
        raise StrategyError(f"{path} defines neither generate(model, prompt_ids, max_tokens) nor attention(q, k, v)")
    return Strategy(path, **functions)


def guarded(path: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the user's code; an exception becomes a StrategyError with the last line of the file that was running."""
    try:
        return function(*arguments)
    except SyntaxError as error:
        where = f"{error.filename or path}:{error.lineno}"
        raise StrategyError(f"{where}: SyntaxError: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        where = f"{path}:{frames[-1].lineno}: in {frames[-1].name}" if frames else str(path)
        raise StrategyError(f"{where}: {type(error).__name__}: {' '.join(str(error).split())[:500]}") from error


def check_tokens(path: Path, answer: Any, max_tokens: int, vocab_size: int) -> list[int]:
    """What generate returned, as token ids. Raises StrategyError where it is something else."""
    if not isinstance(answer, (Sequence, np.ndarray)) or isinstance(answer, (str, bytes)):
        raise StrategyError(f"{path}: generate must return a list of token ids, got {type(answer).__name__}")
    tokens = list(answer)
    if len(tokens) != max_tokens:
        raise StrategyError(f"{path}: generate must return {max_tokens} tokens, got {len(tokens)}")
    for index, token in enumerate(tokens):
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise StrategyError(f"{path}: token {index} of what generate returned is no token id: {shown(token)}")
    return [int(token) for token in tokens]


def first_difference(
    expected: list[int], got: list[int], naive_logits: naive.Array, logit_difference: Sequence[tuple[int, float]], num_prompt_tokens: int
) -> dict[str, Any] | None:
    """Where the answer leaves the naive one: the first other token, or before it the first logits out of tolerance.

    naive_logits: float32 [tokens, vocab]. logit_difference: (index of the token the logits are for, largest difference).
    """
    token = next((i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b), None)
    logits = next(((i, gap) for i, gap in logit_difference if gap > LOGIT_TOLERANCE and (token is None or i <= token)), None)
    if token is None and logits is None:
        return None
    index = token if logits is None or (token is not None and token <= logits[0]) else logits[0]
    assert index is not None
    row = naive_logits[index]
    return {
        "token": index,
        "position": num_prompt_tokens + index,
        "expected": expected[index],
        "got": got[index],
        "logit_gap": float(row[expected[index]] - row[got[index]]),
        "logit_difference": next((gap for i, gap in logit_difference if i == index), None),
    }


def check_attention(strategy: Strategy, heads: int = 9, kv_heads: int = 3, dim: int = 64) -> dict[str, Any]:
    """Compare with naive.attention: the largest difference, and where it first leaves the tolerance."""
    largest = 0.0
    for length in ATTENTION_LENGTHS:
        rng = np.random.default_rng(length)
        q, k, v = (rng.standard_normal((h, length, dim), dtype=np.float32) for h in (heads, kv_heads, kv_heads))
        expected = naive.attention(q, k, v)
        got = guarded(strategy.path, strategy.attention or _missing, q.copy(), k.copy(), v.copy())
        if getattr(got, "shape", None) != q.shape:
            shape = getattr(got, "shape", type(got).__name__)
            raise StrategyError(f"{strategy.path}: attention must return an array {q.shape} for {length} tokens, got {shape}")
        difference = np.abs(guarded(strategy.path, np.asarray, got, np.float64) - expected)
        wrong = np.argwhere(~(difference.transpose(1, 0, 2) <= ATTENTION_TOLERANCE))  # by token first; NaN is wrong too
        if len(wrong):
            token, head, column = (int(x) for x in wrong[0])
            value, finite = float(got[head, token, column]), difference[np.isfinite(difference)]
            first = {"length": length, "token": token, "head": head, "column": column, "expected": float(expected[head, token, column]),
                     "got": value if np.isfinite(value) else str(value)}  # fmt: skip  # JSON has no word for those
            return {"verified": False, "largest_difference": float(finite.max()) if finite.size else None, "first_difference": first}
        largest = max(largest, float(difference.max()))
    return {"verified": True, "largest_difference": largest, "first_difference": None}


def _missing(*arguments: Any) -> Any:
    raise OctavoError("the file defines no attention")
