"""One streamed answer: reads the deltas, shows the text as it comes, and says how fast it was.

Owner of the stream while it runs: whatever ends it (the model, Ctrl-C, a closed pipe), the request is closed.
Not here: where the deltas come from (llm.py, remote.py), the conversation (chat_session.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.cli.loading_bar import LoadingBar
from octavo.cli.terminal import Interrupt
from octavo.errors import OctavoError
from octavo.outputs import CompletionDelta, OutputAccumulator, RequestOutput

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.llm import LLM


@dataclass(slots=True)
class Answer:
    """What came back, and when: times in seconds from the call."""

    output: RequestOutput
    num_prompt_tokens: int = 0
    interrupted: bool = False
    ttft: float = 0.0
    total: float = 0.0
    #: Tokens of all choices, also of those that were drawn and not returned.
    num_tokens: int = field(default=0)
    #: Deltas with text: all that can be counted where tokens are not told apart.
    num_pieces: int = 0
    #: What num_tokens counts.
    unit: str = "token"

    @property
    def text(self) -> str:
        return self.output.outputs[0].text

    @property
    def tokens_per_second(self) -> float:
        """Rate of the tokens after the first step; of all of them where there was only one, or they came in one piece."""
        later, seconds = self.num_tokens - len(self.output.outputs), self.total - self.ttft
        if later > 0 and seconds > 0 and self.num_pieces != 1:
            return later / seconds
        return self.num_tokens / self.total if self.total > 0 else 0.0

    def summary(self) -> str:
        tokens = f"{self.num_tokens} {self.unit}" + ("" if self.num_tokens == 1 else "s")
        stopped = "stopped: " if self.interrupted else ""
        return f"{stopped}{tokens}, {self.tokens_per_second:.1f} {self.unit}s/s, first after {self.ttft:.2f} s"


def open_llm(config: EngineConfig) -> LLM:
    """The engine; imported here, so that help and usage errors do not wait for it."""
    from octavo.llm import LLM

    with LoadingBar() as bar:
        return LLM(config.model, config=config, load_progress=bar.report)


def read_answer(start: Callable[[], Iterator[CompletionDelta]], n: int, show: Callable[[str], Any], *, at_once: bool = False) -> Answer:
    """Run one request to its end; `show` gets the text of choice 0 in pieces.

    The first Ctrl-C ends it and sets `interrupted`: after the step under way, or `at_once` where there is no step to be torn
    (before any text KeyboardInterrupt is raised then). A request that failed raises OctavoError, after what it had written
    was shown.
    """
    joined = OutputAccumulator("", None, [], n)
    answer = Answer(joined.output)
    begin = time.perf_counter()
    with nullcontext() if at_once else Interrupt() as interrupt:
        deltas = start()
        try:
            for delta in deltas:
                joined.add(delta)
                answer.num_tokens += len(delta.token_ids) + delta.num_discarded_tokens
                answer.num_pieces += bool(delta.text)
                answer.num_prompt_tokens = delta.num_prompt_tokens or answer.num_prompt_tokens
                if not answer.ttft and (delta.token_ids or delta.text):
                    answer.ttft = time.perf_counter() - begin
                if delta.text and delta.index == 0:
                    show(delta.text)
                if interrupt is not None and interrupt.seen:
                    answer.interrupted = True
                    break
        except KeyboardInterrupt:
            if not (at_once and answer.text):
                raise
            answer.interrupted = True
        finally:
            close = getattr(deltas, "close", None)
            if close is not None:
                close()
            answer.total = time.perf_counter() - begin
    for choice in answer.output.outputs:
        if choice.finish_reason == "error":
            raise OctavoError(choice.error or "the request failed")
    return answer
