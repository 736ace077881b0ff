"""One trace under one policy: arrivals by the virtual clock, steps of the engine's own core, and what each request went through.

As a real loop does: what has arrived is queued between two steps; where nothing runs, the clock goes on to the next arrival.
Owner of the core it runs. Not here: figures (report.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from octavo.bench.simulate.costs import CostFile, StepCosts
from octavo.bench.simulate.trace import TraceRequest, check, token_ids
from octavo.bench.simulate.virtual import CountingOutputs, VirtualClock, VirtualExecutor, VirtualTokenizer
from octavo.config import EngineConfig
from octavo.engine.engine_core import EngineCore
from octavo.engine.executor import KVGroup
from octavo.engine.metrics import EngineStats
from octavo.engine.request import EngineRequest
from octavo.errors import ConfigError, InvalidRequestError, OctavoError
from octavo.outputs import CompletionDelta
from octavo.sampling_params import SamplingParams

#: Steps in a row that compute nothing, after which something is wrong.
MOST_IDLE_STEPS = 10_000


@dataclass(slots=True)
class Outcome:
    """What became of a trace. Times are seconds on the virtual clock."""

    requests: Sequence[TraceRequest]
    config: EngineConfig
    num_blocks: int
    stats: EngineStats
    executor: VirtualExecutor
    #: By number in the trace; None: refused, or not done.
    first_scheduled: list[float | None] = field(default_factory=list)
    first_token: list[float | None] = field(default_factory=list)
    last_token: list[float | None] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    #: Between two tokens of one request, of all requests.
    gaps: Sequence[float] = ()
    refused: int = 0
    failed: int = 0
    #: When the last request ended.
    end: float = 0.0

    @property
    def finished(self) -> list[int]:
        """Numbers of the requests that got their whole answer."""
        return [number for number, request in enumerate(self.requests) if self.output_tokens[number] == request.output_tokens]


def pool_blocks(config: EngineConfig, file: CostFile) -> int:
    """Blocks of the pool that an engine with these settings would have. Raises ConfigError when not one fits."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    length = min(config.max_model_len or file.max_model_len, file.max_model_len)
    useful = config.max_num_seqs * -(-length // config.block_size)
    blocks = min(int(config.kv_cache_memory) // (file.kv_token_bytes * config.block_size), useful)
    if blocks < 1:
        raise ConfigError(f"kv_cache_memory holds not one block of {config.block_size} tokens of {file.model}")
    return blocks


def simulate(
    requests: Sequence[TraceRequest],
    costs: StepCosts,
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    done: Callable[[], object] | None = None,
) -> Outcome:
    """Run all of `requests`, which are sorted by arrival. `done` is called after each one that is over. Raises ConfigError for a
    request that no such engine would run."""
    length = min(config.max_model_len or max_model_len, max_model_len)
    check(requests, length, num_blocks * config.block_size)
    return _Simulation(requests, costs, replace(config, event_history=1), num_blocks, length).run(done or (lambda: None))


class _Simulation:
    def __init__(
        self, requests: Sequence[TraceRequest], costs: StepCosts, config: EngineConfig, num_blocks: int, max_model_len: int
    ) -> None:
        self._requests = requests
        self._clock = VirtualClock()
        self._executor = VirtualExecutor(costs, self._clock, (KVGroup(num_blocks, config.block_size),), max_model_len)
        self._core = EngineCore(self._executor, VirtualTokenizer(), config, self._clock)
        self._outputs = self._core.outputs = CountingOutputs(self._executor.info, self._clock)
        self._executor.kv = self._core.kv
        self._params = SamplingParams(temperature=0, ignore_eos=True).resolve({})
        count = len(requests)
        self._outcome = Outcome(requests, config, num_blocks, self._core.stats, self._executor)
        self._outcome.first_scheduled, self._outcome.first_token = [None] * count, [None] * count
        self._outcome.last_token, self._outcome.output_tokens = [None] * count, [0] * count

    def run(self, done: Callable[[], object]) -> Outcome:
        gc.freeze()  # a long trace is not walked again and again by the garbage collector
        try:
            self._run_all(done)
        finally:
            gc.unfreeze()
        outcome = self._outcome
        outcome.stats, outcome.gaps, outcome.end = self._core.stats.copy(), self._outputs.gaps, self._clock.now
        return outcome

    def _run_all(self, done: Callable[[], object]) -> None:
        core, clock, requests = self._core, self._clock, self._requests
        following, idle = 0, 0
        while following < len(requests) or core.has_unfinished_requests():
            while following < len(requests) and requests[following].arrival <= clock.now:
                if not self._add(following):
                    done()
                following += 1
            if not core.has_unfinished_requests():
                if following < len(requests):
                    clock.now = max(clock.now, requests[following].arrival)
                continue
            before = self._executor.steps
            for delta in core.step():
                if delta.finish_reason is not None:
                    self._over(delta)
                    done()
            idle = 0 if self._executor.steps > before else idle + 1
            if idle > MOST_IDLE_STEPS:
                raise OctavoError("the simulated engine does not get on: no step computes anything, and requests are left")

    def _add(self, number: int) -> bool:
        """False where the engine refuses it."""
        request = self._requests[number]
        order = EngineRequest(
            str(number),
            token_ids(request, number),
            self._params,
            request.output_tokens,
            seed=0,
            arrival=request.arrival,
            priority=request.priority,
            tenant=request.tenant,
        )
        try:
            self._core.add_request(order)
        except InvalidRequestError:  # the queue is full
            self._outcome.refused += 1
            return False
        return True

    def _over(self, delta: CompletionDelta) -> None:
        outcome, metrics = self._outcome, delta.metrics
        number = int(delta.request_id)
        if delta.finish_reason != "length" or metrics is None:
            outcome.failed += 1
            return
        outcome.first_scheduled[number], outcome.first_token[number] = metrics.first_scheduled, metrics.first_token
        outcome.last_token[number] = metrics.last_token
        outcome.output_tokens[number] = self._requests[number].output_tokens
