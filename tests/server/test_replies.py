"""Replies in OpenAI's shapes: the client's own types read them, and joined chunks are the whole reply however it was cut."""

from __future__ import annotations

import copy
import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from octavo.engine.core_messages import decode_request
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.outputs import CompletionDelta, Logprob
from octavo.server.prepared import Prepared, PreparedPrompt
from octavo.server.replies import Head, StreamReply, WholeReply, encode
from octavo.server.text_offsets import bytes_of
from octavo.wiring import EngineParts
from tests.server.bodies import Bodies, real_intake, user

HEAD = Head("cmpl-1", 1_700_000_000, "fp")
PIECES = [b"<s>", b" a", b"bc", b"\xf0\x9f", b"\x98\x80", b"\xe4\xb8", b"\x96", b"\xff", b"", b"\\x41", b"e\xcc\x81", b"</s>", b"\n"]
HIDDEN = [0, 11]


class Tokenizer:
    vocab_size, special_ids, strip_leading_space = len(PIECES), frozenset(HIDDEN), False

    def __init__(self, strip: bool) -> None:
        self.strip_leading_space = strip

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token]


def shown(token: int) -> str:
    return PIECES[token].decode("utf-8", "backslashreplace")


def entry(token: int, draw) -> dict[int, Logprob]:
    """A position as the sampler reports it: the chosen token first, then the three most probable ones."""
    top = draw(st.permutations(range(len(PIECES))))[:3]
    rank = top.index(token) + 1 if token in top else 7
    value = draw(st.sampled_from([-0.5, -1e30, -math.inf, math.nan, -9999.0, 0.0]))
    return {token: Logprob(value, rank, shown(token))} | {
        t: Logprob(-0.1 * (i + 1), i + 1, shown(t)) for i, t in enumerate(top) if t != token
    }


@st.composite
def answers(draw):
    """(endpoint, Prepared, deltas, what is known of each choice): texts made by the engine's detokenizer, held back and cut at random."""
    endpoint = draw(st.sampled_from(["chat", "completions"]))
    logprobs, n = draw(st.sampled_from([None, 0, 2])), draw(st.integers(1, 3))
    echo = endpoint == "completions" and draw(st.booleans())
    asked = draw(st.sampled_from([None, None, 1]))
    strip = draw(st.booleans())
    prompts, streams, facts = [], [], []
    for number in range(draw(st.integers(1, 3)) if endpoint == "completions" else 1):
        ids = draw(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=5))
        pieces = [b"" if t in HIDDEN else PIECES[t] for t in ids]
        whole = b"".join(pieces)
        detokenizer = IncrementalDetokenizer(Tokenizer(strip), (), True)
        echo_text = "".join(map(detokenizer.push, ids))
        prompts.append(
            PreparedPrompt(
                f"r{number}",
                msgspec.Raw(b"\xc0"),
                len(ids),
                echo_text if echo else None,
                [shown(t) for t in ids] if echo and logprobs is not None else None,
                [offset_of(pieces, i, strip) for i in range(len(ids))] if echo and logprobs is not None else None,
                detokenizer._tail,
                strip and not any(pieces),
            )
        )
        wants = asked is not None or (echo and logprobs is not None)
        prompt_logprobs = [None, *(entry(t, draw) for t in ids[1:])] if wants else None
        for index in range(n):
            made = draw(choice(f"r{number}", index, ids, strip, logprobs, len(ids)))
            if wants and index == 0:
                made[0].prompt_logprobs = prompt_logprobs
            streams.append(made)
            facts.append((number, index, ids, whole, made, prompt_logprobs))
    # Interleaved at random; the first delta of a prompt is that of its first choice, as the engine has it.
    deltas, left = [], [list(made) for made in streams]
    for position in range(0, len(left), n):
        deltas.append(left[position].pop(0))
    while any(left):
        deltas.append(draw(st.sampled_from([made for made in left if made])).pop(0))
    prepared = Prepared(
        prompts, n, True, True, "m", logprobs, echo, asked, [], HIDDEN if endpoint == "completions" and logprobs is not None else []
    )
    return endpoint, prepared, deltas, facts


