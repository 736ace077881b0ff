"""Requests that are several to the engine (n > 1, beams), that wait for another's beginning, and files that lie: explained or refused."""

from __future__ import annotations

import copy
import json
import random

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.trace import of_llm
from octavo.engine.engine_core import EngineCore
from octavo.errors import OctavoError
from octavo.trace import explain
from octavo.trace.blocks import holders, tables
from octavo.trace.html import page
from octavo.trace.perfetto import chrome_trace
from octavo.trace.record import Settings, Trace, decode
from octavo.trace.report import as_object, lines
from tests.engine.fake import FakeExecutor, make_core, request, run
from tests.trace.scripted import FIXED, GENERATED, G, P, Script, admission, pushed_out

WHOLE = 1.25


def traced(core: EngineCore) -> Trace:
    config, groups = core.config, core.executor.info.kv_groups
    limits = Settings(config.max_num_batched_tokens, config.max_num_seqs, config.max_prefill_batch_size, config.max_decode_batch_size)
    return Trace(core.events.recent(), "fake", 4, [group.num_blocks for group in groups], limits)


def summed(trace: Trace, name: str):
    found = explain(trace, name)
    assert sum(found.parts.values()) == pytest.approx(found.total, abs=1e-9) and min(found.parts.values()) >= -1e-9
    return found


def test_a_choice_goes_on_when_its_parent_lets_go_of_the_blocks():
    core = make_core(num_blocks=24, max_num_seqs=2, enable_prefix_caching=False)
    run(core, [request("a", [6 + i % 20 for i in range(40)], eos=False, n=4, temperature=1.0, max_tokens=28)])
    trace = traced(core)
    assert "a" in {name for event in trace.steps for name in event.preempted}, "the parent was to be pushed out"
    for choice in range(4):
        name = f"a#{choice}"
        own = sum(name in event.preempted for event in trace.steps)
        found = summed(trace, name)
        if not own and any(name == one.request_id and one.num_found for event in trace.steps for one in event.admitted):
            assert found.num_preemptions == 0 and "preempted" not in found.parts and "recompute" not in found.parts
    assert "preempted" not in summed(trace, "a#0").parts


def test_waiting_for_the_same_beginning_is_a_part_of_its_own():
    core = make_core(num_blocks=200, max_num_batched_tokens=16, max_stalled_steps=4)
    shared = [6 + (i * i) % 23 for i in range(160)]
    run(core, [request("leader", [*shared, 9], eos=False, max_tokens=2), request("behind", [*shared, 10], eos=False, max_tokens=2)])
    trace = traced(core)
    (one,) = [one for event in trace.steps for one in event.admitted if one.request_id == "behind"]
    ((first, stop),) = one.followed
    assert stop - first >= 4 and core.stats.prefix_waits == 1 and one.num_found == 160
    assert not any(entry.request_id == "behind" for event in trace.steps if event.step < stop for entry in event.entries)
    found = summed(trace, "behind")
    begin, until = (next(event.time for event in trace.steps if event.step == step) for step in (first, stop))
    assert found.parts["follow"] == pytest.approx(until - begin)
    assert "follow" not in summed(trace, "leader").parts


def test_following_is_divided_to_the_last_microsecond():
    script = Script()
    script.step(("b", 0, 8, P, "new"), admitted=[admission("b", 99.0, 16)])
    script.step(("b", 8, 8, P, "prompt"))
    waited = admission("a", 99.0, 12, 8)._replace(followed=((1, 3),))
    script.step(("b", 16, 1, G, "decode"), ("a", 8, 4, P, "new"), admitted=[waited])
    script.step(("a", 12, 1, G, "decode"), ends=[("a", 2)])
    found = summed(script.trace(), "a")
    assert found.parts["follow"] == pytest.approx(2 * (FIXED + 4) * WHOLE + 2 * 0.25)
    assert found.parts["queue"] == pytest.approx(1.0)
    # alone it would not have waited, but computed the beginning itself
    alone = next(claim for claim in found.claims if "without_others" in claim.change)
    assert alone.seconds == pytest.approx(1 + 2 * (FIXED + 4) * WHOLE + 0.5 + GENERATED * WHOLE - 8 * 0.5 * WHOLE)


@pytest.mark.parametrize("blocks", [200, 14])
def test_a_beam_search_is_one_request(blocks):
    core = make_core(num_blocks=blocks, block_size=4)
    orders = [request("s", [6 + i % 20 for i in range(18)], eos=False, beam_width=3, n=2, max_tokens=10)]
    run(core, [*orders, request("o", [9] * 30, eos=False, max_tokens=20)])
    trace = traced(core)
    found = summed(trace, "s")
    assert found.request_id == "s" and found.num_output_tokens == 10 and found.num_others == 1
    rows = {event.step for event in trace.steps if any(entry.request_id.startswith("s#") for entry in event.entries)}
    assert len(rows) >= 10 and found.parts["schedule"] > 0 and any(name.startswith("prefill") for name in found.parts)
    assert explain(trace, "s#1").request_id == "s" and explain(trace, "o").num_others <= 1
    if blocks == 14:
        assert core.stats.preemptions


