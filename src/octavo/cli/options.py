"""Flags derived from the dataclasses, so that a setting is written down once.

`engine_options` gives a command a flag for each field of EngineConfig, `server_options` one for each of ServerConfig too,
`sampling_options` one for each of SamplingParams; the command receives the finished objects as `config`, `server`, `params`.
Stateless. Not here: conversion and precedence (config_sources.py), the fields and their limits (config.py, server_config.py,
sampling_params.py).
"""

from __future__ import annotations

import functools
import inspect
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.config import EngineConfig
from octavo.config_sources import coerce, field_types, flag_name, is_text_list, load_settings
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.server_config import ServerConfig

#: Help of each sampling field; a test compares the keys with the dataclass.
SAMPLING_HELP = {
    "n": "answers to the same prompt",
    "temperature": "0: always the most probable token; default: the model's own, else 1",
    "top_k": "choose among this many tokens; 0: all",
    "top_p": "choose among the most probable tokens that together have this probability",
    "min_p": "leave out tokens less probable than this share of the best one",
    "typical_p": "locally typical sampling; 1: off",
    "repetition_penalty": "above 1: tokens already seen become less probable",
    "presence_penalty": "subtracted from the logit of each token that was generated",
    "frequency_penalty": "subtracted once for each time a token was generated",
    "logit_bias": "ID=VALUE,...: added to the logits of these tokens",
    "max_tokens": "longest answer; default: what the context holds",
    "min_tokens": "no end before this many tokens",
    "stop": "text that ends the answer (may be repeated)",
    "stop_token_ids": "ID,...: tokens that end the answer",
    "include_stop_in_output": "keep the stop text in the answer",
    "ignore_eos": "go on after the end-of-sequence token",
    "bad_words": "text that must not appear (may be repeated)",
    "allowed_token_ids": "ID,...: choose among these tokens only",
    "seed": "same seed, same answer; default: drawn at random (--json tells it)",
    "logprobs": "report this many alternatives for each token (with --json)",
    "prompt_logprobs": "the same for the tokens of the prompt (with --json)",
    "logprobs_mode": "raw: before, processed: after the sampling settings",
    "skip_special_tokens": "leave special tokens out of the text",
    "best_of": "draw so many answers, show the n most probable ones (by log probability a token)",
    "beam_width": "beam search with so many beams; shows the n best",
    "length_penalty": "above 0: beam search favours long answers",
    "early_stopping": "beam search ends when beam_width answers have: true; when none better is likely: false; is possible: never",
}
#: Given once for each value, since the values may hold commas.
REPEATED = frozenset(name for cls in (SamplingParams, ServerConfig) for name, kind in field_types(cls).items() if is_text_list(kind))

Command = Callable[..., Any]


def chosen_model(config: EngineConfig, positional: str | None) -> EngineConfig:
    """The configuration with MODEL, where it was given as an argument."""
    return replace(config, model=positional) if positional is not None else config


def engine_options(command: Command) -> Command:
    """The command gets `config: EngineConfig` from --config, OCTAVO_* and the flags."""
    return _with_settings(command, {"config": EngineConfig})


def server_options(command: Command) -> Command:
    """The command gets `config: EngineConfig` and `server: ServerConfig`, both from the same --config, OCTAVO_* and flags."""
    return _with_settings(command, {"server": ServerConfig, "config": EngineConfig})


def _with_settings(command: Command, classes: Mapping[str, type]) -> Command:
    """The command gets an object of each class under its name in `classes`."""
    extra = {
        "config_file": Annotated[str | None, typer.Option("--config", metavar="FILE", help="settings as YAML (also OCTAVO_CONFIG)")],
        "debug": Annotated[bool, typer.Option("--debug", help="show tracebacks and what the engine logs")],
    }
    flags = {field.name: _setting_flag(cls, field.name, field.metadata["help"]) for cls in classes.values() for field in fields(cls)}

    def build(given: dict[str, Any]) -> dict[str, Any]:
        file = given.pop("config_file") or os.environ.get("OCTAVO_CONFIG") or None
        given.pop("debug")
        given = {name: value for name, value in given.items() if value or name not in REPEATED}
        built = load_settings(Path(file) if file else None, os.environ, given, list(classes.values()))
        return dict(zip(classes, built, strict=True))

    return _with_flags(command, frozenset(classes), flags | extra, build)


def sampling_options(without: frozenset[str] = frozenset()) -> Callable[[Command], Command]:
    """The command gets `params: SamplingParams` from the flags; it has none for the fields in `without`."""
    flags = {name: _flag(SamplingParams, name, text) for name, text in SAMPLING_HELP.items() if name not in without}
    return lambda command: _with_flags(command, frozenset({"params"}), flags, lambda given: {"params": _params(given)})


def _params(given: dict[str, Any]) -> SamplingParams:
    values = {}
    for name, value in given.items():
        if value is None or (name in REPEATED and not value):
            continue
        try:
            values[name] = value if name in REPEATED else coerce(value, field_types(SamplingParams)[name])
        except ValueError as error:
            raise ConfigError(f"{flag_name(name)}: {error}") from None
    return SamplingParams(**values)


def _flag(cls: type, name: str, help: str) -> Any:
    """The annotation typer reads: text, converted later by `coerce` so that every source gives the same errors."""
    annotation = field_types(cls)[name]
    flag = flag_name(name)
    if annotation is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=help, show_default=False)]
    default = next(field.default for field in fields(cls) if field.name == name)
    names = [flag, f"-{name}"] if len(name) == 1 else [flag]
    shown = f" [{default}]" if default not in (None, "", ()) else ""
    kind = list[str] if name in REPEATED else str
    return Annotated[kind | None, typer.Option(*names, metavar=_metavar(annotation), help=help + shown, show_default=False)]


def _setting_flag(cls: type, name: str, help: str) -> Any:
    return _flag(cls, name, f"{help} (may be repeated)" if name in REPEATED else help)


def _metavar(annotation: Any) -> str:
    kinds = [kind for kind in typing.get_args(annotation) or (annotation,) if kind is not type(None)]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(kinds)
    if kinds[0] is bool:  # or a word
        return "|".join(["true", "false", *typing.get_args(kinds[1])])
    if {typing.get_origin(kind) for kind in (annotation, *kinds)} & {Sequence, Mapping}:
        return "TEXT" if is_text_list(annotation) else "LIST"
    return {(int,): "INTEGER", (float,): "NUMBER", (str,): "TEXT", (int, str): "SIZE"}[tuple(kinds)]


def _with_flags(
    command: Command, arguments: frozenset[str], flags: Mapping[str, Any], build: Callable[[dict[str, Any]], dict[str, Any]]
) -> Command:
    """Replace the parameters `arguments` of `command` by `flags`, and fill them with what `build` makes of those.

    A flag the command has already keeps its meaning: `--seed` is the request's where there is one.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    flags = {name: flag for name, flag in flags.items() if name not in signature.parameters}

    @functools.wraps(command)
    def wrapper(*positional: Any, **given: Any) -> Any:
        built = build({name: given.pop(name) for name in flags})
        return command(*positional, **given, **built)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [p.replace(kind=keyword, annotation=hints[p.name]) for p in signature.parameters.values() if p.name not in arguments]
    added = [inspect.Parameter(name, keyword, default=False if name == "debug" else None, annotation=flags[name]) for name in flags]
    wrapper.__signature__ = inspect.Signature(own + added)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in own + added}
    del wrapper.__wrapped__  # typer would look through it
    return wrapper
