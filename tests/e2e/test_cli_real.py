"""The command line with the real model: what a person and a program get from `octavo chat` and `octavo run`."""

import json
import os
import subprocess
import sys

import pexpect
import pytest

pytestmark = pytest.mark.usefixtures("smollm2_path")

#: Small enough for the reference, should the native kernels be missing; greedy, so that runs can be compared.
SMALL = ["--temperature", "0", "--max-tokens", "8", "--kv-cache-memory", "64MiB"]


def octavo(*arguments, stdin="", **environment):
    command = [sys.executable, "-m", "octavo.cli.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment})


def test_run_stream_and_json_agree():
    streamed = octavo("run", "smollm2", "Name three rivers.", *SMALL)
    whole = octavo("run", "smollm2", "Name three rivers.", "--json", "--logprobs", "1", *SMALL)
    assert streamed.returncode == whole.returncode == 0, streamed.stderr + whole.stderr
    result = json.loads(whole.stdout)
    assert streamed.stdout == result["text"] + "\n" and len(result["token_ids"]) == len(result["choices"][0]["logprobs"]) == 8
    assert result["finish_reason"] == "length" and result["usage"]["prompt_tokens"] > 8  # the template is around it
    raw = json.loads(octavo("run", "--raw", "Name three rivers.", "--json", *SMALL).stdout)
    assert raw["usage"]["prompt_tokens"] < result["usage"]["prompt_tokens"]


def test_a_seed_gives_the_same_text_and_nothing_depends_on_the_source_of_a_setting(tmp_path):
    (tmp_path / "o.yaml").write_text("kv_cache_memory: 64MiB\nmax_num_batched_tokens: 5\n")
    flags = ["--seed", "11", "--temperature", "1", "--max-tokens", "8"]
    texts = {
        octavo("run", "--raw", "The sea is", *flags, "--kv-cache-memory", "64MiB").stdout,
        octavo("run", "--raw", "The sea is", *flags, "--config", str(tmp_path / "o.yaml")).stdout,
        octavo("run", "--raw", "The sea is", *flags, OCTAVO_KV_CACHE_MEMORY="32MiB", OCTAVO_THREADS="1").stdout,
    }
    assert len(texts) == 1 and texts.pop().strip()


def test_piped_chat_answers_and_exits():
    result = octavo("chat", *SMALL, stdin="Say hello.\n")
    assert result.returncode == 0 and result.stdout.strip() and "tokens/s" in result.stderr.splitlines()[-1]


def test_what_the_engine_refuses_is_one_line():
    for arguments, words in (
        (["run", "word " * 3000, "--max-model-len", "64"], "64"),
        (["run", "Hi", "--model", "no-such-model"], "no-such-model"),
        (["run", "Hi", "--kv-cache-memory", "1KiB"], "kv_cache_memory"),
        (["run", "Hi", "--device", "cuda"], "device"),
    ):
        result = octavo(*arguments, "--max-tokens", "1")
        assert result.returncode in (1, 2) and result.stdout == "", arguments
        assert result.stderr.startswith("octavo: ") and result.stderr.count("\n") == 1 and words in result.stderr, result.stderr


def test_a_conversation_on_a_terminal(tmp_path):
    environment = {**os.environ, "TERM": "dumb"}
    arguments = ["-m", "octavo.cli.main", "chat", "--temperature", "0", "--max-tokens", "400", "--kv-cache-memory", "64MiB"]
    chat = pexpect.spawn(sys.executable, arguments, env=environment, encoding="utf-8", timeout=120, dimensions=(40, 200))
    chat.expect_exact(">>> ")
    chat.sendline("/set max_tokens 6")
    chat.expect_exact(">>> ")
    chat.sendline("Hello")
    chat.expect("tokens/s, first after")
    chat.expect_exact(">>> ")
    chat.sendline("/set ignore_eos true")
    chat.expect_exact(">>> ")
    chat.sendline("/set max_tokens 4000")
    chat.expect_exact(">>> ")
    chat.sendline("Tell me a long story.")
    chat.expect_exact("Tell me a long story.")  # the echo
    chat.expect(r"\w+ \w+ \w+")  # it has begun
    chat.sendintr()
    chat.expect_exact("stopped: ")
    chat.expect_exact(">>> ")
    chat.sendline("/stats")
    chat.expect_exact("requests_aborted: 1")  # the engine has let go of it
    chat.expect_exact("running: 0")
    chat.expect_exact(">>> ")
    chat.sendline(f"/save {tmp_path / 'chat.json'}")
    chat.expect_exact("saved 4 messages")
    chat.expect_exact(">>> ")
    for _ in range(3):  # as soon as the question is in, answer begun or not: the program stays
        chat.sendline("Tell me another one.")
        chat.expect_exact("Tell me another one.")
        chat.sendintr()
        chat.expect_exact("stopped: ")
        chat.expect_exact(">>> ")
    chat.sendeof()
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2 and all(message["content"] for message in messages)


def test_the_oldest_turns_go_when_the_real_context_is_full():
    chat = pexpect.spawn(
        sys.executable,
        [
            "-m",
            "octavo.cli.main",
            "chat",
            "--max-model-len",
            "128",
            "--kv-cache-memory",
            "64MiB",
            "--temperature",
            "0",
            "--max-tokens",
            "16",
        ],
        env={**os.environ, "TERM": "dumb"},
        encoding="utf-8",
        timeout=120,
        dimensions=(40, 200),
    )
    shown = ""
    for _ in range(5):
        chat.expect_exact(">>> ")
        shown += chat.before
        chat.sendline("Tell me about the sea and the mountains, please.")
    chat.expect_exact(">>> ")
    shown += chat.before
    chat.sendeof()
    chat.expect(pexpect.EOF)
    chat.close()
    assert "to fit the context of 128 tokens" in shown and shown.count("tokens/s") == 5 and "octavo:" not in shown
