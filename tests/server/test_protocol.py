"""The three lists of fields: every field is in one of them, an honoured one has an effect, a refused one is never passed over."""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat

from octavo.server import fields
from octavo.server.fields import HONOURED, IGNORED, REFUSED
from octavo.server.prepared import Prepared
from octavo.server.protocol import ChatRequest, CompletionRequest
from tests.server.bodies import Bodies, real_intake, user

ENDPOINTS = {"chat": {"messages": user()}, "completions": {"prompt": "hi"}}


@pytest.fixture(scope="module")
def bodies(smollm2_path) -> Bodies:
    return Bodies(real_intake(smollm2_path))


def test_no_field_is_in_two_lists():
    for endpoint in ENDPOINTS:
        lists = (HONOURED[endpoint], IGNORED, frozenset(REFUSED[endpoint]))
        assert sum(map(len, lists)) == len(frozenset().union(*lists))


@pytest.mark.parametrize("endpoint, source", [("chat", openai_chat), ("completions", openai_completion)])
def test_every_field_that_the_openai_client_can_send_is_in_a_list(endpoint, source):
    known = HONOURED[endpoint] | IGNORED | frozenset(REFUSED[endpoint])
    sent = typing.get_type_hints(source.CompletionCreateParamsBase).keys()
    assert len(sent) > 15 and not sent - known


@pytest.mark.parametrize("endpoint, model", [("chat", ChatRequest), ("completions", CompletionRequest)])
def test_the_models_declare_exactly_the_honoured_fields(endpoint, model):
    assert set(model.model_fields) == HONOURED[endpoint]
    schema = model.model_json_schema()
    assert schema["additionalProperties"] is True
    assert schema["required"] == list(ENDPOINTS[endpoint])


def observed(bodies: Bodies, endpoint: str, body: dict) -> dict:
    """Everything that leaves `prepare`, with the order to the engine decoded."""
    outcome = bodies.outcome(body, endpoint)
    assert isinstance(outcome, Prepared), outcome
    orders = [asdict(bodies_order) for bodies_order in bodies.ok(**body)[1]] if body.get("seed") is not None else []
    return {**msgspec.structs.asdict(outcome), "prompts": orders}


#: Field -> (what else is needed, a value that must make a difference).
EFFECTS = {
    "model": ({}, "other"),
    "messages": ({}, user("bye")),
    "prompt": ({}, "bye"),
    "max_tokens": ({}, 5),
    "max_completion_tokens": ({}, 5),
    "temperature": ({}, 0.5),
    "top_p": ({}, 0.5),
    "n": ({}, 2),
    "stop": ({}, ["x"]),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "seed": ({}, 8),
    "logit_bias": ({}, {"5": 1}),
    "presence_penalty": ({}, 1),
    "frequency_penalty": ({}, 1),
    "top_k": ({}, 5),
    "min_p": ({}, 0.1),
    "typical_p": ({}, 0.5),
    "repetition_penalty": ({}, 1.1),
    "min_tokens": ({}, 3),
    "ignore_eos": ({}, True),
    "stop_token_ids": ({}, [5]),
    "include_stop_str_in_output": ({}, True),
    "allowed_token_ids": ({}, [5]),
    "bad_words": ({}, ["x"]),
    "prompt_logprobs": ({}, 1),
    "cache_salt": ({}, "x"),
    "priority": ({}, -1),
    "skip_special_tokens": ({}, False),
    "top_logprobs": ({"logprobs": True}, 2),
    "add_generation_prompt": ({}, False),
    "continue_final_message": ({"messages": [*user(), {"role": "assistant", "content": "x"}]}, True),
    "echo": ({}, True),
    "best_of": ({}, 3),
    "use_beam_search": ({}, True),
    "beam_width": ({}, 3),
    "length_penalty": ({"use_beam_search": True, "n": 2}, 0.5),
    "early_stopping": ({"use_beam_search": True, "n": 2}, "never"),
}


