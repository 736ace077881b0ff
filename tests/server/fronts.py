"""FrontParts for input processes in tests: the fake tokenizer with templates that do what a message says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from octavo.config import EngineConfig
from octavo.errors import ModelLoadError
from octavo.wiring import FrontParts
from tests.engine.fake import BOS, EOS, FakeTemplate, FakeTokenizer


class WilfulTemplate(FakeTemplate):
    """Does what the last message asks for before it renders; a path after a colon makes that happen only once."""

    def encode_chat(self, messages, /, **kwargs):
        word, _, path = messages[-1]["content"].partition(":")
        if not path or not Path(path).exists():
            if path:
                Path(path).touch()
            self.do(word)
        return super().encode_chat([{"role": "user", "content": "hi"}], **kwargs)

    def do(self, word: str) -> None:
        if word == "burn":
            while True:
                pass
        elif word == "sleep":
            time.sleep(600)
        elif word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "fail":
            raise RuntimeError("a secret of the prompt")
        elif word == "print":
            print("noise on standard output")
            os.write(1, b"more noise\n")
            assert sys.stdin.read() == ""
        elif word == "memory":
            bytearray(64 * 2**30)


def fake(config: EngineConfig) -> FrontParts:
    return FrontParts(FakeTokenizer(BOS), WilfulTemplate(), frozenset({EOS}), {}, config)


def unloadable(config: EngineConfig) -> FrontParts:
    raise ModelLoadError("there is no such model")


def crashing(config: EngineConfig) -> FrontParts:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
