"""VirtualClock and VirtualExecutor: time that passes only when a step is paid for.

Owner of the clock is one simulation. The executor computes nothing: it adds the cost of a step to the clock and draws the same token
for everybody; how long an answer gets is the request's max_tokens, which the trace says. CountingOutputs stands where text is made,
without any text.
Not here: what a step costs (costs.py), the loop (run.py).
"""

from __future__ import annotations

from array import array

from octavo.bench.simulate.costs import StepCosts, Work
from octavo.engine.executor import ExecutorInfo, KVGroup
from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.output_processor import Ending, OutputProcessor
from octavo.engine.request import Request
from octavo.engine.scheduler_output import SampledToken, SchedulerOutput, StepResult
from octavo.outputs import CompletionDelta

#: The one token there is. Prompts hold others (trace.token_ids).
TOKEN = 7


class VirtualClock:
    """Seconds since the beginning; goes where it is told."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualExecutor:
    """Behind the engine's Executor protocol."""

    def __init__(self, costs: StepCosts, clock: VirtualClock, groups: tuple[KVGroup, ...], max_model_len: int) -> None:
        self.info = ExecutorInfo(groups, 1 << 17, max_model_len, (1,) * len(groups))
        self.costs = costs
        self.clock = clock
        #: Whose use is noted; set once the core has made it.
        self.kv: KVCacheManager | None = None
        self.steps = 0
        self.busy_seconds = 0.0
        self.rows = 0
        #: Sums over steps: blocks held, and requests in the step, each times its seconds.
        self.block_seconds = 0.0
        self.request_seconds = 0.0
        self.most_blocks = 0
        self._token = SampledToken(TOKEN)

    def execute(self, output: SchedulerOutput) -> StepResult:
        entries = output.entries
        work = Work.of(entries)
        seconds = self.costs.of(work)
        self.clock.now += seconds
        self.steps += 1
        self.busy_seconds += seconds
        self.rows += work.generated_rows + work.prompt_rows
        self.request_seconds += seconds * len(entries)
        if self.kv is not None:
            held = self.kv.num_used_blocks
            self.block_seconds += seconds * held
            self.most_blocks = max(self.most_blocks, held)
        return StepResult(sampled=dict.fromkeys([entry.request_id for entry in entries if entry.sample], self._token))

    def close(self) -> None:
        """There is nothing to let go of."""


class VirtualTokenizer:
    """A token is a letter; nobody asks for one."""

    vocab_size = 1 << 17
    special_ids: frozenset[int] = frozenset()
    strip_leading_space = False
    bos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        return [TOKEN] * len(text)

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"

    def token_text(self, token_id: int) -> str:
        return "x"


class CountingOutputs(OutputProcessor):
    """Notes when tokens come, and ends answers at their length: what the real one does to a request with ignore_eos and no stop."""

    def __init__(self, info: ExecutorInfo, clock: VirtualClock) -> None:
        super().__init__(VirtualTokenizer(), info, clock)
        #: Seconds between two tokens of one request, of all requests.
        self.gaps = array("f")
        self._going_on = CompletionDelta("", 0)

    def add_token(self, request: Request, sampled: SampledToken) -> tuple[CompletionDelta, Ending | None]:
        metrics, now = request.metrics, self.clock()
        if metrics.last_token is None:
            metrics.first_token = now
        else:
            self.gaps.append(now - metrics.last_token)
        metrics.last_token = now
        if len(request.token_ids) - request.num_prompt_tokens >= request.origin.max_tokens:
            return self.delta(request), Ending("length")
        return self._going_on, None
