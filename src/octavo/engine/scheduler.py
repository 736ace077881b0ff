"""Scheduler: which tokens of which requests are computed in the next step.

Owner of the queue of waiting requests and of the sets of running ones; it alone moves a request between them and asks
the KVCacheManager for blocks. Not here: text and stop strings (output_processor.py), running a step (engine_core.py).

One rule, no phases: a request has tokens with KV (num_computed_tokens) and tokens it should have; a step hands out a
budget of tokens so that the first catches up with the second. In a step, in this order:
1. starved: the prefill that has got nothing for longest, once its turn has come (below), at most half of the budget;
2. decodes: running requests one token behind, round robin, at most max_decode_batch_size;
3. prefills: running requests further behind, oldest first, with the rest of the budget;
4. admissions from the queue, most urgent first, while budget, blocks and places last. A request gets the blocks of all
   its known tokens at once, so only decodes ever need another block later.
Limits: max_num_batched_tokens a step; max_prefill_batch_size requests get more than one token, max_decode_batch_size
exactly one.

Starvation bound. With S = max_stalled_steps, B = max_num_batched_tokens, D = max_decode_batch_size:
- a running request gets nothing for at most S steps in a row. For that, at most S * min(D - 1, B - B // 2) requests run
  (what is sure to be served beside a starved prefill), so the round robin comes around in time;
- the same holds for half-done prefills and for the first waiting request as long as a sequence, its blocks and a
  prefill place are free (at most S prefills are half done at a time). One starved prefill is served a step, and with
  K of them each is called starved K - 1 steps early, so that the last one is still in time.
Where a step can hold a single decode (B or D is 1), starved prefills take every other step only; S is then at least 4.

When a decode finds no free block, a holding parent lets go of its blocks; where there is none, the most recent of the
least urgent running requests is preempted, and will recompute. The most urgent one never is, so work always ends.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from itertools import chain, islice
from time import perf_counter

from octavo.config import EngineConfig
from octavo.engine.events import Why
from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.metrics import EngineStats
from octavo.engine.request import Request, RequestStatus
from octavo.engine.request_queue import RequestQueue
from octavo.engine.scheduler_output import ScheduledEntry, SchedulerOutput, TokenKind
from octavo.engine.step_plan import PlannedEntry, StepPlan

_log = logging.getLogger("octavo")


class Scheduler:
    def __init__(self, config: EngineConfig, kv: KVCacheManager, stats: EngineStats, step: int = 0) -> None:
        """`step`: the number of the last step, where another scheduler went before."""
        self.config = config
        self.kv = kv
        self.stats = stats
        self.step = step
        self.waiting = RequestQueue()
        #: Running requests with a token to compute before they can sample, and those exactly one token behind.
        self.prefilling: dict[str, Request] = {}
        self.decoding: OrderedDict[str, Request] = OrderedDict()
        #: Parents whose children are not all admitted yet.
        self.holding: dict[str, Request] = {}
        self.plan = self._empty_plan()
        self._dropped: list[str] = []
        self._dropped_in_flight: list[str] = []
        self._head: Request | None = None
        self._blocked: tuple[Request, int, int] | None = None
        #: The first waiting request, if it could not start although nothing else holds anything: it never will.
        self.stuck: Request | None = None
        self._set_bounds()

    def _set_bounds(self) -> None:
        budget, decodes = self.config.max_num_batched_tokens, self.config.max_decode_batch_size
        #: A starved prefill may go first in every step, or in every other one where it would take the only place.
        self.period = 2 if min(budget, decodes) == 1 else 1
        self.stall_bound = max(self.config.max_stalled_steps, 2 * self.period if self.period > 1 else 1)
        sure = self.stall_bound // 2 if self.period > 1 else self.stall_bound * min(decodes - 1, budget - budget // 2)
        self.max_running = min(self.config.max_num_seqs, sure)
        self.max_prefills = max(1, (self.stall_bound + 1) // self.period - 1)
        if self.max_running < self.config.max_num_seqs or self.stall_bound > self.config.max_stalled_steps:
            _log.warning(
                "to keep the starvation bound with steps of %d tokens and %d decodes: at most %d sequences run at once, "
                "and none gets nothing for more than %d steps",
                budget,
                decodes,
                self.max_running,
                self.stall_bound,
            )

    def _empty_plan(self) -> StepPlan:
        config = self.config
        return StepPlan(config.max_num_batched_tokens, config.max_prefill_batch_size, config.max_decode_batch_size)

    # Requests come and go

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def running(self) -> Iterator[Request]:
        return chain(self.prefilling.values(), self.decoding.values())

    def add(self, request: Request) -> None:
        self.waiting.push(request)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """Take a request out for good, wherever it stands (also between schedule and complete_step); twice is nothing."""
        if request.status.finished:
            return
        if request in self.waiting:
            self.waiting.remove(request)
        self._detach(request)
        request.status = status
        if request.parent is not None and not request.was_admitted:
            self._child_left(request.parent)

    def append_token(self, request: Request, token_id: int) -> None:
        """A token was drawn: the request is one behind again."""
        request.token_ids.append(token_id)
        if self.prefilling.pop(request.request_id, None) is not None:
            self.decoding[request.request_id] = request

    def hold(self, parent: Request) -> list[Request]:
        """The prompt of a parent is computed: queue its children, in front by their order, and keep its blocks."""
        del self.prefilling[parent.request_id]
        self.holding[parent.request_id] = parent
        parent.status = RequestStatus.HOLDING
        for child in parent.make_children():
            self.waiting.push(child)
        return parent.children

    def computed_parents(self) -> list[Request]:
        """Running prefill-only requests with nothing missing any more."""
        return [r for r in self.prefilling.values() if r.prefill_only and r.num_missing_tokens == 0]

    def undelivered_drops(self) -> list[str]:
        """Ids the worker has not been told to forget, or that were in the step under way."""
        return [*self._dropped_in_flight, *self._dropped]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Have the worker forget these, whether or not it knows them."""
        self._dropped.extend(request_ids)

    # A step

    def schedule(self) -> SchedulerOutput:
        self.step += 1
        self.plan = self._empty_plan()
        starved = self._starved_prefill()
        if starved is not None and (starved not in self.waiting or self._admit(starved)):
            self._plan_chunk(starved, "starved", max(1, self.config.max_num_batched_tokens // 2))
        self._plan_decodes()
        for request in sorted(self.prefilling.values(), key=lambda r: r.order):
            self._plan_chunk(request, "resumed" if request.metrics.num_preemptions else "prompt")
        self._admit_waiting()
        self.stuck = self.waiting.peek() if not (self.num_running or self.holding) else None
        return self._output()

    def complete_step(self, failed: Container[str]) -> list[tuple[Request, PlannedEntry]]:
        """The step's KV is written (but that of `failed` requests): count and commit it.

        Returns the entries whose requests are still there, in the order of the step.
        """
        self.kv.release_copies()
        done = []
        for entry in self.plan.entries.values():
            request = entry.request
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted meanwhile
            if request.request_id not in failed:
                request.num_computed_tokens = entry.end
                self.kv.commit(request)
            done.append((request, entry))
        return done

    def _starved_prefill(self) -> Request | None:
        """The prefill, running or first in the queue, that must be served now to keep the bound."""
        candidates = list(self.prefilling.values())
        head = self.waiting.peek()
        if head is not None:
            place = len(candidates) < self.max_prefills and self.num_running < self.max_running
            if head is not self._head or not place:
                head.last_step = self.step - 1  # only now its waiting begins to count
            if place:
                candidates.append(head)
        self._head = head
        if self.period > 1 and self.step % self.period:
            return None
        if not candidates:
            return None
        oldest = min(candidates, key=lambda r: (r.last_step, r.order))
        stalled = self.step - 1 - oldest.last_step
        return oldest if stalled >= self.stall_bound + 1 - self.period * len(candidates) else None

    def _plan_decodes(self) -> None:
        places = min(self.plan.decode_places, self.plan.budget)
        for request in list(islice(self.decoding.values(), places)):
            if request.request_id not in self.decoding or not self._grow(request):
                continue  # preempted in this very step
            self._add_entry(request, 1, "decode")
            self.decoding.move_to_end(request.request_id)

    def _plan_chunk(self, request: Request, why: Why, most: int | None = None) -> int:
        """As many missing tokens of a prefill as fit, if it has nothing in this step yet; returns how many."""
        if request.request_id in self.plan.entries:
            return 0
        wanted = request.next_chunk()
        count = self.plan.fit(wanted if most is None else min(wanted, most))
        if count > 0:
            self._add_entry(request, count, why)
        return count

    def _add_entry(self, request: Request, count: int, why: Why) -> None:
        self.plan.add(request, count, why)
        request.last_step = self.step
        if request.metrics.first_scheduled is None:
            request.metrics.first_scheduled = perf_counter()

    # Admission and preemption

    def _admit_waiting(self) -> None:
        entries = self.plan.entries
        half_done = sum(not (r.request_id in entries and entries[r.request_id].completes) for r in self.prefilling.values())
        while self.plan.budget > 0 and half_done < self.max_prefills:
            request = self.waiting.peek()
            if request is None or not self._admit(request):
                return
            why: Why = "resumed" if request.metrics.num_preemptions else "fork" if request.parent is not None else "new"
            if request.num_missing_tokens == 0:
                continue  # a parent whose prompt is in the cache
            if not self._plan_chunk(request, why):
                return
            half_done += not entries[request.request_id].completes

    def _admit(self, request: Request) -> bool:
        """Move the first waiting request to the running ones, if sequences and blocks allow it."""
        state = (request, self.kv.num_free_blocks, self.num_running)
        if self.num_running > 0 and state == self._blocked:
            return False  # nothing has changed since it did not fit
        while self.num_running >= self.max_running or not self._start(request):
            victim = self._victim_for(request)
            if victim is None:
                self._blocked = state
                return False
            self._preempt(victim)
        popped = self.waiting.pop()
        assert popped is request, "only the first in the queue is admitted"
        self._blocked = None
        if request is not self._head:
            request.last_step = self.step - 1  # it has not waited as the first one
        self.prefilling[request.request_id] = request
        request.status = RequestStatus.RUNNING
        if not request.was_admitted:
            request.was_admitted = True
            if request.parent is None:
                request.num_cached_tokens = request.num_computed_tokens
            else:
                self._child_left(request.parent)
        return True

    def _start(self, request: Request) -> bool:
        """Get its blocks: its parent's, or those of a cached prefix, and new ones. One block for each running request
        stays free, so that a request is not preempted as soon as it is admitted."""
        parent = request.parent
        if parent is not None and parent.status is RequestStatus.HOLDING and not request.was_admitted:
            return self.kv.fork(parent, request, last=parent.num_children_to_admit == 1, headroom=self.num_running)
        return self.kv.admit(request, headroom=self.num_running)

    def _child_left(self, parent: Request) -> None:
        """A child of the parent was admitted, or finished before that; the last one lets the parent go."""
        parent.num_children_to_admit -= 1
        if parent.num_children_to_admit == 0 and parent.status is RequestStatus.HOLDING:
            self.finish(parent, RequestStatus.FINISHED_PARENT)

    def _grow(self, request: Request) -> bool:
        """A slot for the next token of a decode; False when the request itself had to be preempted."""
        while not self.kv.allocate_slots(request, request.num_tokens):
            victim = self._latest(self.holding.values()) or self._latest(self.running())
            assert victim is not None
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _victim_for(self, request: Request) -> Request | None:
        """Whom a waiting request may push out: the less urgent; and holding parents where nothing runs at all."""
        latest = self._latest(self.running())
        if latest is None:
            return self._latest(self.holding.values())
        return latest if latest.origin.priority > request.origin.priority else None

    @staticmethod
    def _latest(requests: Iterable[Request]) -> Request | None:
        return max(requests, key=lambda r: r.order, default=None)

    def _preempt(self, request: Request) -> None:
        """Free its blocks. A running request is queued again; a parent is done, its children go on without it."""
        self.plan.remove(request)
        self.plan.preempted.append(request.request_id)
        self.stats.preemptions += 1
        if request.status is RequestStatus.HOLDING:
            self.finish(request, RequestStatus.FINISHED_PARENT)
            return
        self._detach(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.metrics.num_preemptions += 1
        self.waiting.push(request)

    def _detach(self, request: Request) -> None:
        for group in (self.prefilling, self.decoding, self.holding):
            group.pop(request.request_id, None)
        self.kv.free(request)
        if request.known_to_worker:
            self._dropped.append(request.request_id)
            request.known_to_worker = False

    # The contract with the worker

    def _output(self) -> SchedulerOutput:
        # Sorted by kind, generated rows first; the plan keeps that order for the result.
        ordered = sorted(self.plan.entries.values(), key=lambda entry: entry.kind is TokenKind.PROMPT)
        self.plan.entries = {entry.request.request_id: entry for entry in ordered}
        output = SchedulerOutput(self.step, [], block_copies=self.kv.take_copies())
        for entry in ordered:
            output.entries.append(self._scheduled(entry, output))
            if entry.kind is TokenKind.PROMPT:
                self.stats.prompt_tokens_computed += entry.num_tokens
            else:
                self.stats.generated_tokens_computed += entry.num_tokens
        if ordered or output.block_copies:  # otherwise there is no step that would carry them
            output.dropped_request_ids.extend(self._dropped)
            self._dropped_in_flight, self._dropped = self._dropped, []
        return output

    def _scheduled(self, entry: PlannedEntry, output: SchedulerOutput) -> ScheduledEntry:
        request = entry.request
        if not request.known_to_worker:
            output.new_requests.append(request.for_worker())
            request.known_to_worker = True
            request.num_blocks_sent = 0
        tables = self.kv.block_tables(request)
        new_block_ids = tuple(tuple(table[request.num_blocks_sent :]) for table in tables)
        request.num_blocks_sent = len(tables[0])
        return ScheduledEntry(request.request_id, entry.start, entry.num_tokens, entry.kind, new_block_ids, entry.sample)

    def check_invariants(self) -> None:
        """Raises AssertionError. For tests: O(requests + blocks)."""
        holders = [*self.running(), *self.holding.values()]
        self.kv.check_invariants(holders)
        assert self.num_running <= self.max_running
        for request in self.running():
            assert request.status is RequestStatus.RUNNING and request not in self.waiting
            assert 0 <= request.num_computed_tokens <= request.num_target_tokens
        for request in self.decoding.values():
            assert request.num_missing_tokens == 1 and not request.prefill_only
        for parent in self.holding.values():
            assert parent.status is RequestStatus.HOLDING and parent.num_children_to_admit > 0