@pytest.mark.parametrize("endpoint, name", sorted((endpoint, name) for endpoint in ENDPOINTS for name in HONOURED[endpoint]))
def test_every_honoured_field_has_an_effect(bodies, endpoint, name):
    if name == "logprobs":
        more, value = {}, True if endpoint == "chat" else 2
    elif name == "chat_template_kwargs":
        return  # SmolLM2's template reads none: see the test below
    else:
        more, value = EFFECTS[name]
    before = {**ENDPOINTS[endpoint], "seed": 7, **more}
    first, again = observed(bodies, endpoint, before), observed(bodies, endpoint, before)
    assert first == again, "the comparison would show nothing"
    assert observed(bodies, endpoint, {**before, name: value}) != first
    assert observed(bodies, endpoint, {**before, name: value})["ignored"] == []
    if name not in ENDPOINTS[endpoint] and name not in before:
        assert observed(bodies, endpoint, {**before, name: None}) == first, "null is as if it were not there"


def test_template_arguments_reach_the_template(bodies, monkeypatch):
    seen = {}
    real = bodies.intake.processor.chat_template.encode_chat
    monkeypatch.setattr(
        bodies.intake.processor.chat_template, "encode_chat", lambda messages, **kwargs: seen.update(kwargs) or real(messages)
    )
    bodies.ok(messages=user(), chat_template_kwargs={"enable_thinking": False})
    assert seen["enable_thinking"] is False


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", sorted(IGNORED))
@pytest.mark.parametrize("value", [True, "x", 5, [], {"a": 1}])
def test_an_ignored_field_changes_nothing_and_is_listed(bodies, endpoint, name, value):
    before = {**ENDPOINTS[endpoint], "seed": 7}
    found = observed(bodies, endpoint, {**before, name: value})
    assert found.pop("ignored") == [name]
    expected = observed(bodies, endpoint, before)
    assert expected.pop("ignored") == [] and found == expected
    assert observed(bodies, endpoint, {**before, name: None})["ignored"] == []


@pytest.mark.parametrize("endpoint, name", sorted((endpoint, name) for endpoint in ENDPOINTS for name in REFUSED[endpoint]))
def test_a_refused_field_is_refused_unless_it_asks_for_nothing(bodies, endpoint, name):
    before = {**ENDPOINTS[endpoint], "seed": 7}
    for value in (
        "something",
        [{"type": "function"}],
        {"type": "json_object"},
        7,
        1.5,
        *([True] if True not in REFUSED[endpoint][name] else []),
    ):
        refused = bodies.outcome({**before, name: value}, endpoint)
        assert (refused.status, refused.param, refused.code) == (400, name, "unsupported_parameter")
        assert refused.message.startswith(name) and "something" not in refused.message
    for value in (None, *REFUSED[endpoint][name]):
        found = bodies.outcome({**before, name: value}, endpoint)
        assert isinstance(found, Prepared) and found.ignored == [], found


@pytest.mark.parametrize(
    "n, best_of, ok", [(None, 1, True), (None, 2, False), (2, 2, True), (2, 1, False), (2, 3, False), (1, True, False)]
)
def test_best_of_must_be_n_in_a_chat(bodies, n, best_of, ok):
    outcome = bodies.outcome({"messages": user(), "n": n, "best_of": best_of}, "chat")
    assert isinstance(outcome, Prepared) == ok and (ok or outcome.param == "best_of")


@pytest.mark.parametrize(
    "n, best_of, ok", [(None, 1, True), (None, 2, True), (2, 2, True), (2, 1, False), (2, 3, True), (1, True, False), (1, 129, False)]
)
def test_best_of_is_at_least_n(bodies, n, best_of, ok):
    outcome = bodies.outcome({"prompt": "a", "n": n, "best_of": best_of}, "completions")
    assert isinstance(outcome, Prepared) == ok and (ok or outcome.param == "best_of")


