"""The official client drives the real server: what applications do, and the exceptions they catch."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.server.fake_server import MODEL, alphabet, fake_server
from tests.server.real_server import RealServer, wait_for

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
#: Awkward text of many kinds, in and (the model repeats some of it) out.
CORPUS = [
    "Repeat exactly: 😀🎉👨‍👩‍👧 flags 🇫🇷🇯🇵 and ❤️.",
    "Write 你好，世界 and こんにちは and 안녕하세요 in one line.",
    "Repeat: e\u0301 a\u0308 n\u0303 \u1e9b\u0323 z̷̢̛a̴l̸g̵o̶.",
    "Write a Python function with a loop, tabs and \"quotes\".\n\tdef f(x):\n\t\treturn x\\n",
    "Line one\u2028line two\u2029line three\u0085end",
    "مرحبا بالعالم и привет мир και γειά",
    "a",
    "Count: one, two, three, " * 20,
]  # fmt: skip


@pytest.fixture(scope="module")
def client(real: RealServer):
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def idle_afterwards(real: RealServer):
    yield
    wait_for(real.is_idle, "idle server")


def test_models(client):
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").owned_by == "octavo"


def test_chat(client):
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=20)
    assert "Paris" in reply.choices[0].message.content and reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    again = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=20)
    assert again.choices[0].message.content == reply.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == 32 and again.usage.prompt_tokens == reply.usage.prompt_tokens


def test_a_conversation_reuses_its_prefix(client):
    messages = [{"role": "system", "content": "You answer in one short sentence, without any decoration. " * 3}, *QUESTION]
    first = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=12)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And of Italy?"}]
    second = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=12)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16 - 16


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "seeded"])
def test_stream_is_whole_chat(client, sampling):
    for text in CORPUS:
        order = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 12, **sampling}
        whole = client.chat.completions.create(**order)
        chunks = list(client.chat.completions.create(**order, stream=True, stream_options={"include_usage": True}))
        joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert joined == whole.choices[0].message.content, text
        assert "\ufffd" not in joined
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
        assert reasons == [whole.choices[0].finish_reason]
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stream_is_whole_completions_with_logprobs(client):
    for text in CORPUS[:4]:
        order = {"model": "smollm2", "prompt": text, "max_tokens": 12, "temperature": 0, "logprobs": 2}
        whole = client.completions.create(**order).choices[0]
        parts = [chunk.choices[0] for chunk in client.completions.create(**order, stream=True) if chunk.choices]
        assert "".join(part.text for part in parts) == whole.text
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [item for part in parts if part.logprobs for item in getattr(part.logprobs, name)]
            assert joined == getattr(whole.logprobs, name), name


def test_choices_seed_and_logprobs(client):
    order = {
        "model": "smollm2",
        "messages": QUESTION,
        "n": 3,
        "seed": 5,
        "temperature": 1.2,
        "max_tokens": 10,
        "logprobs": True,
        "top_logprobs": 2,
    }
    one, two = (client.chat.completions.create(**order) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices] and [choice.index for choice in one.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    for choice in one.choices:
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(**order, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[index] for index in range(3)] == texts


def test_stop_strings(client):
    messages = [{"role": "user", "content": "Count from 1 to 10."}]
    plain = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=40).choices[0].message.content
    stop = plain[len(plain) // 2 : len(plain) // 2 + 3]
    cut = plain[: plain.index(stop)]
    order = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 40, "stop": [stop]}
    reply = client.chat.completions.create(**order).choices[0]
    assert reply.message.content == cut and reply.finish_reason == "stop"
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**order, stream=True))
    assert joined == cut


def test_asynchronous_client(real):
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:

            async def ask(text: str) -> str:
                stream = await client.chat.completions.create(
                    model="smollm2", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=16, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(ask(text) for text in CORPUS))

    together = asyncio.run(main())
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0) as client:
        for text, streamed in zip(CORPUS, together, strict=True):
            alone = client.chat.completions.create(
                model="smollm2", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=16
            )
            assert alone.choices[0].message.content == streamed  # the same alone as among seven others


def test_closing_a_stream_ends_it(real, client):
    with client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    wait_for(real.is_idle, "idle server")


def test_errors_have_their_class(client):
    cases = [
        (openai.BadRequestError, {"temperature": "hot"}),
        (openai.BadRequestError, {"max_tokens": -1}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "a " * 9000}]}),
        (openai.NotFoundError, {"model": "gpt-9"}),
    ]
    for kind, change in cases:
        with pytest.raises(kind) as raised:
            client.chat.completions.create(**{"model": "smollm2", "messages": QUESTION} | change)
        assert raised.value.type == "invalid_request_error" and raised.value.message
        assert raised.value.request_id
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="smollm2", messages=QUESTION, stream=True, temperature=-1)
    assert raised.value.param == "temperature"


def test_errors_of_a_server_in_trouble():
    with fake_server(alphabet, api_key=("right",), max_body=2048) as server:
        with (
            openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="right", max_retries=0, timeout=30) as client:
            assert client.models.retrieve(MODEL).id == MODEL
            with pytest.raises(openai.APIStatusError) as raised:
                client.completions.create(model=MODEL, prompt="a" * 5000)
            assert raised.value.status_code == 413
            stream = client.completions.create(model=MODEL, prompt="abc", stream=True)
            next(stream)

            def die(output):
                raise RuntimeError("a wild pointer")

            server.executor.before_step = die
            with pytest.raises(openai.APIError):  # the event of the error, not a normal end
                for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError) as broken:
                client.completions.create(model=MODEL, prompt="abc")
            assert broken.value.status_code == 503
