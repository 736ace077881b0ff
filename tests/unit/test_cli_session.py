"""The conversation behind `octavo chat`: turns, room in the context, slash commands; and flags against the dataclass."""

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.chat import read_message
from octavo.cli.chat_session import NOT_SETTABLE, ChatSession
from octavo.cli.options import SAMPLING_HELP
from octavo.cli.terminal import write
from octavo.errors import OctavoError
from octavo.sampling_params import SamplingParams


def session(**settings):
    return ChatSession(SamplingParams(**settings), "smollm2")


def words(messages):
    return sum(len(message["content"].split()) for message in messages)


def test_every_sampling_field_has_a_flag():
    assert list(SAMPLING_HELP) == sorted(SAMPLING_HELP, key=[field.name for field in fields(SamplingParams)].index)
    assert set(SAMPLING_HELP) == {field.name for field in fields(SamplingParams)} and set(SAMPLING_HELP) > NOT_SETTABLE


def test_why_explains_an_answer_once_there_is_one():
    chat = session()
    for why in (None, lambda: "because"):
        with pytest.raises(OctavoError, match="none yet"):
            chat.execute("/why", dict, why)
    chat.totals.answers = 1
    assert chat.execute("/why", dict, lambda: "because") == "because"


def test_turns_alternate_whatever_happens():
    chat = session()
    chat.add_user("a")
    chat.add_assistant("b")
    chat.add_user("unanswered")
    chat.add_assistant("")
    chat.add_user("failed")
    chat.take_back()
    chat.take_back()
    assert [message["content"] for message in chat.messages] == ["a", "b"]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=8),
    last=st.integers(1, 60),
    limit=st.integers(8, 200),
    system=st.booleans(),
    max_tokens=st.one_of(st.none(), st.integers(1, 100)),
)
def test_make_room_drops_the_oldest_turns_and_no_more_than_needed(lengths, last, limit, system, max_tokens):
    chat = ChatSession(SamplingParams(max_tokens=max_tokens), "m", "be brief" if system else None)
    for number, (question, answer) in enumerate(lengths):
        chat.add_user(f"q{number} " + "x " * (question - 1))
        chat.add_assistant(f"a{number} " + "x " * (answer - 1))
    chat.add_user("last " * last)
    before = list(chat.turns)
    dropped = chat.make_room(limit, words)
    reserved = min(max_tokens or 512, 512, limit // 4)
    assert chat.turns == before[2 * dropped :] and chat.turns[-1] == before[-1]
    alone = words(chat.messages[:system] + before[-1:])
    if alone >= limit:
        assert dropped == 0  # a question that cannot be answered costs nothing
    else:
        assert len(chat.turns) == 1 or words(chat.messages) + reserved <= limit
    if dropped:  # one turn fewer would not have been enough
        system_words = words(chat.messages) - words(chat.turns)
        assert system_words + words(before[2 * (dropped - 1) :]) + reserved > limit
    assert (chat.messages[0]["role"] == "system") == system


def run(chat, line):
    return chat.execute(line, lambda: {"steps": 3})


def test_system_and_clear():
    chat = session()
    assert run(chat, "/system  Be brief. ") == "system message set"
    chat.add_user("q")
    assert chat.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    run(chat, "/clear")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    run(chat, "/system")
    assert chat.messages == []


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0.2", "temperature", 0.2),
        ("/set temperature none", "temperature", None),
        ("/set top-k 5", "top_k", 5),
        ("/set max_tokens 10", "max_tokens", 10),
        ("/set stop a, b", "stop", ("a, b",)),
        ("/set stop none", "stop", ()),
        ("/set stop_token_ids 1,2", "stop_token_ids", (1, 2)),
        ("/set logit_bias 3=-5", "logit_bias", {3: -5.0}),
        ("/set ignore_eos on", "ignore_eos", True),
        ("/set presence_penalty default", "presence_penalty", 0.0),
    ],
)
def test_set(line, name, value):
    chat = session(temperature=0.7, presence_penalty=1.0, stop="x")
    run(chat, line)
    assert getattr(chat.params, name) == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature hot", "temperature: must be a number or none, got 'hot'"),
        ("/set temperature -1", "temperature: must be between"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set n 2", "there is no setting n"),
        ("/set min_tokens 5", None),
        ("/set max_tokens 0", "max_tokens: 0 is only allowed"),
        ("/sett x", "did you mean set?"),
        ("/", "there is no command /"),
        ("/save", "needs a file name"),
        ("/save /nonexistent/folder/x", "No such file"),
        ("/save a\0b", "null"),
    ],
)
def test_a_command_that_fails_changes_nothing(line, words):
    chat = session(temperature=0.7)
    if words is None:
        run(chat, line)
        return
    with pytest.raises(OctavoError) as caught:
        run(chat, line)
    assert words in str(caught.value) and chat.params == SamplingParams(temperature=0.7)


def test_set_lists_and_shows():
    chat = session(temperature=0.7)
    listed = run(chat, "/set").splitlines()
    assert [line.split()[0] for line in listed] == [name for name in SAMPLING_HELP if name not in NOT_SETTABLE]
    assert run(chat, "/set temperature") == "temperature = 0.7"


def test_save_writes_the_conversation_and_never_over_a_file(tmp_path):
    chat = session(temperature=0.5, stop="x")
    chat.add_user("h\u00e9")
    chat.add_assistant("yes")
    path = tmp_path / "chat.json"
    run(chat, f"/save {path}")
    assert json.loads(path.read_text("utf-8")) == {
        "model": "smollm2",
        "sampling": {"temperature": 0.5, "stop": ["x"]},
        "messages": [{"role": "user", "content": "h\u00e9"}, {"role": "assistant", "content": "yes"}],
    }
    with pytest.raises(OctavoError, match="exists"):
        run(chat, f"/save {path}")


def test_help_stats_quit():
    chat = session()
    for command in ("/help", "/clear", "/system", "/set", "/stats", "/save", "/quit"):
        assert command in run(chat, "/help")
    assert run(chat, "/stats").splitlines() == ["answers 0, tokens 0 (0.0/s over all), prompt tokens 0 (0 from the cache)", "steps: 3"]
    assert not chat.done
    run(chat, "/quit")
    assert chat.done


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["hello"], "hello"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one"""'], "one"),
        ([""], ""),
    ],
)
def test_read_message(typed, message):
    lines = iter(typed)
    prompts = []

    def read(prompt):
        prompts.append(prompt)
        return next(lines)

    assert read_message(read) == message
    assert prompts == [">>> ", *["... "] * (len(typed) - 1)] and not list(lines)


@pytest.mark.parametrize("typed", [['"""', "one"], ["one\\"]])
def test_a_message_given_up_half_way(typed):
    lines = iter(typed)

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    with pytest.raises(EOFError):
        read_message(read)


class Terminal(list):
    closed = False

    def isatty(self):
        return True

    def write(self, text):
        self.append(text)

    def flush(self):
        pass


@given(st.text())
def test_a_terminal_gets_no_control_characters(text):
    screen = Terminal()
    write(text, screen)
    shown = "".join(screen)
    assert len(shown) == len(text)
    assert all(c in "\n\t" or not (c < " " or "\x7f" <= c < "\xa0") for c in shown)
    assert all(a == b for a, b in zip(shown, text, strict=True) if b.isprintable())
