"""What tests of the input side share: the real model's tokenizer and template, and short ways to prepare a body."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.config import EngineConfig
from octavo.engine.core_messages import decode_request
from octavo.engine.executor import ExecutorInfo, KVGroup
from octavo.engine.request import EngineRequest
from octavo.server.prepare import Intake, prepare
from octavo.server.prepared import Endpoint, Job, Outcome, Prepared, Refused
from octavo.wiring import FrontParts

VOCAB_SIZE = 49152
MAX_MODEL_LEN = 2048


def real_intake(path: Path, **limits: int) -> Intake:
    info = ExecutorInfo((KVGroup(512, 16),), VOCAB_SIZE, MAX_MODEL_LEN, (1,))
    settings = {"max_json_depth": 32, "max_prompts": 128, "max_choices": 128, **limits}
    return Intake(FrontParts.load(EngineConfig(model=str(path))).input_processor(info), ("smollm2", "other"), **settings)


def user(content="hi") -> list[dict]:
    return [{"role": "user", "content": content}]


class Bodies:
    """`ok` and `bad` prepare a body of /v1/chat/completions (`messages`) or /v1/completions (`prompt`)."""

    def __init__(self, intake: Intake) -> None:
        self.intake = intake
        self.tokenizer = intake.processor.tokenizer

    def outcome(self, body: object, endpoint: Endpoint | None = None, key_scope: str | None = None) -> Outcome:
        if endpoint is None:
            endpoint = "completions" if isinstance(body, dict) and "prompt" in body else "chat"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return prepare(Job(endpoint, data, "id-1", key_scope, 2.5), self.intake)

    def ok(self, **body) -> tuple[Prepared, list[EngineRequest]]:
        outcome = self.outcome(body)
        assert isinstance(outcome, Prepared), outcome
        return outcome, [decode_request(prompt.request) for prompt in outcome.prompts]

    def order(self, **body) -> EngineRequest:
        (order,) = self.ok(**body)[1]
        return order

    def bad(self, param: str | None = None, code: str | None = None, status: int = 400, **body) -> str:
        outcome = self.outcome(body)
        assert isinstance(outcome, Refused), outcome
        check_refused(outcome)
        assert outcome.status == status, outcome
        assert param is None or outcome.param == param, outcome
        assert code is None or outcome.code == code, outcome
        return outcome.message


def check_refused(outcome: Refused) -> None:
    assert outcome.status in (400, 404) and outcome.message and outcome.code
    assert "\n" not in outcome.message and len(outcome.message) <= 1000
