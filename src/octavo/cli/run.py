"""`octavo run`: one completion, streamed as text or returned as one JSON object.

Stateless. Not here: how an answer is read (answer.py), conversations (chat.py).
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import terminal
from octavo.cli.answer import Answer, open_llm, read_answer
from octavo.cli.options import chosen_model, engine_options, sampling_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.outputs import CompletionOutput, PositionLogprobs
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

EXAMPLES = """\b
Examples:
  octavo run "What is the capital of France?"
  octavo run smollm2 "What is the capital of France?" --temperature 0
  octavo run --raw --max-tokens 20 "Deep learning is"
  octavo run --json --seed 7 "Tell me a joke." | python3 -m json.tool
  octavo run - < question.txt
"""


@engine_options
@sampling_options()
def command(
    config: EngineConfig,
    params: SamplingParams,
    words: Annotated[list[str] | None, typer.Argument(metavar="[MODEL] PROMPT", hidden=True)] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="whether to wrap the prompt in the model's chat template; default: if it has one", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object when done, for programs")] = False,
) -> int:
    """Complete one prompt.

    A single argument is the prompt, unless it is a short model name (octavo models). Without a prompt, or with -, standard input is read.
    """
    model, prompt = split_words(words or [])
    config = chosen_model(config, model)
    if not as_json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ConfigError("--logprobs and --prompt-logprobs need --json")
    if prompt is None or prompt == "-":
        if prompt is None and terminal.is_terminal(sys.stdin):
            raise ConfigError('there is no prompt; write octavo run "...", or pipe it in')
        prompt = terminal.read_input()
    prompt = terminal.check_text(prompt, "the prompt")
    begin = time.perf_counter()
    with closing(open_llm(config)) as llm:
        loaded = time.perf_counter() - begin
        answer = complete(llm, prompt, params, chat, streamed=not as_json and params.n == 1)
        if as_json:
            terminal.write(terminal.as_json(as_object(answer, config.model, loaded)))
        elif params.n > 1:
            for choice in answer.output.outputs:
                terminal.write(f"[{choice.index + 1}] {choice.text}\n")
        else:
            terminal.write("\n")
        if terminal.is_terminal(sys.stderr) and not as_json:
            terminal.note(answer.summary())
    return 130 if answer.interrupted else 0


def split_words(words: list[str]) -> tuple[str | None, str | None]:
    """(model or None, prompt or None) from the positional arguments."""
    if len(words) > 2:
        raise ConfigError(f"at most MODEL and PROMPT, got {len(words)} arguments; put the prompt in quotes")
    if len(words) == 2:
        return words[0], words[1]
    from octavo.loading.source import SHORT_NAMES

    if words and words[0] in SHORT_NAMES:
        return words[0], None
    return None, words[0] if words else None


def complete(llm: LLM, prompt: str, params: SamplingParams, chat: bool | None, *, streamed: bool) -> Answer:
    if chat is None:
        chat = llm.chat_template is not None and llm.chat_template.source is not None

    def start() -> Any:
        return llm.stream_chat([{"role": "user", "content": prompt}], params) if chat else llm.stream(prompt, params)

    return read_answer(start, params.n, terminal.write if streamed else lambda text: None)


def as_object(answer: Answer, model: str, loaded: float) -> dict[str, Any]:
    """The object that --json prints; `text`, `token_ids` and `finish_reason` are those of the first choice."""
    choices = [_choice(choice) for choice in answer.output.outputs]
    result: dict[str, Any] = {
        "model": model,
        **{name: choices[0][name] for name in ("text", "token_ids", "finish_reason")},
        "choices": choices,
        "seed": answer.output.seed,
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "cached_tokens": answer.output.num_cached_tokens,
            "completion_tokens": answer.num_tokens,
            "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
        },
        "timings": {
            "load_s": round(loaded, 6),
            "ttft_s": round(answer.ttft, 6),
            "total_s": round(answer.total, 6),
            "tokens_per_s": round(answer.tokens_per_second, 3),
        },
    }
    if answer.output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [position and _position(position) for position in answer.output.prompt_logprobs]
    return result


def _choice(choice: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason or "abort",
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        result["logprobs"] = [_position(position) for position in choice.logprobs]
    return result


def _position(position: PositionLogprobs) -> list[dict[str, Any]]:
    # JSON has no -inf, the logprob of a token that was banned.
    return [
        {"token_id": token, "text": entry.text, "logprob": entry.logprob if math.isfinite(entry.logprob) else None, "rank": entry.rank}
        for token, entry in position.items()
    ]
