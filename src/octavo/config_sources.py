"""Settings from a YAML file, the environment and flags: who wins, what text means, and whom to blame for an error.

Precedence: flags > environment > file > defaults. A setting has one name everywhere: `max_num_seqs` in the file,
`OCTAVO_MAX_NUM_SEQS` in the environment, `--max-num-seqs` as a flag. The engine's settings and the server's share that
namespace, so that one file serves every command: what a command has no use for is known, and left alone.
Stateless; the environment is passed in. `coerce` also reads sampling fields for the command line.
Not here: the settings themselves and their limits (config.py, server_config.py), how flags are declared (cli/options.py).
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError, shown
from octavo.server_config import ServerConfig

#: Every class of settings. No two of them have a field of the same name.
SETTINGS: tuple[type, ...] = (EngineConfig, ServerConfig)
PREFIX = "OCTAVO_"
#: Variables that are read elsewhere and are no settings.
OTHER_VARIABLES = frozenset({"OCTAVO_CONFIG", "OCTAVO_DEBUG", "OCTAVO_ALLOW_REFERENCE"})
MAX_FILE_BYTES = 1 << 20

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NONE = frozenset({"none", "null"})
_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def variable_name(setting: str) -> str:
    return PREFIX + setting.upper()


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint to append to "unknown ...": the closest known name, or nothing."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else ""


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> annotation of a dataclass, in order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def coerce(value: Any, annotation: Any) -> Any:
    """`value`, converted to `annotation` where it is text; raises ValueError("must be ...") where it does not fit.

    Understands int, float, str, bool, None, Literal, unions of them, and sequences and mappings written as
    "a,b" and "1=0.5,2=-3". Only text is converted: a YAML 1.5 is no integer, and a YAML number is no text.
    """
    kinds = _alternatives(annotation)
    text = value.strip() if isinstance(value, str) else None
    if type(None) in kinds and (value is None or (text is not None and text.lower() in _NONE)):
        return None
    for kind in kinds:
        try:
            return _coerce_one(value, text, kind)
        except (ValueError, TypeError):
            continue
    raise ValueError(f"must be {describe(annotation)}, got {value!r}")


def describe(annotation: Any) -> str:
    """What a person may write for a field of this type."""
    words: list[str] = []
    for kind in _alternatives(annotation):
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Literal:
            words += map(str, arguments)
        elif origin is Sequence:
            words.append(f"a list of {_WORDS[arguments[0]].split()[-1]}s")
        elif origin is Mapping:
            words.append("a list of ID=VALUE")
        else:
            words.append("none" if kind is type(None) else _WORDS[kind])
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _coerce_one(value: Any, text: str | None, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError
        return value
    if origin is Sequence:
        if text is None and not isinstance(value, (list, tuple)):
            raise ValueError
        items = [item.strip() for item in text.split(",") if item.strip()] if text is not None else value
        return [coerce(item, arguments[0]) for item in items]
    if origin is Mapping:
        pairs = [item.split("=", 1) for item in text.split(",")] if text is not None else list(value.items())
        return {coerce(key, arguments[0]): coerce(number, arguments[1]) for key, number in pairs}
    if kind is str:
        if not isinstance(value, str):
            raise ValueError
        return value
    if kind is bool:
        if text is not None and text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        if not isinstance(value, bool):
            raise ValueError
        return value
    if text is not None and kind in (int, float):
        return kind(text)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ValueError
    return value


def load_config(file: Path | None, env: Mapping[str, str], overrides: Mapping[str, Any]) -> EngineConfig:
    """`load_settings` for the engine's settings alone."""
    config: EngineConfig = load_settings(file, env, overrides, [EngineConfig])[0]
    return config


