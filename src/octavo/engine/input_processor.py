"""InputProcessor: what a caller asks for -> a checked EngineRequest, or an InvalidRequestError before any harm.

Everything a request brings is hostile until it has passed here: prompts, token ids, parameters against this model's
vocabulary and lengths. Holds no state but a counter; it may run in other threads than the engine.
Not here: fields that can be checked without the model (sampling_params.py), the queue's limit (engine_core.py).
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

from octavo.config import EngineConfig
from octavo.engine.detokenizer import TokenBytes
from octavo.engine.executor import ExecutorInfo
from octavo.engine.request import EngineRequest, max_output_tokens
from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams

#: No tokenizer makes one token of more characters, so longer texts are refused before they are tokenised.
MAX_CHARS_PER_TOKEN = 512
MAX_ID_CHARS = 256
MAX_SALT_CHARS = 1024
#: Parameters of `encode_chat` that no request may set a second time.
_OWN_PARAMETERS = frozenset({"add_generation_prompt", "continue_final_message", "tools"})

#: A prompt: text (BOS is added where the model wants it) or token ids (taken as they are).
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class EngineTokenizer(TokenBytes, Protocol):
    """What the engine needs of octavo.tokenizer.Tokenizer."""

    @property
    def bos_token_id(self) -> int | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]: ...
    def token_text(self, token_id: int) -> str: ...


class EngineChatTemplate(Protocol):
    """What the engine needs of octavo.tokenizer.ChatTemplate."""

    def encode_chat(
        self, messages: Messages, /, *, add_generation_prompt: bool = True, continue_final_message: bool = False, **template_kwargs: Any
    ) -> list[int]: ...


def _invalid(message: str, param: str, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code=code)


class InputProcessor:
    def __init__(
        self,
        tokenizer: EngineTokenizer,
        chat_template: EngineChatTemplate | None,
        info: ExecutorInfo,
        eos_token_ids: Iterable[int],
        generation_defaults: Mapping[str, Any],
        config: EngineConfig,
    ) -> None:
        """`generation_defaults`: the model's own sampling defaults. Raises InvalidRequestError if those are unusable."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.info = info
        self.eos_token_ids = frozenset(eos_token_ids)
        self.generation_defaults = dict(generation_defaults)
        self.config = config
        self._counter = itertools.count()
        SamplingParams().resolve(self.generation_defaults)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        parse_special: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        arrival: float | None = None,
    ) -> EngineRequest:
        """Check one prompt and its parameters. Raises InvalidRequestError naming the field.

        parse_special: control tokens written in a text are tokens (whoever wrote it applied a template); else they stay text.
        """
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._encode(prompt, parse_special) if isinstance(prompt, str) else self._checked_ids(prompt)
        if not token_ids:
            if self.tokenizer.bos_token_id is None:
                raise _invalid("the prompt is empty, and this model has no token to begin with", "prompt", "empty_prompt")
            token_ids = [self.tokenizer.bos_token_id]
        return self._request(request_id, token_ids, text, params, priority, cache_salt, tenant, arrival)

    def process_chat(
        self,
        request_id: str,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        arrival: float | None = None,
    ) -> EngineRequest:
        """Render and tokenise a conversation, then as `process`. Raises TemplateError too."""
        token_ids = self.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._request(request_id, token_ids, None, params, priority, cache_salt, tenant, arrival)

    # The prompt

    def encode_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, whatever their number. Raises InvalidRequestError or TemplateError."""
        if self.chat_template is None:
            raise _invalid("this model has no chat template: send a plain prompt instead", "messages")
        kwargs = chat_template_kwargs or {}
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            raise _invalid("chat_template_kwargs must be a mapping of names to values", "chat_template_kwargs")
        self._check_characters(sum(map(_characters, messages)) if isinstance(messages, Sequence) else 0, "messages")
        from octavo.tokenizer.chat_template import check_template_kwargs  # only here: plain prompts need no jinja2

        check_template_kwargs(kwargs)
        for name in _OWN_PARAMETERS & kwargs.keys():  # the template refuses the other reserved names itself
            raise _invalid(f"chat_template_kwargs may not set {name!r}", "chat_template_kwargs")
        token_ids = self.chat_template.encode_chat(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message, **kwargs
        )
        if not token_ids:
            raise _invalid("the chat template made an empty prompt of these messages", "messages", "empty_prompt")
        return token_ids

    def _encode(self, prompt: str, parse_special: bool) -> list[int]:
        self._check_characters(len(prompt), "prompt")
        return self.tokenizer.encode(prompt, add_special_tokens=True, parse_special=parse_special)

    def _check_characters(self, count: int, param: str) -> None:
        """A tokenizer takes time and memory for every character, also of what could never fit."""
        most = self.info.max_model_len * MAX_CHARS_PER_TOKEN
        if count > most:
            raise _invalid(
                f"the prompt has {count} characters, more than {most}, which cannot fit a context of "
                f"{self.info.max_model_len} tokens: shorten it",
                param,
                "context_length_exceeded",
            )

    def _checked_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
            raise _invalid(f"must be text or a list of token ids, got {type(prompt).__name__}", "prompt")
        if len(prompt) > self.info.max_model_len:
            self._check_length(len(prompt), None)
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int):
                raise _invalid(f"a prompt of token ids holds {token!r:.40}, which is no integer", "prompt", "invalid_token_id")
            self._check_id("prompt", token)
        return list(prompt)

    def _check_id(self, param: str, token: int) -> None:
        if not 0 <= token < self.info.vocab_size:
            raise _invalid(f"{param}: token id {token} is not in [0, {self.info.vocab_size})", param, "invalid_token_id")

    def _check_length(self, length: int, max_tokens: int | None) -> None:
        """Raises InvalidRequestError unless prompt and one token (none with max_tokens 0) fit context and pool."""
        wanted = 0 if max_tokens == 0 else 1
        if length + wanted > self.info.max_model_len:
            raise _invalid(
                f"the prompt has {length} tokens, but the context of {self.info.max_model_len} leaves room for a prompt of at most "
                f"{self.info.max_model_len - wanted}: shorten it",
                "prompt",
                "context_length_exceeded",
            )
        check_pool(self.info, length)

    # The parameters

    def _request(
        self,
        request_id: str,
        token_ids: list[int],
        prompt: str | None,
        params: SamplingParams | None,
        priority: int,
        cache_salt: str | None,
        tenant: str | None,
        arrival: float | None,
    ) -> EngineRequest:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise _invalid(f"must be a SamplingParams, got {type(params).__name__}", "sampling_params")
        _check_names(request_id, priority, cache_salt, tenant)
        self._check_length(len(token_ids), params.max_tokens)
        self._check_id("prompt", max(token_ids))  # a tokenizer may know tokens that the model has no embedding for
        self._check_vocabulary(params)
        room = max_output_tokens(self.info, len(token_ids))
        index = next(self._counter)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params.resolve(self.generation_defaults),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=self._seed(params.seed, index),
            eos_token_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
            bad_words_ids=self._bad_words(params.bad_words),
            prompt=prompt,
            arrival=perf_counter() if arrival is None else arrival,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )

    def _check_vocabulary(self, params: SamplingParams) -> None:
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(params, name) or ():
                self._check_id(name, token)

    def _seed(self, seed: int | None, index: int) -> int:
        """The request's own (as unsigned 64 bits), else derived from the configured one and the request's number, else
        drawn; those two have 53 bits, so that they survive JSON."""
        if seed is not None:
            return seed % 2**64
        if self.config.seed is None:
            return secrets.randbits(53)
        digest = hashlib.blake2b(f"{self.config.seed}:{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 11

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Every word as it is tokenised at a beginning and after a space, without doubles."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)


def _characters(message: Any) -> int:
    """Of the text in it; what is wrong with it otherwise, the template says."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return sum(len(text) for text in texts if isinstance(text, str))


def check_pool(info: ExecutorInfo, num_prompt_tokens: int) -> None:
    """Raises InvalidRequestError for a prompt that could not fit even an empty KV pool."""
    for group in info.kv_groups:
        needed = -(-num_prompt_tokens // group.block_size)
        if num_prompt_tokens > group.max_tokens:
            raise _invalid(
                f"the prompt needs {needed} KV blocks of {group.block_size} tokens, but the pool has {group.num_blocks}: "
                "shorten it or raise kv_cache_memory",
                "prompt",
                "kv_cache_exceeded",
            )


def _check_names(request_id: Any, priority: Any, cache_salt: Any, tenant: Any) -> None:
    # '#' separates a request from its choices in the engine's own ids.
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID_CHARS or "#" in request_id:
        raise _invalid(f"must be a string of 1 to {MAX_ID_CHARS} characters without '#', got {request_id!r:.60}", "request_id")
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
        raise _invalid(f"must be an integer, got {priority!r:.40}", "priority")
    for name, value in (("cache_salt", cache_salt), ("tenant", tenant)):
        if value is not None and (not isinstance(value, str) or not 0 < len(value) <= MAX_SALT_CHARS):
            raise _invalid(f"must be a string of 1 to {MAX_SALT_CHARS} characters", name)
