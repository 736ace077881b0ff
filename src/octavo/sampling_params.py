"""SamplingParams: how the tokens of one request are chosen and when it ends.

Plain data, validated on construction; shared by the Python API, the server and the engine. Fields that are None
take the model's own default (generation_config.json) when the request is admitted: see `resolve`.
Not here: anything that needs the model (vocabulary size, token ids of bad_words): engine/input_processor.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.errors import InvalidRequestError, shown

#: Below this temperature a request is greedy: logits / temperature would only overflow.
GREEDY_TEMPERATURE = 1e-5

MAX_N = 128
#: As many beams as the 20 most probable continuations of each can feed.
MAX_BEAM_WIDTH = 16
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_TOKEN_LIST = 4096
#: The stop-string and bad-word lists are matched per token, so they stay short.
MAX_BAD_WORDS = 256

_MODEL_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}

#: What changes the probabilities by which beams are ranked, and the value that asks for nothing.
_NOT_WITH_BEAMS: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "allowed_token_ids": (),
    "bad_words": (),
    "logprobs_mode": "raw",
}


def _fail(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {message}", param=name)


def _number(name: str, value: Any, low: float, high: float) -> None:
    """Raise unless `value` is a finite real number (not a bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise _fail(name, f"must be a finite number, got {shown(value)}")
    if not low <= value <= high:
        raise _fail(name, f"must be between {low:g} and {high:g}, got {shown(value)}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _fail(name, f"must be an integer, got {shown(value)}")
    if not low <= value <= high:
        raise _fail(name, f"must be between {low} and {high}, got {shown(value)}")


def _list(name: str, value: Any, most: int, what: str) -> Sequence[Any]:
    """`value` if it is a list of at most `most` entries; text and bytes are no lists."""
    if isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, Sequence):
        raise _fail(name, f"must be {what}, got {shown(value)}")
    try:
        length = len(value)
    except OverflowError:  # range(10**30)
        length = most + 1
    if length > most:
        raise _fail(name, f"holds too many entries, at most {most} are allowed")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    tokens = tuple(_list(name, value, MAX_TOKEN_LIST, "a list of token ids"))
    for token in tokens:
        _integer(name, token, 0, 2**31 - 1)
    return tokens


def _strings(name: str, value: Any, most: int) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else tuple(_list(name, value, most, "a string or a list of strings"))
    for item in items:
        if not isinstance(item, str) or not item:
            raise _fail(name, "entries must be non-empty strings")
        if len(item) > MAX_STOP_CHARS:
            raise _fail(name, f"an entry has {len(item)} characters, at most {MAX_STOP_CHARS} are allowed")
        try:
            item.encode()
        except UnicodeEncodeError:  # a lone surrogate: no text can hold it, no tokenizer takes it
            raise _fail(name, "an entry is not valid Unicode") from None
    return items


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Order of the filters (docs/sampling.md): bans and allowed_token_ids, logit_bias, penalties, then temperature,
    top_k, top_p, min_p, typical_p; each filter works on the renormalised outcome of the one before, and at least one
    token always survives: the most probable one (for typical_p the most typical one).

    Raises InvalidRequestError naming the field.
    """

    n: int = 1
    #: 0 (or anything below 1e-5) is greedy: argmax, the lowest id wins a tie. None: the model's default, else 1.
    temperature: float | None = None
    #: 0 and -1 mean off; 1 is argmax; at least the vocabulary's size is off too.
    top_k: int | None = None
    #: 0 is accepted as greedy, since many clients send it to mean that.
    top_p: float | None = None
    min_p: float | None = None
    #: Locally typical sampling (Meister et al. 2022); 1 is off.
    typical_p: float | None = None
    #: Over prompt and output tokens (CTRL, Keskar et al. 2019); 1 is off.
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: token id -> value added to its logit, in [-100, 100].
    logit_bias: Mapping[int, float] | None = None
    #: None: until the context is full; a value beyond the room left is lowered to it. 0 only with prompt_logprobs.
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    #: None: a fresh random seed, reported in the result.
    seed: int | None = None
    #: How many of the most probable tokens to report beside the chosen one; None: no logprobs at all.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    #: raw: log-softmax of the model's logits, whatever the sampling settings. processed: after all of them.
    logprobs_mode: Literal["raw", "processed"] = "raw"
    skip_special_tokens: bool = True
    #: Draw so many choices and return the n with the highest logprob a token; None: n.
    best_of: int | None = None
    #: Beam search with so many beams instead of drawing; n of the best are returned. None: off.
    beam_width: int | None = None
    #: Beams are ranked by their cumulative logprob / length ** length_penalty: above 0 favours long ones.
    length_penalty: float = 1.0
    #: When beams stop: True as soon as beam_width have ended; False when the best running one, at its present length, is no
    #: better than the worst of those; "never" when it could not become better at any length.
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        for name, low, high in (
            ("temperature", 0.0, 1e6),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("typical_p", 0.0, 1.0),
            ("repetition_penalty", 1e-3, 1e3),
        ):
            value = getattr(self, name)
            if value is not None:
                _number(name, value, low, high)
        if self.top_k is not None:
            _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise _fail("max_tokens", "0 is only allowed together with prompt_logprobs")
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _fail("min_tokens", f"{self.min_tokens} is larger than max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logprobs_mode not in ("raw", "processed"):
            raise _fail("logprobs_mode", f"must be 'raw' or 'processed', got {shown(self.logprobs_mode)}")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("include_stop_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, f"must be true or false, got {shown(getattr(self, name))}")
        set_ = object.__setattr__  # the instance is frozen: normalised once, here
        set_(self, "stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
        set_(self, "bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        set_(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise _fail("allowed_token_ids", "must not be empty")
            set_(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            set_(self, "logit_bias", self._checked_bias(self.logit_bias))
        self._check_choices()

    def _check_choices(self) -> None:
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.early_stopping != "never" and not isinstance(self.early_stopping, bool):
            raise _fail("early_stopping", f"must be true, false or 'never', got {shown(self.early_stopping)}")
        if self.best_of is not None:
            _integer("best_of", self.best_of, 1, MAX_N)
            if self.best_of < self.n:
                raise _fail("best_of", f"{self.best_of} is smaller than n {self.n}")
        if self.beam_width is None:
            return
        _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.beam_width < self.n:
            raise _fail("beam_width", f"{self.beam_width} is smaller than n {self.n}")
        if self.best_of is not None:
            raise _fail("best_of", "does not go with beam_width: n of the beams are returned")
        for name, neutral in _NOT_WITH_BEAMS.items():
            if getattr(self, name) not in (None, neutral):
                raise _fail(name, "does not go with beam search, which ranks by the model's own probabilities")

    @staticmethod
    def _checked_bias(bias: Any) -> dict[int, float]:
        if not isinstance(bias, Mapping):
            raise _fail("logit_bias", f"must be a mapping of token id to bias, got {shown(bias)}")
        if len(bias) > MAX_TOKEN_LIST:
            raise _fail("logit_bias", f"holds {len(bias)} entries, at most {MAX_TOKEN_LIST} are allowed")
        checked: dict[int, float] = {}
        for key, value in bias.items():
            # JSON objects can only have string keys: plain decimal digits
            token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
                raise _fail("logit_bias", f"key {shown(key)} is not a token id")
            if token in checked:
                raise _fail("logit_bias", f"token id {token} is given twice")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
                raise _fail("logit_bias", f"value {shown(value)} of key {shown(key)} is not a number in [-100, 100]")
            checked[token] = float(value)
        return checked

    def resolve(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """A copy whose None fields are filled from `defaults` (the model's generation config), else neutral. Beams draw nothing:
        all of these are neutral for them."""
        if self.beam_width is not None:
            settled: dict[str, Any] = {**_MODEL_DEFAULTS, "temperature": 0.0}
            return self if all(getattr(self, name) == value for name, value in settled.items()) else replace(self, **settled)
        fill: dict[str, Any] = {
            name: defaults[name] if defaults.get(name) is not None else neutral
            for name, neutral in _MODEL_DEFAULTS.items()
            if getattr(self, name) is None
        }
        return replace(self, **fill) if fill else self

    @property
    def num_choices(self) -> int:
        """How many are drawn, of which n are returned. Beams are no choices."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_sequences(self) -> int:
        """How many are computed side by side: choices or beams."""
        return self.num_choices if self.beam_width is None else self.beam_width

    @property
    def whole_only(self) -> bool:
        """Nothing of an answer is known before all of it is: it cannot be streamed."""
        return self.beam_width is not None or self.num_choices > self.n

    @property
    def greedy(self) -> bool:
        """True when the outcome is the argmax whatever the random number (after `resolve`)."""
        return (self.temperature is not None and self.temperature < GREEDY_TEMPERATURE) or self.top_k == 1 or self.top_p == 0.0
