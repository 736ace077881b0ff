"""The row `streamed`: what LLM.stream yields, joined, is what LLM.generate returns, and both are the text of the tokens.

Three times over: to the length limit; with a stop string in the middle, which must end the text just before it; and with a stop
string that has begun when the length limit comes, so that withheld text must be released.
Stateless. Not here: the server's streams, which carry the same deltas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from octavo.llm import LLM
from octavo.outputs import CompletionDelta, OutputAccumulator, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.verify.cases import Case
from octavo.verify.recorder import Recorder
from octavo.verify.session import Session

_NEVER = "\x01never"
_STOP_CHARS = 3


class Streamed:
    name = "streamed"
    about = "streams, joined, against whole answers; with stop strings that end them or nearly do"
    required: ClassVar[tuple[str, ...]] = ("pieces", "withheld and released")
    hits_allowed = True

    def not_applicable(self, session: Session) -> str | None:
        answers = (session.text_of(case, session.baseline.tokens[case.number, 0]) for case in session.cases)
        return None if any(len(text) > 1 for text in answers) else "the answers have no text"

    def run(self, session: Session, watch: Any) -> dict[str, int | float]:
        counters: dict[str, int | float] = {"pieces": 0, "stopped by a string": 0, "withheld and released": 0}
        # Nothing is asked for beside what is served: these are the very requests of production.
        recorder = Recorder(session.fault.executor(session.executor), watch, all_prompt_rows=False)
        parts = session.parts
        llm = LLM.from_parts(
            recorder,
            parts.tokenizer,
            eos_token_ids=parts.eos_token_ids,
            generation_defaults=parts.generation_defaults,
            config=parts.config,
            model_config=parts.model_config,
        )
        session.fault.plant(llm._core)
        with llm:
            for make in (_plain, stop_string, _held_string):
                work = [(case, stop) for case in session.cases if (stop := make(session, case)) is not None]
                self._one_way(session, watch, llm, work, counters)
        return counters

    def _one_way(self, session: Session, watch: Any, llm: LLM, work: list[tuple[Case, str]], counters: dict[str, int | float]) -> None:
        prompts = [list(case.token_ids) for case, _ in work]
        settings = [replace(case.params, stop=(stop,) if stop else ()) for case, stop in work]
        first = next(llm._numbers) + 1  # request ids are numbered in order
        for offset in range(2 * len(work)):
            watch.names[f"request-{first + offset}"] = work[offset % len(work)][0].number
        whole = llm.generate(prompts, settings, progress=False)
        joined = self._streams(llm, prompts, settings, counters)
        for index, (case, stop) in enumerate(work):
            text, count = expected(session, case, stop)
            tokens = session.baseline.tokens[case.number, 0]
            ends = [len(session.text_of(case, tokens[: k + 1])) for k in range(len(tokens))]
            for output, how, request_id in (
                (whole[index], "whole", f"request-{first + index}"),
                (joined[index], "stream", f"request-{first + len(work) + index}"),
            ):
                watch.finish(request_id, 0, output.outputs[0].token_ids, count)
                watch.text(request_id, case.number, output.outputs[0].text, text, how, ends)
                reason = output.outputs[0].finish_reason
                counters["stopped by a string"] += reason == "stop"
                counters["withheld and released"] += stop.endswith(_NEVER) and reason == "length"

    def _streams(
        self, llm: LLM, prompts: list[list[int]], settings: list[SamplingParams], counters: dict[str, int | float]
    ) -> list[RequestOutput]:
        """All streams read in turn, one delta each."""
        joined = [OutputAccumulator("", None, prompt, 1) for prompt in prompts]
        open_streams = {i: llm.stream(prompt, params) for i, (prompt, params) in enumerate(zip(prompts, settings, strict=True))}
        while open_streams:
            for index, stream in list(open_streams.items()):
                delta: CompletionDelta | None = next(stream, None)
                if delta is None:
                    del open_streams[index]
                else:
                    joined[index].add(delta)
                    counters["pieces"] += bool(delta.text)
        return [one.output for one in joined]


def _plain(session: Session, case: Case) -> str | None:
    return ""


def stop_string(session: Session, case: Case) -> str | None:
    """A few characters from the middle of the baseline's answer on; None where none of it is fit to be a stop string."""
    text = session.text_of(case, session.baseline.tokens[case.number, 0])
    for length in range(_STOP_CHARS, 0, -1):
        for start in range(len(text) // 2, len(text) - length + 1):
            found = text[start : start + length]
            if found.strip() and "\ufffd" not in found:
                return found
    return None


def _held_string(session: Session, case: Case) -> str | None:
    """A stop string whose beginning is the end of the answer, and which never comes."""
    text = session.text_of(case, session.baseline.tokens[case.number, 0])
    return text[-2:] + _NEVER if len(text) > 1 else None


def expected(session: Session, case: Case, stop: str) -> tuple[str, int]:
    """Text and number of tokens of the baseline's answer when it ends at `stop` ("" never)."""
    tokens = session.baseline.tokens[case.number, 0]
    text = session.text_of(case, tokens)
    if not stop or stop not in text:
        return text, len(tokens)
    count = next(k for k in range(1, len(tokens) + 1) if stop in session.text_of(case, tokens[:k]))
    return text[: text.find(stop)], count
