"""Text to token ids and back, and the chat templates in between.

Owner of all state: one Tokenizer and one ChatTemplate per model, both unchanged after construction.
Not here: streaming (engine/detokenizer.py), stop strings (engine/stop.py), finding the files (loading/).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import ModelLoadError
from octavo.tokenizer.chat_template import ChatTemplate, RenderedChat, check_template_kwargs
from octavo.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "RenderedChat", "Tokenizer", "check_template_kwargs", "load_tokenizer"]


class TokenizerFiles(Protocol):
    """What is read of loading.model_files.ModelFiles."""

    @property
    def name(self) -> str: ...
    @property
    def gguf_metadata(self) -> Mapping[str, Any] | None: ...
    @property
    def tokenizer_path(self) -> Path | None: ...
    @property
    def tokenizer_config(self) -> Mapping[str, Any]: ...


def load_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a model that was found: tokenizer.json where there is one, else the GGUF metadata. Raises ModelLoadError."""
    if files.tokenizer_path is not None:
        return Tokenizer.from_file(files.tokenizer_path, files.tokenizer_config)
    if files.gguf_metadata is not None:
        return Tokenizer.from_gguf(files.gguf_metadata)
    raise ModelLoadError(f"{files.name} has no tokenizer.json: save the model's fast tokenizer beside its weights")
