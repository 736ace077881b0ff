"""The core's side of a CoreLink: take commands, step, report. The same loop runs in a thread and in a process.

Owner of the EngineCore while it runs. It sleeps only when there is nothing to compute.
Not here: how commands and reports travel (thread_core.py, core_process.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import monotonic
from typing import Protocol

import msgspec

from octavo.engine.core_messages import (
    Abort,
    AddRequests,
    Close,
    Command,
    Events,
    GetEvents,
    Rejected,
    Report,
    ResetPrefixCache,
    StepOutput,
    decode_request,
)
from octavo.engine.engine_core import EngineCore
from octavo.engine.request import EngineRequest
from octavo.errors import InvalidRequestError
from octavo.outputs import CompletionDelta

logger = logging.getLogger("octavo")

#: Seconds between two reports of the figures while there is work.
STATS_INTERVAL = 0.1
#: Commands taken between two steps: a flood of new requests must not stall the running ones.
MOST_COMMANDS = 128


class Channel(Protocol):
    def receive(self, wait: bool) -> Command | None:
        """The next command; None only where it need not wait. Raises msgspec.DecodeError or msgspec.ValidationError for
        what is no command."""
        ...

    def send(self, report: Report) -> None: ...


class CoreLoop:
    def __init__(self, core: EngineCore, channel: Channel) -> None:
        self._core = core
        self._channel = channel
        self._handled = 0
        self._stats_sent = 0.0
        self._closing = False
        #: A command was taken of which no report has told yet.
        self._unreported = False

    def run(self) -> None:
        """Until a Close. Whatever it raises is fatal to the core."""
        core = self._core
        while True:
            deltas: list[CompletionDelta] = []
            before = self._handled
            while self._handled - before < MOST_COMMANDS and self._take(deltas):
                if self._closing:
                    return
            if core.has_unfinished_requests():
                deltas += core.step()
            self._report(deltas)

    def _take(self, deltas: list[CompletionDelta]) -> bool:
        """Carry out one command; False if there is none and something to do meanwhile."""
        try:
            command = self._channel.receive(wait=not (self._core.has_unfinished_requests() or deltas or self._unreported))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.error("a message to the engine core was no command and is dropped: %s", error)
        else:
            if command is None:
                return False
            self._carry_out(command, deltas)
        self._handled += 1
        self._unreported = True
        return True

    def _carry_out(self, command: Command, deltas: list[CompletionDelta]) -> None:
        match command:
            case AddRequests():
                self._add(command.requests, deltas)
            case Abort():
                deltas += self._core.abort(command.request_ids)
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
            case GetEvents():
                self._channel.send(Events(self._core.events.recent(command.count, command.after)))
            case Close():
                self._closing = True

    def _add(self, encoded: Mapping[str, bytes], deltas: list[CompletionDelta]) -> None:
        """All of them, or none and a word why: after `deltas`, which may end an earlier request of the same id."""
        name = ""
        added: list[str] = []
        try:
            for name, data in encoded.items():
                request = decode_request(data)
                check_request(name, request, self._core)
                self._core.add_request(request)
                added.append(name)
        except (InvalidRequestError, msgspec.DecodeError, msgspec.ValidationError) as error:
            self._core.abort(added)  # before any step: nobody has seen a delta of theirs
            param, code = (error.param, error.code) if isinstance(error, InvalidRequestError) else (None, "invalid_value")
            if deltas:
                self._report(deltas[:])
                deltas.clear()
            self._channel.send(Rejected(name, str(error), param, code))

    def _report(self, deltas: list[CompletionDelta]) -> None:
        now, resting = monotonic(), not self._core.has_unfinished_requests()
        stats = None
        if resting or now - self._stats_sent >= STATS_INTERVAL:
            stats, self._stats_sent = self._core.stats.copy(), now
        self._channel.send(StepOutput(deltas, self._handled, resting, stats))
        self._unreported = False


def check_request(name: str, request: EngineRequest, core: EngineCore) -> None:
    """What would break the engine rather than the request. InputProcessor sees to all of it; but requests come from
    processes that handle hostile input, and this one must outlive them. Raises InvalidRequestError."""
    info, params, prompt = core.executor.info, request.sampling_params, request.prompt_token_ids
    if request.request_id != name or "#" in name:  # "#" makes the ids of a request's choices
        raise InvalidRequestError("the request was sent under another id, or one with '#'", param="request_id")
    if not 0 < len(prompt) <= info.max_model_len:
        raise InvalidRequestError(f"the prompt has {len(prompt)} tokens, not 1 to {info.max_model_len}", param="prompt")
    for token_ids in (prompt, params.stop_token_ids, params.allowed_token_ids, params.logit_bias):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < info.vocab_size):
            raise InvalidRequestError("the request names a token that the model does not have", code="invalid_token_id")
    if not (request.max_tokens >= 0 and 0 <= request.seed < 2**64 and abs(request.priority) < 2**31):
        raise InvalidRequestError("max_tokens, seed or priority is out of range")
    if params.resolve({}) is not params:
        raise InvalidRequestError("a sampling parameter is left open", param="sampling_params")
