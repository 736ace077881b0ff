"""Every bad request is refused before it reaches the engine, with the field named; good ones arrive complete."""

from __future__ import annotations

import pytest

from octavo.config import EngineConfig
from octavo.engine.executor import ExecutorInfo, KVGroup
from octavo.engine.input_processor import MAX_CHARS_PER_TOKEN, InputProcessor
from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams
from tests.engine.fake import BOS, EOS, FakeTemplate, FakeTokenizer


def processor(
    bos: int | None = None, max_model_len: int = 20, num_blocks: int = 100, template=None, defaults=None, **settings
) -> InputProcessor:
    info = ExecutorInfo((KVGroup(num_blocks, 4),), 40, max_model_len, (1,))
    return InputProcessor(FakeTokenizer(bos), template, info, {EOS}, defaults or {}, EngineConfig(**settings))


def refused(call, param: str | None = None, code: str | None = None) -> str:
    with pytest.raises(InvalidRequestError) as error:
        call()
    assert "\n" not in str(error.value)
    if param is not None:
        assert error.value.param == param
    if code is not None:
        assert error.value.code == code
    return str(error.value)


def test_a_good_request_arrives_complete():
    made = processor(BOS).process(
        "a", "abc", SamplingParams(seed=3, max_tokens=5, stop_token_ids=[9]), priority=2, cache_salt="s", arrival=1.5
    )
    assert made.prompt == "abc" and made.prompt_token_ids == [BOS, 5, 6, 7]
    assert (made.max_tokens, made.seed, made.priority, made.cache_salt, made.arrival) == (5, 3, 2, "s", 1.5)
    assert made.eos_token_ids == {EOS} and made.stop_token_ids == {EOS, 9}
    params = made.sampling_params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (1.0, 0, 1.0, 1.0)


def test_the_models_defaults_fill_what_is_not_given():
    made = processor(defaults={"temperature": 0.2, "top_p": 0.9}).process("a", "a", SamplingParams(top_p=0.5))
    assert (made.sampling_params.temperature, made.sampling_params.top_p) == (0.2, 0.5)
    refused(lambda: processor(defaults={"temperature": float("nan")}), "temperature")


def test_ignore_eos_drops_the_models_ends_only():
    made = processor().process("a", "a", SamplingParams(ignore_eos=True, stop_token_ids=[9]))
    assert made.eos_token_ids == frozenset() and made.stop_token_ids == {9}


@pytest.mark.parametrize("prompt", ["", []])  # E10
def test_an_empty_prompt_starts_from_bos_or_is_refused(prompt):
    assert processor(BOS).process("a", prompt).prompt_token_ids == [BOS]
    assert "empty" in refused(lambda: processor().process("a", prompt), "prompt", "empty_prompt")


@pytest.mark.parametrize(
    "prompt", [[40], [-1], [[1, -1]], [1.5], [True], [2**63], [[[1]]], ["a", 1], [1, "a"], [None], b"ab", 5, {"a": 1}, None]
)  # E11
def test_prompts_that_are_no_token_ids(prompt):
    made = processor()
    refused(lambda: made.process("a", prompt), "prompt")
    assert made.process("b", [39, 0]).prompt_token_ids == [39, 0]


@pytest.mark.parametrize("length, ok", [(18, True), (19, True), (20, False), (21, False)])
@pytest.mark.parametrize("max_tokens", [None, 1, 50])
def test_prompts_longer_than_the_context(length, ok, max_tokens):  # E12, E13
    params = SamplingParams(max_tokens=max_tokens)
    if ok:
        room = 20 - length
        assert processor().process("a", [7] * length, params).max_tokens == min(room, max_tokens or room)
    else:
        message = refused(lambda: processor().process("a", [7] * length, params), "prompt", "context_length_exceeded")
        assert str(length) in message and "20" in message


def test_a_prompt_alone_may_fill_the_context():
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert processor().process("a", [7] * 20, params).max_tokens == 0
    refused(lambda: processor().process("a", [7] * 21, params), "prompt", "context_length_exceeded")


def test_a_prompt_beyond_the_pool_names_both_numbers():  # E01
    made = processor(num_blocks=3)
    assert made.process("a", [7] * 12).max_tokens == 1
    assert made.process("a", [7] * 5).max_tokens == 8
    message = refused(lambda: made.process("a", [7] * 13), "prompt", "kv_cache_exceeded")
    assert "4 KV blocks" in message and "pool has 3" in message


