"""AsyncLLM: the Python interface for asyncio.

Owner: it owns its engine core, which runs in a thread of this process, and the input processor, whose work is done in
other threads. Not here: streams and their ends (engine/async_engine.py), what an engine is made of (wiring.py).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine, Submission
from octavo.engine.executor import Executor
from octavo.engine.input_processor import EngineTokenizer, Messages, Prompt
from octavo.engine.request import EngineRequest
from octavo.engine.thread_core import ThreadCore
from octavo.model_config import ModelConfig
from octavo.outputs import CompletionDelta
from octavo.sampling_params import SamplingParams
from octavo.wiring import EngineParts, LoadProgress, make_config


class AsyncLLM(AsyncEngine):
    """A model for asyncio: `async for delta in llm.generate(prompt, params)`. Loads in the constructor, as LLM."""

    def __init__(
        self, model: str | None = None, *, config: EngineConfig | None = None, load_progress: LoadProgress | None = None, **settings: Any
    ) -> None:
        self._wire(EngineParts.load(make_config(model, config, settings), load_progress))

    @classmethod
    def from_parts(cls, executor: Executor, tokenizer: EngineTokenizer, **parts: Any) -> AsyncLLM:
        """An AsyncLLM around any executor and tokenizer; the other fields of EngineParts by name."""
        llm = cls.__new__(cls)
        llm._wire(EngineParts(executor, tokenizer, **parts))
        return llm

    def _wire(self, parts: EngineParts) -> None:
        super().__init__(ThreadCore(parts.core()))
        self.parts = parts
        self.input_processor = parts.input_processor()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """The deltas of one prompt, of all its choices, as they come. Closing it or cancelling its reader aborts it.

        The first step raises InvalidRequestError for a bad request; any step may raise EngineDeadError.
        """
        name = _new_id(request_id)
        process = self.input_processor.process
        make = partial(process, name, prompt, sampling_params, priority=priority, cache_salt=cache_salt, tenant=tenant)
        return self._deltas(make)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """As `generate`, for a conversation."""
        make = partial(
            self.input_processor.process_chat,
            _new_id(request_id),
            messages,
            sampling_params,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )
        return self._deltas(make)

    async def _deltas(self, make: Callable[[], EngineRequest]) -> AsyncGenerator[CompletionDelta, None]:
        await self.wait_ready()
        # Templates and tokenisation take time: not on the event loop.
        request = await asyncio.to_thread(make)
        async with aclosing(self.stream([Submission(request.request_id, request.sampling_params.n, request)])) as batches:
            async for batch in batches:
                for delta in batch:
                    yield delta

    @property
    def tokenizer(self) -> Any:
        """octavo.tokenizer.Tokenizer."""
        return self.parts.tokenizer

    @property
    def config(self) -> EngineConfig:
        return self.parts.config

    @property
    def model_config(self) -> ModelConfig | None:
        return self.parts.model_config


def _new_id(request_id: str | None) -> str:
    return f"request-{uuid.uuid4().hex}" if request_id is None else request_id
