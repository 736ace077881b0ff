"""An answer as it grows: its text in pieces, each with the tokens it came from, and when they came.

Owner of nothing but its own lists; made from the engine's deltas. Not here: drawing (markup.py, chat_tab.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

from octavo.outputs import CompletionDelta


class Alternative(NamedTuple):
    text: str
    probability: float
    chosen: bool


class Token(NamedTuple):
    token_id: int
    text: str
    probability: float
    rank: int
    #: Since the token before, or since the question for the first one.
    seconds: float
    first: bool
    #: The most probable ones first; the chosen one is among them.
    alternatives: tuple[Alternative, ...]


class Piece(NamedTuple):
    """Text that became final at once, and the tokens behind it: more than one where a character spans tokens."""

    text: str
    tokens: tuple[Token, ...]


@dataclass(slots=True)
class Answer:
    #: time.perf_counter when the question was sent.
    asked: float
    pieces: list[Piece] = field(default_factory=list)
    #: Tokens whose text is still withheld.
    pending: list[Token] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    ttft: float | None = None
    last: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first, seconds."""
        if self.ttft is None or len(self.tokens) < 2:
            return None
        return (self.last - self.asked - self.ttft) / (len(self.tokens) - 1)

    def add(self, delta: CompletionDelta, now: float) -> None:
        for token_id, position in zip(delta.token_ids, delta.logprobs or (), strict=True):
            chosen = position[token_id]
            by_rank = sorted(position.items(), key=lambda item: item[1].rank)
            alternatives = tuple(Alternative(entry.text, exp(entry.logprob), other == token_id) for other, entry in by_rank)
            since, first = (self.last, False) if self.tokens else (self.asked, True)
            token = Token(token_id, chosen.text, exp(chosen.logprob), chosen.rank, now - since, first, alternatives)
            self.tokens.append(token)
            self.pending.append(token)
            self.ttft = now - self.asked if self.ttft is None else self.ttft
            self.last = now
        if delta.text:
            self.pieces.append(Piece(delta.text, tuple(self.pending)))
            self.pending.clear()
        self.num_prompt_tokens, self.num_cached_tokens = delta.num_prompt_tokens, delta.num_cached_tokens
        if delta.finish_reason is not None:
            self.finish_reason, self.error = delta.finish_reason, delta.error
