"""Cases: the prompts every row of the matrix runs, each with sampling settings of its own.

Plain data and the functions that make it. Texts of our own, or the user's; neighbours in a batch differ in their settings, so
that a setting which leaks into another request shows. Not here: running them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.input_processor import InputProcessor
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams

MAX_PROMPTS = 256
#: Our own prompts are cut to this many tokens: more than the largest chunk of the matrix.
MOST_TOKENS, MOST_TOKENS_QUICK = 80, 72
PROMPTS = (
    "A ship left the harbour early in the morning with salt, wool and letters on board. Its captain had sailed this coast for thirty "
    "years and knew every rock of it, but on that day the fog was so thick that nobody on deck could see the bow. They rang the bell "
    "once a minute and listened. After an hour an answer came from the north, very faint, and then a second one from the east, closer.",
    "The three most important things to know about bread are",
    "def fibonacci(n):\n    # returns the n-th number of the sequence, counting from zero\n    a, b = 0, 1\n    for _ in range(n):\n",
    "Question: why is the sea salty while most rivers are not? Answer in two sentences that a child can understand. Answer:",
    "A ship left the harbour early in the morning with salt, wool and letters on board. Its captain had sailed to the south",
    "Monday, Tuesday, Wednesday,",
)
#: One after the other over the cases.
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
)


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    token_ids: tuple[int, ...]
    #: As it was given, for messages; never in a certificate.
    text: str
    params: SamplingParams

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def draws(self) -> bool:
        """Several choices of it would differ."""
        return not self.params.greedy


def make_cases(inputs: InputProcessor, prompts: Sequence[str] | None, max_tokens: int, *, quick: bool) -> list[Case]:
    """The user's prompts as they are, or our own, cut to what the matrix needs and one of them to whole blocks.

    Raises InvalidRequestError for a prompt the model cannot take, ConfigError for none or too many.
    """
    if prompts is not None and not 0 < len(prompts) <= MAX_PROMPTS:
        raise ConfigError(f"give 1 to {MAX_PROMPTS} prompts, not {len(prompts)}")
    texts = PROMPTS[: 4 if quick else None] if prompts is None else prompts
    cases = []
    for number, text in enumerate(texts):
        # answers of several lengths: the batch shrinks while it runs
        count = max(2, max_tokens - number % 3)
        params = SamplingParams(**_SETTINGS[number % len(_SETTINGS)], max_tokens=count, seed=1000 + number, ignore_eos=True)
        if prompts is None:
            tokens = _own_prompt(inputs, number, text, count, MOST_TOKENS_QUICK if quick else MOST_TOKENS)
        request = inputs.process("check", text if prompts is not None else tokens, params)
        tokens = request.prompt_token_ids
        if request.max_tokens < count:
            raise ConfigError(f"prompt {number + 1} has {len(tokens)} tokens, which leaves room for {request.max_tokens} more: shorten it")
        cases.append(Case(number, tuple(tokens), text, params))
    return cases


def _own_prompt(inputs: InputProcessor, number: int, text: str, max_tokens: int, most: int) -> list[int]:
    """Cut to `most` tokens and to what context and pool leave room for; the third to whole blocks, so that a hit covers all of it."""
    tokens = inputs.tokenizer.encode(text)
    block = inputs.info.kv_groups[0].block_size
    room = min(inputs.info.max_model_len, *(group.num_blocks * group.block_size for group in inputs.info.kv_groups)) - max_tokens
    tokens = tokens[: max(1, min(most, room))]
    return tokens[: len(tokens) // block * block] if number == 2 and len(tokens) >= block else tokens
