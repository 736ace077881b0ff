"""A user's file: how it is read, how its mistakes are reported, and what is compared."""

import json

import numpy as np
import pytest

from octavo.lab.attention import naive
from octavo.lab.standard import strategy
from octavo.lab.standard.model import StrategyError


@pytest.fixture
def write(tmp_path):
    def make(text):
        path = tmp_path / "my.py"
        path.write_text(text, "utf-8")
        return path

    return make


def test_what_a_file_defines(write):
    found = strategy.load(write("import json\ndef generate(model, prompt_ids, max_tokens):\n    return [1]\n"))
    assert found.generate(None, [], 1) == [1] and found.attention is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "defines neither generate"),
        ("generate = 3\n", "defines neither generate"),
        ("def generate(:\n", r"my.py:1: SyntaxError"),
        ("\n\nimport nothing_like_this\n", r"my.py:3: in <module>: ModuleNotFoundError"),
        ("def f():\n    return 1 / 0\n\nf()\n", r"my.py:2: in f: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)\n", r"my.py:1: in <module>: SystemExit"),
    ],
)
def test_a_file_that_does_not_load(write, text, words):
    with pytest.raises(StrategyError, match=words):
        strategy.load(write(text))


def test_no_file(tmp_path):
    with pytest.raises(StrategyError, match="there is no such file"):
        strategy.load(tmp_path / "none.py")
    (tmp_path / "words.txt").write_text("generate = print")
    with pytest.raises(StrategyError, match=r"must end in \.py"):
        strategy.load(tmp_path / "words.txt")


def test_an_error_deep_in_a_library_is_reported_at_the_users_line(write):
    user = strategy.load(write("import json\n\ndef generate(model, prompt_ids, max_tokens):\n    return json.loads('{')\n"))
    with pytest.raises(StrategyError, match=r"my.py:4: in generate: JSONDecodeError"):
        strategy.guarded(user.path, user.generate, None, [], 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "must return a list"),
        ("abc", "must return a list"),
        ([1, 2], "must return 3 tokens, got 2"),
        ([1, 2, 3.0], "token 2 .* 3.0"),
        ([1, True, 2], "token 1 .* True"),
        ([1, 2, 99], "token 2 .* 99"),
        ([1, -1, 2], "token 1 .* -1"),
    ],
)
def test_an_answer_that_is_none(write, answer, words):
    with pytest.raises(StrategyError, match=words):
        strategy.check_tokens(write(""), answer, 3, 99)


def test_an_answer_of_numpy_integers(write):
    assert strategy.check_tokens(write(""), np.array([1, 2, 98]), 3, 99) == [1, 2, 98]


def test_the_first_difference():
    logits = np.zeros((3, 10), np.float32)
    logits[1, 4], logits[1, 5] = 2.5, 1.0

    def differ(got, gaps):
        return strategy.first_difference([3, 4, 6], got, logits, gaps, 7)

    assert differ([3, 4, 6], [(0, 0.0), (1, 1e-4), (2, 1e-3)]) is None
    first = differ([3, 5, 9], [(0, 0.0), (1, 1e-4)])
    assert (first["token"], first["position"], first["expected"], first["got"], first["logit_gap"]) == (1, 8, 4, 5, 1.5)
    early = differ([3, 5, 9], [(0, 0.5), (1, 0.7)])  # its logits were wrong before its tokens were
    assert (early["token"], early["expected"], early["got"], early["logit_difference"]) == (0, 3, 3, 0.5)


GOOD = "from octavo.lab.attention.flash import attention\n"
#: name -> (file, where it must be caught)
BROKEN = {
    "not causal": ("import numpy as np\n"
                   "def attention(q, k, v):\n"
                   "    s = q @ np.repeat(k, 3, 0).swapaxes(1, 2) / 8\n"
                   "    w = np.exp(s)\n"
                   "    return (w / w.sum(-1, keepdims=True)) @ np.repeat(v, 3, 0)\n", (2, 0, 0)),
    "wrong scale at long lengths": ("from octavo.lab.attention import naive\n"
                                    "def attention(q, k, v):\n"
                                    "    out = naive.attention(q, k, v)\n"
                                    "    out[2, 200:] *= 1.01\n"
                                    "    return out\n", (300, 200, 2)),
    "not a number": ("from octavo.lab.attention import naive\n"
                     "def attention(q, k, v):\n"
                     "    out = naive.attention(q, k, v)\n"
                     "    out[1, 5:6] = float('nan')\n"
                     "    return out\n", (17, 5, 1)),
}  # fmt: skip


def test_good_attention_is_verified(write):
    found = strategy.check_attention(strategy.load(write(GOOD)))
    assert found["verified"] and 0 < found["largest_difference"] < strategy.ATTENTION_TOLERANCE


@pytest.mark.parametrize("name", BROKEN)
def test_broken_attention_is_caught_where_it_breaks(write, name):
    text, (length, token, head) = BROKEN[name]
    found = strategy.check_attention(strategy.load(write(text)))
    first = found["first_difference"]
    assert not found["verified"] and (first["length"], first["token"], first["head"]) == (length, token, head)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_no_number_can_be_written_as_json(write, value):
    found = strategy.check_attention(strategy.load(write(f"def attention(q, k, v):\n    return q * float('{value}')\n")))
    assert not found["verified"] and found["largest_difference"] is None
    assert "Infinity" not in json.dumps(found, allow_nan=False) and float(found["first_difference"]["got"]) != 0


def test_attention_that_is_no_array_of_numbers(write):
    with pytest.raises(StrategyError, match=r"my.py: ValueError"):
        strategy.check_attention(strategy.load(write("def attention(q, k, v):\n    return q.astype(str).astype(object) + 'x'\n")))


def test_attention_of_another_shape(write):
    with pytest.raises(StrategyError, match=r"must return an array \(9, 1, 64\) for 1 tokens, got \(1,\)"):
        strategy.check_attention(strategy.load(write("def attention(q, k, v):\n    return q[:1, 0, 0]\n")))


def test_an_attention_that_changes_its_inputs_harms_nothing(write):
    user = strategy.load(write("from octavo.lab.attention import naive\ndef attention(q, k, v):\n    out = naive.attention(q, k, v)\n"
                               "    q[:] = 0\n    return out\n"))  # fmt: skip
    assert strategy.check_attention(user)["verified"]
    assert naive.attention is not user.attention
