"""StopChecker against an oracle that reads the whole text character by character (CASES A04, A05, A06)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.stop import StopChecker


def oracle(text: str, stops: list[str], include: bool, enabled_from: int = 0) -> tuple[str, str | None]:
    """The first stop string to be complete wins, the longest of those completed together."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done and end > enabled_from:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False, enabled: list[bool] | None = None) -> tuple[str, str | None, list[str]]:
    checker, sent = StopChecker(stops, include), []
    for i, piece in enumerate(pieces):
        emit, matched = checker.push(piece, enabled=True if enabled is None else enabled[i])
        sent.append(emit)
        if matched is not None:
            assert checker.push("more", enabled=True) == ("", matched)
            break
    sent.append(checker.flush())
    return "".join(sent), checker.matched, sent


PIECES = st.lists(st.text("ab<é\n", max_size=6), max_size=10)
STOPS = st.lists(st.text("ab<é\n", min_size=1, max_size=5), max_size=4)


@settings(deadline=None)
@given(PIECES, STOPS, st.booleans())
def test_any_chunking_equals_the_whole_text(pieces, stops, include):
    text, matched, _ = run(pieces, stops, include)
    assert (text, matched) == oracle("".join(pieces), stops, include)


@settings(deadline=None)
@given(PIECES, STOPS, st.integers(0, 10))
def test_min_tokens_only_delays_the_effect(pieces, stops, minimum):
    enabled = [i >= minimum for i in range(len(pieces))]
    text, matched, _ = run(pieces, stops, enabled=enabled)
    assert (text, matched) == oracle("".join(pieces), stops, False, len("".join(pieces[:minimum])))


@settings(deadline=None)
@given(PIECES, STOPS)
def test_withholds_no_more_than_a_beginning_of_a_stop_string(pieces, stops):
    checker, seen, sent = StopChecker(stops), "", ""
    for piece in pieces:
        emit, matched = checker.push(piece)
        seen, sent = seen + piece, sent + emit
        if matched is not None:
            return
        starts = [s[:k] for s in stops for k in range(1, len(s)) if seen.endswith(s[:k])]
        assert seen == sent + max(starts, key=len, default="")


def test_stop_string_over_several_tokens_is_never_seen():
    assert run(["DEF", "G", "HI", "J", "K"], ["DEFGHIJ"]) == ("", "DEFGHIJ", ["", "", "", "", ""])
    assert run(["abcDE", "FGHIJK", "L"], ["DEFGHIJ"])[:2] == ("abc", "DEFGHIJ")


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [(["UNO ", "DUE TRE"], "TRE\nXXXX", "UNO DUE TRE"), (["What", "?\n"], "\n", "What?"), (["x", "<|im", "_en"], "<|im_end|>", "x<|im_en")],
)
def test_text_withheld_at_the_end_is_flushed(pieces, stop, text):
    assert run(pieces, [stop])[0] == text


def test_including_the_stop_string_withholds_nothing():
    assert run(["ab", "c", "d"], ["bcd"], include=True) == ("abcd", "bcd", ["ab", "c", "d", ""])


def test_a_tie_is_the_longest_and_the_first_complete_wins():
    assert run(["xabc"], ["bc", "abc", "c"])[:2] == ("x", "abc")
    for pieces in (["xabcd"], ["xab", "cd"], list("xabcd")):
        assert run(pieces, ["abcd", "b"])[:2] == ("xa", "b")


def test_without_stop_strings_text_passes():
    assert run(["a", "", "b"], []) == ("ab", None, ["a", "", "b", ""])


def test_copy_is_independent():
    checker = StopChecker(["abc"])
    checker.push("xab")
    fork = checker.copy()
    assert fork.push("c") == ("", "abc") and checker.push("d") == ("abd", None) and checker.matched is None


def test_self_overlapping_stop_string_in_a_long_run():
    pieces = ["a" * 50 + "b"] * 20 + ["aa"]
    stop = "a" * 51
    assert run(pieces, [stop])[0] == "".join(pieces)
    assert run(["a" * 40, "a" * 40], [stop])[:2] == ("", stop)
