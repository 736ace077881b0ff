"""The two request bodies as pydantic models: for checking their types, and for /openapi.json.

Strict: "5" is no number and true is no integer, but 1 is a temperature. Lists are declared here and checked where their
limits are (SamplingParams, InputProcessor), so that a list of a million faults costs one look.
Stateless. Not here: which fields there are besides (fields.py), ranges (sampling_params.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from octavo.errors import InvalidRequestError
from octavo.server.prepared import Endpoint

_INT, _NUMBER, _STRING = {"type": "integer"}, {"type": "number"}, {"type": "string"}


def _listed(*kinds: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema(kinds[0] if len(kinds) == 1 else {"anyOf": list(kinds)})


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TokenIds = Annotated[Any, _listed(_array(_INT))]
Strings = Annotated[Any, _listed(_STRING, _array(_STRING))]
Bias = Annotated[Any, _listed({"type": "object", "additionalProperties": _NUMBER})]
TextPrompt = Annotated[Any, _listed(_STRING, _array(_STRING), _array(_INT), _array(_array(_INT)))]
_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": _STRING}, "required": ["type", "text"]}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [_STRING, _array(_PART), {"type": "null"}]},
    },
    "required": ["role"],
}
Messages = Annotated[Any, _listed(_array(_MESSAGE))]
EarlyStopping = Annotated[Any, _listed({"type": "boolean"}, {"const": "never"})]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    #: vLLM: usage in every chunk. Not here.
    continuous_usage_stats: Literal[False] | None = None


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="a name of /v1/models; default: the first")
    max_tokens: int | None = Field(None, description="default: until the model ends or the context is full; more than fits is lowered")
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: Strings = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    logit_bias: Bias = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: bool = False
    allowed_token_ids: TokenIds = None
    bad_words: Strings = ()
    prompt_logprobs: int | None = None
    cache_salt: str | None = Field(None, description="requests with different salts share no prefix blocks")
    priority: int = Field(0, description="smaller is more urgent")
    skip_special_tokens: bool = True
    use_beam_search: bool = Field(False, description="beam search with beam_width beams, else n; the n best are returned")
    beam_width: int | None = Field(None, description="beams; asks for beam search by itself")
    length_penalty: float = Field(1.0, description="of beam search: rank by cumulative logprob / length ** length_penalty")
    early_stopping: EarlyStopping = False


class ChatRequest(_Request):
    messages: Messages
    max_completion_tokens: int | None = Field(None, description="the newer name of max_tokens; both must agree")
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = Field(None, description="default: true, unless continue_final_message is")
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Request):
    prompt: TextPrompt
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = Field(None, description="draw so many, return the n with the highest log probability a token")


_SAYS = {
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def checked(endpoint: Endpoint, fields: dict[str, Any]) -> ChatRequest | CompletionRequest:
    """`fields`: the honoured ones, without nulls. Raises InvalidRequestError naming the first bad one."""
    model = ChatRequest if endpoint == "chat" else CompletionRequest
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _invalid(first["loc"], first["type"]) from None


def _invalid(place: tuple[int | str, ...], kind: str) -> InvalidRequestError:
    path = str(place[0])
    if path == "stream_options" and len(place) > 1:  # the only field with parts; other steps are keys of a client's own
        path += f".{place[1]}"
    if path == "stream_options.continuous_usage_stats":
        return InvalidRequestError(f"{path} is not supported by this server: leave it out", param=path, code="unsupported_parameter")
    says = _SAYS.get(kind, "has a value that is not accepted")
    code = "missing_required_parameter" if kind == "missing" else "invalid_type"
    return InvalidRequestError(f"{path}: {says}", param=path, code=code)
