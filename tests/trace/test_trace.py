"""Records of real engines (the fake model and SmolLM2): whole, bounded, without text; and the pictures made of them."""

from __future__ import annotations

import json
import random

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.chat import LocalModel
from octavo.cli.main import main
from octavo.cli.trace import of_llm
from octavo.errors import OctavoError
from octavo.trace import explain, read, write
from octavo.trace.blocks import holders, tables
from octavo.trace.html import page
from octavo.trace.lives import lives
from octavo.trace.perfetto import chrome_trace
from octavo.trace.record import Settings, Text, Trace, decode
from tests.engine.fake import make_core, request

NAMES = ["plain", "</script><img src=x onerror=alert(1)>", 'quo"te\n', "ünï"]


def fake_run(**settings):
    """(trace, core, what the engine itself said of its blocks as each step ran): a pool too small for what is asked of it, with
    hits, forks, copies, preemptions, chunks and an abort."""
    core = make_core(**{"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 12, "max_stalled_steps": 20, **settings})
    draw, seen = random.Random(3), {}
    core.executor.before_step = lambda output: seen.setdefault(output.step, core.kv.snapshot())
    orders = [
        request(NAMES[i] if i < 4 else f"r{i}", [5, 6, 7, 8] * 3 + [draw.randrange(5, 30) for _ in range(draw.randrange(1, 14))],
                eos=False, n=3 if i % 5 == 2 else 1, temperature=1.0, max_tokens=draw.randrange(3, 20))
        for i in range(14)
    ]  # fmt: skip
    for step in range(3000):
        if step % 3 == 0 and orders:
            core.add_request(orders.pop(0))
        if step == 9:
            core.abort([NAMES[0]])
        if not core.has_unfinished_requests() and not orders:
            break
        core.step()
    stats = core.stats
    assert stats.preemptions and stats.prefix_hit_tokens and stats.forks and stats.blocks_copied and not core.has_unfinished_requests()
    blocks = [group.num_blocks for group in core.executor.info.kv_groups]
    return Trace(core.events.recent(), "fake", 4, blocks, Settings(12, 64, 16, 64)), core, seen


@pytest.fixture(scope="module")
def fake():
    return fake_run()


@pytest.mark.parametrize("groups", [1, 2])
def test_block_owners_are_the_engines_own(groups):
    trace, core, seen = fake_run(groups=groups)
    compared = 0
    for event, of in zip(trace.steps, tables(trace), strict=True):
        if event.step not in seen:
            continue
        scheduled = {entry.request_id for entry in event.entries}
        found = holders(of, groups)
        for view in seen[event.step]:
            # a request that was admitted and has had no entry yet holds blocks the record does not know of
            truth = [(h.request_id, h.place) for h in view.holders if h.place >= 0 and (h.request_id in of or h.request_id in scheduled)]
            assert sorted(found[view.group].get(view.block_id, [])) == sorted(truth), (event.step, view)
            compared += len(truth)
        unknown = {h.request_id for view in seen[event.step] for h in view.holders if h.place >= 0} - set(of)
        assert len(unknown) <= 1
    assert compared > 1000 and sum(bool(event.preempted) for event in trace.steps) > 0


def test_every_request_has_a_life_from_arrival_to_end(fake):
    trace, core, _ = fake
    found = lives(trace)
    parents = {life.parent for life in found.values()} - {None}
    ended = {name: life for name, life in found.items() if life.finish is not None}
    assert len(ended) == 14 + 2 * len(parents) and parents == {"r7", "r12", NAMES[2]}
    assert sum(len(life.preempted) for life in found.values()) == core.stats.preemptions
    for name, life in ended.items():
        assert life.complete and life.finish.num_preemptions >= len(life.preempted)
        if life.finish.reason == "length" and life.entries:
            explanation = explain(trace, name)
            assert sum(explanation.parts.values()) == pytest.approx(explanation.total, abs=1e-9)
            assert min(explanation.parts.values()) >= -1e-9
    assert found[NAMES[0]].finish.reason == "abort"


def test_a_file_comes_back_as_it_was_and_holds_no_text(fake, tmp_path):
    trace, _, _ = fake
    path = tmp_path / "run.octrace.json"
    write(trace, path)
    assert read(path) == trace
    text = path.read_text()
    assert json.loads(text)["format"] == "octavo-trace" and json.loads(text)["texts"] == {}
    assert "token_id" not in text and "[5,6,7,8" not in text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a trace"),
        (b"{}", "is not a trace"),
        (b'{"format": "octavo-trace", "version": 2}', "version 2"),
        (b'{"format": "octavo-trace", "version": 1}', "damaged"),
        (b'{"format": "octavo-trace", "version": 1, "steps": [{"step": 1, "time": 1e300}]}', "impossible time"),
        (
            b'{"format": "octavo-trace", "version": 1, "steps": [{"step": 1, "time": 1, "entries": [["r", 0, 0, 0, "new"]]}]}',
            "impossible entry",
        ),
        (b'{"format": "octavo-trace", "version": 1, "steps": [], "block_size": 0}', "pool is impossible"),
        (b"[" * 100_000, "is not a trace"),
    ],
)
def test_damaged_files_are_one_clear_error(data, words):
    with pytest.raises(OctavoError, match=words) as error:
        decode(data, "file.json")
    assert "\n" not in str(error.value)


