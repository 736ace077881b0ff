"""`octavo lab` as a user runs it."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.lab.lessons import LESSONS
from octavo.lab.standard import examples, experiment

EXAMPLES = Path(examples.__path__[0])
ARMS = [arm[0] for arm in experiment.ARMS]


def test_the_lessons_are_listed_and_have_their_parts(octavo):
    listed = octavo("lab", "list")
    assert listed.returncode == 0 and all(name in listed.stdout for name in LESSONS)
    found = json.loads(octavo("lab", "list", "--json").stdout)["lessons"]
    assert [lesson["name"] for lesson in found] == list(LESSONS) == ["attention", "standard"]
    for lesson in found:
        text = Path(lesson["text"])
        words = text.read_text("utf-8")
        assert list(text.parent.glob("naive*.py")) and (text.parent / "experiment.py").exists()
        for heading in ("## Theory", "## Prediction", "## Measurement", "## What it means for flags"):
            assert heading in words
        assert re.search(r"\| *Octavo *\| *vLLM *\| *TensorRT-LLM *\| *llama.cpp *\|", words)


def test_attention_as_json_with_a_figure_and_a_file(octavo, tmp_path):
    done = octavo(
        "lab",
        "run",
        "attention",
        "--lengths",
        "128",
        "--runs",
        "1",
        "--json",
        "--plot",
        tmp_path / "a.svg",
        "--output",
        tmp_path / "a.json",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["lesson"] == "attention" and found["bound"]["holds"] and found["settings"]["lengths"] == [128]
    assert {"length", "way", "seconds", "peak_bytes", "mean_diff", "max_diff", "mean_error", "max_error"} <= set(found["rows"][0])
    record = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert record["results"]["rows"] == found["rows"] and record["machine"]["cpu"] and "lab run attention" in record["command"]
    assert (tmp_path / "a.svg").read_text("utf-8").startswith("<svg")


def run_standard(octavo, model, *arguments):
    return octavo("lab", "run", "standard", "--quick", "--model", model, *arguments)


def test_standard_on_the_real_model_with_the_good_example(octavo, smollm2_path, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text((EXAMPLES / "good_strategy.py").read_text("utf-8") + "\n\nfrom octavo.lab.attention.efficient import attention\n")
    done = run_standard(octavo, smollm2_path, "--strategy", mine, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["arm"] for row in found["arms"]] == [*ARMS, "mine.py"] and not found["skipped"]
    rows = {row["arm"]: row for row in found["arms"]}
    assert len({row["text"] for row in rows.values()}) == 1 and len(rows["naive, NumPy"]["token_ids"]) == 8
    for row in rows.values():
        assert row["tokens_equal_naive"] and row["tokens_equal_reference"] and row["repeats"]
        assert 0 < row["ttft_s"] <= row["seconds"] and row["tokens_per_s"] == pytest.approx(8 / row["seconds"])
        # the reference holds 134 million numbers as float32, the native kernels keep them in 5 to 6 bits
        assert row["peak_bytes"] > 500e6 if row["backend"] == "reference" else 100e6 < row["peak_bytes"] < 450e6
        # on the same native ops not a bit differs, with or without a cache, by hand or in the engine
        if row["backend"] == "cpu":
            assert row["max_logit_diff_naive"] == 0 < row["max_logit_diff_reference"] < 1
        else:
            assert row["max_logit_diff_reference"] < 1e-3
    assert rows["engine, whole reply"]["ttft_s"] == rows["engine, whole reply"]["seconds"]
    assert rows["engine, streaming"]["ttft_s"] < rows["engine, streaming"]["seconds"]
    assert all(rows[arm]["predicted_s"] > 0 for arm in ARMS)
    assert [c["what"] for c in found["comparisons"]] == [c[0] for c in experiment.COMPARISONS]
    assert found["curve"]["lengths"] == [4, 8] and found["curve"]["naive_steps_computed"] == found["curve"]["naive_steps_agreeing"] == 8
    assert found["curve"]["naive"][1] > found["curve"]["naive"][0] > 0
    strategy = found["strategy"]
    assert strategy["generate"] == {"verified": True, "first_difference": None} and strategy["attention"]["verified"]
    assert list(strategy["attention"]["seconds"]) == ["naive", "efficient", "flash-style", "mine.py"]
    assert "mine.py: attention verified" in experiment.report(found)


def test_the_broken_example_is_caught(octavo, tiny_path, tmp_path):
    done = run_standard(octavo, tiny_path, "--strategy", EXAMPLES / "broken_strategy.py", "--plot", tmp_path / "s.svg")
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"octavo: broken_strategy\.py first differs from naive decoding at position \d+ \(token \d+ of the answer\): "
        r"expected token \d+ .+, got \d+ .+, whose logit is [\d.e-]+ lower in the naive run", message,
    )  # fmt: skip
    assert "NOT verified" in done.stdout and "roofline" in done.stdout and "####" in done.stdout
    assert (tmp_path / "s.svg").read_text("utf-8").count("<polyline") == 3


def test_a_users_error_is_shown_with_its_line_and_what_it_prints_is_not_ours(octavo, tiny_path, tmp_path):
    (tmp_path / "beside.py").write_text("def index(values):\n    return values[99]\n")
    mine = tmp_path / "my.py"
    mine.write_text(
        "import beside\n\ndef generate(model, prompt_ids, max_tokens):\n    print('hello')\n    return beside.index(prompt_ids)\n"
    )
    done = run_standard(octavo, tiny_path, "--strategy", mine, "--json")
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr and "hello" in done.stderr
    assert done.stderr.splitlines()[-1] == f"octavo: {mine}:5: in generate: IndexError: list index out of range"


@pytest.mark.parametrize("flag", ["--output", "--plot"])
def test_a_file_that_cannot_be_written_does_not_take_the_results_along(octavo, tmp_path, flag):
    (tmp_path / "taken.svg").mkdir()
    done = octavo("lab", "run", "attention", "--quick", "--lengths", "8", "--json", flag, tmp_path / "taken.svg")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("Is a directory")
    assert json.loads(done.stdout)["lesson"] == "attention"


def test_a_thread_that_a_file_leaves_behind_is_not_waited_for(octavo, tiny_path, tmp_path):
    mine = tmp_path / "my.py"
    mine.write_text("import threading, time\n\nthreading.Thread(target=time.sleep, args=(3000,)).start()\nraise MemoryError\n")
    done = run_standard(octavo, tiny_path, "--strategy", mine)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"octavo: {mine}:4: in <module>: MemoryError")


def test_a_strategy_that_never_returns_ends_with_the_program(tiny_path, tmp_path):
    mine = tmp_path / "my.py"
    mine.write_text("import os\n\nprint('pid', os.getpid(), flush=True)\nwhile True:\n    pass\n")
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "lab",
        "run",
        "standard",
        "--quick",
        "--model",
        str(tiny_path),
        "--strategy",
        str(mine),
    ]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # nobody is left to remove its folder
    with subprocess.Popen(command, **pipes, text=True, env=environment) as program:
        pid = next(line for line in program.stderr if line.startswith("pid ")).split()[1]
        program.kill()
        # the pipe ends when the last process that holds it has ended
        ended = select.select([program.stderr], [], [], 30)[0] and not program.stderr.read()
        if not ended:
            os.kill(int(pid), signal.SIGKILL)
    assert ended


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["attentoin"], "did you mean attention?"),
        (["standard", "--heads", "3"], "--heads is no setting of the lesson standard"),
        (["attention", "--max-tokens", "3"], "--max-tokens is no setting of the lesson attention"),
        (["attention", "--lengths", "many"], "--lengths must be"),
        (["attention", "--lengths", "0"], "--lengths must be"),
        (["standard", "--max-tokens", "1"], "--max-tokens must be between"),
        (["standard", "--strategy", "nothing.py"], "there is no such file"),
        (["attention", "--plot", "a.png"], "must end in .svg"),
    ],
)
def test_bad_usage_is_one_line(octavo, arguments, words):
    done = octavo("lab", "run", *arguments)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1 and words in done.stderr
