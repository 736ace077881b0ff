"""Where the time went, to the last microsecond, on scripted steps; and what would have helped."""

from __future__ import annotations

import pytest

from octavo.errors import OctavoError
from octavo.trace import explain
from octavo.trace.record import seconds
from octavo.trace.report import as_object, lines, percentages
from octavo.trace.row_model import fit
from tests.trace.scripted import FIXED, GENERATED, PROMPT, G, P, Script, admission, pushed_out

#: A step takes this much longer than its forward pass.
WHOLE = 1.25


def company() -> Script:
    """a waits 3 s for the engine and 2 s in the queue, computes a prompt of 12 in two chunks, and decodes beside b, then alone."""
    script = Script()
    script.step(("b", 0, 8, P, "new"), admitted=[admission("b", 99.0, 8)])
    start = script.now
    script.step(("b", 8, 1, G, "decode"), ("a", 0, 8, P, "new"), admitted=[admission("a", start - 5, 12, added=start - 2)])
    script.step(("b", 9, 1, G, "decode"), ("a", 8, 4, P, "prompt"))
    script.step(("b", 10, 1, G, "decode"), ("a", 12, 1, G, "decode"), ends=[("b", 4)])
    script.step(("a", 13, 1, G, "decode"), dropped=["b"])
    script.step(("a", 14, 1, G, "decode"), ends=[("a", 4)])
    return script


def test_every_part_is_what_the_script_says():
    found = explain(company().trace(), "a")
    alone = [FIXED + 8 * PROMPT, FIXED + 4 * PROMPT, *[FIXED + GENERATED] * 3]
    shared = 3 * GENERATED  # b's row in three of the steps
    decode = sum(alone[2:])
    expected = {
        "intake": 3.0,
        "queue": 2.0,
        "prefill 0 8": alone[0] * (WHOLE - 1 / 16),
        "prefill 8 12": alone[1] * (WHOLE - 1 / 16),
        "schedule": decode / 16,
        "forward": decode,
        "sample": decode / 8,
        "detokenise": sum(alone) / 16,
        "others": shared * WHOLE,
        "between": 4 * 0.25,
        "other": 0.0,
    }
    assert found.parts == pytest.approx(expected, abs=1e-9) and list(found.parts) == list(expected)
    assert found.total == pytest.approx(5 + sum(alone) * WHOLE + shared * WHOLE + 1.0) == pytest.approx(sum(found.parts.values()))
    assert (found.num_others, found.num_prompt_tokens, found.num_output_tokens, found.num_preemptions) == (1, 12, 4, 0)
    assert not found.rough and found.reason == "length"


def test_the_row_model_finds_the_cost_it_was_shown():
    model = fit(company().trace())
    assert model.coefficients == pytest.approx([FIXED * WHOLE, GENERATED * WHOLE, PROMPT * WHOLE, 0, 0], abs=1e-9)


def test_claims_are_what_the_change_would_have_cost():
    claims = {next(iter(claim.change)): claim for claim in explain(company().trace(), "a").claims}
    # a hit of 8 tokens: the first chunk's step does not happen, the second computes the same 4
    assert claims["prefix_tokens"].change == {"prefix_tokens": 8}
    assert claims["prefix_tokens"].seconds == pytest.approx((FIXED + GENERATED + 8 * PROMPT) * WHOLE)
    assert claims["without_others"].seconds == pytest.approx(2 + 3 * GENERATED * WHOLE)
    # 6 tokens instead of 12: two rows less in the first chunk, no second one
    assert claims["prompt_tokens"].seconds == pytest.approx((2 * PROMPT + FIXED + GENERATED + 4 * PROMPT) * WHOLE)
    # the first token came with the prompt, two of the three others stay
    assert claims["answer_tokens"].change == {"answer_tokens": 3}
    assert claims["answer_tokens"].seconds == pytest.approx((FIXED + GENERATED) * WHOLE + 0.25)


