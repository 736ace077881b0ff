"""`octavo chat` on a terminal (a pseudo-terminal, with the scripted engine): what a person types and sees."""

import json
import os
import sys
from pathlib import Path

import pexpect
import pytest

FAKE = Path(__file__).with_name("fake_cli.py")


class Chat:
    def __init__(self, folder, *arguments):
        self.log = folder / "log"
        environment = {**os.environ, "FAKE_LOG": str(self.log), "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
        self.process = pexpect.spawn(
            sys.executable, [str(FAKE), "chat", *arguments], env=environment, encoding="utf-8", timeout=20, dimensions=(40, 200)
        )
        self.process.delaybeforesend = None
        self.until(">>> ")

    def until(self, text):
        self.process.expect_exact(text)
        return self.process.before

    def say(self, text, until=">>> "):
        """Type a line; what the program shows before `until`, without the echo."""
        self.process.sendline(text)
        return self.until(until).replace(text, "", 1).strip()

    def leave(self):
        self.process.expect(pexpect.EOF)
        self.process.close()
        return self.process.exitstatus

    def asked(self, event="chat"):
        return [entry for entry in map(json.loads, self.log.read_text().splitlines()) if entry["event"] == event]


@pytest.fixture
def chat(tmp_path):
    started = []

    def start(*arguments):
        started.append(Chat(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.close(force=True)


def test_answers_remember_the_conversation_and_end_with_a_line_of_figures(chat):
    it = chat("--system", "Be brief.")
    shown = it.say("hello")
    assert shown.startswith("you said hello") and "tokens/s, first after" in shown and "3 tokens" in shown
    it.say("again")
    assert [(m["role"], m["content"].strip()) for m in it.asked()[-1]["messages"]] == [
        ("system", "Be brief."),
        ("user", "hello"),
        ("assistant", "you said hello"),
        ("user", "again"),
    ]
    it.process.sendeof()
    assert it.leave() == 0 and len(it.asked("close")) == 1


def test_ctrl_c_stops_the_answer_and_not_the_program(chat):
    it = chat()
    it.process.sendline("slow")
    it.until("3 4 ")
    it.process.sendintr()
    assert "stopped: " in it.until(">>> ")
    assert len(it.asked("closed")) == 1  # the request was ended, not left running
    assert it.say("hello").startswith("you said hello")
    kept = it.asked()[-1]["messages"]
    assert [message["role"] for message in kept] == ["user", "assistant", "user"] and kept[1]["content"].startswith("0 1 2 3 4 ")
    it.process.sendintr()
    it.until("(Ctrl-C again or Ctrl-D leaves)")
    it.until(">>> ")
    it.process.sendintr()
    assert it.leave() == 0


def test_ctrl_c_at_the_prompt_counts_only_twice_in_a_row(chat):
    it = chat()
    it.process.sendintr()
    it.until(">>> ")
    it.say("hello")
    it.process.sendintr()
    it.until("again or Ctrl-D")
    it.until(">>> ")
    assert it.say("still here").startswith("you said still here")


def test_commands_and_several_lines(chat, tmp_path):
    it = chat()
    assert "/save FILE" in it.say("/help")
    assert it.say("/set temperature") == "temperature = 0.2 (the model's)"
    assert it.say("/set temperature 0.25") == "temperature = 0.25"
    assert "must be a number" in it.say("/set temperature hot")
    assert "did you mean clear?" in it.say("/claer")
    it.say("hello")
    assert it.asked()[-1]["temperature"] == 0.25
    it.say("/clear")
    it.say("/system Short.")
    it.process.sendline('"""one')
    it.until("... ")
    assert it.say('two"""').startswith("you said one two")
    assert it.asked()[-1]["messages"] == [{"role": "system", "content": "Short."}, {"role": "user", "content": "one\ntwo"}]
    it.process.sendline("three\\")
    it.until("... ")
    it.say("four")
    assert it.asked()[-1]["messages"][-1]["content"] == "three\nfour"
    it.say("//etc")
    assert it.asked()[-1]["messages"][-1]["content"] == "/etc"
    assert "answers 4" in it.say("/stats")
    it.say(f"/save {tmp_path / 'chat.json'}")
    assert len(json.loads((tmp_path / "chat.json").read_text())["messages"]) == 7
    it.say("")
    it.process.sendline("/quit")
    assert it.leave() == 0 and len(it.asked()) == 4


def test_the_oldest_turns_go_when_the_context_is_full(chat):
    it = chat("--max-model-len", "24")
    shown = [it.say(f"number {i}") for i in range(4)]
    assert "the oldest" not in shown[0] and any("the oldest turn went, to fit the context of 24 tokens" in text for text in shown)
    assert shown[3].count("the oldest") == 1
    last = it.asked()[-1]["messages"]
    assert len(last) < 7 and last[0]["role"] == "user" and last[-1]["content"] == "number 3"


def test_what_fails_is_one_line_and_the_chat_goes_on(chat):
    it = chat()
    assert "the request is refused" in it.say("refuse")
    assert "the request failed" in it.say("fail")
    it.say("hello")
    assert [message["content"] for message in it.asked()[-1]["messages"]] == ["hello"]
    it.process.sendline("dead")
    it.until("octavo: the engine is dead")
    assert it.leave() == 1


def test_a_terminal_is_not_the_models_to_command(chat):
    shown = chat().say("escape")
    assert "\ufffd[31mred\ufffd" in shown and "\x1b" not in shown and "\x07" not in shown