@st.composite
def choice(
    draw, request_id: str, index: int, prompt: list[int], strip: bool, logprobs: int | None, num_prompt: int
) -> list[CompletionDelta]:
    ids = draw(st.lists(st.integers(0, len(PIECES) - 1), max_size=8))
    detokenizer = IncrementalDetokenizer(Tokenizer(strip), prompt, True)
    deltas, held = [], ""
    for token in ids:
        held += detokenizer.push(token)
        text, held = (held, "") if draw(st.booleans()) else ("", held)  # what a stop string holds back
        found = None if logprobs is None else [entry(token, draw)]
        delta = CompletionDelta(request_id, index, text, [token], found, num_prompt_tokens=num_prompt, num_cached_tokens=2)
        if deltas and draw(st.booleans()):  # several steps in one
            deltas[-1].text += delta.text
            deltas[-1].token_ids += delta.token_ids
            deltas[-1].logprobs = None if found is None else [*deltas[-1].logprobs, *found]
        else:
            deltas.append(delta)
    if not deltas or draw(st.booleans()):
        deltas.append(CompletionDelta(request_id, index, num_prompt_tokens=num_prompt))
    deltas[-1].text += held
    deltas[-1].finish_reason, deltas[-1].stop_reason = draw(st.sampled_from([("stop", None), ("stop", 5), ("stop", "x"), ("length", None)]))
    return deltas


def offset_of(pieces: list[bytes], place: int, strip: bool, tail: bytes = b"") -> int:
    """By brute force: decode everything before the token, without a last unfinished character."""
    data = tail + b"".join(pieces[:place])
    if strip and data.startswith(b" "):
        data = data[1:]
    for cut in range(4):
        text = data[: len(data) - cut].decode("utf-8", "replace")
        try:
            unfinished = data[len(data) - cut :]
            unfinished.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return len(text)
    return len(data.decode("utf-8", "replace"))


def join(chunks: list[dict], endpoint: str) -> dict[int, dict]:
    """What a client does with a stream, and the checks that every stream must pass."""
    found: dict[int, dict] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = found.setdefault(part["index"], {"text": "", "lists": {}, "ended": False, "prompt_logprobs": "absent"})
            assert not choice["ended"], "nothing follows a finish_reason"
            text = part["delta"].get("content", "") if endpoint == "chat" else part["text"]
            if part["finish_reason"] is not None:
                assert text == "" and part["logprobs"] is None and part.get("delta", {}) == {}, "the ending stands alone"
                choice.update(ended=True, finish_reason=part["finish_reason"], stop_reason=part["stop_reason"])
            if endpoint == "chat" and "first" not in choice:
                assert part["delta"] == {"role": "assistant", "content": ""} and part["logprobs"] is None
            choice["first"] = True
            choice["text"] += text
            for name, items in (part["logprobs"] or {}).items():
                choice["lists"].setdefault(name, []).extend(items or [])
            if "prompt_logprobs" in part:
                choice["prompt_logprobs"] = part["prompt_logprobs"]
    return found


def replies(endpoint, prepared, deltas, sizes=(1,)) -> tuple[list[dict], dict]:
    """The chunks of a stream whose deltas came in groups, and the whole reply to the same deltas; both through JSON."""
    stream, whole = StreamReply(endpoint, prepared, HEAD), WholeReply(endpoint, prepared, HEAD)
    chunks, position, turn = [], 0, 0
    while position < len(deltas):
        size = sizes[turn % len(sizes)]
        chunks += stream.add(deltas[position : position + size])
        position, turn = position + size, turn + 1
    whole.add(deltas)
    assert stream.failure is None and whole.failure is None
    return [strict(chunk) for chunk in [*chunks, *stream.end()]], strict(whole.body())


