"""IncrementalDetokenizer: token ids to text, piece by piece, for streams and for whole replies alike.

Owner: one per choice, kept by the output processor; it holds at most three bytes of an unfinished character.
Not here: what a token's bytes are (octavo.tokenizer), stop strings (engine/stop.py).

Text is bytes joined in order and read as UTF-8, malformed parts replaced by U+FFFD (the Unicode standard's "maximal subpart"
rule, which Python and Rust follow). A character that has begun but not ended is the only thing ever withheld; if the
tokens end there, it is dropped. This is the one place where that is decided.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from typing import Protocol

_UTF8_LONGEST = 4


class TokenBytes(Protocol):
    """What the detokenizer needs of a Tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> Set[int]: ...
    @property
    def strip_leading_space(self) -> bool: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """Joined pieces == decode(prompt + ids) without decode(prompt), minus an incomplete last character."""

    __slots__ = ("_skip", "_strip", "_tail", "_tokenizer")

    def __init__(self, tokenizer: TokenBytes, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip: Set[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        # SentencePiece: only the first space of the whole text is dropped, and the prompt usually holds it.
        self._strip = tokenizer.strip_leading_space and not any(self._bytes(t) for t in prompt_token_ids)
        # A prompt of token ids may end inside a character.
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _UTF8_LONGEST - 1:
                break
        self._tail = _split(tail[-(_UTF8_LONGEST - 1) :])[1]

    def push(self, token_id: int) -> str:
        """The text that this token makes final; "" while a character is incomplete or the token is skipped."""
        data = self._bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        text, self._tail = _split(self._tail + data)
        return text

    def finish(self) -> str:
        """Call once, after the last token: drops an incomplete character. There is no text left to return ("")."""
        self._tail = b""
        return ""

    def copy(self) -> IncrementalDetokenizer:
        """An independent detokenizer in the same state, for a fork."""
        other = object.__new__(IncrementalDetokenizer)
        other._tokenizer, other._skip, other._strip, other._tail = self._tokenizer, self._skip, self._strip, self._tail
        return other

    def _bytes(self, token_id: int) -> bytes:
        # Logits may have more columns than the vocabulary has tokens; such an id stands for no text.
        if token_id in self._skip or token_id >= self._tokenizer.vocab_size:
            return b""
        return self._tokenizer.token_bytes(token_id)


def _split(data: bytes) -> tuple[str, bytes]:
    """Decoded text, and the bytes of a last character that more bytes could complete."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    rest = data[used:]
    if rest[:1] == b"\xed" and rest[1:2] >= b"\xa0":  # half a surrogate: Python waits for its end, but no end makes it a character
        return text + rest.decode("utf-8", "replace"), b""
    return text, rest
