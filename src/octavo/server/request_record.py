"""What is remembered of one request for the log and the metrics: counts and times, never text.

Owner: the request itself, until it ends. Times are time.perf_counter of this process.
Not here: exposition (metrics.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.outputs import CompletionDelta


@dataclass(slots=True)
class _Choice:
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class RequestRecord:
    request_id: str
    endpoint: str
    #: X-Request-Id of the exchange, safe to log.
    http_id: str = "-"
    arrival: float = field(default_factory=time.perf_counter)
    #: HTTP status; 499: the client hung up. A stream that failed after its 200 has the status it should have had.
    status: int = 0
    #: Of the error object, where there was an error.
    code: str | None = None
    streamed: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    #: Seconds until the first of its prompts was first computed, and until its first token was here.
    queue_time: float | None = None
    ttft: float | None = None
    _choices: dict[tuple[str, int], _Choice] = field(default_factory=dict)

    def add(self, deltas: Sequence[CompletionDelta], seen_latency: Callable[[float], None]) -> None:
        """Count a batch that has just come. `seen_latency` is called with the seconds of one token after another."""
        now = time.perf_counter()
        for delta in deltas:
            choice = self._choices.get((delta.request_id, delta.index))
            if choice is None:
                choice = self._first_of(delta)
            tokens = len(delta.token_ids)
            if tokens:
                if choice.tokens:
                    seen_latency((now - choice.last) / tokens)
                else:
                    choice.first = now
                choice.tokens += tokens
                choice.last = now
                self.num_output_tokens += tokens
                if self.ttft is None:
                    self.ttft = now - self.arrival
            if delta.finish_reason is not None:
                self.finish_reasons.append(delta.finish_reason)
                if delta.metrics is not None and delta.metrics.first_scheduled is not None:
                    waited = max(0.0, delta.metrics.first_scheduled - self.arrival)
                    self.queue_time = waited if self.queue_time is None else min(self.queue_time, waited)

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token of a choice after its first."""
        steps = sum(max(0, choice.tokens - 1) for choice in self._choices.values())
        return sum(choice.last - choice.first for choice in self._choices.values()) / steps if steps else None

    def line(self) -> str:
        """The one line of the log."""
        finish = ",".join(sorted(set(self.finish_reasons))) or self.code or "-"
        kind = "stream" if self.streamed else "whole"
        return (
            f"{self.http_id} {self.request_id} {self.endpoint} {kind} {self.status} {finish} "
            f"prompt={self.num_prompt_tokens} cached={self.num_cached_tokens} output={self.num_output_tokens} "
            f"queue={_ms(self.queue_time)} ttft={_ms(self.ttft)} tpot={_ms(self.tpot)} total={_ms(time.perf_counter() - self.arrival)}"
        )

    def _first_of(self, delta: CompletionDelta) -> _Choice:
        if not any(request_id == delta.request_id for request_id, _ in self._choices):
            self.num_prompt_tokens += delta.num_prompt_tokens
            self.num_cached_tokens += delta.num_cached_tokens
        return self._choices.setdefault((delta.request_id, delta.index), _Choice())


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}ms"
