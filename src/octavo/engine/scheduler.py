"""Scheduler: which tokens of which requests are computed in the next step.

Owner of the policy, which keeps the waiting requests, and of the sets of running ones; it alone moves a request between them
and asks the KVCacheManager for blocks. Not here: the order of the waiting (policies.py), text and stop strings
(output_processor.py), running a step (engine_core.py).

One rule, no phases: a request has tokens with KV (num_computed_tokens) and tokens it should have; a step hands out a
budget of tokens so that the first catches up with the second. In a step, in this order:
1. starved: the prefill that has got nothing for longest, once its turn has come (below), at most half of the budget;
2. decodes: running requests one token behind, round robin, at most max_decode_batch_size;
3. prefills: running requests further behind, most urgent first, with the rest of the budget;
4. admissions from the queue, in the order of the policy, while budget, blocks and places last. A request gets the blocks of all
   its known tokens at once, so only decodes ever need another block later; but in KV groups with a sliding window, where it gets
   those of each chunk with the chunk. As many as it will hold at a time must be free, and not promised to others, when it is
   admitted. A chunk shrinks to the blocks that are free.
Limits: max_num_batched_tokens a step; max_prefill_batch_size requests get more than one token, max_decode_batch_size
exactly one.

No request that runs, and not the first place of the queue, gets nothing for more than max_stalled_steps in a row (starvation.py).

When a decode, or the first token of a chunk, finds no free block, a holding parent lets go of its blocks; where there is none, a
running request is preempted and will recompute: of those the policy puts last the one with the least to recompute. The most
urgent one never is, so work always ends. A waiting request pushes out only less urgent ones, first those that just hold
blocks, and nobody at all unless it can start once all of them are gone.

No thrash. While other requests run, a preempted one is admitted again only if, beside its blocks, as many again stay free as
its recomputed tokens fill; that reserve, at most half a pool, is kept until as many tokens have been computed for the first time
(recompute_debt.py). So, but for requests that a more urgent one pushed out and for beams, tokens are recomputed at most twice
as many as computed for the first time, and one pool.

A beginning that a running prefill computes is not computed twice: who shares its next whole block follows it, and the prefill
goes as if it were as urgent (followers.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Iterator
from itertools import chain, islice
from time import perf_counter

from octavo.config import EngineConfig
from octavo.engine.events import Admission, Why
from octavo.engine.executor import Clock
from octavo.engine.followers import Followers
from octavo.engine.kv_cache_manager import KVCacheManager, Terms
from octavo.engine.metrics import EngineStats
from octavo.engine.policies import Policy, make_policy
from octavo.engine.recompute_debt import RecomputeDebt
from octavo.engine.request import Request, RequestStatus
from octavo.engine.request_queue import WaitingCounts
from octavo.engine.scheduler_output import SchedulerOutput
from octavo.engine.starvation import StarvationBound
from octavo.engine.step_plan import PlannedEntry, StepPlan
from octavo.engine.victims import Victims
from octavo.engine.worker_view import WorkerView


class Scheduler:
    def __init__(self, config: EngineConfig, kv: KVCacheManager, stats: EngineStats, step: int = 0, clock: Clock = perf_counter) -> None:
        """`step`: the number of the last step, where another scheduler went before."""
        self.config = config
        self.kv = kv
        self.stats = stats
        self.bound = StarvationBound.of(config)
        self.clock = clock
        self.step = step
        self.waiting: Policy = make_policy(config, kv)
        self.worker = WorkerView(kv, stats)
        self.victims = Victims(kv, self.waiting)
        self.followers = Followers(kv, config.max_num_seqs)
        self.counts = WaitingCounts()
        #: Running requests with a token to compute before they can sample, and those exactly one token behind.
        self.prefilling: dict[str, Request] = {}
        self.decoding: OrderedDict[str, Request] = OrderedDict()
        #: Parents whose children are not all admitted yet, and beams that wait for the other beams.
        self.holding: dict[str, Request] = {}
        #: Beams that wait to go on: they keep the places of their search and never stand in the policy's queue.
        self.continuing: OrderedDict[str, Request] = OrderedDict()
        #: Places that searches under way keep until they end, by id.
        self._search_places: dict[str, int] = {}
        self._beam_blocked = False
        self.plan = self._empty_plan()
        self._head: Request | None = None
        #: Last step in which the first place of the queue was served, or could not be for lack of a place to run.
        self._queue_served = step
        self._blocked: tuple[Request, tuple[int, ...], int, int] | None = None
        self.debt = RecomputeDebt()
        #: The first waiting request, if it could not start although nothing else holds anything: it never will.
        self.stuck: Request | None = None

    def _empty_plan(self) -> StepPlan:
        config = self.config
        return StepPlan(config.max_num_batched_tokens, config.max_prefill_batch_size, config.max_decode_batch_size)

    # Requests come and go

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.followers) + len(self.continuing)

    def running(self) -> Iterator[Request]:
        return chain(self.prefilling.values(), self.decoding.values())

    def add(self, request: Request) -> None:
        self.counts.add(request)
        if _is_beam(request):
            self.continuing[request.request_id] = request
        else:
            self.waiting.push(request, self.step)

    def end_search(self, top: Request) -> None:
        """The places it kept are free."""
        self._search_places.pop(top.request_id, None)

    def _free_places(self, request: Request) -> int:
        """Places for it. Beams have those of their search; others only such as no search keeps."""
        if _is_beam(request) or not self._search_places:
            return self.bound.max_running - self.num_running
        alone = sum(r.origin.sampling_params.beam_width is None for r in self.running())
        return self.bound.max_running - alone - sum(self._search_places.values())

    def _has_place(self, request: Request, freed: int = 0) -> bool:
        """A search needs as many places as it has beams. `freed`: so many others would go."""
        return self._free_places(request) + freed >= (1 if _is_beam(request) else self._places_of(request))

    def _places_of(self, request: Request) -> int:
        return min(request.origin.sampling_params.beam_width or 1, self.bound.max_running)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """Take a request out for good, wherever it stands (also between schedule and complete_step); twice is nothing."""
        if request.status.finished:
            return
        if request in self.waiting:
            self.waiting.remove(request, self.step)
            self.counts.remove(request)
        elif self.continuing.pop(request.request_id, None) is not None:
            self.counts.remove(request)
        elif request in self.followers:
            self.followers.remove(request)
            self.counts.remove(request)
        self._detach(request)
        request.status = status
        if request.parent is not None and not request.was_admitted:
            self._child_left(request.parent)

    def append_token(self, request: Request, token_id: int) -> None:
        """A token was drawn: the request is one behind again."""
        request.token_ids.append(token_id)
        self.waiting.generated(request)
        if self.prefilling.pop(request.request_id, None) is not None:
            self.decoding[request.request_id] = request

    def hold(self, parent: Request) -> list[Request]:
        """The prompt of a parent is computed: queue its children, in front by their order, and keep its blocks."""
        del self.prefilling[parent.request_id]
        self.holding[parent.request_id] = parent
        parent.status = RequestStatus.HOLDING
        for child in parent.make_children():
            self.add(child)
        return parent.children

    def hold_beam(self, beam: Request) -> None:
        """A beam knows what may follow it: it keeps its blocks until its continuations start, or until memory is short."""
        del self.prefilling[beam.request_id]
        self.holding[beam.request_id] = beam
        beam.status = RequestStatus.HOLDING
        self.waiting.generated(beam)

    def branch(self, beam: Request, children: list[Request]) -> None:
        """Queue the continuations of a beam that holds its blocks, or has lost them; without any it is over."""
        beam.children, beam.num_children_to_admit = children, len(children)
        if not children:
            self.finish(beam, RequestStatus.FINISHED_PARENT)
        if beam.status.finished:
            _lose_blocks(beam)
        for child in children:
            child.last_step, child.patience = beam.last_step, beam.patience
            self.add(child)

    def computed_parents(self) -> list[Request]:
        """Running prefill-only requests with nothing missing any more."""
        return [r for r in self.prefilling.values() if r.prefill_only and r.num_missing_tokens == 0]

    # A step

    def schedule(self) -> SchedulerOutput:
        self.step += 1
        self.plan = self._empty_plan()
        for request in self.followers.take_done(self.step):
            self.waiting.push(request, self.step)
        starved = self._starved_prefill()
        if starved is not None and (starved not in self.waiting or (not self._follow(starved) and self._admit(starved))):
            self._plan_chunk(starved, "starved", max(1, self.config.max_num_batched_tokens // 2))
        self._plan_decodes()
        for request in self.followers.by_urgency(self.prefilling.values(), self.waiting.rank):
            self._plan_chunk(request, "resumed" if request.metrics.num_preemptions else "prompt")
        self._admit_waiting()
        self.stuck = (
            (next(iter(self.continuing.values()), None) or self.waiting.peek(self.step)) if not (self.num_running or self.holding) else None
        )
        return self.worker.output(self.step, self.plan)

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
                if self.debt or entry.start < request.num_lost_tokens:
                    self._count_recomputed(entry)
                request.num_computed_tokens = entry.end
                self.kv.commit(request)
            done.append((request, entry))
        return done

    def _count_recomputed(self, entry: PlannedEntry) -> None:
        recomputed = max(0, min(entry.end, entry.request.num_lost_tokens) - entry.start)
        self.stats.tokens_recomputed += recomputed
        self.debt.pay(entry.num_tokens - recomputed)

    def _starved_prefill(self) -> Request | None:
        """The prefill, running or first in the queue, that must be served now to keep the bound."""
        candidates = list(self.prefilling.values())
        head = self.waiting.peek(self.step)
        place = len(candidates) < self.bound.max_prefills and (head is None or self._has_place(head)) and not self._beam_blocked
        if self._head is None or not place:
            self._queue_served = self.step - 1  # only now the waiting of the first place begins to count
        if head is not None:
            head.last_step = self._queue_served
            if place:
                candidates.append(head)
        self._head = head
        if self.bound.period > 1 and self.step % self.bound.period:
            return None
        if not candidates:
            return None
        oldest = min(candidates, key=lambda r: (r.last_step, self.waiting.rank(r)))
        stalled = self.step - 1 - oldest.last_step
        return oldest if self.bound.is_starved(stalled, len(candidates)) else None

    def _plan_decodes(self) -> None:
        places = min(self.plan.decode_places, self.plan.budget)
        self._beam_blocked = False
        turns = [*islice(self.decoding.values(), places), *islice(self.continuing.values(), places)]
        for request in sorted(turns, key=lambda r: r.last_step):
            if min(self.plan.decode_places, self.plan.budget) < 1:
                break  # a beam that finds no blocks takes no place
            if request.request_id in self.continuing:
                self._continue(request)
                continue
            if request.request_id not in self.decoding or not (self.kv.has_slot(request) or self._grow(request)):
                continue  # preempted in this very step
            self._add_entry(request, 1, "decode")
            self.decoding.move_to_end(request.request_id)

    def _plan_chunk(self, request: Request, why: Why, most: int | None = None) -> int:
        """As many missing tokens of a prefill as fit, if it has nothing in this step yet; returns how many."""
        if request.request_id in self.plan.entries or request.status is not RequestStatus.RUNNING:
            return 0  # planned, or preempted, in this very step
        wanted = request.next_chunk()
        wanted = wanted if most is None else min(wanted, most)
        fits = self.plan.fit(wanted)
        while fits and not (count := self.kv.allocate_chunk(request, fits, len(self.decoding))):
            if not self._make_room_for(request):
                return 0
        count = self.plan.fit(count) if fits else 0  # a chunk that has shrunk to one token takes another kind of place
        if count > 0:
            self._add_entry(request, count, why)
        return count

    def _add_entry(self, request: Request, count: int, why: Why) -> None:
        self.plan.add(request, count, why)
        request.last_step = self.step
        if request.metrics.first_scheduled is None:
            request.metrics.first_scheduled = self.clock()

    # Admission and preemption

    def _continue(self, beam: Request) -> None:
        if self._beam_blocked or self.plan.budget == 0:
            return
        if self._admit(beam):
            self._plan_chunk(beam, "resumed" if beam.metrics.num_preemptions else "fork")
        else:
            self._beam_blocked = True

    def _admit_waiting(self) -> None:
        for beam in list(self.continuing.values()):
            self._continue(beam)
        if self._beam_blocked:
            return  # memory or places that a beam waits for are not given to others
        entries = self.plan.entries
        half_done = sum(not (r.request_id in entries and entries[r.request_id].completes) for r in self.prefilling.values())
        while self.plan.budget > 0 and half_done < self.bound.max_prefills:
            request = self.waiting.peek(self.step)
            if request is not None and self._follow(request):
                continue
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
        state = (request, self.kv.room(), self.num_running, self.debt.num_tokens)
        if self.num_running > 0 and state == self._blocked:
            return False  # nothing has changed since it did not fit
        reserve = (
            self.num_running > 0
            and not _is_beam(request)
            and (bool(self.debt) or request.num_lost_tokens > 0)
            and self._pushed_out_by(request) is None
        )
        suffices = False
        while not self._has_place(request) or not self._start(request, reserve):
            victim = self._pushed_out_by(request)
            if victim is None or not (suffices or self._all_gone_suffices(request)):
                self._blocked = state
                return False
            suffices = True
            self._preempt(victim)
        self.counts.remove(request)
        self._leave_queue(request)
        self._blocked = None
        if request.parent is None and request.origin.sampling_params.beam_width is not None:
            self._search_places[request.request_id] = self._places_of(request)
        if request is not self._head and not _is_beam(request):
            request.last_step = self.step - 1  # it has not waited as the first one
        self.prefilling[request.request_id] = request
        request.status = RequestStatus.RUNNING
        self.debt.owe(request)
        resumed = request.was_admitted
        if not resumed:
            request.was_admitted = True
            self.waiting.admitted(request)
            if request.parent is None:
                request.num_cached_tokens = request.num_computed_tokens
            else:
                self._child_left(request.parent)
        self._note_admission(request, resumed)
        return True

    def _note_admission(self, request: Request, resumed: bool) -> None:
        parent = None if request.parent is None else request.parent.request_id
        arrival, found = request.metrics.arrival, request.num_computed_tokens
        admission = Admission(request.request_id, parent, arrival, request.added, request.num_prompt_tokens, found, resumed)
        if request.followed:
            admission = admission._replace(followed=tuple(request.followed))
            request.followed.clear()
        self.plan.admitted.append(admission)

    def _leave_queue(self, request: Request) -> None:
        if self.continuing.pop(request.request_id, None) is not None:
            return
        was_promoted = request.patience == 0
        self.waiting.remove(request, self.step)
        self.stats.requests_promoted += request.patience == 0 and not was_promoted
        self._queue_served = self.step

    def _start(self, request: Request, reserve: bool, without: Collection[Request] | None = None) -> bool:
        """Get its blocks: its parent's, or those of a cached prefix, and new ones. One block for each running request
        stays free, so that a request is not preempted as soon as it is admitted; and what `reserve` keeps from thrash.
        `without`: change nothing, but say whether it would get them once these had let go of theirs."""
        parent = request.parent
        if _is_beam(request) and request.is_fork:
            terms = Terms(0, 0, without)  # it goes on, with hardly more than its parent held
        else:
            running = self.num_running - sum(other.status is RequestStatus.RUNNING for other in without or ())
            terms = Terms(running, self.kv.blocks_for(self.debt.num_tokens) if reserve else 0, without)
        if parent is not None and parent.status is RequestStatus.HOLDING and not request.was_admitted:
            return self.kv.fork(parent, request, terms, last=parent.num_children_to_admit == 1)
        return self.kv.admit(request, terms, twice=reserve and request.num_lost_tokens > 0)

    def _all_gone_suffices(self, request: Request) -> bool:
        """A waiting request could start without all it may push out; where nothing runs it always can."""
        if self.num_running == 0:
            return True
        gone = self.waiting.less_urgent(request, self._give_way_to(request))
        if not self._has_place(request, freed=len(gone)):
            return False
        return self._start(request, False, [*gone, *self.waiting.less_urgent(request, self.holding.values())])

    def _follow(self, request: Request) -> bool:
        """Take the request out of the queue, if a running prefill is about to compute a block that it needs next."""
        if not self.followers.add(request, self.prefilling.values(), self.step):
            return False
        self._leave_queue(request)
        self.stats.prefix_waits += 1
        return True

    # Preemption

    def _child_left(self, parent: Request) -> None:
        """A child of the parent was admitted, or finished before that; the last one lets the parent go."""
        parent.num_children_to_admit -= 1
        if parent.num_children_to_admit == 0 and parent.status is RequestStatus.HOLDING:
            self.finish(parent, RequestStatus.FINISHED_PARENT)
        if parent.num_children_to_admit == 0 and parent.origin.sampling_params.beam_width is not None:
            parent.children = []  # else the first beam of a search would keep every later one in memory

    def _grow(self, request: Request) -> bool:
        """A slot for the next token of a decode; False when the request itself had to be preempted."""
        while not self.kv.allocate_slots(request, request.num_tokens):
            if not self._make_room_for(request):
                return False
        return True

    def _make_room_for(self, request: Request) -> bool:
        """Preempt one that holds blocks; False when it was the request itself."""
        victim = self.victims.for_running(self.running(), self.holding.values())
        self._preempt(victim)
        return victim is not request

    def _pushed_out_by(self, request: Request) -> Request | None:
        holding = self.holding.values() if self._has_place(request) else ()  # they give no place to run
        return self.victims.for_waiting(request, self._give_way_to(request), holding)

    def _give_way_to(self, request: Request) -> list[Request]:
        """Running ones that a waiting request might push out: for lack of a place no beams, which would keep theirs."""
        running = list(self.running())
        return running if self._has_place(request) else [r for r in running if r.origin.sampling_params.beam_width is None]

    def _preempt(self, request: Request) -> None:
        """Free its blocks. A running request is queued again; a parent is done, its children go on without it."""
        self.plan.remove(request)
        self.plan.preempted.append(request.request_id)
        self.stats.preemptions += 1
        if request.status is RequestStatus.HOLDING:
            if request.parent is not None:
                _lose_blocks(request)
            self.finish(request, RequestStatus.FINISHED_PARENT)
            return
        self._detach(request)
        self._search_places.pop(request.request_id, None)
        request.status = RequestStatus.PREEMPTED
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.metrics.num_preemptions += 1
        self.add(request)

    def _detach(self, request: Request) -> None:
        for group in (self.prefilling, self.decoding, self.holding):
            group.pop(request.request_id, None)
        self.kv.free(request)
        self.debt.forgive(request)
        self.worker.forget(request)

    def check_invariants(self) -> None:
        """Raises AssertionError. For tests: O(requests + blocks)."""
        holders = [*self.running(), *self.holding.values()]
        self.kv.check_invariants(holders)
        assert self.num_running <= self.bound.max_running
        for request in self.running():
            assert request.status is RequestStatus.RUNNING and request not in self.waiting
            assert 0 <= request.num_computed_tokens <= request.num_target_tokens
        for request in self.decoding.values():
            assert request.num_missing_tokens == 1 and not request.prefill_only
        for parent in self.holding.values():
            assert parent.status is RequestStatus.HOLDING
            assert parent.num_children_to_admit > 0 or (parent.parent is not None and not parent.children)
        assert self.counts.num_sequences == self.num_waiting and self.counts.num_tokens >= 0
        assert self.counts.num_tokens == 0 or self.num_waiting > 0
        assert self.debt.debtors <= {request.request_id for request in holders}, "who holds nothing owes nothing"


def _lose_blocks(beam: Request) -> None:
    """Those that continue it and have not started will compute again what it held."""
    for child in beam.children:
        if not child.was_admitted:
            child.num_lost_tokens = beam.num_computed_tokens
            child.metrics.num_preemptions += 1


def _is_beam(request: Request) -> bool:
    return request.parent is not None and request.origin.sampling_params.beam_width is not None
