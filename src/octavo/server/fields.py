"""The fields of /v1/chat/completions and /v1/completions, each in exactly one of three lists.

HONOURED fields do what they say. IGNORED ones change nothing in the answer; they and unknown names (many clients send
some) are accepted and reported in one warning header. REFUSED ones would change the answer if this server had what they
ask for, so they are an error, unless their value asks for nothing. null is the same as leaving a field out, everywhere.
Dialects: OpenAI's, and vLLM's additional fields.
Stateless. Not here: types and ranges (protocol.py, sampling_params.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.errors import InvalidRequestError
from octavo.server.prepared import Endpoint

_BOTH = {
    "model", "max_tokens", "temperature", "top_p", "n", "stop", "stream", "stream_options", "seed", "logprobs", "logit_bias",
    "presence_penalty", "frequency_penalty", "top_k", "min_p", "typical_p", "repetition_penalty", "min_tokens", "ignore_eos",
    "stop_token_ids", "include_stop_str_in_output", "allowed_token_ids", "bad_words", "prompt_logprobs", "cache_salt",
    "priority", "skip_special_tokens", "use_beam_search", "beam_width", "length_penalty", "early_stopping",
}  # fmt: skip
_CHAT = {
    "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs",
}  # fmt: skip

HONOURED: Mapping[Endpoint, frozenset[str]] = {
    "chat": frozenset(_BOTH | _CHAT),
    "completions": frozenset(_BOTH | {"prompt", "echo", "best_of"}),
}

#: Bookkeeping and hints about speed, settings of features that are refused when they are asked for, and vLLM's switches
#: between ways to the same text.
IGNORED = frozenset({
    "store", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prediction", "parallel_tool_calls", "request_id",
    "spaces_between_special_tokens", "guided_decoding_backend", "guided_whitespace_pattern",
})  # fmt: skip

#: Field -> values besides null that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "logits_processors": ([],),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "grammar": (),
    "regex": (),
    "ebnf": (),
    "truncate_prompt_tokens": (),
    "detokenize": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "thinking_token_budget": (),
}
_REFUSED_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": (),
    "moderation": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "echo": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "add_special_tokens": (False,),
}
_REFUSED_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_embeds": ([],),
    "add_special_tokens": (True,),
    "max_completion_tokens": (),
    "top_logprobs": (),
    "messages": (),
}
REFUSED: Mapping[Endpoint, Mapping[str, tuple[Any, ...]]] = {
    "chat": _REFUSED | _REFUSED_CHAT | {"prompt": (), "best_of": ()},  # best_of: and n itself, see `_asks_for_nothing`
    "completions": _REFUSED | _REFUSED_COMPLETIONS,
}
#: What to say instead of "is not supported".
_INSTEAD = {
    ("completions", "max_completion_tokens"): "is a field of /v1/chat/completions: use max_tokens",
    ("completions", "top_logprobs"): "is a field of /v1/chat/completions: use logprobs",
    ("completions", "messages"): "is a field of /v1/chat/completions: use prompt",
    ("chat", "prompt"): "is a field of /v1/completions: use messages",
    ("chat", "best_of"): "must be equal to n",
    ("chat", "chat_template"): "is not accepted: the server uses the model's own template",
}

_MAX_LISTED = 16
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class Sorted(NamedTuple):
    honoured: dict[str, Any]
    #: Names as they may stand in a header.
    ignored: list[str]


def sort(endpoint: Endpoint, body: Mapping[str, Any]) -> Sorted:
    """Raises InvalidRequestError, code unsupported_parameter, for a refused field that asks for something."""
    honoured: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        if name in HONOURED[endpoint]:
            honoured[name] = value
        elif name in REFUSED[endpoint]:
            if not _asks_for_nothing(endpoint, name, value, body):
                reason = _INSTEAD.get((endpoint, name), "is not supported by this server: leave it out")
                raise InvalidRequestError(f"{name} {reason}", param=name, code="unsupported_parameter")
        else:
            ignored.append(name)
    return Sorted(honoured, listed(ignored))


def listed(names: list[str]) -> list[str]:
    """A client's own names, fit for a header: few, short, and without a character that means something there."""
    shown = [name for name in dict.fromkeys(names) if _NAME.fullmatch(name)]
    if len(shown) < len(set(names)) or len(shown) > _MAX_LISTED:
        shown = [*shown[:_MAX_LISTED], "..."]
    return shown


def _asks_for_nothing(endpoint: Endpoint, name: str, value: Any, body: Mapping[str, Any]) -> bool:
    neutral = REFUSED[endpoint][name]
    if name == "best_of":
        n = body.get("n")
        neutral = (1 if n is None else n,)
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)
