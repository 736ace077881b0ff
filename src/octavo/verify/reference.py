"""The row `reference`: the native kernels (or torch) against the NumPy reference, which is the specification.

The reference computes the baseline's own tokens, so that every position can be compared; bits are not promised, closeness is.
Stateless. Not here: the tolerances of single ops (tests/ops).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from octavo.engine.scheduler_output import NewRequest, ScheduledEntry, SchedulerOutput, TokenKind
from octavo.verify.cases import Case
from octavo.verify.comparison import Comparison, Difference
from octavo.verify.recorder import FloatArray, Recorder
from octavo.verify.session import Session

#: What docs/numerics.md states for logits: mean Kullback-Leibler divergence per token, share of equal most probable tokens.
MAX_MEAN_KL = 0.01
MIN_TOP_1 = 0.97
#: The share is one of a long text: one position of six that differs says nothing, so fewer count as this many.
LEAST_POSITIONS = 100
#: Tokens nearer to each other than this, in the reference's own natural-log probabilities, count as equal.
NEAR_TIE = 0.05


class Reference:
    name = "reference"
    about = "the same tokens computed by the NumPy reference"
    required: ClassVar[tuple[str, ...]] = ("positions",)
    hits_allowed = False

    def not_applicable(self, session: Session) -> str | None:
        if session.backend == "reference":
            return "the reference is what runs already"
        needed = _float_bytes(session)
        room = _available_bytes()
        if room is not None and needed > room:
            return f"its float32 weights would take {needed >> 20} MiB, {room >> 20} are available"
        return None

    def run(self, session: Session, watch: Any) -> dict[str, int | float]:
        with session.other(backend="reference", op_backends="", kv_dtype="auto") as parts:
            collect = _Divergence(session, watch)
            for case in session.cases:
                collect.case = case
                watch.names[f"{case.number}.0"] = case.number
                _whole(Recorder(parts.executor, collect), case, session.baseline.tokens[case.number, 0])
        return collect.judge()


def _whole(recorder: Recorder, case: Case, tokens: list[int]) -> None:
    """Prompt and answer but its last token in one step; on the reference the kind of a row has no effect."""
    known = [*case.token_ids, *tokens[:-1]]
    request_id = f"{case.number}.0"
    new = NewRequest(request_id, known, [], case.params.resolve({}), 0, 0)
    groups = recorder.info.kv_groups
    blocks = tuple(range(-(-len(known) // groups[0].block_size)))
    entry = ScheduledEntry(request_id, 0, len(known), TokenKind.PROMPT, (blocks,) * len(groups), sample=True)
    recorder.execute(SchedulerOutput(0, [entry], [new]))
    recorder.close()


class _Divergence:
    """Reads the reference's logits. `inner` is a Comparison, or the watch of a rerun with taps."""

    def __init__(self, session: Session, inner: Any) -> None:
        self.session, self.inner = session, inner
        self.case: Case = session.cases[0]
        self.divergences: list[tuple[float, int, int]] = []
        self.agreed = 0
        self.ties = 0

    def tap(self, output: SchedulerOutput) -> Any:
        return self.inner.tap(output)

    def logits(self, request_id: str, position: int, rows: FloatArray) -> None:
        if not isinstance(self.inner, Comparison):
            return
        for offset, row in enumerate(rows):
            at = position + offset
            ours = self.session.baseline.logits(self.case.number, 0, at)
            reference, native = _log_softmax(row), _log_softmax(ours)
            divergence = float((np.exp(reference) * (reference - native)).sum())
            best, chosen = int(reference.argmax()), int(native.argmax())
            tie = best != chosen and reference[best] - reference[chosen] < NEAR_TIE
            self.agreed += best == chosen or bool(tie)
            self.ties += bool(tie)
            self.divergences.append((divergence, self.case.number, at))
            self.inner.positions += 1
            self.inner.logits_compared += row.size
            self.inner.largest_difference = max(self.inner.largest_difference, float(np.abs(row - ours).max()))
            self.inner.bitwise = self.inner.bitwise and bool((row.view(np.uint32) == ours.view(np.uint32)).all())

    def judge(self) -> dict[str, int | float]:
        """Counters; where the limits are broken the worst position is the difference."""
        count = len(self.divergences)
        if not count:
            return {"positions": 0}
        mean = sum(d for d, _, _ in self.divergences) / count
        top_1 = self.agreed / count
        too_many = count - self.agreed > (1 - MIN_TOP_1) * max(count, LEAST_POSITIONS)
        if not mean <= MAX_MEAN_KL or too_many:  # NaN is no agreement either
            worst, case, position = max(self.divergences)
            words = f"mean KL {mean:.3g} (at most {MAX_MEAN_KL}), equal top-1 {top_1:.1%} (at least {MIN_TOP_1:.0%}); here KL {worst:.3g}"
            self.inner.differences.append(Difference(case, 0, position, "logits", words, f"{case}.0"))
        return {"positions": count, "mean KL": mean, "largest KL": max(self.divergences)[0], "equal top-1": top_1, "near ties": self.ties}


def _log_softmax(row: FloatArray) -> np.ndarray[Any, np.dtype[np.float64]]:
    x = row.astype(np.float64)
    x -= x.max()
    result: np.ndarray[Any, np.dtype[np.float64]] = x - np.log(np.exp(x).sum())
    return result


def _float_bytes(session: Session) -> int:
    """Of the model's matrices in float32."""
    c = session.parts.model_config
    if c is None:
        return 0
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return 4 * (c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size) + 2 * c.vocab_size * c.hidden_size)


def _available_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
