"""Octavo: an LLM inference engine to read and to run.

The names below are loaded when first used, so that `import octavo` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.config import EngineConfig
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    homes = {
        "LLM": "octavo.llm",
        "AsyncLLM": "octavo.async_llm",
        "EngineConfig": "octavo.config",
        "RequestOutput": "octavo.outputs",
        "SamplingParams": "octavo.sampling_params",
    }
    if name not in homes:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
