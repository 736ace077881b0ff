"""Which engines `bench compare` knows, what its --peer flags mean, and which file each engine loads.

Most read the GGUF file itself; those that read none get the same weights as a folder of bfloat16 safetensors.
Stateless. Not here: running them (peer_process.py), the export (loading/export.py).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from octavo.bench.peer_process import PEERS, Peer
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.loading.export import export_bf16
from octavo.loading.source import ModelFiles, resolve_source
from octavo.models.registry import model_class

OURS = "octavo"


class Known(NamedTuple):
    script: str
    #: What it reads of a model that is a GGUF file.
    reads: Literal["gguf", "safetensors"]


#: Name -> how it is driven. "octavo" as a peer is another build of ours.
KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        "llamacpp": Known("llamacpp_peer.py", "gguf"),
        "openvino": Known("openvino_peer.py", "gguf"),
        "transformers": Known("transformers_peer.py", "safetensors"),
        "vllm": Known("vllm_peer.py", "safetensors"),
        OURS: Known("octavo_peer.py", "gguf"),
    }
)


def ours(config: EngineConfig, model: Path) -> Peer:
    """Our engine in a process like those of the others: this interpreter, the settings that differ from the defaults."""
    default = EngineConfig()
    names = [setting.name for setting in fields(EngineConfig) if setting.name not in ("model", "revision", "threads")]
    options = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}
    return Peer(OURS, sys.executable, PEERS / KNOWN[OURS].script, str(model), options)


def chosen(
    peers: Sequence[str],
    models: Sequence[str],
    options: Sequence[str],
    model: Path,
    exported: Callable[[], Path],
) -> list[Peer]:
    """From NAME=PYTHON, NAME=PATH and NAME.KEY=VALUE. `exported` is asked for the safetensors folder where one is needed.

    NAME is one of KNOWN or the path of a file like those in peers/, which then goes by its stem. Raises ConfigError.
    """
    pythons = _pairs("--peer", peers)
    scripts = {_short(name): (_script(name), name) for name in pythons}
    if len(scripts) < len(pythons):
        raise ConfigError("--peer: two engines have the same name")
    paths = {_short(name): Path(value) for name, value in _pairs("--peer-model", models).items()}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in _pairs("--peer-option", options).items():
        name, dot, option = key.rpartition(".")
        if not dot or not name or not option:
            raise ConfigError(f"--peer-option: {key!r} is not NAME.KEY")
        settings.setdefault(_short(name), {})[option] = _value(value)
    for flag, names in (("--peer-model", set(paths)), ("--peer-option", set(settings))):
        if odd := names - set(scripts):
            raise ConfigError(f"{flag}: there is no --peer {sorted(odd)[0]}")
    found = []
    for given, python in pythons.items():
        name = _short(given)
        path = paths.get(name)
        if path is None:
            path = _model_for(name, model, exported)
        elif not path.exists():
            raise ConfigError(f"--peer-model: {path} does not exist")
        label = f"{name}, other build" if name == OURS else name
        found.append(Peer(label, _interpreter(python), scripts[name][0], str(path.absolute()), settings.get(name, {})))
    return found


def _short(name: str) -> str:
    return Path(name).stem if name.endswith(".py") else name


def _script(name: str) -> Path:
    if name in KNOWN:
        return PEERS / KNOWN[name].script
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ConfigError(f"--peer: there is no file {name}")
        return Path(name).absolute()
    raise ConfigError(f"--peer: {name!r} is unknown; there are {', '.join(sorted(KNOWN))}, or name a file as in octavo/bench/peers")


def _model_for(name: str, model: Path, exported: Callable[[], Path]) -> Path:
    reads = KNOWN[name].reads if name in KNOWN else "gguf"
    if reads == "safetensors" and not model.is_dir():
        return exported()
    if name in KNOWN and name != OURS and reads == "gguf" and model.is_dir():
        raise ConfigError(f"{name} reads a GGUF file: name one with --peer-model {name}=FILE.gguf")
    return model


def _interpreter(python: str) -> str:
    found = shutil.which(str(Path(python).expanduser()))
    # not resolved: a virtual environment's interpreter is a link, and finds its packages by the link's place
    return python if found is None else str(Path(found).absolute())


def _pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"{flag}: {text!r} is not NAME=VALUE")
        if name in found:
            raise ConfigError(f"{flag}: {name} is given twice")
        found[name] = value
    return found


def _value(text: str) -> Any:
    """A number, true, false or null as JSON has them; anything else is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) or value is None else text


def model_path(model: str) -> Path:
    """The .gguf file, or the folder, that `model` means. Raises ModelLoadError."""
    files = _files(model)
    return files.paths[0].absolute() if files.kind == "gguf" else files.paths[0].absolute().parent


def export(model: str, folder: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """`model`, a GGUF file, as a folder of bfloat16 safetensors. Raises ModelLoadError or ConfigError."""
    files = _files(model)
    try:
        return export_bf16(files, model_class(files.config.architecture).weights(files.config), folder, progress)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None


def _files(model: str) -> ModelFiles:
    files = resolve_source(model)
    if files.gguf_file is not None:
        files.gguf_file.close()
    return files
