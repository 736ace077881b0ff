"""ModelFiles: everything about a model but its weights, read from a local folder or GGUF file.

Sampling defaults, end tokens and chat templates come from several files that may disagree; the rules are here, once.
Plain data plus the functions that build it. Not here: finding and fetching the files (source.py, hub.py).
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.errors import InvalidRequestError, ModelLoadError, shown
from octavo.loading.gguf import GGUFFile
from octavo.loading.gguf_config import gguf_model_config
from octavo.loading.hf_config import parse_hf_config
from octavo.loading.json_file import read_json_object, read_text
from octavo.loading.safetensors import checkpoint_paths
from octavo.model_config import ModelConfig
from octavo.sampling_params import SamplingParams

#: Tokens that end a turn in known chat templates. One that a model has as a special token, and that its own template
#: writes, ends an answer even where eos_token_id forgets it.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_GGUF_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_CONTROL = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine, checked as far as its headers go. Pickling drops `gguf_file`, an open file."""

    name: str
    kind: Literal["gguf", "safetensors"]
    #: The weight files.
    paths: tuple[Path, ...]
    config: ModelConfig
    #: The model's own sampling defaults, for SamplingParams.resolve; only those it states.
    generation: Mapping[str, Any]
    #: Every token that ends an answer: the union of what generation_config, config and tokenizer say.
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    #: Jinja source, untrusted.
    chat_template: str | None
    #: tokenizer.json, for safetensors.
    tokenizer_path: Path | None = None
    #: tokenizer_config.json; {} for GGUF.
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    #: All metadata, for GGUF.
    gguf_metadata: Mapping[str, Any] | None = field(default=None, repr=False)
    #: The open file, so that the weights need not parse the header again; load_weights closes it.
    gguf_file: GGUFFile | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "gguf_file": None}


# -- GGUF --------------------------------------------------------------------------------------------------------
def gguf_model(path: Path, name: str) -> ModelFiles:
    """Raises ModelLoadError naming the file."""
    if (split := re.search(r"-(\d{5})-of-(\d{5})\.gguf$", path.name)) and split[2] != "00001":
        raise ModelLoadError(f"{path}: one part of a split GGUF file; merge the parts first (llama-gguf-split --merge)")
    file = GGUFFile(path)
    try:
        config, meta = gguf_model_config(file), file.metadata
        where, template = str(path), _text_or_none(meta.get("tokenizer.chat_template"), f"{path}: tokenizer.chat_template")
        tokens, kinds = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type")
        special = {}
        if isinstance(tokens, list) and isinstance(kinds, list) and len(tokens) == len(kinds):
            special = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == _CONTROL}
        eos = [meta.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
        bos = _token_ids(meta.get("tokenizer.ggml.bos_token_id"), config, f"{where}: bos_token_id")
        return ModelFiles(
            name=name,
            kind="gguf",
            paths=(path,),
            config=config,
            generation=_sampling_defaults({to: meta.get(key) for key, to in _GGUF_SAMPLING.items()}, where),
            eos_token_ids=_token_ids(eos, config, f"{where}: eos_token_id") | _end_of_turn(template, special),
            bos_token_id=next(iter(bos), None),
            chat_template=template,
            gguf_metadata=meta,
            gguf_file=file,
        )
    except BaseException:
        file.close()
        raise


# -- a Hugging Face folder -----------------------------------------------------------------------------------------
def folder_model(folder: Path, name: str) -> ModelFiles:
    """A folder with config.json and safetensors, or else with one .gguf file. Raises ModelLoadError naming the file."""
    paths = checkpoint_paths(folder)
    if not paths:
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return gguf_model(ggufs[0], name)
        if ggufs:
            raise ModelLoadError(f"{folder}: holds {len(ggufs)} .gguf files; name one of them, for example {ggufs[0]}")
        raise ModelLoadError(_no_weights(folder))
    config_path = folder / "config.json"
    raw = read_json_object(config_path)
    config = parse_hf_config(raw, str(config_path))
    generation_path, tokenizer_path = folder / "generation_config.json", folder / "tokenizer.json"
    generation = _optional_json(generation_path)
    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    template = _folder_template(folder, tokenizer_config)
    special = special_tokens(tokenizer_config, tokenizer_path)
    eos = _token_ids(generation.get("eos_token_id"), config, f"{generation_path}: eos_token_id")
    eos |= _token_ids(raw.get("eos_token_id"), config, f"{config_path}: eos_token_id")
    eos |= _token_ids(special.get(_content(tokenizer_config.get("eos_token"))), config, "eos_token")
    eos |= _token_ids(list(_end_of_turn(template, special)), config, "the template's end of turn")
    bos = [generation.get("bos_token_id"), raw.get("bos_token_id"), special.get(_content(tokenizer_config.get("bos_token")))]
    return ModelFiles(
        name=name,
        kind="safetensors",
        paths=paths,
        config=config,
        generation=_sampling_defaults(generation, str(generation_path)),
        eos_token_ids=eos,
        bos_token_id=next((i for value in bos for i in _token_ids(value, config, f"{config_path}: bos_token_id")), None),
        chat_template=template,
        tokenizer_path=tokenizer_path if tokenizer_path.is_file() else None,
        tokenizer_config=tokenizer_config,
    )


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for ending in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(ending))
    if pickles:
        return f"{folder}: holds only pickled weights ({pickles[0]}), which can run code and are refused: convert them to safetensors"
    return f"{folder}: holds neither .safetensors nor .gguf weights"


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if os.path.lexists(path) else {}  # a broken link is an error, not an absent file