def test_a_huge_text_is_refused_before_it_is_tokenised(monkeypatch):  # H02
    made = processor()
    monkeypatch.setattr(made.tokenizer, "encode", lambda *args, **kwargs: pytest.fail("tokenised"))
    refused(lambda: made.process("a", "a" * (20 * MAX_CHARS_PER_TOKEN + 1)), "prompt", "context_length_exceeded")
    refused(lambda: made.process("a", [7] * 10**6), "prompt", "context_length_exceeded")


def test_a_huge_conversation_is_refused_before_it_is_rendered(monkeypatch):  # H02
    made = processor(template=FakeTemplate())
    monkeypatch.setattr(made.chat_template, "encode_chat", lambda *args, **kwargs: pytest.fail("rendered"))
    half = "a" * (10 * MAX_CHARS_PER_TOKEN + 1)
    for content in (2 * half, [{"type": "text", "text": half}, {"type": "text", "text": half}]):
        refused(
            lambda content=content: made.process_chat("a", [{"role": "user", "content": content}]), "messages", "context_length_exceeded"
        )
    messages = [{"role": "user", "content": half}, {"role": "assistant", "content": None}, {"role": "user", "content": half}]
    refused(lambda: made.process_chat("a", messages), "messages", "context_length_exceeded")


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {"40": 1}}, {"logit_bias": {999999: 5}}, {"allowed_token_ids": [3, 40]}, {"stop_token_ids": [10**6]}]
)  # B08
def test_token_ids_outside_the_models_vocabulary(fields):
    (name,) = fields
    assert "[0, 40)" in refused(lambda: processor().process("a", "a", SamplingParams(**fields)), name)
    assert processor().process("a", "a", SamplingParams(logit_bias={"39": -100}, allowed_token_ids=[0, 39], stop_token_ids=[39]))


@pytest.mark.parametrize("request_id", ["", "a#0", "x" * 300, 5, None])
def test_bad_request_ids(request_id):
    refused(lambda: processor().process(request_id, "a"), "request_id")


def test_other_bad_fields():
    made = processor()
    refused(lambda: made.process("a", "a", priority=True), "priority")
    refused(lambda: made.process("a", "a", priority=2**40), "priority")
    refused(lambda: made.process("a", "a", cache_salt=""), "cache_salt")
    refused(lambda: made.process("a", "a", cache_salt=5), "cache_salt")
    refused(lambda: made.process("a", "a", tenant=""), "tenant")
    refused(lambda: made.process("a", "a", tenant="x" * 1025), "tenant")
    refused(lambda: made.process("a", "a", {"temperature": 0}), "sampling_params")


def test_bad_words_with_and_without_a_leading_space():
    made = processor(BOS).process("a", "a", SamplingParams(bad_words=["ab", " ab", "c"]))
    assert made.bad_words_ids == ((5, 6), (3, 5, 6), (7,), (3, 7))


def test_seeds():
    made = processor()
    assert made.process("a", "a", SamplingParams(seed=-1)).seed == 2**64 - 1
    drawn = {made.process("a", "a").seed for _ in range(20)}
    assert len(drawn) == 20 and all(0 <= seed < 2**53 for seed in drawn)
    one, two = ([p.process("a", "a").seed for _ in range(5)] for p in (processor(seed=1), processor(seed=1)))
    assert one == two and len(set(one)) == 5
    assert processor(seed=2).process("a", "a").seed != one[0]


def test_chat():
    made = processor(template=FakeTemplate())
    messages = [{"role": "user", "content": "hi"}]
    assert made.process_chat("a", messages).prompt_token_ids == FakeTokenizer().encode("uhia")
    same = made.process_chat("a", messages, add_generation_prompt=False, chat_template_kwargs={"suffix": "x"})
    assert same.prompt_token_ids == FakeTokenizer().encode("uhix")
    refused(lambda: made.process_chat("a", [], add_generation_prompt=False), "messages", "empty_prompt")
    refused(lambda: made.process_chat("a", [{"role": "user", "content": "a" * 30}]), "prompt", "context_length_exceeded")
    refused(lambda: made.process_chat("a", messages, chat_template_kwargs=[1]), "chat_template_kwargs")
    for name in ("add_generation_prompt", "continue_final_message", "tools"):
        refused(lambda name=name: made.process_chat("a", messages, chat_template_kwargs={name: True}), "chat_template_kwargs")
    assert "no chat template" in refused(lambda: processor().process_chat("a", messages), "messages")