def load_settings(file: Path | None, env: Mapping[str, str], overrides: Mapping[str, Any], classes: Sequence[type]) -> tuple[Any, ...]:
    """One object of each of `classes`, in order; `overrides` are flags by setting name (None: not given).

    The file and the environment may hold settings of the other classes in SETTINGS; their values are not looked at.
    A list replaces the list of a weaker source, nothing is merged.
    Raises ConfigError naming the source: "octavo.yaml: threads: ...", "OCTAVO_THREADS: ...", "--threads: ...".
    """
    owners = {name: cls for cls in classes for name in field_types(cls)}
    known = [name for cls in SETTINGS for name in field_types(cls)]
    values: dict[type, dict[str, Any]] = {cls: {} for cls in classes}

    def take(source: str, name: str, value: Any) -> None:
        if name in owners:
            values[owners[name]][name] = _checked(source, owners[name], name, value)

    for name, value in (read_yaml(file) if file is not None else {}).items():
        if name not in known:
            raise ConfigError(f"{file}: unknown setting {shown(name)}{nearest(str(name)[:80], known)}")
        take(f"{file}: {name}", str(name), value)
    for name, variable in _variables(env, known).items():
        if env[variable].strip():
            take(variable, name, env[variable])
        elif name in owners and is_secret(owners[name], name):
            # an empty key is a mistake in a script, and must not open the server
            raise ConfigError(f"{variable}: is empty; unset it, or give a value")
    for name, value in overrides.items():
        if value is None:
            continue
        if name not in owners:
            raise ConfigError(f"{flag_name(name)}: unknown setting{nearest(name, owners)}")
        take(flag_name(name), name, value)
    return tuple(cls(**values[cls]) for cls in classes)


def is_secret(cls: type, name: str) -> bool:
    """Whether the value of this setting must never be shown."""
    return any(field.name == name and field.metadata.get("secret", False) for field in fields(cls))


def is_text_list(annotation: Any) -> bool:
    """Whether a setting of this type holds several texts: as a flag it is repeated, since a text may hold commas."""
    return any(typing.get_origin(kind) is Sequence and typing.get_args(kind) == (str,) for kind in _alternatives(annotation))


def _variables(env: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """Setting -> its variable. A near miss is refused: ignoring it would be silent."""
    names = {variable_name(name): name for name in known}
    found = {}
    for variable in sorted(env):
        if variable in names:
            found[names[variable]] = variable
        elif variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            match = difflib.get_close_matches(variable, names, n=1, cutoff=0.9)
            if match:
                raise ConfigError(f"{variable}: unknown setting; did you mean {match[0]}?")
    return found


def _checked(source: str, cls: type, name: str, value: Any) -> Any:
    """The value in its type, after the limits that its class puts on this setting alone."""
    annotation, secret = field_types(cls)[name], is_secret(cls, name)
    try:
        text, value = value, coerce(value, annotation)
    except ValueError as error:
        hint = "; put it in quotes" if describe(annotation).startswith(("text", "a list of texts")) and not isinstance(value, str) else ""
        if secret:
            raise ConfigError(f"{source}: must be {describe(annotation)}{hint}") from None
        if name == "port" and isinstance(value, str) and "://" in value:
            hint = "; Kubernetes sets it for a service named octavo: give the service another name, or set enableServiceLinks: false"
        raise ConfigError(f"{source}: {error}{hint}") from None
    if secret and isinstance(text, str) and not value:
        raise ConfigError(f"{source}: holds no value")
    try:
        cls(**{name: value})
    except ConfigError as error:
        raise ConfigError(f"{source}: {str(error).removeprefix(f'{name}: ')}") from None
    return value


def read_yaml(file: Path) -> dict[Hashable, Any]:
    """The mapping in `file`. Refuses what a settings file has no use for: tags, anchors, repeated keys, a second document.

    Raises ConfigError, one line with the position.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # a few lines of them expand to gigabytes
                raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=self.peek_event().start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if isinstance(key, Hashable) and key in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice", problem_mark=key_node.start_mark)
                seen.add(key if isinstance(key, Hashable) else id(key))
            return super().construct_mapping(node, deep)

    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_FILE_BYTES} bytes, not a settings file")
    try:
        content = yaml.load(data.decode("utf-8"), Loader)  # noqa: S506  Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else f"{file}"
        raise ConfigError(f"{position}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML: {str(error).splitlines()[0]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: must hold lines like 'threads: 2', not a {type(content).__name__}")
    return content
