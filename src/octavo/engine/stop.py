"""StopChecker: ends a text at a stop string, however the text was cut into pieces.

Owner: one per choice, kept by the output processor; it holds the text it withholds and one number per stop string.
Not here: stop token ids (engine/output_processor.py compares them), bytes and characters (engine/detokenizer.py).

The rule: a stop string takes effect at the character that completes it. The first one completed wins; of several completed by
the same character, the longest. This is the only rule that gives the same text for every way of cutting: waiting for a longer
stop string that began earlier would make the outcome depend on what happened to arrive in the same piece.
Matching is Knuth, Morris & Pratt (1977), one automaton a string, so the cost per character does not depend on lengths.
"""

from __future__ import annotations

from collections.abc import Sequence


def _failure(stop: str) -> list[int]:
    """failure[k]: length of the longest proper prefix of stop[:k] that is also its suffix."""
    failure = [0] * (len(stop) + 1)
    length = 0
    for k in range(2, len(stop) + 1):
        while length and stop[k - 1] != stop[length]:
            length = failure[length]
        length += stop[k - 1] == stop[length]
        failure[k] = length
    return failure


class StopChecker:
    """Finds stop strings in a growing text; withholds only what could be the beginning of one."""

    __slots__ = ("_failures", "_held", "_include", "_states", "_stops", "matched")

    def __init__(self, stop: Sequence[str] = (), include_stop_in_output: bool = False) -> None:
        self._stops = tuple(stop)
        self._failures = [_failure(s) for s in self._stops]
        self._include = include_stop_in_output
        #: Per stop string, how many of its characters the text ends with.
        self._states = [0] * len(self._stops)
        self._held = ""
        #: The stop string that ended the text, or None.
        self.matched: str | None = None

    def push(self, text: str, *, enabled: bool = True) -> tuple[str, str | None]:
        """Add text; returns (text that may be sent, the stop string that ended it or None).

        With `enabled` False (min_tokens not reached) a completed stop string is ordinary text. After a match, everything
        further is dropped.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        for position, char in enumerate(text):
            complete = self._advance(char)
            if complete is not None and enabled:
                return self._end(self._held + text[: position + 1], complete), complete
        buffer = self._held + text
        # What is to be included in the output anyway need not be withheld.
        hold = 0 if self._include else max(self._states)
        self._held = buffer[len(buffer) - hold :]
        return buffer[: len(buffer) - hold], None

    def flush(self) -> str:
        """The withheld text, when generation ends without a (complete) stop string."""
        held, self._held = self._held, ""
        return held

    def copy(self) -> StopChecker:
        """An independent checker in the same state, for a fork."""
        other = object.__new__(StopChecker)
        other._stops, other._failures, other._include = self._stops, self._failures, self._include
        other._states, other._held, other.matched = list(self._states), self._held, self.matched
        return other

    def _advance(self, char: str) -> str | None:
        """Move every automaton by one character; returns the longest stop string it completes."""
        complete: str | None = None
        for i, stop in enumerate(self._stops):
            state, failure = self._states[i], self._failures[i]
            while state and stop[state] != char:
                state = failure[state]
            state += stop[state] == char
            if state == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                state = failure[state]
            self._states[i] = state
        return complete

    def _end(self, buffer: str, stop: str) -> str:
        self.matched, self._held = stop, ""
        return buffer if self._include else buffer[: len(buffer) - len(stop)]