def test_what_is_ranked_cannot_be_streamed(bodies):
    assert "best_of" in bodies.bad("stream", prompt="a", best_of=2, stream=True)
    assert "beam search" in bodies.bad("stream", messages=user(), use_beam_search=True, stream=True)
    assert bodies.ok(prompt="a", n=2, best_of=2, stream=True)[0].stream


def test_beams_of_vllm_s_dialect(bodies):  # as many beams as answers are asked for
    assert bodies.order(messages=user(), use_beam_search=True, n=3).sampling_params.beam_width == 3
    assert bodies.order(prompt="a", use_beam_search=True, n=2, best_of=5).sampling_params.beam_width == 5
    assert bodies.order(prompt="a", beam_width=5).sampling_params.beam_width == 5
    assert bodies.order(prompt="a", use_beam_search=False).sampling_params.beam_width is None
    params = bodies.order(prompt="a", beam_width=4, n=2, early_stopping="never", length_penalty=0).sampling_params
    assert (params.n, params.early_stopping, params.length_penalty) == (2, "never", 0)
    assert bodies.bad("n", prompt="a", use_beam_search=True, n=17)
    assert bodies.bad("best_of", prompt="a", use_beam_search=True, best_of=17)
    assert bodies.bad("beam_width", prompt="a", beam_width=17)
    assert bodies.bad("beam_width", prompt="a", beam_width=0)
    assert bodies.bad("early_stopping", prompt="a", beam_width=2, early_stopping="sometimes")
    assert bodies.bad("presence_penalty", prompt="a", beam_width=2, presence_penalty=1)


def test_settings_of_beams_without_beams_are_listed(bodies):
    assert bodies.ok(prompt="a", length_penalty=2.0, early_stopping=True)[0].ignored == ["length_penalty", "early_stopping"]


def test_zero_is_not_false_and_one_is_not_true(bodies):
    assert bodies.outcome({"messages": user(), "echo": 0}).param == "echo"
    assert bodies.outcome({"messages": user(), "detokenize": True}).ignored == []
    assert bodies.outcome({"prompt": "a", "detokenize": 1}).param == "detokenize"


def test_misspelt_and_unknown_fields_are_accepted_and_listed(bodies):  # G02
    found, _ = bodies.ok(messages=user(), temprature=0, store=True, metadata={"a": "b"}, Tools=[1])
    assert found.ignored == ["temprature", "store", "metadata", "Tools"]


@pytest.mark.parametrize("name", ["a b", "x\r\nSet-Cookie: a=b", "", "é", "x" * 65, "a,b", '"', "\x00"])
def test_names_that_are_no_words_are_not_repeated(bodies, name):
    assert bodies.ok(messages=user(), **{name: 1})[0].ignored == ["..."]


def test_the_list_of_ignored_names_is_short(bodies):
    found, _ = bodies.ok(messages=user(), **{f"field{i}": 1 for i in range(1000)})
    assert len(found.ignored) == 17 and found.ignored[-1] == "..."


def test_the_document_lists_what_is_honoured_and_what_is_ignored():
    text = (Path(__file__).resolve().parents[2] / "docs/server.md").read_text("utf-8")
    parts = re.split(
        r"^- \*\*(honoured|ignored|refused)\*\*", text.partition("## Fields")[2].partition("What one may")[0], flags=re.MULTILINE
    )
    listed = {name: set(re.findall(r"`([a-z_]+)`", part)) for name, part in zip(parts[1::2], parts[2::2], strict=True)}
    assert listed["honoured"] == HONOURED["chat"] | HONOURED["completions"]
    assert listed["ignored"] - {"temprature"} == IGNORED
    assert listed["refused"] - {"n", "null"} <= REFUSED["chat"].keys() | REFUSED["completions"].keys()


def test_every_table_entry_is_a_word():
    for names in (*HONOURED.values(), IGNORED, *REFUSED.values()):
        assert fields.listed(list(names)[:16]) == list(names)[:16]
    assert set(EFFECTS) | {"logprobs", "chat_template_kwargs"} == HONOURED["chat"] | HONOURED["completions"]
    assert inspect.getdoc(fields)
