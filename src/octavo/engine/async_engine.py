"""AsyncEngine: many asyncio tasks share one EngineCore, which steps in a thread of its own.

Owners: the thread alone changes requests in the core and knows which mailbox a request answers to; the event loop's side
owns the streams that read them, and of the core reads only figures (`stats`, `events`). Commands go in through a queue,
and one batch of deltas per step comes back in one call_soon_threadsafe, so the core can move to another process without
a change on this side.
Not here: HTTP (server/), loading a model (llm.py: AsyncLLM).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.engine.engine_core import EngineCore
from octavo.engine.events import StepEvent
from octavo.engine.input_processor import InputProcessor, Messages, Prompt
from octavo.engine.metrics import EngineStats
from octavo.engine.request import EngineRequest
from octavo.errors import EngineDeadError, InvalidRequestError, OctavoError
from octavo.outputs import CompletionDelta
from octavo.sampling_params import SamplingParams

_Mailbox = asyncio.Queue[CompletionDelta | OctavoError]
_Command = Callable[[], Iterable[CompletionDelta]]


class AsyncEngine:
    """Runs a core. All methods belong to one event loop; use it as `async with`, or call `close`."""

    def __init__(self, core: EngineCore, input_processor: InputProcessor) -> None:
        self.input_processor = input_processor
        self._core = core
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        #: The loop's side: mailboxes of the streams that are read now.
        self._mailboxes: dict[str, _Mailbox] = {}
        #: The thread's side: where the deltas of a request go. A late delta can so never reach a later request of the same id.
        self._routes: dict[str, _Mailbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    # Requests

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """The deltas of one prompt, of all its choices, as they come. Closing it or cancelling its reader aborts it.

        The first step raises InvalidRequestError for a bad request; any step may raise EngineDeadError.
        """
        name = _new_id(request_id)
        process = self.input_processor.process
        return self._stream(name, partial(process, name, prompt, sampling_params, priority=priority, cache_salt=cache_salt))

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
    ) -> AsyncGenerator[CompletionDelta, None]:
        """As `generate`, for a conversation."""
        name = _new_id(request_id)
        make = partial(
            self.input_processor.process_chat,
            name,
            messages,
            sampling_params,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            priority=priority,
            cache_salt=cache_salt,
        )
        return self._stream(name, make)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets its last deltas. Unknown and finished ids are passed over in silence."""
        if request_id in self._mailboxes:
            self._commands.put(lambda: self._core.abort([request_id]))

    async def _stream(self, name: str, make: Callable[[], EngineRequest]) -> AsyncGenerator[CompletionDelta, None]:
        self._start()
        if name in self._mailboxes:
            raise InvalidRequestError(f"request id {name!r} is in use", param="request_id", code="duplicate_request_id")
        mailbox = self._mailboxes[name] = _Mailbox()
        unfinished = 0
        try:
            # Templates and tokenisation take time: not on the event loop.
            request = await asyncio.to_thread(make)
            self._check_alive()
            unfinished = request.sampling_params.n
            self._commands.put(lambda: self._add(request, mailbox))
            while unfinished:
                mail = await mailbox.get()
                if isinstance(mail, OctavoError):
                    unfinished = 0
                    raise mail
                unfinished -= mail.finish_reason is not None
                yield mail
        finally:
            del self._mailboxes[name]
            if unfinished:
                self._commands.put(lambda: self._core.abort([name]))

    # The engine as a whole

    @property
    def failure(self) -> str | None:
        """Why the engine cannot run any more, or None."""
        return self._failure

    def stats(self) -> EngineStats:
        """Counters and gauges, a copy. Read beside the thread that writes them: the figures may be of two steps."""
        return replace(self._core.stats)

    def events(self, count: int | None = None) -> list[StepEvent]:
        return self._core.events.recent(count)

    async def reset_prefix_cache(self) -> None:
        """Soon, between two steps: no later request shares a block computed before."""
        self._commands.put(self._reset)

    async def close(self) -> None:
        """Stop the thread and close the executor; streams that wait get EngineDeadError. Closing twice is nothing."""
        self._fail("the engine was closed")
        if self._thread is None:
            self._core.close()
        else:
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _start(self) -> None:
        """Tie the engine to this event loop and start its thread, the first time."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._thread = threading.Thread(target=self._run, args=(loop,), name="octavo-engine", daemon=True)
            self._thread.start()
        elif self._loop is not loop:
            raise EngineDeadError("an engine belongs to the event loop of its first request: make one per loop")

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def _fail(self, reason: str) -> None:
        """Every waiting stream gets an error at once, and every later request."""
        self._failure = self._failure or reason
        for mailbox in self._mailboxes.values():
            mailbox.put_nowait(EngineDeadError(self._failure))

    # The thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        core = self._core
        try:
            while True:
                while not (core.has_unfinished_requests() and self._commands.empty()):
                    command = self._commands.get()  # sleeps only when there is nothing to compute
                    if command is None:
                        return
                    self._post(loop, command())
                self._post(loop, core.step())
        except Exception as error:
            if not loop.is_closed():  # else nobody is left to tell
                reason = str(error) if isinstance(error, EngineDeadError) else f"the engine's thread has failed ({error!r})"
                loop.call_soon_threadsafe(self._fail, reason)
        finally:
            core.close()

    def _add(self, request: EngineRequest, mailbox: _Mailbox) -> Iterable[CompletionDelta]:
        assert self._loop is not None
        try:
            self._core.add_request(request)
            self._routes[request.request_id] = mailbox
        except InvalidRequestError as error:
            self._loop.call_soon_threadsafe(mailbox.put_nowait, error)
        return ()

    def _reset(self) -> Iterable[CompletionDelta]:
        self._core.reset_prefix_cache()
        return ()

    def _post(self, loop: asyncio.AbstractEventLoop, deltas: Iterable[CompletionDelta]) -> None:
        batch = [(self._routes[delta.request_id], delta) for delta in deltas]
        for _, delta in batch:
            if delta.finish_reason is not None and not self._core.has_request(delta.request_id):
                self._routes.pop(delta.request_id, None)
        if batch:
            loop.call_soon_threadsafe(_deliver, batch)


def _deliver(batch: list[tuple[_Mailbox, CompletionDelta]]) -> None:
    for mailbox, delta in batch:
        mailbox.put_nowait(delta)


def _new_id(request_id: str | None) -> str:
    return f"request-{uuid.uuid4().hex}" if request_id is None else request_id