def test_preemption_is_waiting_and_computing_again():
    script = pushed_out()
    found = explain(script.trace(), "a")
    one = FIXED + GENERATED
    # two steps of b's, and the time behind each of them
    assert found.parts["preempted"] == pytest.approx(2 * one * WHOLE + 2 * 0.25)
    # of the two generated tokens one had been computed before
    assert found.parts["recompute"] == pytest.approx(((FIXED + 4 * PROMPT) + (FIXED + 2 * GENERATED) / 2) * WHOLE)
    assert found.parts["others"] == pytest.approx(4 * PROMPT * WHOLE) and found.num_preemptions == 1
    assert sum(found.parts.values()) == pytest.approx(found.total)
    pool = next(claim for claim in found.claims if "larger_pool" in claim.change)
    # without it: one more step beside b, one alone, instead of two of waiting and three more
    without = [FIXED + 4 * PROMPT, FIXED + GENERATED + 4 * PROMPT, FIXED + 2 * GENERATED, FIXED + 2 * GENERATED]
    assert pool.seconds == pytest.approx(found.total - sum(without) * WHOLE - 3 * 0.25)


def test_a_step_without_a_row_of_its_own_is_waiting():
    script = Script()
    script.step(("a", 0, 4, P, "new"), admitted=[admission("a", 100.0, 8)])
    script.step(("b", 0, 16, P, "new"), admitted=[admission("b", 100.0, 16)])
    script.step(("a", 4, 4, P, "starved"), ends=[("a", 1)])
    found = explain(script.trace(), "a")
    assert found.parts["others"] == pytest.approx((FIXED + 16 * PROMPT) * WHOLE)


def test_a_choice_has_the_prompt_of_its_request():
    script = Script()
    script.step(("r", 0, 7, P, "new"), admitted=[admission("r", 99.0, 8)])
    forks = [admission(f"r#{i}", 99.0, 8, 7)._replace(parent="r") for i in range(2)]
    script.step(("r#0", 7, 1, P, "fork"), ("r#1", 7, 1, P, "fork"), admitted=forks)
    script.step(("r#0", 8, 1, G, "decode"), ("r#1", 8, 1, G, "decode"), ends=[("r#0", 2), ("r#1", 2)])
    trace = script.trace()
    assert explain(trace, "r").request_id == "r#0" and explain(trace).request_id in ("r#0", "r#1")
    found = explain(trace, "r#1")
    assert found.parts["queue"] == pytest.approx(1.0 + 0.25) or found.parts["queue"] == pytest.approx(1.0)
    assert {"prefill 0 7", "prefill 7 8", "forward", "others"} <= set(found.parts)
    assert sum(found.parts.values()) == pytest.approx(found.total)


def test_requests_that_are_not_there_whole_are_refused():
    script = company()
    trace = script.trace()
    with pytest.raises(OctavoError, match="no request 'c'; there are: b, a"):
        explain(trace, "c")
    trace.steps = trace.steps[2:]
    with pytest.raises(OctavoError, match="from its beginning on"):
        explain(trace, "a")
    with pytest.raises(OctavoError, match="no request from its beginning"):
        explain(trace)


def test_percentages_add_up_and_so_does_the_table():
    assert percentages([1, 1, 1]) == [33.4, 33.3, 33.3] and percentages([0.0, 0.0]) == [0.0, 0.0]
    found = explain(company().trace(), "a")
    table = [line for line in lines(found) if line.endswith("%")]
    assert sum(round(10 * float(line.split()[-2])) for line in table[:-1]) == 1000 and table[-1].endswith("100.0 %")
    shown = as_object(found)
    assert sum(part["ms"] for part in shown["parts"]) == pytest.approx(shown["total_ms"])
    assert round(sum(part["percent"] for part in shown["parts"]), 6) == 100


def test_steps_of_one_kind_alone_are_called_a_guess():
    script = Script()
    script.step(("a", 0, 4, P, "new"), ("b", 0, 4, P, "new"), admitted=[admission(name, 100.0, 4) for name in "ab"])
    for place in (4, 5):
        script.step(("a", place, 1, G, "decode"), ("b", place, 1, G, "decode"))
    trace = script.trace()
    assert explain(trace, "a").rough and "a guess" in "\n".join(lines(explain(trace, "a")))
    assert seconds(trace.steps[0]) == pytest.approx((FIXED + 8 * PROMPT) * WHOLE)
