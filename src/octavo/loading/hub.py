"""Fetches a model from the Hugging Face Hub, or finds it in the Hub's cache.

huggingface_hub is imported on the first call, never for local models: it takes longer to import than a small model to
load. Its cache, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN are honoured. No state. Not here: what is in the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from octavo.errors import ModelLoadError, shown
from octavo.loading.hf_config import read_hf_config

Progress = Callable[[int, int], None]

#: Small files first: a model that cannot run here is refused before its weights are fetched.
_SMALL = ("*.json", "*.jinja", "tokenizer*")
_WEIGHTS = ("*.safetensors",)
#: Copies in other formats: subfolders (onnx/, original/) and Meta's or Mistral's own layout.
_IGNORED = ("*/*", "consolidated*")

_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def is_model_id(text: str) -> bool:
    """`owner/name`, nothing that could be a path."""
    return bool(_MODEL_ID.fullmatch(text)) and ".." not in text and "--" not in text


def fetch(model_id: str, *, revision: str | None, offline: bool | None, token: str | None, progress: Progress | None) -> Path:
    """The folder of the model's files in the cache. Raises ModelLoadError, one line that says what to do."""
    import huggingface_hub

    def snapshot(patterns: tuple[str, ...], revision: str | None, report: Progress | None) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                model_id,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_IGNORED),
                token=token,
                local_files_only=bool(offline),
                tqdm_class=_bar_class(report),
            )
        )

    try:
        small = snapshot(_SMALL, revision, None)
        if not (small / "config.json").is_file():
            raise ModelLoadError(
                f"{model_id}: has no config.json, so it is not a model in the Hugging Face format; for a GGUF, give the file"
            )
        read_hf_config(small / "config.json")
        folder = snapshot((*_SMALL, *_WEIGHTS), small.name, progress)  # the folder's name is the commit: no second look-up
        if not any(folder.glob("*.safetensors")):
            raise ModelLoadError(f"{model_id}: has no safetensors weights (pickled ones are refused; a GGUF is given as a file)")
        return folder
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(_explain(error, model_id, revision)) from error


def _explain(error: Exception, model_id: str, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{model_id}: is gated; accept its terms at https://huggingface.co/{model_id} and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{model_id}: not found on the Hugging Face Hub (if it is private, set HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model_id}: has no revision {shown(revision)}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause, here = error.__cause__, f"{model_id}: not (completely) in the local cache"
        if cause is None or isinstance(cause, errors.OfflineModeIsEnabled):
            return f"{here}, and nothing was fetched: `octavo run {model_id}` does, unless HF_HUB_OFFLINE is set"
        return f"{here}, and the Hugging Face Hub cannot be reached: check the network and try again"
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{model_id}: cannot be fetched from the Hugging Face Hub: {first_line[:300]}"


def _bar_class(report: Progress | None) -> type[Any]:
    """A stand-in for tqdm that prints nothing and reports bytes (done, total) of the whole download."""
    lock = Lock()  # the class is used by several download threads

    class Bar:
        format_dict: dict[str, Any] = {}

        def __init__(
            self, iterable: Any = None, *, total: float | None = None, initial: float = 0, unit: str = "it", desc: str = "", **_: Any
        ) -> None:
            self.iterable, self.total, self.n, self.unit = iterable, total, initial, unit
            self.reports = unit == "B" and "econstruct" in desc  # bytes on disk; there is a second bar for the network

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.n += n or 0
                if report is not None and self.reports:
                    report(int(self.n), int(max(self.total or 0, self.n)))

        def __iter__(self) -> Any:
            return iter(self.iterable)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def _nothing(self, *_: Any, **__: Any) -> None: ...

        close = refresh = set_description = set_description_str = set_postfix_str = reset = clear = _nothing

        @classmethod
        def get_lock(cls) -> Lock:
            return lock

        @classmethod
        def set_lock(cls, _: Any) -> None: ...

    return Bar
