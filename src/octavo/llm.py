"""LLM: the Python interface.

Owner: an LLM owns its engine core and runs it in the caller's thread; a lock lets several threads and half-read streams
share it, each step bringing forward all of them.
Not here: the same for asyncio (async_llm.py), what an engine is made of (wiring.py), scheduling (engine/).
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from octavo.config import EngineConfig
from octavo.engine.events import StepEvent
from octavo.engine.executor import Executor
from octavo.engine.input_processor import EngineTokenizer, Messages, Prompt
from octavo.engine.interrupts import InterruptGate
from octavo.engine.metrics import EngineStats
from octavo.engine.request import EngineRequest
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.model_config import ModelConfig
from octavo.outputs import CompletionDelta, OutputAccumulator, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.wiring import EngineParts, LoadProgress, make_config

_log = logging.getLogger("octavo")

#: Called with (choices finished, choices in all).
Progress = Callable[[int, int], None]


class LLM:
    """A model in this process.

    >>> llm = LLM("smollm2")
    >>> llm.generate("Deep learning is", SamplingParams(max_tokens=50))[0].outputs[0].text

    Settings are the fields of EngineConfig. `load_progress` is called while a model is fetched and loaded.
    Raises ConfigError or ModelLoadError.
    """

    def __init__(
        self, model: str | None = None, *, config: EngineConfig | None = None, load_progress: LoadProgress | None = None, **settings: Any
    ) -> None:
        self._wire(EngineParts.load(make_config(model, config, settings), load_progress))

    @classmethod
    def from_parts(cls, executor: Executor, tokenizer: EngineTokenizer, **parts: Any) -> LLM:
        """An LLM around any executor and tokenizer; the other fields of EngineParts by name."""
        llm = cls.__new__(cls)
        llm._wire(EngineParts(executor, tokenizer, **parts))
        return llm

    def _wire(self, parts: EngineParts) -> None:
        self._parts = parts
        self._inputs = parts.input_processor()
        self._gate = InterruptGate()
        self._core = parts.core(self._gate)
        self._lock = threading.RLock()
        self._stepping = False
        #: Requests whose reader went in the middle of a step: the garbage collector may close a stream anywhere.
        self._late_aborts: list[str] = []
        self._mail: dict[str, deque[CompletionDelta]] = {}
        self._numbers = itertools.count()  # its next is one operation: safe for threads and interrupts

    def _new_id(self) -> str:
        return f"request-{next(self._numbers)}"

    # Whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | bool | None = None,
        priority: int | Sequence[int] = 0,
        tenant: str | None | Sequence[str | None] = None,
    ) -> list[RequestOutput]:
        """Complete one prompt (text or token ids) or a list of them; results in the order of the prompts.

        sampling_params, priority (smaller is more urgent) and tenant (whose it is, for the policy `fair`): one for all, or one
        per prompt. progress: None counts
        on a terminal for two prompts or more; True, False, or a function called with (choices finished, choices in all).
        A bad prompt raises InvalidRequestError before anything runs. An interrupt aborts what runs.
        """
        batch = _as_batch(prompts)
        all_params = _per_prompt("sampling_params", sampling_params, len(batch))
        priorities = _per_prompt("priority", priority, len(batch))
        tenants = _per_prompt("tenant", tenant, len(batch))
        requests = [
            self._inputs.process(self._new_id(), prompt, params, priority=level, tenant=whose)
            for prompt, params, level, whose in zip(batch, all_params, priorities, tenants, strict=True)
        ]
        return self._run(requests, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Progress | bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or a list of conversations; as `generate`."""
        batch = _as_conversations(messages)
        requests = [
            self._inputs.process_chat(
                self._new_id(),
                conversation,
                params,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation, params in zip(batch, _per_prompt("sampling_params", sampling_params, len(batch)), strict=True)
        ]
        return self._run(requests, progress)

    def _run(self, requests: list[EngineRequest], progress: Progress | bool | None) -> list[RequestOutput]:
        total = sum(request.sampling_params.n for request in requests)
        accumulators = {r.request_id: OutputAccumulator(r.request_id, r.prompt, r.prompt_token_ids, r.sampling_params.n) for r in requests}
        queued, finished = deque(requests), 0
        show = _reporter(progress, len(requests))
        with _Reading(self, list(accumulators)) as reading:
            while finished < total:
                for delta in reading.next(queued):
                    accumulators[delta.request_id].add(delta)
                    if delta.finish_reason is not None:
                        finished += 1
                        show(finished, total)
        return [accumulators[request.request_id].output for request in requests]

    def _step(self) -> list[CompletionDelta]:
        """One step of the core; the caller holds the lock."""
        self._stepping = True
        try:
            return self._core.step()
        finally:
            self._stepping = False
            late, self._late_aborts = self._late_aborts, []
            self._core.abort(late)

    # Streams

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[CompletionDelta]:
        """The deltas of one prompt as they come. It is checked at once; closing the iterator aborts it.

        Other calls may run while a stream is half read: they bring it forward too.
        """
        return self._stream(self._inputs.process(self._new_id(), prompt, sampling_params))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[CompletionDelta]:
        """As `stream`, for a conversation."""
        request = self._inputs.process_chat(
            self._new_id(),
            messages,
            sampling_params,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._stream(request)

    def _stream(self, request: EngineRequest) -> Iterator[CompletionDelta]:
        unfinished, queued = request.sampling_params.n, deque([request])
        with _Reading(self, [request.request_id]) as reading:
            while unfinished:
                for delta in reading.next(queued):
                    unfinished -= delta.finish_reason is not None
                    yield delta

    def stream_batch(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[list[tuple[int, CompletionDelta]]]:
        """Several prompts at once: after each step what it gave, as (number of the prompt, delta); never an empty list.

        As `generate`, all are checked at once and computed together; closing the iterator aborts them.
        """
        batch = _as_batch(prompts)
        params = _per_prompt("sampling_params", sampling_params, len(batch))
        return self._stream_batch([self._inputs.process(self._new_id(), one, own) for one, own in zip(batch, params, strict=True)])

    def _stream_batch(self, requests: list[EngineRequest]) -> Iterator[list[tuple[int, CompletionDelta]]]:
        numbers = {request.request_id: number for number, request in enumerate(requests)}
        unfinished, queued = sum(request.sampling_params.n for request in requests), deque(requests)
        with _Reading(self, list(numbers)) as reading:
            while unfinished:
                if found := [(numbers[delta.request_id], delta) for delta in reading.next(queued)]:
                    unfinished -= sum(delta.finish_reason is not None for _, delta in found)
                    yield found

    # The engine as a whole

    @property
    def tokenizer(self) -> Any:
        """octavo.tokenizer.Tokenizer."""
        return self._parts.tokenizer

    @property
    def chat_template(self) -> Any:
        """octavo.tokenizer.ChatTemplate, or None where the model has none."""
        return self._parts.chat_template

    @property
    def config(self) -> EngineConfig:
        return self._parts.config

    @property
    def model_config(self) -> ModelConfig | None:
        return self._parts.model_config

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """Sampling fields the model sets where a request leaves them open."""
        return self._parts.generation_defaults

    @property
    def executor(self) -> Executor:
        return self._parts.executor

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and answer."""
        return self._parts.executor.info.max_model_len

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of this moment: a copy."""
        return self._core.stats.copy()

    def events(self, count: int | None = None) -> list[StepEvent]:
        """What the last steps did, oldest first."""
        return self._core.events.recent(count)

    def reset_prefix_cache(self) -> None:
        with self._lock:
            self._core.reset_prefix_cache()

    def close(self) -> None:
        """Stop for good: whatever is half read raises EngineDeadError; the memory goes with the object. Closing twice is nothing."""
        with self._lock:
            self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Reading:
    """One reader of the shared core: its requests, the mailbox their deltas are sorted into, and their end."""

    def __init__(self, llm: LLM, request_ids: list[str]) -> None:
        self._llm = llm
        self._ids = request_ids
        self._box: deque[CompletionDelta] = deque()

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Abort whatever is unfinished: nothing after a normal end."""
        try:
            self._leave()
        except KeyboardInterrupt:  # it came just before or behind the gate; leaving twice is nothing
            self._leave()
            raise

    def _leave(self) -> None:
        llm = self._llm
        with llm._gate, llm._lock:
            for request_id in self._ids:
                llm._mail.pop(request_id, None)
            if llm._stepping:
                llm._late_aborts += self._ids
            else:
                llm._core.abort(self._ids)

    def next(self, queued: deque[EngineRequest]) -> list[CompletionDelta]:
        """Queue what there is room for, and return the deltas that are there, after a step if there are none."""
        llm, core = self._llm, self._llm._core
        with llm._gate, llm._lock:
            if llm._stepping:
                raise InvalidRequestError("an engine cannot be used from inside its own step (a signal handler or finaliser?)")
            while queued and core.has_room(queued[0]):
                request = queued.popleft()
                core.add_request(request)
                llm._mail[request.request_id] = self._box
            if not self._box:
                if not core.has_unfinished_requests():
                    raise EngineDeadError("the engine was closed while a request was running")
                ended: set[str] = set()
                for delta in llm._step():
                    if (box := llm._mail.get(delta.request_id)) is not None:
                        box.append(delta)
                    if delta.finish_reason is not None and not core.has_request(delta.request_id):
                        ended.add(delta.request_id)
                for request_id in ended:  # here, behind the gate: an interrupt at the door of __exit__ would keep them for ever
                    llm._mail.pop(request_id, None)
            found = list(self._box)
            self._box.clear()
        return found


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: text is one; a list of integers is one; a list of texts or lists is many; [] is none."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"prompts must be text, token ids or a list of those, got {type(prompts).__name__}", param="prompt")
    nested = [isinstance(prompt, (str, Sequence)) for prompt in prompts]
    if all(nested):
        return list(cast(Sequence[Prompt], prompts))
    if any(nested):
        raise InvalidRequestError("a list of prompts holds single token ids too: put each prompt into its own list", param="prompt")
    return [cast(Prompt, prompts)]


def _as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation or many: a list whose first entry is a message is one; what a message holds is checked later."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages must be a list of messages or of conversations, got {type(messages).__name__}", param="messages"
        )
    if messages and isinstance(messages[0], Sequence) and not isinstance(messages[0], (str, bytes)):
        return list(cast(Sequence[Messages], messages))
    return [cast(Messages, messages)]


def _per_prompt(name: str, given: Any, count: int) -> Sequence[Any]:
    if isinstance(given, (list, tuple)):
        if len(given) != count:
            raise InvalidRequestError(f"{name}: {len(given)} entries for {count} prompts; give one, or one per prompt", param=name)
        return given
    return [given] * count


def _reporter(progress: Progress | bool | None, count: int) -> Progress:
    """The caller's function, a line on standard error that counts up, or nothing."""
    if callable(progress):
        return progress
    if progress or (progress is None and count > 1 and sys.stderr.isatty()):
        return _print_progress
    return lambda finished, total: None


def _print_progress(finished: int, total: int) -> None:
    print(f"\r{finished}/{total} finished", end="\n" if finished == total else "", file=sys.stderr, flush=True)