def test_perfetto_events_follow_the_format(fake):
    trace, core, _ = fake
    made = json.loads(json.dumps(chrome_trace(trace), allow_nan=False))
    events = made["traceEvents"]
    kinds = {kind: [event for event in events if event["ph"] == kind] for kind in {event["ph"] for event in events}}
    assert set(kinds) == {"X", "C", "M", "s", "t", "f", "i"}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] == "M" or (isinstance(event["ts"], float) and event["ts"] >= 0)
    assert all(event["dur"] >= 0 and isinstance(event["args"], dict) for event in kinds["X"])
    assert {event["name"] for event in kinds["C"]} == {"requests", "KV blocks in use", "tokens in the step"}
    assert all(isinstance(value, (int, float)) for event in kinds["C"] for value in event["args"].values())
    steps = [event for event in kinds["X"] if event["name"].startswith("step ")]
    assert len(steps) == len(trace.steps) == core.stats.steps
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in steps]
    assert all(a[1] <= b[0] + 0.01 for a, b in zip(spans, spans[1:], strict=False))  # rounded to nanoseconds
    flows = {event["id"] for event in kinds["s"]}
    assert flows == {event["id"] for event in kinds["f"]} >= {event["id"] for event in kinds["t"]}
    for kind in "stf":
        assert all(any(begin <= event["ts"] <= stop for begin, stop in spans) for event in kinds[kind])
    assert any(event["name"] == "preempted" for event in kinds["X"])


def test_the_page_shows_the_blocks_of_every_step(fake, browser, tmp_path):
    trace, _, _ = fake
    trace.texts = {NAMES[1]: Text("a prompt </script><script>document.title='bad'</script>", "an answer")}
    path = tmp_path / "trace.html"
    path.write_text(page(trace), "utf-8")
    trace.texts = {}
    browser.open(path.as_uri())
    known = list(tables(trace))
    assert browser.js("return document.title") == "Octavo trace" and not browser.all("img")
    assert int(browser.find("#step").get_attribute("max")) == len(trace.steps) - 1
    move = "const s = document.getElementById('step'); s.value = arguments[0]; s.dispatchEvent(new Event('input'));"
    read_owners = "return [...document.querySelectorAll('.cell')].map(c => c.dataset.owners)"
    seen = set()
    for place in (0, 7, len(trace.steps) // 2, len(trace.steps) - 1, 3):
        browser.js(move, place)
        owners = browser.js(read_owners)
        expected = holders(known[place], 1)[0]
        assert owners == [",".join(name for name, _ in expected.get(block, [])) for block in range(len(owners))]
        assert f"step {trace.steps[place].step}," in browser.text("#where")
        assert len(browser.all("#entries tr")) == len(trace.steps[place].entries)
        seen.add(tuple(owners))
    assert len(seen) == 5 and NAMES[1] in browser.text("#texts") and "document.title='bad'" in browser.text("#texts")
    browser.click("#next")
    assert f"step {trace.steps[4].step}," in browser.text("#where")
    from selenium.webdriver.common.keys import Keys

    browser.find("#step").send_keys(Keys.ARROW_RIGHT)
    assert f"step {trace.steps[5].step}," in browser.text("#where")
    backs = set()
    for scheme in ("light", "dark"):
        browser.colour_scheme(scheme)
        backs.add(browser.js("return getComputedStyle(document.body).backgroundColor"))
    assert len(backs) == 2
    browser.assert_clean()
    assert [url for url in browser.requests() if not url.startswith("file:")] == []


def test_an_empty_trace_is_a_page_too(browser, tmp_path):
    path = tmp_path / "empty.html"
    path.write_text(page(Trace([])), "utf-8")
    browser.open(path.as_uri())
    assert "nothing ran" in browser.text("#about")
    browser.assert_clean()


def test_a_real_run_is_explained_but_for_three_percent(smollm2_path, tmp_path, capsys):
    files = {name: tmp_path / f"run.{name}" for name in ("octrace.json", "html", "json")}
    arguments = ["trace", "run", "--model", str(smollm2_path), "--raw", "A secret word. " * 30, "Rain is", "The sea is"]
    arguments += ["--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--kv-cache-memory", "64MiB"]
    arguments += ["--output", str(files["octrace.json"]), "--html", str(files["html"]), "--perfetto", str(files["json"])]
    assert main(arguments) == 0
    assert "3 requests admitted: request-5, request-6, request-7" in capsys.readouterr().out
    assert not any("secret" in file.read_text() for file in files.values())
    for name in ("request-5", "request-6"):
        assert main(["explain", str(files["octrace.json"]), name, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        percent = {part["name"]: part["percent"] for part in shown["parts"]}
        assert round(sum(percent.values()), 6) == 100.0 and percent["other"] <= 3.0
        assert sum(part["ms"] for part in shown["parts"]) == pytest.approx(shown["total_ms"], abs=0.01)
        assert percent["forward"] > percent["schedule"] and percent["others"] > 0 and shown["completion_tokens"] == 12
        assert shown["would_have_helped"] and not shown["rough"]


def test_the_last_answer_of_an_engine_is_explained(smollm2_path):
    with LLM(str(smollm2_path), kv_cache_memory="64MiB") as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate("one two", params)
        llm.generate("Rain is water that falls. " * 8, params)
        found = explain(of_llm(llm))
        why = LocalModel(llm, "smollm2").why()
    assert found.request_id == "request-1" and found.num_output_tokens == 4 and found.num_others == 0
    assert sum(found.parts.values()) == pytest.approx(found.total) and found.parts["other"] <= 0.03 * found.total
    assert why.startswith("request-1: ") and "with a prefix hit on its first" in why and "100.0 %" in why
