"""The lab's pages without a browser: what they are drawn from, and that whatever a model says is only text."""

from __future__ import annotations

import html
import itertools
import re
import socket
from html.parser import HTMLParser

import pytest

from octavo.config import EngineConfig
from octavo.engine.engine_core import EngineCore
from octavo.errors import ConfigError, ModelLoadError
from octavo.lab.ui import block_map, launch, markup
from octavo.lab.ui.answer import Answer
from octavo.lab.ui.race import Lane, verdict
from octavo.lab.ui.recorder import Arrival, Recording, Scenario, record_parts
from octavo.outputs import CompletionDelta, Logprob
from octavo.wiring import EngineParts
from tests.engine.fake import FakeExecutor, FakeTemplate, FakeTokenizer

HOSTILE = "<img src=x onerror=alert(1)>\"' </div><script>alert(2)</script>"


class Shape(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def position(chosen: int, *others: int, text: str = "x") -> dict[int, Logprob]:
    return {token: Logprob(-float(rank), rank, text) for rank, token in enumerate((chosen, *others), 1)}


# Answers


def test_an_answer_joins_to_the_engines_text_and_keeps_every_token():
    answer = Answer(asked=10.0)
    answer.add(CompletionDelta("r", 0, "He", [1], [position(1, 2)]), 10.5)
    answer.add(CompletionDelta("r", 0, "", [3], [position(3, 4)]), 10.6)  # half a character: withheld
    answer.add(CompletionDelta("r", 0, "😀!", [5], [position(5, 6)]), 10.8)
    answer.add(CompletionDelta("r", 0, "", [7], [position(7)], finish_reason="stop", num_prompt_tokens=9, num_cached_tokens=4), 11.0)
    assert answer.text == "He😀!"
    assert [[token.token_id for token in piece.tokens] for piece in answer.pieces] == [[1], [3, 5]]
    assert [token.token_id for token in answer.tokens] == [1, 3, 5, 7]
    assert [round(token.seconds, 6) for token in answer.tokens] == [0.5, 0.1, 0.2, 0.2]
    assert answer.ttft == 0.5 and answer.tpot == pytest.approx(0.5 / 3)
    assert [(other.chosen, round(other.probability, 4)) for other in answer.tokens[0].alternatives] == [(True, 0.3679), (False, 0.1353)]


def test_hostile_tokens_stay_text():
    answer = Answer(asked=0.0)
    answer.add(CompletionDelta("r", 0, HOSTILE, [1], [position(1, 2, text=HOSTILE)]), 1.0)
    shape = Shape(markup.answer(answer.pieces))
    assert [tag for tag, _ in shape.tags] == ["div", "span"] and shape.text == HOSTILE
    assert set(shape.tags[1][1]) == {"class", "data-tip"}
    assert [tag for tag, _ in Shape(markup.plain(HOSTILE)).tags] == ["div"]
    assert [tag for tag, _ in Shape(markup.stats([(HOSTILE, HOSTILE)])).tags] == ["div", "span", "b"]


@pytest.mark.parametrize(
    ("probability", "css"), [(1.0, "p0"), (0.9, "p0"), (0.89, "p1"), (0.2, "p2"), (0.05, "p3"), (0.049, "p4"), (0.0, "p4")]
)
def test_levels_of_probability(probability, css):
    assert markup.level(probability) == css and f".{css} " in markup.CSS + ".p0 "


# Recordings


def recording(*arrivals: Arrival, num_blocks: int = 24, **settings) -> Recording:
    scenario = Scenario("t", "", arrivals, num_kv_blocks=num_blocks)
    executor = FakeExecutor(num_blocks=num_blocks)
    return record_parts(EngineParts(executor, FakeTokenizer(), FakeTemplate(), config=EngineConfig(**settings)), scenario)


def test_a_recording_accounts_for_every_block_after_every_step(monkeypatch):
    """Against the engine's own accounting, asked at the same moments."""
    used = []
    step = EngineCore.step

    def counted(core):
        deltas = step(core)
        core.check_invariants()
        used.append((core.stats.blocks_used, core.stats.blocks_cached, core.stats.running))
        return deltas

    monkeypatch.setattr(EngineCore, "step", counted)
    found = recording(
        Arrival("A", "the same beginning and one end", max_tokens=9),
        Arrival("B", "the same beginning and another end", step=3, max_tokens=9),
        Arrival("C", "four of these ones", step=5, max_tokens=6, n=4),
    )
    assert len(found.frames) == len(used) > 10
    for frame, (blocks_used, cached, running) in zip(found.frames, used, strict=True):
        assert [view.block_id for view in frame.blocks] == list(range(24))
        assert sum(view.ref_count > 0 for view in frame.blocks) == blocks_used
        assert sum(view.cached for view in frame.blocks) == cached
        assert all(len(view.holders) == view.ref_count for view in frame.blocks)
        assert frame.event.running == running
    events = [frame.event for frame in found.frames]
    assert sum(event.blocks_shared for event in events) > 0 and sum(event.blocks_copied for event in events) > 0
    assert max(view.ref_count for frame in found.frames for view in frame.blocks) == 4
    assert found.requests == ["A", "B", "C", "C#0", "C#1", "C#2", "C#3"]
    assert all(view.ref_count == 0 for view in found.frames[-1].blocks)
    assert set(found.frames[-1].texts) == {"A", "B", "C#0", "C#1", "C#2", "C#3"}


def test_written_blocks_are_those_of_the_steps_tokens():
    found = recording(Arrival("A", "abcdefghij", max_tokens=5), max_num_batched_tokens=4)
    spans = []
    for frame in found.frames[:-1]:  # after the last one nobody holds them
        spans.append(sorted(index for view in frame.blocks if view.block_id in frame.written for _, index in view.holders))
    assert spans[:3] == [[0], [1], [2]]  # four tokens a step, four a block
    assert spans[3:] == [[position // 4] for position in range(10, 10 + len(spans) - 3)]


def test_a_small_pool_is_recorded_with_its_preemptions():
    prompts = ("aaaaaaaa", "bbbbbbbb", "cccccccc")
    crowded = recording(*(Arrival(text[0].upper(), text, max_tokens=16) for text in prompts), num_blocks=10)
    roomy = recording(*(Arrival(text[0].upper(), text, max_tokens=16) for text in prompts), num_blocks=60)
    assert any(frame.event.preempted for frame in crowded.frames) and not any(frame.event.preempted for frame in roomy.frames)
    assert crowded.frames[-1].texts == roomy.frames[-1].texts


def test_the_map_has_a_cell_for_every_block_and_says_what_it_is():
    found = recording(
        Arrival("A", "the same beginning", max_tokens=6), Arrival("B", "the same beginning too", step=2, max_tokens=9), num_blocks=33
    )
    for place, frame in enumerate(found.frames):
        cells = [attributes for tag, attributes in Shape(block_map.grid(found, frame)).tags if tag == "div"][1:]
        assert [int(cell["data-block"] or -1) for cell in cells] == list(range(33))
        for cell, view in zip(cells, frame.blocks, strict=True):
            classes = (cell["class"] or "").split()
            assert ("held" in classes) == bool(view.holders) and ("shared" in classes) == (len(view.holders) > 1)
            assert ("cached" in classes) == (view.cached and not view.holders) and ("free" in classes) == (
                not view.cached and not view.holders
            )
            assert all(f"{holder.request_id}: tokens {4 * holder.place} to" in (cell["data-tip"] or "") for holder in view.holders)
        columns = [attributes["data-tip"] or "" for tag, attributes in Shape(block_map.timeline(found, place)).tags if tag == "i"]
        assert len(columns) == len(found.frames)
        assert sum(int(number) for number in re.findall(r": (\d+) blocks", columns[place])) == 33
    rows = Shape(block_map.step_table(found, found.frames[0])).text
    assert "new" in rows and "tokens 0 to 17" in rows


def test_a_request_with_a_hostile_name_stays_text():
    found = recording(Arrival(HOSTILE, "abcdefgh", max_tokens=3))
    frame = found.frames[0]
    parts = (
        block_map.grid(found, frame),
        block_map.step_table(found, frame),
        block_map.texts(found, frame),
        block_map.legend(found),
        block_map.timeline(found, 0),
    )
    for part in parts:
        assert not {"img", "script"} & {tag for tag, _ in Shape(part).tags}
        assert html.escape(HOSTILE) in part


# The race


def test_the_verdict_names_the_first_different_token():
    lanes = [
        Lane("naive", token_ids=[1, 2, 3], state="done"),
        Lane("native", token_ids=[1, 2, 3], state="done"),
        Lane("engine", state="failed"),
    ]
    assert verdict(lanes) == (True, "All 2 wrote the same 3 tokens: being faster changed nothing.")
    lanes[1].token_ids = [1, 9, 3]
    assert verdict(lanes) == (False, "KV cache, native differs from Naive at token 2.")
    lanes[1].token_ids = [1, 2]
    assert verdict(lanes)[1].endswith("at token 3.")
    assert verdict(lanes[:1])[0] and "Nothing to compare" in verdict(lanes[:1])[1]


def test_token_times_add_up():
    lane = Lane("naive", times=[0.5, 0.75, 2.0])
    assert lane.token_times() == [0.5, 0.25, 1.25] and list(itertools.accumulate(lane.token_times())) == lane.times


# Starting


def test_it_listens_on_the_loopback_only_and_reports_nothing():
    found = launch.settings(1234)
    assert found["server.address"] == "127.0.0.1" and found["browser.gatherUsageStats"] is False
    assert found["server.enableCORS"] and found["server.enableXsrfProtection"] and found["server.fileWatcherType"] == "none"
    from streamlit import config

    unknown = found.keys() - config._config_options_template.keys()
    assert not unknown, "Streamlit has no such settings"


def test_a_taken_port_and_a_wrong_one_are_errors_that_say_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .*choose another, or 0"):
            launch.free_port(port)
    with pytest.raises(ConfigError, match="between 0 and 65535"):
        launch.free_port(70000)
    assert 0 < launch.free_port(0) < 65536


def test_a_model_that_is_not_there_is_an_error_before_anything_listens(tmp_path):
    with pytest.raises(ModelLoadError):
        launch.main(str(tmp_path / "missing.gguf"), port=0, open_browser=False)
