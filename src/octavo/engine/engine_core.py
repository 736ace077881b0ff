"""EngineCore: requests in, CompletionDeltas out, one step at a time.

Owner of every request from add_request to its last delta, and of scheduler, KV accounting, output processing and the
event log. Called from one thread. It knows the model only through the Executor it is given.
Not here: waiting for results (llm.py, async_engine.py), checking of input (input_processor.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from time import perf_counter

from octavo.config import EngineConfig
from octavo.engine.beam_search import BeamSearch
from octavo.engine.best_of import BestOf
from octavo.engine.events import EntryEvent, EventLog, Finish, StepEvent
from octavo.engine.executor import Clock, Executor
from octavo.engine.input_processor import EngineTokenizer, check_pool
from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.metrics import EngineStats
from octavo.engine.output_processor import Ending, OutputProcessor
from octavo.engine.request import EngineRequest, Request, RequestStatus
from octavo.engine.scheduler import Scheduler
from octavo.engine.scheduler_output import SchedulerOutput, StepResult
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.outputs import CompletionDelta

logger = logging.getLogger("octavo")


class EngineCore:
    def __init__(self, executor: Executor, tokenizer: EngineTokenizer, config: EngineConfig, clock: Clock = perf_counter) -> None:
        """`clock`: what all times of requests and events are read from."""
        self.executor = executor
        self.tokenizer = tokenizer
        self.config = config
        self.clock = clock
        self._stats = EngineStats()
        self.events = EventLog(config.event_history)
        #: Requests with an unfinished choice, by the caller's id: the parent where n > 1.
        self._requests: dict[str, Request] = {}
        #: Those whose answer is known only as a whole, by id: what their choices or beams have come to.
        self._gathering: dict[str, BestOf] = {}
        self._searches: dict[str, BeamSearch] = {}
        self._num_added = 0
        #: Deltas made outside a step; the next one returns them.
        self._early: list[CompletionDelta] = []
        #: Endings that no event has told of yet.
        self._ends: deque[Finish] = deque(maxlen=config.event_history)
        #: Seconds of this step spent on text.
        self._detokenise = 0.0
        self._dead: str | None = None
        self._executing = False
        self._last_step = 0
        self.outputs = OutputProcessor(tokenizer, executor.info, clock)
        if config.reuse_generated and config.enable_prefix_caching:
            logger.warning(
                "reuse_generated: a prompt may share blocks that were computed as an answer; the logits after such a hit are "
                "close to, but not bit for bit, those without it"
            )
        self._start_fresh()

    def _start_fresh(self) -> None:
        config = self.config
        groups = self.executor.info.kv_groups
        caching, reuse = config.enable_prefix_caching, config.reuse_generated
        self.kv = KVCacheManager(groups, caching, self._stats, reuse_generated=reuse, max_chunk=config.max_num_batched_tokens)
        self.scheduler = Scheduler(self.config, self.kv, self._stats, self._last_step, self.clock)

    # Requests

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequestError (id in use, code queue_full, prompt beyond the pool) or EngineDeadError."""
        self._check_alive()
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id", code="duplicate_request_id")
        if (full := self._full_for(request)) is not None:
            self._stats.requests_refused += 1
            raise InvalidRequestError(f"{full}: try again later", code="queue_full")
        check_pool(self.executor.info, len(request.prompt_token_ids))
        self._num_added += 1
        self._stats.requests_added += 1
        self._requests[request.request_id] = added = Request(request, self._num_added, added=self.clock())
        if request.sampling_params.beam_width is not None:
            self._searches[request.request_id] = BeamSearch(added, self.outputs)
        elif request.sampling_params.whole_only:
            self._gathering[request.request_id] = BestOf(request)
        self.scheduler.add(added)

    def has_room(self, request: EngineRequest) -> bool:
        """`add_request` would not refuse it with queue_full."""
        return self._full_for(request) is None

    def _full_for(self, request: EngineRequest) -> str | None:
        """Why the queue cannot take it now. An empty queue takes any prompt."""
        config, waiting = self.config, self.scheduler.counts.num_requests
        if waiting >= config.max_waiting_requests:
            return f"{waiting} requests are waiting already (max_waiting_requests)"
        tokens = self.scheduler.counts.num_tokens
        if waiting and tokens + len(request.prompt_token_ids) > config.max_waiting_tokens:
            return f"{tokens} tokens are waiting already (max_waiting_tokens)"
        return None

    def abort(self, request_ids: Iterable[str]) -> list[CompletionDelta]:
        """End requests now; returns the last delta of each of their unfinished choices (a step does not repeat them).

        Unknown and finished ids are passed over in silence: a finish that was seen first wins.
        """
        deltas: list[CompletionDelta] = []
        if self._dead is not None:
            return deltas
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                deltas += self._gathered(self._end_request(request, Ending("abort")))
        return deltas

    def has_request(self, request_id: str) -> bool:
        return request_id in self._requests

    def has_unfinished_requests(self) -> bool:
        """A step would do something, or bring deltas that are ready."""
        return bool(self._requests or self._early)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def dead(self) -> str | None:
        """Why nothing can run any more, or None."""
        return self._dead

    def reset_prefix_cache(self) -> None:
        """No later request shares a block computed before; running ones keep theirs."""
        self.kv.reset_prefix_cache()

    def close(self) -> None:
        """Drop all requests without a word and close the executor; closing twice is nothing."""
        if self._dead != "it was closed":
            self._dead = "it was closed"
            self._requests.clear()
            self._gathering.clear()
            self._searches.clear()
            self.executor.close()

    # A step

    def step(self) -> list[CompletionDelta]:
        """Schedule, execute, update; returns what became of it, at most one delta per choice that goes on.

        Raises EngineDeadError if the executor fails, and on every call from then on. After a KeyboardInterrupt in the
        middle of it every request is aborted, and the next step returns their last deltas.
        """
        self._check_alive()
        early, self._early = self._early, []
        if not self._requests:
            return early
        self._last_step += 1
        event = StepEvent(self._last_step, self.clock())
        before = self._block_counts()
        self._detokenise = 0.0
        try:
            output = self.scheduler.schedule()
            scheduled = self.clock()
            result = self._execute(output)
            executed = self.clock()
            deltas = self._update(result, event)
        except Exception as error:
            self._dead = f"{type(error).__name__}: {error}"
            logger.exception("the engine died in step %d", self.scheduler.step)
            raise EngineDeadError(f"the engine has failed ({self._dead}); start it again") from error
        except BaseException:  # KeyboardInterrupt: half a step
            self._abandon_step()
            self._early[:0] = early
            raise
        self._note_times(event, scheduled - event.time, executed - scheduled, self.clock() - executed)
        event.timings.update(result.timings)
        event.timings["detokenise"] = self._detokenise
        event.dropped = output.dropped_request_ids
        event.replayed = result.replayed
        self._stats.steps_replayed += result.replayed
        self._stats.steps_eager += bool(output.entries) and not result.replayed
        self._record(event, before)
        return early + deltas

    def _execute(self, output: SchedulerOutput) -> StepResult:
        if not output.entries and not output.block_copies:
            return StepResult()
        self._executing = True
        result = self.executor.execute(output)
        self._executing = False
        return result

    def _update(self, result: StepResult, event: StepEvent) -> list[CompletionDelta]:
        deltas: list[CompletionDelta] = []
        for request, entry in self.scheduler.complete_step(result.errors):
            event.entries.append(EntryEvent(request.request_id, entry.start, entry.num_tokens, entry.kind, entry.why, entry.blocks))
            error = result.errors.get(request.request_id)
            if request.status.finished:
                continue  # another beam of it has failed
            if error is not None:
                self._stats.requests_failed += 1
                deltas += self._end_request(request, Ending("error"), error)
                continue
            if (found := result.prompt_logprobs.get(request.request_id)) is not None:
                request.add_prompt_logprobs(entry.start, found)
            if entry.sample and (search := self._searches.get(request.origin.request_id)) is not None:
                self._take_proposals(search, request, result)
            elif entry.sample:
                deltas.append(self._take_token(request, result))
        for search in [search for search in self._searches.values() if search.ready]:
            deltas += self._advance(search)
        for parent in self.scheduler.computed_parents():
            deltas += self._prompt_computed(parent)
        if self.scheduler.stuck is not None:
            deltas += self._end_request(self.scheduler.stuck, Ending("error"), "it could not be scheduled although nothing else runs")
        deltas = self._gathered(deltas)
        event.finished = [d.request_id for d in deltas if d.finish_reason is not None]
        return deltas

    def _take_token(self, request: Request, result: StepResult) -> CompletionDelta:
        sampled = result.sampled[request.request_id]
        self._stats.tokens_sampled += 1
        self.scheduler.append_token(request, sampled.token_id)
        delta, ending = self.outputs.add_token(request, sampled)
        self._detokenise += self.clock() - (request.metrics.last_token or 0.0)  # which add_token has just set
        return delta if ending is None else self._end_choice(request, delta, ending)

    def _take_proposals(self, search: BeamSearch, beam: Request, result: StepResult) -> None:
        self._stats.tokens_sampled += 1
        self.scheduler.hold_beam(beam)
        search.take(beam, result.sampled[beam.request_id])

    def _advance(self, search: BeamSearch) -> list[CompletionDelta]:
        """All beams of a search are computed: those that go on are queued, the others let go."""
        for beam, children in search.advance():
            self.scheduler.branch(beam, children)
        return self._end_search(search) if search.over else []

    def _prompt_computed(self, request: Request) -> list[CompletionDelta]:
        """The prompt of a prefill-only request is done: it ends (max_tokens 0), or its children start."""
        if request.origin.max_tokens == 0:
            return self._end_request(request, Ending("length"))
        children = self.scheduler.hold(request)
        if (search := self._searches.get(request.request_id)) is not None:
            search.start(children[0])
        wants_logprobs = request.origin.sampling_params.prompt_logprobs is not None
        return [self.outputs.delta(request)] if wants_logprobs else []

    # Endings

    def _end_choice(self, request: Request, delta: CompletionDelta, ending: Ending, error: str | None = None) -> CompletionDelta:
        """The last delta of one choice; the request is over with its last choice."""
        self.scheduler.finish(request, RequestStatus.of(ending.reason))
        self.outputs.close(request, delta, ending, error)
        top = request.parent or request
        if all(choice.status.finished for choice in top.children):
            self._forget(top, ending)
        self._note_end(request, ending, request.num_output_tokens)
        self._log(request, ending, request.num_output_tokens)
        return delta

    def _forget(self, top: Request, ending: Ending) -> None:
        self._requests.pop(top.request_id, None)
        self._stats.requests_finished += 1
        self._stats.requests_aborted += ending.reason == "abort"

    def _note_end(self, request: Request, ending: Ending, count: int) -> None:
        """For the record of this step."""
        metrics = request.metrics
        self._ends.append(Finish(request.request_id, ending.reason, metrics.first_token, self.clock(), count, metrics.num_preemptions))

    def _end_search(self, search: BeamSearch, ending: Ending | None = None, error: str | None = None) -> list[CompletionDelta]:
        """The answer of a beam search, which is over or (`ending`) broken off."""
        top, beams, deltas = search.top, search.requests, search.deltas(ending, error)
        ending = ending or Ending("stop")
        del self._searches[top.request_id]
        for request in (*beams, top):
            self.outputs.forget(request)
            self.scheduler.finish(request, RequestStatus.of(ending.reason))
        self.scheduler.end_search(top)
        self._forget(top, ending)
        best, top.metrics = deltas[0], deltas[0].metrics or top.metrics
        self._note_end(top, ending, len(best.token_ids))
        self._log(top, ending, len(best.token_ids))
        return deltas

    def _gathered(self, deltas: list[CompletionDelta]) -> list[CompletionDelta]:
        """What callers get of these: of a request with best_of > n nothing, until all its choices have ended."""
        if not self._gathering:
            return deltas
        found: list[CompletionDelta] = []
        for delta in deltas:
            gathering = self._gathering.get(delta.request_id)
            if gathering is None:
                found.append(delta)
            elif whole := gathering.add(delta):
                found += whole
                del self._gathering[delta.request_id]
        return found

    def _end_request(self, request: Request, ending: Ending, error: str | None = None) -> list[CompletionDelta]:
        """End a choice, or all that is left of a parent or of a beam search, without a new token."""
        if (search := self._searches.get(request.origin.request_id)) is not None:
            return self._end_search(search, ending, error)
        if request.prefill_only and not request.children:
            request.make_children()  # never queued: they only stand for the n answers
        elif not request.prefill_only:
            return [self._end_choice(request, self.outputs.early_end(request), ending, error)]
        deltas = []
        for child in request.children:
            if not child.status.finished:
                delta = self.outputs.early_end(child)
                if child.choice == 0:
                    delta.prompt_logprobs = self.outputs.delta(request).prompt_logprobs
                deltas.append(self._end_choice(child, delta, ending, error))
        self.scheduler.finish(request, RequestStatus.of(ending.reason))
        return deltas

    def _abandon_step(self) -> None:
        """After an interrupt: abort everything. Inside the executor the accounting is whole and the cache is kept;
        elsewhere it may be half changed and starts afresh."""
        requests, undelivered = list(self._requests.values()), self.scheduler.worker.undelivered_drops()
        if self._executing:
            self.kv.release_copies()
        else:
            self._start_fresh()
        self._executing = False
        self.scheduler.worker.drop(undelivered)
        for request in requests:
            self._early += self._gathered(self._end_request(request, Ending("abort")))
        self._gathering.clear()

    # Bookkeeping

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine cannot run ({self._dead}); start it again")

    def _log(self, request: Request, ending: Ending, count: int) -> None:
        metrics = request.metrics
        end = self.clock()
        queued = (metrics.first_scheduled or end) - metrics.arrival
        per_token = (metrics.last_token - metrics.first_token) / max(1, count - 1) if metrics.last_token and metrics.first_token else 0.0
        logger.info(
            "request %r: %s, queue %.3f s, ttft %.3f s, tpot %.4f s, prompt %d (cached %d), output %d, preempted %d times",
            request.request_id,
            ending.reason,
            queued,
            metrics.ttft or 0.0,
            per_token,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            count,
            metrics.num_preemptions,
        )

    @property
    def stats(self) -> EngineStats:
        """The counters, with the gauges of this moment; the same object every time."""
        stats, pools = self._stats, self.kv.pools
        stats.running, stats.waiting, stats.holding = self.scheduler.num_running, self.num_waiting, len(self.scheduler.holding)
        stats.waiting_tokens = self.scheduler.counts.num_tokens
        stats.blocks_total, stats.blocks_used = self.kv.num_blocks, self.kv.num_used_blocks
        stats.blocks_cached = sum(pool.num_cached for pool in pools)
        return stats

    def _note_times(self, event: StepEvent, schedule: float, execute: float, update: float) -> None:
        event.timings = {"schedule": schedule, "execute": execute, "update": update}
        self._stats.schedule_seconds += schedule
        self._stats.execute_seconds += execute
        self._stats.update_seconds += update

    def _block_counts(self) -> tuple[int, int, int, int, int]:
        stats = self._stats
        return stats.blocks_taken, stats.blocks_shared, stats.blocks_copied, stats.blocks_evicted, stats.blocks_freed

    def _record(self, event: StepEvent, before: tuple[int, int, int, int, int]) -> None:
        self._stats.steps += 1
        self._stats.count_batch([entry.num_tokens for entry in event.entries])
        taken, shared, copied, evicted, freed = (now - then for now, then in zip(self._block_counts(), before, strict=True))
        event.blocks_taken, event.blocks_shared, event.blocks_copied, event.blocks_evicted = taken, shared, copied, evicted
        event.blocks_freed, event.blocks_used = freed, self.kv.num_used_blocks
        event.preempted, event.admitted = self.scheduler.plan.preempted, self.scheduler.plan.admitted
        if self._ends:
            event.ends = list(self._ends)
            self._ends.clear()
        event.running, event.waiting = self.scheduler.num_running, self.num_waiting
        self.events.add(event)

    def check_invariants(self) -> None:
        """Raises AssertionError. For tests; O(requests + blocks)."""
        self.scheduler.check_invariants()
        for request in self._requests.values():
            assert not request.status.finished or request.children or request.request_id in self._searches, (
                f"{request.request_id} is finished but still here"
            )
