"""Baseline: every prompt completed by full recomputation, the plainest way there is.

Each token is drawn from a pass over its whole prefix in blocks dealt out anew: no scheduler, no KV of an earlier step, no
neighbours, no chunks. Prompt tokens run as prompt rows, generated ones as generated rows (docs/numerics.md).
Owner of the logits and tokens all rows are compared with. Not here: comparing (comparison.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from octavo.engine.request import EngineRequest
from octavo.engine.scheduler_output import NewRequest, ScheduledEntry, SchedulerOutput, TokenKind
from octavo.errors import ConfigError, OctavoError
from octavo.verify.cases import Case
from octavo.verify.recorder import FloatArray, Recorder, RowValues, Target, Watch

#: Logits of the baseline are kept, float32; more than this is refused before it is computed.
MAX_BASELINE_BYTES = 4 << 30
_ID = "baseline"


class Baseline:
    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self._logits: dict[tuple[int, int, int], FloatArray] = {}
        self._prompt_lengths: dict[int, int] = {}

    def key(self, case: int, choice: int, position: int) -> tuple[int, int, int]:
        """Choices of a prompt share its logits."""
        return (case, choice if position >= self._prompt_lengths[case] else 0, position)

    def logits(self, case: int, choice: int, position: int) -> FloatArray:
        """float32 [V] after `position`."""
        return self._logits[self.key(case, choice, position)]

    def has(self, case: int, choice: int, position: int) -> bool:
        return self.key(case, choice, position) in self._logits

    def prompt_length(self, case: int) -> int:
        return self._prompt_lengths[case]

    def compute(self, executor: Any, case: Case, choice: int, request: EngineRequest) -> None:
        """One choice of one case, by full recomputation. Raises OctavoError where the model's logits are not finite."""
        self._prompt_lengths[case.number] = case.num_prompt_tokens
        recorder = Recorder(executor, _Keep(self, case.number, choice))
        self.tokens[case.number, choice] = recompute(recorder, request, choice, request.max_tokens)
        recorder.close()

    def keep(self, case: int, choice: int, position: int, row: FloatArray) -> None:
        self._logits[self.key(case, choice, position)] = row.copy()

    def rows(self) -> Iterator[tuple[tuple[int, int, int], FloatArray]]:
        """Every row of logits with its (case, choice, position), in order."""
        yield from sorted(self._logits.items(), key=lambda item: item[0])


class _Keep:
    """Reads the logits of a recomputation; a position computed again must not change, so only the first is kept."""

    def __init__(self, baseline: Baseline, case: int, choice: int) -> None:
        self.baseline, self.case, self.choice = baseline, case, choice

    def logits(self, request_id: str, position: int, rows: FloatArray) -> None:
        for offset, row in enumerate(rows):
            if not self.baseline.has(self.case, self.choice, position + offset):
                self.baseline.keep(self.case, self.choice, position + offset, row)

    def tap(self, output: SchedulerOutput) -> None:
        return None


def check_memory(positions: int, vocab_size: int) -> None:
    """Raises ConfigError before logits are kept that memory could not hold."""
    needed = positions * vocab_size * 4
    if needed > MAX_BASELINE_BYTES:
        raise ConfigError(
            f"the logits of {positions} positions take {needed >> 20} MiB, more than {MAX_BASELINE_BYTES >> 20}: "
            "give fewer or shorter prompts"
        )


def recompute(recorder: Recorder, request: EngineRequest, choice: int, count: int, known: list[int] | None = None) -> list[int]:
    """`count` more tokens after `known` ones, each from a pass over everything before it; returns the tokens drawn."""
    drawn = list(known or ())
    rng = np.random.default_rng(0)
    for _ in range(count):
        token = _next_token(recorder, request, choice, drawn, rng)
        drawn.append(token)
    return drawn[len(known or ()) :]


def _next_token(recorder: Recorder, request: EngineRequest, choice: int, drawn: list[int], rng: np.random.Generator) -> int:
    groups = recorder.info.kv_groups
    group = min(groups, key=lambda group: group.num_blocks)
    length = len(request.prompt_token_ids)
    needed = -(-(length + len(drawn)) // group.block_size)
    # another placement every time: where a block lies must not matter
    blocks = tuple((rng.permutation(min(group.num_blocks, 4 * needed))[:needed]).tolist())
    new = NewRequest(
        _ID,
        request.prompt_token_ids,
        list(drawn),
        request.sampling_params,
        request.seed,
        choice,
        request.stop_token_ids,
        request.bad_words_ids,
    )
    whole_prompt = ScheduledEntry(_ID, 0, length, TokenKind.PROMPT, (blocks,) * len(groups), sample=not drawn)
    recorder.all_prompt_rows = not drawn  # once is enough
    result = recorder.execute(SchedulerOutput(0, [whole_prompt], [new], dropped_request_ids=[_ID]))
    if drawn:
        generated = ScheduledEntry(_ID, length, len(drawn), TokenKind.GENERATED, ((),) * len(groups), sample=True)
        result = recorder.execute(SchedulerOutput(0, [generated]))
    if _ID in result.errors:
        raise OctavoError(f"the baseline failed: {result.errors[_ID]}")
    return result.sampled[_ID].token_id


def tapped_row(executor: Any, request: EngineRequest, choice: int, tokens: list[int], position: int, names: frozenset[str]) -> RowValues:
    """The layers' values of one row of the baseline: tap name -> float32 [hidden]."""
    from octavo.verify.layers import TapWatch

    watch = TapWatch(Target(_ID, position), names)
    known = tokens[: max(0, position + 1 - len(request.prompt_token_ids))]
    recorder = Recorder(executor, cast(Watch, watch))
    recompute(recorder, request, choice, 1, known)
    recorder.close()
    assert watch.values is not None
    return watch.values
