"""The command line as a program: exit codes, one-line errors, pipes, signals; with a scripted engine (fake_cli.py).

Streams, encodings and signals are tested on real processes; what depends on the arguments alone runs in this one.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import octavo as octavo_package
from octavo.cli.main import main
from tests.unit.fake_cli import FakeLLM

FAKE = Path(__file__).with_name("fake_cli.py")
COMMANDS = ("chat", "run", "models", "doctor")


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command in this process: (exit code, output, errors)."""

    def run(*arguments, stdin="", environment=None):
        monkeypatch.setitem(sys.modules, "octavo.llm", types.SimpleNamespace(LLM=FakeLLM))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


def octavo(*arguments, stdin="", environment=None, **settings):
    """Run the command in its own process; bytes in `stdin` go through as they are."""
    data = stdin if isinstance(stdin, bytes) or stdin is None else stdin.encode()
    environment = {**os.environ, "NO_COLOR": "1", **(environment or {})}
    result = subprocess.run([sys.executable, FAKE, *arguments], input=data, capture_output=True, env=environment, timeout=60, **settings)
    return result.returncode, result.stdout.decode("utf-8", "replace"), result.stderr.decode("utf-8", "replace")


@pytest.fixture
def log(tmp_path):
    """(environment, read): what the engine was asked."""
    path = tmp_path / "log"
    return {"FAKE_LOG": str(path)}, lambda: [json.loads(line) for line in path.read_text().splitlines()]


def assert_one_line(error):
    assert error.startswith("octavo: ") and error.count("\n") == 1 and error.endswith("\n"), error


# -- help and usage ------------------------------------------------------------------------------------------------
def test_help_lists_every_command_and_each_has_examples(call):
    code, out, err = call()
    assert code == 0 and not err
    for command in COMMANDS:
        assert f"\n  {command} " in out
        code, text, err = call(command, "--help")
        assert code == 0 and not err and "Examples:" in text and f"octavo {command}" in text.split("Examples:")[1]


def test_flags_that_take_a_list_say_so(call):
    text = call("run", "--help")[1]
    assert "--stop-token-ids LIST" in text and "--logit-bias LIST" in text and "--top-k INTEGER" in text


def test_version(call):
    assert call("--version") == (0, f"octavo {octavo_package.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu", "hi"], "did you mean run?"),
        (["--bogus"], "No such option: --bogus"),
        (["run", "--bogus", "hi"], "octavo run --help"),
        (["run", "--max-tokens"], "requires an argument"),
        (["run", "--max-tokens", "x", "hi"], "--max-tokens: must be an integer or none, got 'x'"),
        (["run", "--threads", "x", "hi"], "--threads: must be an integer, got 'x'"),
        (["run", "--kv-cache-memory", "lots", "hi"], "not a memory size"),
        (["run", "--temperature", "-1", "hi"], "temperature: must be between"),
        (["run", "--temperature", "nan", "hi"], "temperature: must be a finite number"),
        (["run", "--logit-bias", "7", "hi"], "--logit-bias: must be a list of ID=VALUE"),
        (["run", "--logprobs", "2", "hi"], "need --json"),
        (["run", "how", "are", "you"], "put the prompt in quotes"),
        (["run", ""], "the prompt is empty"),
        (["run", " \n"], "the prompt is empty"),
        (["run", "-"], "standard input is empty"),
        (["run"], "standard input is empty"),
        (["chat"], "standard input is empty"),
        (["chat", "-n", "2"], "No such option: -n"),
        (["run", "--config", "/nonexistent/o.yaml", "hi"], "No such file"),
        (["run", "refuse"], "the request is refused"),
        (["models", "extra"], "extra"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(call, arguments, words):
    code, out, err = call(*arguments)
    assert code == 2 and not out.strip()
    assert_one_line(err)
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "missing", "hi"], "no such model and this is a second line"),
        (["run", "fail"], "the request failed"),
        (["run", "dead"], "the engine is dead"),
        (["run", "crash"], "internal error: RuntimeError: a bug (--debug shows where)"),
    ],
)
def test_a_failure_is_one_line_and_exit_1(call, arguments, words):
    code, _, err = call(*arguments)
    assert code == 1
    assert_one_line(err)
    assert words in err and "Traceback" not in err


def test_the_program_itself_fails_in_one_line():
    """What the tests above see in this process is what a shell sees."""
    for arguments, expected in ((["run", "fail"], 1), (["run", "--threads", "x", "hi"], 2)):
        code, _, err = octavo(*arguments)
        assert code == expected
        assert_one_line(err)


