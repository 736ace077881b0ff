"""The octavo command with a scripted engine in place of octavo.llm: no model, no kernels, and a log of what it was asked.

Run as a program by the command-line tests. What the user says decides what happens: "slow" answers for ever, "fail" ends
with an error delta, "escape" answers with control characters, "refuse" is a bad request, "crash" a bug, "dead" a dead
engine, "raw TEXT" answers TEXT as it is.
"""

import json
import os
import sys
import time
import types

from octavo.engine.metrics import EngineStats
from octavo.errors import EngineDeadError, InvalidRequestError, ModelLoadError
from octavo.outputs import CompletionDelta, Logprob


def log(**entry):
    path = os.environ.get("FAKE_LOG")
    if path:
        with open(path, "a") as stream:
            stream.write(json.dumps(entry) + "\n")


class FakeLLM:
    def __init__(self, model="smollm2", *, config=None, **settings):
        if model == "missing":
            raise ModelLoadError("missing: no such model\nand this is a second line")
        self.config = config
        self.max_model_len = config.max_model_len or 64
        self.generation_defaults = {"temperature": 0.2}
        self.chat_template = types.SimpleNamespace(source=None if model == "base" else "template", encode_chat=self._encode_chat)
        log(event="open", model=model, threads=config.threads)

    def stream_chat(self, messages, params=None):
        log(event="chat", messages=messages, temperature=params.temperature)
        return self._answer(messages[-1]["content"], len(self._encode_chat(messages)), params)

    def stream(self, prompt, params=None):
        log(event="raw", prompt=prompt)
        return self._answer(prompt, len(prompt.split()), params)

    def _answer(self, text, prompt_tokens, params):
        if text == "refuse":
            raise InvalidRequestError("the request is refused", param="prompt")
        if text == "crash":
            raise RuntimeError("a bug")
        if text == "dead":
            raise EngineDeadError("the engine is dead")
        words = (f"{i} " for i in range(10_000)) if text == "slow" else iter(self._words(text))
        try:
            for count, word in enumerate(words):
                if text == "slow":
                    time.sleep(0.02)
                for index in range(params.n):
                    yield CompletionDelta(
                        "r",
                        index,
                        word,
                        [count],
                        [{count: Logprob(-0.5, 1, word), 9: Logprob(float("-inf"), 2, "x")}] if params.logprobs else None,
                        num_prompt_tokens=prompt_tokens,
                        seed=params.seed or 5,
                    )
            for index in range(params.n):
                if text == "fail":
                    yield CompletionDelta("r", index, finish_reason="error", error="the request failed")
                else:
                    yield CompletionDelta("r", index, finish_reason="stop", seed=params.seed or 5)
        finally:
            log(event="closed")

    @staticmethod
    def _words(text):
        if text == "escape":
            return ["\x1b[31mred\x07"]
        if text.startswith("raw "):
            return [text[4:]]
        return [f"{word} " for word in f"you said {text}".split()]

    @staticmethod
    def _encode_chat(messages):
        return [0] * sum(len(message["content"].split()) + 2 for message in messages)

    def stats(self):
        return EngineStats(steps=3)

    def close(self):
        log(event="close")


def main():
    module = types.ModuleType("octavo.llm")
    module.LLM = FakeLLM
    sys.modules["octavo.llm"] = module
    from octavo.cli.main import main as octavo_main

    return octavo_main()


if __name__ == "__main__":
    sys.exit(main())