def test_beams_of_a_real_model_are_divided(smollm2_path):
    with LLM(str(smollm2_path), kv_cache_memory="64MiB") as llm:
        llm.generate("The rivers of Europe are", SamplingParams(beam_width=3, temperature=0, max_tokens=8))
        found = explain(of_llm(llm))
    assert sum(found.parts.values()) == pytest.approx(found.total) and found.parts["other"] <= 0.03 * found.total
    assert {"forward", "sample", "prefill 0 4", "prefill 4 5"} <= set(found.parts) and found.num_output_tokens == 8, found.parts
    # all its steps are its own: nobody else was there
    assert "others" not in found.parts and found.num_others == 0
    assert round(sum(part["percent"] for part in as_object(found)["parts"]), 6) == 100.0


def test_times_are_of_the_clock_of_the_core():
    ticks = iter(range(1000, 10**6))
    core = make_core()
    core = EngineCore(FakeExecutor(), core.tokenizer, core.config, clock=lambda: float(next(ticks)))
    run(core, [request("a", [6, 7, 8], n=2, temperature=1.0, max_tokens=3)])
    added = [one.added for event in core.events.recent() for one in event.admitted]
    assert added == [1000.0] * 3


def test_the_larger_pool_is_priced_against_the_same_model():
    """Where the model is off by a factor for every step, the claim is off by no more than what was saved, not by the whole run."""
    from octavo.trace.counterfactual import saved_without_preemption
    from octavo.trace.explain import find
    from octavo.trace.row_model import RowModel

    script = pushed_out(gap=0.0)
    case = find(script.trace(), "a")
    truth = saved_without_preemption(case)
    case.model = RowModel(tuple(1.2 * value for value in case.model.coefficients), case.model.shapes)
    assert truth > 0 and saved_without_preemption(case) == pytest.approx(truth)


# Files that lie


def everything(trace: Trace) -> None:
    for name in [None, *{one.request_id for event in trace.steps for one in event.admitted}]:
        try:
            found = explain(trace, name)
        except OctavoError as error:
            assert "\n" not in str(error)
            continue
        lines(found)
        json.dumps(as_object(found), allow_nan=False)
    page(trace)
    json.dumps(chrome_trace(trace), allow_nan=False)


def record() -> dict:
    import msgspec

    core = make_core(num_blocks=14, max_num_batched_tokens=12)
    orders = [request(f"r{i}", [6 + i] * 9, eos=False, max_tokens=6, n=1 + i % 2, temperature=1.0) for i in range(4)]
    run(core, [*orders, request("s", [9] * 6, eos=False, beam_width=2, max_tokens=3)])
    return json.loads(msgspec.json.encode(traced(core)))


def places(value, path=()):
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from places(inner, (*path, key))


HOSTILE = [-1, 0, 1, 2**31, 2**62, 1e308, -1e308, 1e-320, "", "r0", "s#1", None, [], True, [[]], [[-5]]]


def test_changed_records_are_read_or_refused_in_one_line():
    good, draw, refused = record(), random.Random(11), 0
    everything(decode(json.dumps(good).encode(), "good"))
    paths = list(places(good))
    for _ in range(400):
        bad = copy.deepcopy(good)
        for _ in range(draw.choice([1, 1, 3])):
            *outer, last = draw.choice(paths)
            inner = bad
            try:
                for key in outer:
                    inner = inner[key]
                inner[last] = draw.choice(HOSTILE)
            except (KeyError, IndexError, TypeError):
                continue
        try:
            trace = decode(json.dumps(bad).encode(), "bad.json")
        except OctavoError as error:
            refused += 1
            assert "\n" not in str(error)
            continue
        everything(trace)
    assert 50 < refused < 400


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda bad: bad["settings"].update(max_num_batched_tokens=-1), "settings"),
        (lambda bad: bad["steps"][0]["admitted"][0].__setitem__(2, 1e308), "beginning or end"),
        (lambda bad: bad["steps"][-1]["ends"][0].__setitem__(3, -1e308), "beginning or end"),
        (lambda bad: bad["steps"][-1]["ends"][0].__setitem__(4, -5), "beginning or end"),
        (lambda bad: bad["steps"][0].update(blocks_used=-1), "count"),
    ],
)
def test_impossible_settings_and_lives_are_refused(change, words):
    bad = record()
    change(bad)
    with pytest.raises(OctavoError, match=words):
        decode(json.dumps(bad).encode(), "bad.json")


def test_the_map_shows_the_group_that_is_chosen(browser, tmp_path):
    core = make_core(num_blocks=40, windows=[(8, 24)], max_num_batched_tokens=12)
    run(core, [request("a", [6 + i % 20 for i in range(20)], eos=False, max_tokens=4), request("b", [9] * 10, eos=False, max_tokens=4)])
    trace = traced(core)
    path = tmp_path / "trace.html"
    path.write_text(page(trace), "utf-8")
    browser.open(path.as_uri())
    assert browser.js("return document.getElementById('group').options.length") == 2
    place = 2
    known = holders(list(tables(trace))[place], 2)
    assert known[0] != known[1]
    move = "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event(arguments[2]));"
    browser.js(move, "step", place, "input")
    for group in (1, 0):
        browser.js(move, "group", group, "change")
        owners = browser.js("return [...document.querySelectorAll('.cell')].map(c => c.dataset.owners)")
        assert owners == [",".join(name for name, _ in known[group].get(block, [])) for block in range(len(owners))] and any(owners)
    browser.assert_clean()
