"""WorkerView: what the worker has been told so far, and what a step must tell it: new requests, new blocks, whom to forget.

Owner: the scheduler. A request is described once, and its block tables only grow while the worker knows it.
Not here: what is computed in a step (scheduler.py), what the worker keeps (worker/input_batch.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.metrics import EngineStats
from octavo.engine.request import Request
from octavo.engine.scheduler_output import ScheduledEntry, SchedulerOutput, TokenKind
from octavo.engine.step_plan import PlannedEntry, StepPlan


class WorkerView:
    def __init__(self, kv: KVCacheManager, stats: EngineStats) -> None:
        self._kv = kv
        self._stats = stats
        self._no_blocks: tuple[tuple[int, ...], ...] = tuple(() for _ in kv.pools)
        self._none_sent = (0,) * len(kv.pools)
        #: Ids to forget: not sent yet, and sent with the step under way.
        self.dropped: list[str] = []
        self._dropped_in_flight: list[str] = []

    def forget(self, request: Request) -> None:
        """It lost its blocks or is over: the worker forgets it, if it knows it."""
        if request.known_to_worker:
            self.dropped.append(request.request_id)
            request.known_to_worker = False

    def drop(self, request_ids: Iterable[str]) -> None:
        """Have the worker forget these, whether or not it knows them."""
        self.dropped.extend(request_ids)

    def undelivered_drops(self) -> list[str]:
        """Ids the worker has not been told to forget, or that were in the step under way."""
        return [*self._dropped_in_flight, *self.dropped]

    def output(self, step: int, plan: StepPlan) -> SchedulerOutput:
        """The step as the worker gets it. Sorted by kind, generated rows first; the plan keeps that order for the result."""
        prompts = [entry for entry in plan.entries.values() if entry.kind is TokenKind.PROMPT]
        ordered = [entry for entry in plan.entries.values() if entry.kind is not TokenKind.PROMPT] + prompts
        if prompts and len(prompts) < len(ordered):
            plan.entries = {entry.request.request_id: entry for entry in ordered}
        output = SchedulerOutput(step, [], block_copies=self._kv.take_copies())
        for entry in ordered:
            output.entries.append(self._scheduled(entry, output))
        num_prompt = sum(entry.num_tokens for entry in prompts)
        self._stats.prompt_tokens_computed += num_prompt
        self._stats.generated_tokens_computed += sum(entry.num_tokens for entry in ordered) - num_prompt
        if ordered or output.block_copies:  # otherwise there is no step that would carry them
            output.dropped_request_ids.extend(self.dropped)
            self._dropped_in_flight, self.dropped = self.dropped, []
        return output

    def _scheduled(self, entry: PlannedEntry, output: SchedulerOutput) -> ScheduledEntry:
        request = entry.request
        if not request.known_to_worker:
            output.new_requests.append(request.for_worker())
            request.known_to_worker = True
            request.num_blocks_sent = self._none_sent
        tables = self._kv.block_tables(request)
        sent, request.num_blocks_sent = request.num_blocks_sent, tuple(map(len, tables))
        new_block_ids = self._no_blocks
        if sent != request.num_blocks_sent:
            entry.blocks = new_block_ids = tuple(tuple(table[count:]) for table, count in zip(tables, sent, strict=True))
        return ScheduledEntry(request.request_id, entry.start, entry.num_tokens, entry.kind, new_block_ids, entry.sample)
