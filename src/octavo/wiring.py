"""The wiring: from a model's name to the parts an engine is made of. The one place that knows all of them.

`FrontParts` is what takes requests in (tokenizer, template, the model's defaults), `EngineParts` adds what computes. A
server has the first in one process and the second in another.
Stateless. Not here: running the engine (llm.py, core_process.py), loading itself (loading/, worker/).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine.engine_core import EngineCore
from octavo.engine.executor import Executor, ExecutorInfo
from octavo.engine.input_processor import EngineChatTemplate, EngineTokenizer, InputProcessor
from octavo.engine.interrupts import InterruptGate, InterruptibleExecutor
from octavo.errors import ConfigError
from octavo.model_config import ModelConfig

if TYPE_CHECKING:
    from octavo.loading.model_files import ModelFiles

_log = logging.getLogger("octavo")

#: Called with ("download" or "load", bytes done, bytes in all); from several threads while downloading.
LoadProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class FrontParts:
    """What turns a prompt into an EngineRequest: no weights, so that it also fits into a process of its own."""

    tokenizer: EngineTokenizer
    chat_template: EngineChatTemplate | None = None
    eos_token_ids: frozenset[int] = frozenset()
    #: Sampling defaults of the model.
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    config: EngineConfig = field(default_factory=EngineConfig)

    @classmethod
    def load(cls, config: EngineConfig, progress: LoadProgress | None = None) -> FrontParts:
        """Find a model and read what it says of itself. Raises ModelLoadError or ConfigError."""
        return cls.of(find_model(config, progress), config)

    @classmethod
    def of(cls, files: ModelFiles, config: EngineConfig) -> FrontParts:
        from octavo.tokenizer import ChatTemplate, load_tokenizer  # only here: a test with fakes needs none of it

        tokenizer = load_tokenizer(files)
        template = ChatTemplate(files.chat_template, tokenizer) if files.chat_template else None
        return cls(tokenizer, template, files.eos_token_ids | frozenset(tokenizer.eos_token_ids), files.generation, config)

    def input_processor(self, info: ExecutorInfo) -> InputProcessor:
        """`info`: of the engine that will run the requests."""
        return InputProcessor(self.tokenizer, self.chat_template, info, self.eos_token_ids, self.generation_defaults, self.config)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of. `load` takes it from a model; tests put it together from fakes."""

    executor: Executor
    tokenizer: EngineTokenizer
    chat_template: EngineChatTemplate | None = None
    eos_token_ids: frozenset[int] = frozenset()
    #: Sampling defaults of the model.
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    config: EngineConfig = field(default_factory=EngineConfig)
    model_config: ModelConfig | None = None

    @classmethod
    def load(cls, config: EngineConfig, progress: LoadProgress | None = None) -> EngineParts:
        """Find, check and load a model. Raises ModelLoadError or ConfigError."""
        from octavo.worker.executor import LocalExecutor

        files = find_model(config, progress)
        front = FrontParts.of(files, config)
        if front.tokenizer.vocab_size > files.config.vocab_size:
            _log.warning(
                "%s: the tokenizer has %d tokens, the model %d: prompts with a token beyond those are refused",
                files.name,
                front.tokenizer.vocab_size,
                files.config.vocab_size,
            )
        executor = LocalExecutor(files, config, progress and partial(progress, "load"))
        shared = {setting.name: getattr(front, setting.name) for setting in fields(FrontParts)}
        return cls(executor, **shared, model_config=files.config)

    def input_processor(self) -> InputProcessor:
        front = FrontParts(self.tokenizer, self.chat_template, self.eos_token_ids, self.generation_defaults, self.config)
        return front.input_processor(self.executor.info)

    def core(self, gate: InterruptGate | None = None) -> EngineCore:
        """`gate`: lets interrupts through while the model computes."""
        executor = self.executor if gate is None else InterruptibleExecutor(self.executor, gate)
        return EngineCore(executor, self.tokenizer, self.config)


def find_model(config: EngineConfig, progress: LoadProgress | None = None) -> ModelFiles:
    """The files `config.model` means; fetches them where it must. Raises ModelLoadError."""
    from octavo.loading.source import resolve_source

    return resolve_source(config.model, revision=config.revision, progress=progress and partial(progress, "download"))


def make_config(model: str | None, config: EngineConfig | None, settings: Mapping[str, Any]) -> EngineConfig:
    """`config`, or the defaults, with the model and single settings laid over. Raises ConfigError for unknown names."""
    known = {setting.name for setting in fields(EngineConfig)}
    for name in settings:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}; there are {', '.join(sorted(known))}")
    changes = dict(settings) if model is None else {"model": str(model), **settings}
    return replace(config or EngineConfig(), **changes)
