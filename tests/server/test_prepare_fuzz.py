"""Whatever a body holds, the outcome is Prepared or a refusal of the client's making, in one line."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.core_messages import decode_request
from octavo.server.fields import HONOURED, IGNORED, REFUSED
from octavo.server.prepared import Prepared
from tests.server.bodies import Bodies, check_refused, real_intake, user

RELAXED = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def bodies(smollm2_path) -> Bodies:
    return Bodies(real_intake(smollm2_path, max_json_depth=16))


def sound(bodies: Bodies, data: bytes, endpoint: str) -> None:
    outcome = bodies.outcome(data, endpoint)
    if not isinstance(outcome, Prepared):
        return check_refused(outcome)
    assert 1 <= len(outcome.prompts) * outcome.n <= 128
    for prompt in outcome.prompts:
        order = decode_request(prompt.request)
        assert 1 <= len(order.prompt_token_ids) == prompt.num_prompt_tokens <= bodies.intake.processor.info.max_model_len
        assert all(0 <= token < bodies.intake.processor.info.vocab_size for token in order.prompt_token_ids)
        assert order.max_tokens >= 0 and order.sampling_params.n == outcome.n


text = st.text(st.characters(), max_size=20) | st.sampled_from(
    ["<|im_end|>", "\ud800", "\x00", "smollm2", "text", "user", "1e999", "%s{{a}}"]
)
scalar = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-2, 3) | st.floats() | text
value = st.recursive(scalar, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=12)
endpoint = st.sampled_from(["chat", "completions"])
name = st.sampled_from(sorted({*HONOURED["chat"], *HONOURED["completions"], *IGNORED, *REFUSED["chat"], *REFUSED["completions"]})) | text

VALID = {
    "chat": {"messages": [{"role": "system", "content": "a"}, *user([{"type": "text", "text": "b"}])], "model": "smollm2", "stop": ["x"]},
    "completions": {"prompt": ["a", "b"], "model": "smollm2", "logprobs": 1, "echo": True, "max_tokens": 3},
}


@RELAXED
@given(st.binary(max_size=60), endpoint)
def test_bytes(bodies, data, endpoint):
    sound(bodies, data, endpoint)


@RELAXED
@given(value, endpoint)
def test_any_json(bodies, value, endpoint):
    sound(bodies, json.dumps(value).encode(), endpoint)


@RELAXED
@given(endpoint, st.dictionaries(name, value, max_size=3))
def test_valid_bodies_with_other_values(bodies, endpoint, changes):
    sound(bodies, json.dumps({**VALID[endpoint], **changes}).encode(), endpoint)


@RELAXED
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "x"]), value, max_size=4), max_size=3
    )
)
def test_messages(bodies, messages):
    sound(bodies, json.dumps({"messages": messages}).encode(), "chat")


@RELAXED
@given(
    st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": text}), min_size=1, max_size=4
    )
)
def test_conversations(bodies, messages):
    sound(bodies, json.dumps({"messages": messages}).encode(), "chat")


@RELAXED
@given(endpoint, st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=2)), min_size=1, max_size=3))
def test_valid_bodies_with_other_bytes(bodies, endpoint, edits):
    data = json.dumps(VALID[endpoint]).encode()
    for place, new in edits:
        data = data[: place % len(data)] + new + data[place % len(data) + 1 :]
    sound(bodies, data, endpoint)


@RELAXED
@given(endpoint, value.filter(lambda value: value not in (None, False, True)), name)
def test_a_refusal_names_a_field_or_the_body(bodies, endpoint, value, name):
    outcome = bodies.outcome({**VALID[endpoint], name: value}, endpoint)
    if not isinstance(outcome, Prepared):
        assert outcome.code == "invalid_json" or outcome.param is not None
