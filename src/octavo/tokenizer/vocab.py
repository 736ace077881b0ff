"""Vocabulary: what a Tokenizer is made of, whichever file it came from, and which added tokens steer the model.

Plain data, built by hf_vocab.py (tokenizer.json) or gguf_vocab.py (GGUF metadata).
Not here: encoding and decoding (tokenizer.py).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import tokenizers

from octavo.errors import ModelLoadError, OctavoError, shown

#: No real control token comes near; searching costs time in proportion.
MAX_CONTROL_CHARS = 512

#: Added tokens that are HTML elements (Gemma has some) are ordinary text, not control tokens.
_HTML_ELEMENTS = (
    "a abbr b blockquote body br button caption center code dd del details div dl dt em figure font footer form h1 h2 h3 h4 h5 h6 "
    "head header hr html i iframe img input ins kbd label li link main mark meta nav ol option p pre q s samp script section "
    "select small span strike strong style sub summary sup svg table tbody td textarea tfoot th thead title tr tt u ul var video"
)
_MARKER = re.compile(r"<[|｜].*[|｜]>|\[/?\w+\]|</?(?P<element>[A-Za-z][\w.:\-]*)>", re.DOTALL)


def looks_like_control(text: str) -> bool:
    """True for added tokens of the form <|x|>, <x>, </x> or [x] that are not HTML: `<think>`, `<tool_call>`, `[INST]`.

    Files mark some tokens that steer the model as ordinary added ones (`special: false`, GGUF type 4) so that they stay visible in
    the output; a user must not be able to forge them either.
    """
    match = _MARKER.fullmatch(text)
    return match is not None and (match["element"] is None or match["element"].lower() not in _HTML_ELEMENTS.split())


@contextmanager
def library_calls(fail: Callable[[str], OctavoError]) -> Iterator[None]:
    """Around calls of the `tokenizers` library: whatever it raises becomes `fail(its message in one line)`.

    It raises bare Exceptions, and where hostile files make its Rust side panic, a PanicException: that is no Exception, and no
    module exports it, so its name is all there is to know it by.
    """
    try:
        yield
    except OctavoError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise fail(" ".join(str(error).split())[:200]) from error


class ControlToken(NamedTuple):
    """An added token that is read from text only where parsing of control tokens is asked for."""

    id: int
    #: Left out of the output under skip_special_tokens (tokenizer.json: special; GGUF: type control or unknown).
    special: bool = True
    #: White space before / after the token belongs to it (tokenizer.json flags).
    lstrip: bool = False
    rstrip: bool = False
    #: Only where no letter, digit or underscore touches it.
    single_word: bool = False


class ControlMatch(NamedTuple):
    """text[start:end] is the token itself, without white space that lstrip or rstrip adds to it."""

    start: int
    end: int
    token: ControlToken


class ControlTokens:
    """The control tokens of a vocabulary, searched from left to right, the longest first (as the `tokenizers` library does)."""

    def __init__(self, tokens: Mapping[str, ControlToken]) -> None:
        """Raises ModelLoadError for a token longer than MAX_CONTROL_CHARS."""
        self.tokens = dict(tokens)
        lengths: dict[str, set[int]] = {}
        for text in self.tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._first = re.compile("[" + re.escape("".join(self._lengths)) + "]") if self.tokens else None
        self._longest = max(map(len, self.tokens), default=0)
        if self._longest > MAX_CONTROL_CHARS:
            long = max(self.tokens, key=len)
            raise ModelLoadError(f"the special token {shown(long)} has {len(long)} characters, at most {MAX_CONTROL_CHARS} are allowed")
        self._forward, self._backward = sorted(self.tokens), sorted(text[::-1] for text in self.tokens)

    def find(self, text: str, marks: Sequence[int] = (), *, special_only: bool = False) -> Iterator[ControlMatch]:
        """Occurrences in order. One that has a mark (sorted offsets) inside, or on both sides of its one character, is passed over."""
        position = 0
        while self._first is not None and (hit := self._first.search(text, position)):
            start = hit.start()
            position = start + 1
            for length in self._lengths[text[start]]:
                end = start + length
                token = self.tokens.get(text[start:end]) if end <= len(text) else None
                if token is None or (special_only and not token.special):
                    continue
                if marks and _is_marked(marks, start, end):
                    continue
                if token.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[end : end + 1])):
                    continue
                yield ControlMatch(start, end, token)
                position = end
                break

    def touches_edge(self, text: str) -> tuple[bool, bool]:
        """Whether `text` begins with the end, and ends with the beginning, of some control token.

        Such a piece of text could become a control token together with its neighbour.
        """
        reach = range(1, min(self._longest, len(text) + 1))
        begins = any(_begins_one(text[:n][::-1], self._backward) for n in reach)
        return begins, any(_begins_one(text[-n:], self._forward) for n in reach)


def _begins_one(text: str, tokens: Sequence[str]) -> bool:
    """Whether one of the sorted tokens is longer than `text` and begins with it: such tokens follow it directly."""
    index = bisect_right(tokens, text)
    return index < len(tokens) and tokens[index].startswith(text)


def _is_marked(marks: Sequence[int], start: int, end: int) -> bool:
    if end == start + 1:
        return start in marks and end in marks
    return bisect_left(marks, end) > bisect_right(marks, start)


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


@dataclass(slots=True)
class Vocabulary:
    """A configured backend and the facts around it. The backend never reads control tokens from text by itself."""

    backend: tokenizers.Tokenizer
    #: How token strings become bytes: the GPT-2 byte alphabet; SentencePiece (U+2581 is a space); joined by spaces.
    decoding: Literal["byte_level", "sentencepiece", "spaced"]
    vocab_size: int
    controls: dict[str, ControlToken]
    #: Every added token's id: its string is plain text, not in the byte alphabet.
    added_ids: frozenset[int] = frozenset()
    #: SentencePiece: tokens <0x00> .. <0xFF> are bytes.
    byte_fallback: bool = False
    #: The first space of a whole decoded text is the encoder's own and is dropped.
    strip_leading_space: bool = False
    #: U+2581 in a text is a space from the start (it would become one anyway, but user-defined runs of spaces match before).
    fold_u2581: bool = False
    #: Metaspace "first": a space goes before a text (not before later segments), unless one is there.
    prefix_first_segment: bool = False
    #: Ids put before and after a prompt under add_special_tokens.
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    #: bos_token, eos_token, pad_token, unk_token ... as chat templates see them.
    special_tokens_map: dict[str, str] = field(default_factory=dict)
    #: The chat template stored with the tokenizer.
    chat_template: str | None = None
