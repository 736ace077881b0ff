"""The row `beams`: a beam search whose beams share blocks, against the same search with every beam computed from its whole prefix.

The rows of logits that the two read for each beam must be the same, and so must the answers. A difference fails the row with its
place; the layer is not looked for, since each beam has tokens of its own.
Stateless. Not here: the rows that follow the baseline's tokens (rows.py).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from octavo.engine.beam_search import BeamSearch
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.request import EngineRequest, Request
from octavo.engine.scheduler_output import SampledToken, ScheduledEntry, SchedulerOutput, TokenKind
from octavo.errors import OctavoError
from octavo.outputs import CompletionDelta
from octavo.sampling_params import SamplingParams
from octavo.verify.cases import Case
from octavo.verify.recorder import FloatArray, Recorder
from octavo.verify.session import EngineRun, Session

WIDTH = 3
MOST_TOKENS = 8
#: The shortest ones: each beam of each step is a pass over its prefix in the search they are compared with.
MOST_CASES = 2
#: By what a beam has generated, and the position of the row: under whatever id it was computed, it is the same beam.
Rows = dict[tuple[tuple[int, ...], int], FloatArray]


class Beams:
    name = "beams"
    about = f"beam search with {WIDTH} beams that share blocks, against a search that computes each beam from its whole prefix"
    required: ClassVar[tuple[str, ...]] = ("forks of beams", "blocks shared", "rows of forked beams")
    hits_allowed = False

    def not_applicable(self, session: Session) -> str | None:
        return None

    def run(self, session: Session, watch: Any) -> dict[str, int | float]:
        counters: dict[str, int | float] = dict.fromkeys(("forks of beams", "blocks shared", "blocks copied", "rows of forked beams"), 0)
        for case in sorted(session.cases, key=lambda one: one.num_prompt_tokens)[:MOST_CASES]:
            kept = _Keep()
            with EngineRun(session, kept) as engine:
                request = engine.request(case, 0, _params(case))
                found = _searched(engine, request)
                stats = engine.core.stats
                counters["forks of beams"] += stats.forks
                counters["blocks shared"] += stats.blocks_shared
                counters["blocks copied"] += stats.blocks_copied
            recomputed = _Keep()
            expected = _recomputed(session, request, recomputed)
            counters["rows of forked beams"] += _compare(case, kept.rows, recomputed.rows, watch)
            if _tolerance_of(watch) is None and [d.token_ids for d in found] != [d.token_ids for d in expected]:
                raise OctavoError(f"prompt {case.number}: the beams that were returned differ")
        return counters


def _params(case: Case) -> SamplingParams:
    count = min(MOST_TOKENS, case.params.max_tokens or MOST_TOKENS)
    return SamplingParams(beam_width=WIDTH, n=WIDTH, max_tokens=count, ignore_eos=True)


class _Keep:
    """The logits that what follows a beam was read from."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        #: What each beam that the worker knows has generated.
        self._paths: dict[str, tuple[int, ...]] = {}

    def logits(self, request_id: str, position: int, rows: FloatArray) -> None:
        if "#" in request_id:
            self.rows[self._paths[request_id], position + len(rows) - 1] = rows[-1].copy()

    def tap(self, output: SchedulerOutput) -> None:
        self._paths |= {new.request_id: tuple(new.output_token_ids) for new in output.new_requests}


def _searched(engine: EngineRun, request: EngineRequest) -> list[CompletionDelta]:
    """By the engine of production."""
    engine.core.add_request(request)
    found: list[CompletionDelta] = []
    while engine.core.has_unfinished_requests():
        found += engine.core.step()
    if errors := [delta.error for delta in found if delta.error is not None]:
        raise OctavoError(f"the search failed: {errors[0]}")
    return found


def _recomputed(session: Session, request: EngineRequest, watch: _Keep) -> list[CompletionDelta]:
    """The same search without a scheduler: no block outlives a pass."""
    recorder = Recorder(session.executor, watch, all_prompt_rows=False)
    top = Request(request, 0)
    search = BeamSearch(top, OutputProcessor(session.parts.tokenizer, recorder.info))
    search.start(top.make_children()[0])
    while not search.over:
        for beam in search.requests:
            search.take(beam, _whole_pass(recorder, beam))
        search.advance()
    recorder.close()
    return search.deltas()


def _whole_pass(recorder: Recorder, beam: Request) -> SampledToken:
    length, count = beam.num_prompt_tokens, beam.num_output_tokens
    groups = recorder.info.kv_groups
    blocks = (tuple(range(-(-beam.num_tokens // groups[0].block_size))),) * len(groups)
    prompt = ScheduledEntry(beam.request_id, 0, length, TokenKind.PROMPT, blocks, sample=not count)
    result = recorder.execute(SchedulerOutput(0, [prompt], [beam.for_worker()], dropped_request_ids=[beam.request_id]))
    if count:
        generated = ScheduledEntry(beam.request_id, length, count, TokenKind.GENERATED, ((),) * len(groups), sample=True)
        result = recorder.execute(SchedulerOutput(0, [generated]))
    if beam.request_id in result.errors:
        raise OctavoError(f"the recomputed search failed: {result.errors[beam.request_id]}")
    return result.sampled[beam.request_id]


def _tolerance_of(watch: Any) -> float | None:
    """None: bit for bit."""
    return getattr(watch, "tolerance", None)


def _compare(case: Case, found: Rows, expected: Rows, watch: Any) -> int:
    """Adds to the watch's counts, and returns how many rows of beams that had forked it compared. Raises OctavoError where a beam's
    logits differ by more than is promised.

    With a tolerance another rounding may choose other beams: then those are compared that both searches have computed.
    """
    tolerance = _tolerance_of(watch)
    forked = 0
    for path, position in sorted(found.keys() & expected.keys(), key=lambda one: (one[1], one[0])):
        row, wanted = found[path, position], expected[path, position]
        difference = 0.0 if (row.view(np.uint32) == wanted.view(np.uint32)).all() else float(np.abs(row - wanted).max())
        watch.positions += 1
        forked += bool(path)
        watch.logits_compared += row.size
        watch.largest_difference = max(watch.largest_difference, difference)
        watch.bitwise = watch.bitwise and difference == 0
        if difference > (tolerance or 0.0) * float(np.abs(wanted).max()):
            after = f"after {list(path)}" if path else "before any fork"
            raise OctavoError(f"prompt {case.number}, the beam {after}, position {position}: logits differ by {difference:.3g}")
    if tolerance is None and found.keys() != expected.keys():
        raise OctavoError(f"prompt {case.number}: other beams were computed")
    return forked