@pytest.mark.parametrize("arguments", [["--debug", "run", "crash"], ["run", "crash", "--debug"]])
def test_debug_shows_the_traceback(call, arguments):
    code, _, err = call(*arguments)
    assert code == 1 and "Traceback" in err and err.splitlines()[-1].startswith("octavo: internal error")


def test_debug_after_two_dashes_is_text(call, log):
    environment, asked = log
    code, _, err = call("run", "--", "--debug", environment=environment)
    assert code == 0 and "Traceback" not in err
    assert [entry["messages"][0]["content"] for entry in asked() if entry["event"] == "chat"] == ["--debug"]


def test_help_and_bad_usage_do_not_wait_for_the_engine():
    heavy = ("numpy", "tokenizers", "jinja2", "rich", "torch", "transformers", "huggingface_hub", "pydantic")
    for arguments in (["--version"], ["run", "--help"], ["run", "--threads", "x", "hi"]):
        program = f"import sys; from octavo.cli.main import main; main({arguments}); print(sorted(set({heavy}) & set(sys.modules)))"
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert result.stdout.splitlines()[-1] == "[]", arguments


# -- run -----------------------------------------------------------------------------------------------------------
def test_run_writes_only_the_answer_to_standard_output():
    assert octavo("run", "hello there") == (0, "you said hello there \n", "")


@pytest.mark.parametrize(
    ("arguments", "stdin", "model", "prompt"),
    [
        (["hello"], "", "smollm2", "hello"),
        (["some/model", "hello"], "", "some/model", "hello"),
        (["smollm2"], "from a pipe\n", "smollm2", "from a pipe"),
        (["qwen2.5-7b"], "from a pipe", "qwen2.5-7b", "from a pipe"),
        (["-"], "two\nlines\n\n", "smollm2", "two\nlines\n"),
        ([], "piped\r\n", "smollm2", "piped"),
        (["some/model", "-"], "piped", "some/model", "piped"),
        (["--model", "some/model", "hello"], "ignored", "some/model", "hello"),
    ],
)
def test_which_argument_is_the_prompt(call, log, arguments, stdin, model, prompt):
    environment, asked = log
    code, _, err = call("run", *arguments, stdin=stdin, environment=environment)
    assert (code, err) == (0, "")
    opened, chat = (next(entry for entry in asked() if entry["event"] == event) for event in ("open", "chat"))
    assert opened["model"] == model
    assert chat["messages"] == [{"role": "user", "content": prompt}]


@pytest.mark.parametrize(
    ("arguments", "event"), [(["hi"], "chat"), (["--raw", "hi"], "raw"), (["base", "hi"], "raw"), (["--chat", "base", "hi"], "chat")]
)
def test_the_chat_template_is_used_where_there_is_one(call, log, arguments, event):
    environment, asked = log
    assert call("run", *arguments, environment=environment)[0] == 0
    assert [entry["event"] for entry in asked()] == ["open", event, "closed", "close"]


def test_run_json_is_one_object(call):
    code, out, err = call("run", "--json", "--logprobs", "1", "--seed", "3", "--n", "2", "hi \u00e9")
    assert (code, err) == (0, "") and out.count("\n") == 1
    result = json.loads(out)
    assert result["text"] == "you said hi \u00e9 " and result["token_ids"] == [0, 1, 2, 3] and result["finish_reason"] == "stop"
    assert [choice["index"] for choice in result["choices"]] == [0, 1]
    assert result["usage"] == {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 8, "total_tokens": 12}
    assert result["seed"] == 3 and set(result["timings"]) == {"load_s", "ttft_s", "total_s", "tokens_per_s"}
    assert result["choices"][0]["logprobs"][0] == [
        {"token_id": 0, "text": "you ", "logprob": -0.5, "rank": 1},
        {"token_id": 9, "text": "x", "logprob": None, "rank": 2},
    ]


def test_several_answers_are_numbered(call):
    assert call("run", "-n", "2", "hi")[:2] == (0, "[1] you said hi \n[2] you said hi \n")


def test_settings_reach_the_engine(call, log, tmp_path):
    environment, asked = log
    (tmp_path / "o.yaml").write_text("threads: 1\nmax_num_seqs: 3\n")
    for arguments, extra, threads in (
        (["--config", str(tmp_path / "o.yaml")], {}, 1),
        ([], {"OCTAVO_CONFIG": str(tmp_path / "o.yaml")}, 1),
        (["--config", str(tmp_path / "o.yaml")], {"OCTAVO_THREADS": "2"}, 2),
        (["--config", str(tmp_path / "o.yaml"), "--threads", "3"], {"OCTAVO_THREADS": "2"}, 3),
    ):
        assert call("run", *arguments, "hi", environment=environment | extra)[0] == 0
        assert [entry for entry in asked() if entry["event"] == "open"][-1]["threads"] == threads