def strict(value: dict) -> dict:
    line = encode(value)
    assert b"\n" not in line
    return json.loads(line.decode("utf-8"), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@settings(max_examples=80, deadline=None)
@given(answers(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_joined_chunks_are_the_whole_reply(made, sizes):
    endpoint, prepared, deltas, facts = made
    chunks, whole = replies(endpoint, prepared, deltas, sizes)
    joined = join(chunks, endpoint)
    assert sorted(joined) == [choice["index"] for choice in whole["choices"]] == list(range(len(facts)))
    for choice in whole["choices"]:
        part = joined[choice["index"]]
        assert part["ended"] and part["text"] == (choice["message"]["content"] if endpoint == "chat" else choice["text"])
        assert (part["finish_reason"], part["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        assert (prepared.logprobs is None) == (choice["logprobs"] is None)
        for name, items in (choice["logprobs"] or {}).items():
            assert part["lists"].get(name, []) == (items or [])
        if endpoint == "completions" and prepared.prompt_logprobs is not None:
            assert part["prompt_logprobs"] == choice["prompt_logprobs"] != "absent"
    if endpoint == "chat" and prepared.prompt_logprobs is not None:
        assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [whole["prompt_logprobs"]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1]) and chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


@settings(max_examples=80, deadline=None)
@given(answers())
def test_replies_hold_what_the_deltas_hold(made):
    endpoint, prepared, deltas, facts = made
    whole = replies(endpoint, prepared, deltas)[1]
    for choice, (_, _, ids, _, made, _) in zip(whole["choices"], facts, strict=True):
        prompt = prepared.prompts[choice["index"] // prepared.n]
        text = "".join(delta.text for delta in made)
        tokens = [token for delta in made for token in delta.token_ids]
        assert choice["finish_reason"] == made[-1].finish_reason
        if endpoint == "chat":
            assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        else:
            assert choice["text"] == (prompt.echo_text or "") + text
        if prepared.logprobs is None:
            continue
        positions = [position for delta in made for position in delta.logprobs or []]
        if endpoint == "chat":
            content = choice["logprobs"]["content"]
            assert [bytes(one["bytes"]) for one in content] == [PIECES[token] for token in tokens]
            for one, position in zip(content, positions, strict=True):
                best = sorted((x for x in position.values()), key=lambda x: x.rank)[: prepared.logprobs]
                assert [top["token"] for top in one["top_logprobs"]] == [x.text for x in best if x.rank <= prepared.logprobs]
                assert -9999.0 <= one["logprob"] <= 0.0
            continue
        lists = choice["logprobs"]
        echoed = ids if prepared.echo else []
        assert lists["tokens"] == [shown(token) for token in [*echoed, *tokens]]
        assert {len(items) for items in lists.values()} == {len(echoed) + len(tokens)}
        if prepared.echo:
            assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
            assert None not in lists["token_logprobs"][1:]
        pieces = [b"" if token in HIDDEN else PIECES[token] for token in tokens]
        start = len(prompt.echo_text or "")
        expected = [start + offset_of(pieces, place, prompt.strips_space, prompt.tail) for place in range(len(tokens))]
        assert lists["text_offset"][len(echoed) :] == expected
        for token, top, logprob in zip([*echoed, *tokens], lists["top_logprobs"], lists["token_logprobs"], strict=True):
            assert top is None or (shown(token) in top and len(top) <= prepared.logprobs + 1 and logprob >= -9999.0)
    total = sum(len(delta.token_ids) for delta in deltas)
    prompt_tokens = sum(prompt.num_prompt_tokens for prompt in prepared.prompts)
    assert whole["usage"]["completion_tokens"] == total and whole["usage"]["prompt_tokens"] == prompt_tokens
    assert whole["usage"]["total_tokens"] == total + prompt_tokens


@settings(max_examples=40, deadline=None)
@given(answers())
def test_the_openai_client_reads_them(made):
    endpoint, prepared, deltas, _ = made
    chunks, whole = replies(endpoint, prepared, deltas)
    if endpoint == "chat":
        reply = ChatCompletion.model_validate(whole, strict=True)
        assert reply.usage.prompt_tokens_details.cached_tokens in (0, 2) and reply.object == "chat.completion"
        for chunk in chunks:
            assert ChatCompletionChunk.model_validate(chunk, strict=True).object == "chat.completion.chunk"
    else:
        for value in [whole, *chunks]:
            assert Completion.model_validate(without_nulls(value), strict=True).object == "text_completion"
    for value in [whole, *chunks]:
        assert (value["id"], value["created"], value["model"], value["system_fingerprint"]) == ("cmpl-1", 1_700_000_000, "m", "fp")


def without_nulls(value: dict) -> dict:
    """OpenAI's own replies have null where a choice goes on and for the first token of an echo; the client's types do not say so."""
    value = copy.deepcopy(value)
    for part in value["choices"]:
        part["finish_reason"] = part["finish_reason"] or "stop"
        for name, empty in (("token_logprobs", 0.0), ("top_logprobs", {})):
            if part["logprobs"] is not None:
                assert None not in part["logprobs"][name][1:]
                part["logprobs"][name] = [empty if item is None else item for item in part["logprobs"][name]]
    return value


def simple(n: int = 1, **fields) -> Prepared:
    values = dict(n=n, stream=True, include_usage=False, model="m", logprobs=None, echo=False, prompt_logprobs=None, ignored=[]) | fields
    return Prepared([PreparedPrompt("r", msgspec.Raw(b"\xc0"), 3)], **values)


def test_the_chunks_of_a_small_chat():
    stream = StreamReply("chat", simple(), HEAD)
    chunks = stream.add(
        [
            CompletionDelta("r", 0, "Hi", [1]),
            CompletionDelta("r", 0, "", [2]),
            CompletionDelta("r", 0, "!\u2028", [3], finish_reason="stop"),
        ]
    )
    assert [chunk["choices"][0] for chunk in chunks] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "Hi"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "!\u2028"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None},
    ]
    assert stream.end() == [] and all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("reason, status, code", [("error", 500, "generation_failed"), ("abort", 503, "request_aborted")])
def test_endings_that_openai_has_no_word_for(endpoint, reason, status, code):
    good, bad = CompletionDelta("r", 0, "Hi", [1]), CompletionDelta("r", 1, "", finish_reason=reason, error="non-finite logits")
    late = CompletionDelta("r", 0, "late", [2], finish_reason="stop")
    stream, whole = StreamReply(endpoint, simple(2), HEAD), WholeReply(endpoint, simple(2), HEAD)
    assert len(stream.add([good])) == (2 if endpoint == "chat" else 1)
    assert stream.failure is None
    assert stream.add([bad, late]) == [] and stream.add([late]) == []
    whole.add([good, bad, late])
    for failure in (stream.failure, whole.failure):
        assert (failure.status, failure.code) == (status, code) and ("non-finite" in failure.message) == (reason == "error")
    fresh = StreamReply(endpoint, simple(2), HEAD)
    assert fresh.add([bad]) == [] and fresh.failure is not None, "nothing was begun, so the status can still say it"


def test_bytes_of_tokens():
    for piece in [*PIECES, b"\xe4\xb8\xff", b"\\x", b"\\xf", b"a\\", b"\xf0\x9f\\x41"]:
        assert bytes_of(piece.decode("utf-8", "backslashreplace")) == piece
    assert bytes_of("\\xc3\\xa9") == b"\\xc3\\xa9"  # spelt out in the text: those bytes would have been a letter


# The real engine


@pytest.fixture(scope="module")
def engine(smollm2_path):
    bodies = Bodies(real_intake(smollm2_path))
    parts = EngineParts.load(bodies.intake.processor.config)
    core = parts.core()
    yield bodies, core
    core.close()


def answer(engine, body: dict) -> tuple[list[dict], dict]:
    bodies, core = engine
    prepared = bodies.outcome({**body, "stream": True, "stream_options": {"include_usage": True}})
    assert isinstance(prepared, Prepared), prepared
    for prompt in prepared.prompts:
        core.add_request(decode_request(prompt.request))
    deltas = []
    while core.has_unfinished_requests():
        deltas += core.step()
    return replies("completions" if "prompt" in body else "chat", prepared, deltas)


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs(engine, max_tokens, n):  # B14
    bodies, _ = engine
    prompts = ["The sea is 😀 b c", bodies.tokenizer.encode("a b c"), "x"]
    for prompt in [prompts[0], prompts[1], [prompts[0], prompts[2]]]:
        chunks, whole = answer(engine, {"prompt": prompt, "echo": True, "logprobs": 5, "max_tokens": max_tokens, "temperature": 0, "n": n})
        joined = join(chunks, "completions")
        assert len(whole["choices"]) == n * (len(prompt) if isinstance(prompt[0], str) and isinstance(prompt, list) else 1)
        for choice in whole["choices"]:
            lists = choice["logprobs"]
            assert joined[choice["index"]]["lists"] == lists and joined[choice["index"]]["text"] == choice["text"]
            assert lists["token_logprobs"][0] is None and all(value <= 0.0 for value in lists["token_logprobs"][1:])
            ends = [*lists["text_offset"][1:], len(choice["text"])]
            for token, begin, end in zip(lists["tokens"], lists["text_offset"], ends, strict=True):
                assert choice["text"][begin:end] == token or "\\x" in token
            if max_tokens == 0:
                source = prompt if isinstance(prompt, str) else "a b c" if isinstance(prompt[0], int) else prompt[choice["index"] // n]
                assert choice["text"] == source and choice["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] <= max_tokens * len(whole["choices"])


def test_echoed_logprobs_are_those_of_the_same_tokens_generated(engine):
    """An independent way to the same numbers: force the continuation token by token and read its logprobs."""
    bodies, _ = engine
    begin, more = bodies.tokenizer.encode("The capital of France"), bodies.tokenizer.encode(" is Paris. It")
    echoed = answer(engine, {"prompt": [*begin, *more], "echo": True, "logprobs": 1, "max_tokens": 0})[1]["choices"][0]["logprobs"]
    for place, token in enumerate(more):
        body = {"prompt": [*begin, *more[:place]], "logprobs": 1, "max_tokens": 1, "allowed_token_ids": [token]}
        forced = answer(engine, body)[1]["choices"][0]["logprobs"]
        assert forced["tokens"] == [echoed["tokens"][len(begin) + place]]
        assert forced["token_logprobs"][0] == pytest.approx(echoed["token_logprobs"][len(begin) + place], abs=0.05)


def test_a_chat_with_everything(engine):
    body = {
        "messages": user("Say hi"),
        "max_tokens": 6,
        "temperature": 0,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "prompt_logprobs": 1,
    }
    chunks, whole = answer(engine, body)
    joined = join(chunks, "chat")
    for choice in whole["choices"]:
        assert joined[choice["index"]]["text"] == choice["message"]["content"] == whole["choices"][0]["message"]["content"] != ""
        assert joined[choice["index"]]["lists"]["content"] == choice["logprobs"]["content"]
        for one in choice["logprobs"]["content"]:  # greedy: the chosen token is the most probable one
            assert len(one["top_logprobs"]) == 3 and one["top_logprobs"][0]["token"] == one["token"]
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"] and whole["prompt_logprobs"][0] is None
    assert all(1 <= len(position) <= 2 for position in whole["prompt_logprobs"][1:])


@pytest.mark.parametrize(
    "body, drawn, returned",
    [
        ({"prompt": "The sea is", "n": 2, "best_of": 4, "temperature": 1.0, "seed": 3}, 4, 2),
        ({"prompt": "The sea is", "n": 2, "beam_width": 4}, 2, 2),
        ({"prompt": "The sea is", "n": 3, "use_beam_search": True, "logprobs": 1}, 3, 3),
    ],
    ids=str,
)
def test_ranked_answers_and_what_they_cost(engine, body, drawn, returned):
    """best_of counts the tokens of all choices, beams those that are returned."""
    bodies, core = engine
    outcome = bodies.outcome({**body, "max_tokens": 6, "ignore_eos": True}, "completions")
    reply = WholeReply("completions", outcome, Head("cmpl-1", 1))
    core.add_request(decode_request(outcome.prompts[0].request))
    while core.has_unfinished_requests():
        reply.add(core.step())
    found = strict(reply.body())
    assert reply.failure is None and [choice["index"] for choice in found["choices"]] == list(range(returned))
    assert len({choice["text"] for choice in found["choices"]}) == returned
    assert found["usage"]["completion_tokens"] == 6 * drawn
    for choice in found["choices"] if "logprobs" in body else ():
        assert len(choice["logprobs"]["tokens"]) == 6
