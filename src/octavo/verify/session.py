"""Session: one model under verification: its parts, the cases, the baseline, and whatever a row needs beside them.

Owner of the loaded model; rows load a second one only where a setting of the executor itself is their subject (threads,
backend, replay). Not here: the rows (rows.py), their order and the report (run.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.engine_core import EngineCore
from octavo.engine.input_processor import InputProcessor
from octavo.engine.request import EngineRequest
from octavo.engine.scheduler_output import TokenKind
from octavo.outputs import CompletionDelta, OutputAccumulator, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.verify.baseline import Baseline
from octavo.verify.cases import Case
from octavo.verify.faults import Fault
from octavo.verify.recorder import Recorder
from octavo.wiring import EngineParts, LoadProgress

#: A case, and which copy of it: the same prompt may run several times in one row.
Work = Sequence[tuple[Case, int]]
AfterStep = Callable[[EngineCore, list[CompletionDelta]], None]


class Session:
    def __init__(self, config: EngineConfig, cases: list[Case], parts: EngineParts, fault: Fault, progress: LoadProgress | None) -> None:
        self.config = config
        self.cases = cases
        self.parts = parts
        self.fault = fault
        self.baseline = Baseline()
        self._progress = progress

    @property
    def backend(self) -> str:
        return str(self.executor.ops.name)

    @property
    def executor(self) -> Any:
        """The LocalExecutor."""
        return self.parts.executor

    @property
    def block_size(self) -> int:
        return self.executor.info.kv_groups[0].block_size  # type: ignore[no-any-return]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def longest(self) -> int:
        """Tokens of the longest case whose KV is needed, prompt and answer."""
        return max(case.num_prompt_tokens + (case.params.max_tokens or 0) for case in self.cases)

    @contextmanager
    def other(self, **changes: Any) -> Iterator[EngineParts]:
        """The same model loaded again with other settings, with a pool no larger than the row can use."""
        group = self.executor.info.kv_groups[0]
        pool = min(group.num_blocks, 2 * sum(self.blocks_for(c.num_prompt_tokens + (c.params.max_tokens or 0)) + 1 for c in self.cases))
        parts = EngineParts.load(replace(self.config, num_kv_blocks=pool, **changes), self._progress)
        try:
            yield parts
        finally:
            parts.executor.close()

    def compute_baseline(self, parts: EngineParts, choices: dict[int, int], done: Callable[[], None]) -> None:
        """Full recomputation of every case; of case i, `choices[i]` choices of one request."""
        inputs = parts.input_processor()
        for case in self.cases:
            request = inputs.process("baseline", list(case.token_ids), case.params)
            for choice in range(choices.get(case.number, 1)):
                self.baseline.compute(self.fault.everywhere(parts.executor), case, choice, request)
                done()

    def text_of(self, case: Case, token_ids: Sequence[int]) -> str:
        """The text of generated tokens in one piece: bytes joined and decoded at once, an incomplete character dropped."""
        tokenizer: Any = self.parts.tokenizer
        skip = tokenizer.special_ids
        data = b"".join(tokenizer.token_bytes(t) for t in token_ids if t not in skip and t < tokenizer.vocab_size)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data, False)


class EngineRun:
    """An engine core on the session's model with a Recorder between; what it ran is compared by the watch.

    parts: another loaded model. num_blocks: a smaller pool. Other settings by name. Prefix caching is off unless asked for.
    """

    def __init__(
        self, session: Session, watch: Any, *, parts: EngineParts | None = None, num_blocks: int | None = None, **changes: Any
    ) -> None:
        parts = parts or session.parts
        changes = {"enable_prefix_caching": False, "event_history": 1 << 20, **changes}
        self.session, self.watch = session, watch
        recorder = Recorder(session.fault.executor(parts.executor), watch, num_blocks=num_blocks)
        self.parts = replace(parts, executor=recorder, config=replace(parts.config, **changes))
        self.core = self.parts.core()
        session.fault.plant(self.core)
        self.inputs: InputProcessor = self.parts.input_processor()

    def __enter__(self) -> EngineRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.core.close()

    def run(self, work: Work, *, n: int = 1, params: dict[str, Any] | None = None, after_step: AfterStep | None = None) -> None:
        """All requests at once; `params`: changes of every case's sampling settings."""
        found: dict[str, OutputAccumulator] = {}
        for case, copy in work:
            request = self.request(case, copy, replace(case.params, n=n, **(params or {})))
            self.watch.names[request.request_id] = case.number
            self.core.add_request(request)
            found[request.request_id] = OutputAccumulator(request.request_id, None, request.prompt_token_ids, n)
        while self.core.has_unfinished_requests():
            deltas = self.core.step()
            for delta in deltas:
                if delta.request_id in found:
                    found[delta.request_id].add(delta)
            if after_step is not None:
                after_step(self.core, deltas)
        for (case, _), joined in zip(work, found.values(), strict=True):
            self._finish(case, joined.output, (params or {}).get("max_tokens"))

    def request(self, case: Case, copy: int, params: SamplingParams) -> EngineRequest:
        return self.inputs.process(f"{case.number}.{copy}", list(case.token_ids), params)

    def _finish(self, case: Case, output: RequestOutput, count: int | None) -> None:
        for choice in output.outputs:
            self.watch.finish(output.request_id, choice.index, choice.token_ids, count)

    def chunk_sizes(self) -> dict[int, int]:
        """Prompt entries by their number of tokens."""
        sizes: dict[int, int] = {}
        for event in self.core.events.recent():
            for entry in event.entries:
                if entry.kind is TokenKind.PROMPT:
                    sizes[entry.num_tokens] = sizes.get(entry.num_tokens, 0) + 1
        return sizes

    @property
    def largest_batch(self) -> int:
        """Most requests that got a token in one step."""
        return max(self.core.stats.batch_sizes, default=0)