def _text_or_none(value: Any, where: str) -> str | None:
    if value is None:
        return None
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):  # no string, or one with half a character, as JSON allows
        raise ModelLoadError(f"{where} must be text") from None
    return str(value)


def _folder_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json: a string, or a list of named ones of which "default" counts."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        return read_text(path)
    value, where = tokenizer_config.get("chat_template"), f"{folder / 'tokenizer_config.json'}: chat_template"
    if isinstance(value, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in value):
            raise ModelLoadError(f"{where} must be text or a list of named templates")
        named = {entry["name"]: entry.get("template") for entry in value}
        value = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
    return _text_or_none(value, where)


# -- end tokens ----------------------------------------------------------------------------------------------------
def _content(token: Any) -> Any:
    """A special token is stored as its text or as an object with a `content`."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def special_tokens(tokenizer_config: Mapping[str, Any], tokenizer_path: Path) -> dict[str, int]:
    """Text -> id of the added tokens, from tokenizer_config.json, else from the head of tokenizer.json."""
    decoder = tokenizer_config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping) and decoder:
        pairs = [(_content(entry), key) for key, entry in decoder.items() if key.isdecimal() and len(key) < 10]
        return {text: int(key) for text, key in pairs if text is not None}
    if not tokenizer_path.is_file():
        return {}
    # The list comes before the vocabulary, which can be tens of MB: decode it alone. A bare "added_tokens" followed by a
    # colon can only be the key, since a quote inside a JSON string is escaped.
    text = read_text(tokenizer_path)
    if (key := re.search(r'"added_tokens"\s*:\s*', text)) is None:
        return {}
    try:
        entries, _ = json.JSONDecoder().raw_decode(text, key.end())
    except (ValueError, RecursionError):
        raise ModelLoadError(f"{tokenizer_path}: not valid JSON") from None
    entries = entries if isinstance(entries, list) else []
    return {
        e["content"]: e["id"] for e in entries if isinstance(e, dict) and isinstance(e.get("content"), str) and type(e.get("id")) is int
    }


def _end_of_turn(template: str | None, special: Mapping[str, int]) -> frozenset[int]:
    return frozenset(special[token] for token in END_OF_TURN if token in special and template and token in template)


def _token_ids(value: Any, config: ModelConfig, where: str) -> frozenset[int]:
    """None, an id or a list of ids, as a set. An id outside the vocabulary can never be generated: dropped with a warning."""
    ids = [i for i in (value if isinstance(value, list) else [value]) if i is not None]
    for token in ids:
        if type(token) is not int:
            raise ModelLoadError(f"{where} must be a token id or a list of them, got {shown(token)}")
        if not 0 <= token < config.vocab_size:
            _log.warning("%s: ignored %d, which is outside the vocabulary of %d", where, token, config.vocab_size)
    return frozenset(i for i in ids if 0 <= i < config.vocab_size)


# -- sampling ------------------------------------------------------------------------------------------------------
def _sampling_defaults(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The stated ones of SamplingParams' fields. do_sample=false means greedy, whatever else the file says."""
    found = {name: values[name] for name in _SAMPLING if values.get(name) is not None}
    if values.get("do_sample") is False:
        found = {"temperature": 0.0, **{k: v for k, v in found.items() if k == "repetition_penalty"}}
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{where}: {error}") from None
    return found