# -- streams -------------------------------------------------------------------------------------------------------
def test_piped_chat_answers_and_exits(log):
    environment, asked = log
    code, out, err = octavo("chat", "--temperature", "0", stdin="What is\nthis?\n", environment=environment)
    assert code == 0 and out == "you said What is this? \n"
    assert err.startswith("5 tokens, ") and err.count("\n") == 1 and "\x1b" not in err
    chat = next(entry for entry in asked() if entry["event"] == "chat")
    assert chat["messages"] == [{"role": "user", "content": "What is\nthis?"}] and chat["temperature"] == 0


def test_input_that_is_no_text():
    for arguments in (["chat"], ["run", "-"]):
        code, _, err = octavo(*arguments, stdin=b"caf\xe9")
        assert code == 2 and "not valid UTF-8 (byte 3)" in err
    code, _, err = octavo("run", b"caf\xe9")
    assert code == 2 and "the prompt is not valid UTF-8" in err


def test_closed_streams():
    code, _, err = octavo("chat", stdin=None, preexec_fn=lambda: os.close(0))
    assert code == 2
    assert_one_line(err)
    closed = subprocess.run([sys.executable, FAKE, "run", "hi"], preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE, timeout=60)
    assert closed.returncode == 0 and closed.stderr == b""


def test_an_encoding_that_lacks_a_letter_costs_that_letter_only():
    code, out, err = octavo("run", "raw na\u00efve \u4f60", environment={"PYTHONIOENCODING": "ascii"})
    assert (code, err) == (0, "") and out == "na?ve ?\n"
    code, out, _ = octavo("run", "--json", "raw na\u00efve \u4f60", environment={"PYTHONIOENCODING": "ascii"})
    assert code == 0 and json.loads(out)["text"] == "na\u00efve \u4f60"


def test_piped_output_is_exactly_what_the_model_said():
    assert octavo("run", "raw \x1b[31mred\t\x07")[1] == "\x1b[31mred\t\x07\n"


def test_a_reader_that_goes_away_is_no_error(log):
    environment, asked = log
    command = [sys.executable, str(FAKE), "run", "slow"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment})
    assert process.stdout.read(2) == b"0 "
    process.stdout.close()
    assert process.wait(30) == 141 and process.stderr.read() == b""
    process.stderr.close()
    assert [entry["event"] for entry in asked()][-2:] == ["closed", "close"]


@pytest.mark.parametrize("arguments", [["run", "slow"], ["run", "--json", "slow"], ["chat"]])
def test_ctrl_c_ends_the_request_and_exits_130(log, arguments):
    environment, asked = log
    command = [sys.executable, str(FAKE), *arguments]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env={**os.environ, **environment}, **streams)
    if arguments == ["chat"]:
        process.stdin.write(b"slow")
    process.stdin.close()
    for _ in range(200):
        if os.path.exists(environment["FAKE_LOG"]) and any(entry["event"] in ("chat", "raw") for entry in asked()):
            break
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.stdout.read(), process.stderr.read()
    assert process.wait(30) == 130 and b"Traceback" not in err and b"Error" not in err
    assert [entry["event"] for entry in asked()][-2:] == ["closed", "close"]
    if "--json" in arguments:
        assert json.loads(out)["finish_reason"] == "abort"
    process.stdout.close(), process.stderr.close()


