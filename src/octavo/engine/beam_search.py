"""BeamSearch: one request's beams: what may follow each, which go on, which have ended, when to stop.

After each step every running beam proposes its most probable continuations; of all of them the best `beam_width` that have not
ended go on. One that has ended is kept if it is among the best `beam_width` of its step and, by its score, of all that ended. A
score is the cumulative log probability / length ** length_penalty, the length being that of the generated tokens with the one
that ended them. These are the rules of transformers' generate(num_beams), early_stopping included.
Owner of one search's state. Its beams are ordinary requests, each forked from the one it continues: the full blocks are shared, a
partial one is copied by all that continue a beam but one, and a beam nobody continues frees its own.
Not here: blocks and steps (scheduler.py holds a beam until all have been computed), who calls it when (engine_core.py).
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, replace

from octavo.engine.output_processor import Ending, OutputProcessor
from octavo.engine.request import Request
from octavo.engine.scheduler_output import SampledToken
from octavo.outputs import CompletionDelta, Logprob, PositionLogprobs


@dataclass(slots=True)
class _Beam:
    request: Request
    #: Cumulative log probability of the generated tokens.
    total: float = 0.0
    text: str = ""
    #: One entry a token, where the request wants them.
    logprobs: list[PositionLogprobs] | None = None
    #: What may follow, once this step has computed it.
    next: PositionLogprobs | None = None
    ending: Ending | None = None


class BeamSearch:
    def __init__(self, top: Request, outputs: OutputProcessor) -> None:
        params = top.origin.sampling_params
        assert params.beam_width is not None
        self.top = top
        self.width = params.beam_width
        #: No beam goes on: `deltas` are the answer.
        self.over = False
        self._params = params
        self._outputs = outputs
        self._numbers = itertools.count()
        #: The running ones, best first.
        self._beams: dict[str, _Beam] = {}
        #: Those that have ended: (score, - number, beam), the worst first; `width` of them at most.
        self._ended: list[tuple[float, int, _Beam]] = []
        self._preemptions = 0

    def start(self, first: Request) -> None:
        """The prompt is computed, and `first` will propose what follows it."""
        next(self._numbers)  # of `first` itself
        self._beams[first.request_id] = _Beam(first, logprobs=None if self._params.logprobs is None else [])

    @property
    def requests(self) -> list[Request]:
        """The running beams."""
        return [beam.request for beam in self._beams.values()]

    @property
    def ready(self) -> bool:
        """Every beam has been computed."""
        return bool(self._beams) and all(beam.next is not None for beam in self._beams.values())

    def take(self, request: Request, sampled: SampledToken) -> None:
        """What a step says may follow a beam; its drawn token means nothing here."""
        assert sampled.logprobs is not None
        self._beams[request.request_id].next = sampled.logprobs
        request.parent = self.top  # it is admitted: nothing needs the beam before it any more (whose children the scheduler lets go)
        self._preemptions += request.metrics.num_preemptions

    def advance(self) -> list[tuple[Request, list[Request]]]:
        """Once `ready`: each beam with the requests that continue it (none: it is dropped). Then look at `over`."""
        going: list[_Beam] = []
        spare: list[_Beam] = []
        for place, (beam, token) in enumerate(self._candidates()):
            if len(going) == self.width and place >= self.width:
                break
            child = self._continued(beam, token)
            if child.ending is None and len(going) < self.width:
                going.append(child)
                continue
            self._outputs.forget(child.request)
            if child.ending is not None:
                (self._end if place < self.width else spare.append)(child)
        if not going:  # nothing else could fill the answer
            for child in spare:
                if len(self._ended) < self.width:
                    self._end(child)
        self.over = not going or self._is_final(going[0])
        kept = [] if self.over else going
        branches = [(beam.request, [c.request for c in kept if c.request.parent is beam.request]) for beam in self._beams.values()]
        for beam in self._beams.values():
            self._outputs.forget(beam.request)
        for child in going if self.over else ():
            self._outputs.forget(child.request)
        self._beams = {child.request.request_id: child for child in kept}
        return branches

    def _candidates(self) -> list[tuple[_Beam, int]]:
        """Continuations of all beams, best first; equal ones in the order of beams and ranks. Stop ids wait for min_tokens."""
        origin = self.top.origin
        early = self._params.min_tokens > next(iter(self._beams.values())).request.num_output_tokens
        banned = origin.stop_token_ids if early else frozenset()
        found = [
            (-(beam.total + entry.logprob), number, entry.rank, beam, token)
            for number, beam in enumerate(self._beams.values())
            for token, entry in (beam.next or {}).items()
        ]
        found.sort(key=lambda one: one[:3])
        allowed = [(beam, token) for *_, beam, token in found if token not in banned]
        return allowed or [(beam, token) for *_, beam, token in found]  # bans give way when nothing else is left

    def _continued(self, beam: _Beam, token: int) -> _Beam:
        assert beam.next is not None
        request = beam.request.continued(token, next(self._numbers))
        self._outputs.fork(beam.request, request)
        entry = beam.next[token]
        reported = None if self._params.logprobs is None else _reported(beam.next, token, self._params.logprobs)
        delta, ending = self._outputs.add_token(request, SampledToken(token, reported))
        logprobs = None if beam.logprobs is None else [*beam.logprobs, *(delta.logprobs or ())]
        return _Beam(request, beam.total + entry.logprob, beam.text + delta.text, logprobs, ending=ending)

    # Scores and the end

    def _score(self, beam: _Beam) -> float:
        return beam.total / self._divisor(max(1, beam.request.num_output_tokens))

    def _divisor(self, length: int) -> float:
        return math.pow(length, self._params.length_penalty)

    def _end(self, beam: _Beam) -> None:
        entry = (self._score(beam), -beam.request.choice, beam)
        if len(self._ended) < self.width:
            heapq.heappush(self._ended, entry)
        elif entry[0] > self._ended[0][0]:
            heapq.heapreplace(self._ended, entry)

    def _is_final(self, best: _Beam) -> bool:
        """Whether the search stops although `best` could go on."""
        params = self._params
        if len(self._ended) < self.width:
            return False
        if params.early_stopping is True:
            return True
        farthest = params.early_stopping == "never" and params.length_penalty > 0
        length = self.top.origin.max_tokens if farthest else best.request.num_output_tokens
        return best.total / self._divisor(length) <= self._ended[0][0]

    # The answer

    def deltas(self, ending: Ending | None = None, error: str | None = None) -> list[CompletionDelta]:
        """One whole delta for each of the n best. `ending`: of all of them, where the search was broken off."""
        ranked = [beam for *_, beam in sorted(self._ended, key=lambda one: one[:2], reverse=True)]
        if ending is not None:
            ranked += sorted(self._beams.values(), key=self._score, reverse=True)
            ranked += [_Beam(self.top)] * self._params.n
        return [self._delta(beam, index, ending or beam.ending, error) for index, beam in enumerate(ranked[: self._params.n])]

    def _delta(self, beam: _Beam, index: int, ending: Ending | None, error: str | None) -> CompletionDelta:
        assert ending is not None
        request, top = beam.request, self.top
        delta = CompletionDelta(
            top.request_id,
            index,
            beam.text,
            request.token_ids[request.num_prompt_tokens :],
            beam.logprobs,
            ending.reason,
            ending.stop_reason,
            error,
            num_prompt_tokens=top.num_prompt_tokens,
            num_cached_tokens=top.num_cached_tokens,
            seed=top.origin.seed,
            metrics=replace(request.metrics, num_preemptions=self._preemptions + top.metrics.num_preemptions),
            cumulative_logprob=beam.total,
        )
        if index == 0:
            delta.prompt_logprobs = self._outputs.delta(top).prompt_logprobs
        return delta


def _reported(found: PositionLogprobs, token: int, most: int) -> PositionLogprobs:
    """The chosen token first, then the `most` most probable ones."""
    chosen: dict[int, Logprob] = {token: found[token]}
    return chosen | {other: entry for other, entry in found.items() if entry.rank <= most and other != token}
