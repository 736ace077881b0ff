"""The fake model as the parts of a core in a real process (ProcessCore's parts_factory), with faults on demand.

`config.model` says how it loads and how long a step takes: "fake", "fake,delay=0.01", "fake,load=model",
"fake,broken_if=PATH" (load=model once that file is there). A request whose
id begins with the name of a fault suffers it in its first step.
"""

from __future__ import annotations

import os
import signal
import time

from octavo.config import EngineConfig
from octavo.engine.scheduler_output import SchedulerOutput
from octavo.errors import ConfigError, ModelLoadError
from octavo.wiring import EngineParts
from tests.engine.fake import EOS, FakeExecutor, FakeTemplate, FakeTokenizer

NUM_BLOCKS = 400


def fault(request_id: str) -> None:
    name = request_id.split("-")[0]
    if name == "hang":
        time.sleep(3600)
    elif name == "raise":
        raise RuntimeError("the fake is broken")
    elif name == "exit":
        os._exit(3)
    elif name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def load_fault(name: str) -> None:
    if name == "model":
        raise ModelLoadError("fake.gguf is damaged: fetch it again")
    if name == "config":
        raise ConfigError("kv_cache_memory is too small")
    if name == "bug":
        raise KeyError("weights")
    if name == "exit":
        os._exit(4)
    if name == "slow":
        time.sleep(3600)


def make(config: EngineConfig, progress) -> EngineParts:
    options = dict(part.split("=") for part in config.model.split(",")[1:])
    for done in (0, 50, 100):
        progress("load", done, 100)
    load_fault("model" if os.path.exists(options.get("broken_if", "")) else options.get("load", ""))
    executor = FakeExecutor(NUM_BLOCKS)
    delay = float(options.get("delay", 0))

    def before_step(output: SchedulerOutput) -> None:
        executor.outputs.clear()
        for new in output.new_requests:
            fault(new.request_id)
        if delay:
            time.sleep(delay)

    executor.before_step = before_step
    return EngineParts(executor, FakeTokenizer(), FakeTemplate(), frozenset({EOS}), config=config)