def test_no_home_and_no_writable_cache():
    environment = {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent/cache", "HF_HOME": "/nonexistent/hf"}
    for arguments in (["run", "hi"], ["models"], ["doctor"]):
        code, out, err = octavo(*arguments, environment=environment)
        assert code == 0 and out and "Traceback" not in err


# -- models and doctor ---------------------------------------------------------------------------------------------
def test_models_as_json_and_as_lines(call):
    code, out, _ = call("models", "--json")
    rows = {row["name"]: row for row in json.loads(out)["models"]}
    assert code == 0 and rows["smollm2"]["hub_id"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    for row in rows.values():
        assert row["local"] == (row["path"] is not None) and (not row["local"] or os.path.exists(row["path"]))
    code, out, _ = call("models")
    assert code == 0 and [line.split("\t")[0] for line in out.splitlines()] == list(rows)


def test_doctor_says_what_can_run(call):
    code, out, err = call("doctor", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "") and report["can_run"] and report["backends"]["reference"] == []
    assert 1 <= report["cores"]["usable"] <= report["cores"]["affinity"] <= report["cores"]["online"]
    assert report["memory"]["available"] <= report["memory"]["total"]
    code, text, _ = call("doctor")
    assert code == 0
    for name, reasons in report["backends"].items():
        assert f"backend    {name}: {'; '.join(reasons) or 'ready'}" in text


def test_doctor_warns_and_still_exits_0(call):
    code, out, err = call("doctor", "no/such-model", "--json", "--kv-cache-memory", "900000GiB", "--threads", "5000")
    assert (code, err) == (0, "")
    text = "\n".join(json.loads(out)["warnings"])
    assert "the model no/such-model is not here" in text and "lower --kv-cache-memory" in text and "threads is 5000" in text


def test_doctor_exits_1_where_nothing_can_run(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError('broken on purpose')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, out, _ = octavo("doctor", "--json", environment={"PYTHONPATH": path})
    report = json.loads(out)
    assert code == 1 and not report["can_run"] and "broken on purpose" in str(report["backends"])


# -- a terminal's locale, Ctrl-C, waiting --------------------------------------------------------------------------
def test_an_argument_survives_a_locale_without_utf8(log):
    environment, asked = log
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert octavo("run", "\u65e5\u672c", environment=environment)[0] == 0
    assert next(entry for entry in asked() if entry["event"] == "chat")["messages"][0]["content"] == "\u65e5\u672c"
    code, _, err = octavo("run", b"\xff", environment=environment)
    assert code == 2
    assert_one_line(err)


def test_ctrl_c_while_the_program_itself_is_loaded_is_quiet():
    """typer takes most of the start, so it must not be imported before main() can answer for Ctrl-C."""
    program = "import sys; import octavo.cli.main; print(sorted({'typer', 'click', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
    program = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from octavo.cli.main import main\n"
        "sys.exit(main(['run', 'hi']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "")


class Clock:
    """Stands in for a module's `time`."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def bars(monkeypatch):
    """(clock, LoadingBar on what claims to be a terminal, the bars it started as lists of events)."""
    from octavo.cli import loading_bar

    clock, started = Clock(), []

    class Bar(list):
        def update(self, task, completed, total):
            self.append((completed, total))

        def stop(self):
            self.append("stopped")

    monkeypatch.setattr(loading_bar, "time", clock)
    monkeypatch.setattr(loading_bar.terminal, "is_terminal", lambda stream: True)
    monkeypatch.setattr(loading_bar, "_start", lambda words: (started.append(Bar([words])) or started[-1], 0))
    return clock, loading_bar.LoadingBar, started


def test_the_loading_bar_is_for_what_takes_long(bars):
    clock, LoadingBar, started = bars
    with LoadingBar() as bar:
        for done in (1, 5, 10):  # at once: nothing is shown
            bar.report("load", done, 10)
    assert started == []
    with LoadingBar() as bar:
        bar.report("download", 1, 10)
        clock.now += 0.6
        bar.report("download", 5, 10)
        bar.report("download", 10, 10)
        bar.report("load", 1, 4)  # counts its own time
        clock.now += 0.6
        bar.report("load", 2, 4)
    assert started == [["fetching the model", (5, 10), "stopped"], ["loading the model", (2, 4), "stopped"]]


def test_there_is_no_loading_bar_in_a_pipe(bars, monkeypatch):
    clock, LoadingBar, started = bars
    monkeypatch.setattr("octavo.cli.loading_bar.terminal.is_terminal", lambda stream: False)
    with LoadingBar() as bar:
        bar.report("load", 1, 10)
        clock.now += 9
        bar.report("load", 2, 10)
    assert started == []


def test_the_real_bar_leaves_nothing_behind(monkeypatch):
    from octavo.cli import loading_bar

    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(loading_bar, "DELAY", 0)
    with loading_bar.LoadingBar() as bar:
        bar.report("load", 1 << 20, 4 << 20)
        bar.report("load", 2 << 20, 4 << 20)
    assert "loading the model" in stream.getvalue() and stream.getvalue().endswith("\x1b[2K")  # the line is erased


def test_closed_standard_files_are_not_taken_by_others():
    """As some who start daemons do it. Whatever is opened later must not become what is printed to."""
    code = (
        "import os\nfor number in (0, 1, 2):\n    os.close(number)\nfrom octavo.cli.main import main\n"
        "status = main(['models'])\nos._exit(os.dup(0) if status == 0 else 99)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert 3 <= done.returncode < 99
