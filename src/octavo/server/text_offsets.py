"""TextOffsets: where each token begins in the text that the tokens make, counted in characters.

The text is made as the engine's detokenizer makes it: bytes joined in order and read as UTF-8. A token that begins inside
a character has the offset of that character.
Owner: whoever counts one text (prepare.py a prompt, replies.py one choice). Not here: what a token's bytes are.
"""

from __future__ import annotations

import codecs


class TextOffsets:
    __slots__ = ("_strip", "length", "tail")

    def __init__(self, start: int = 0, tail: bytes = b"", strip_space: bool = False) -> None:
        """`start`: characters before the first token. `tail`: bytes of a character that has begun. `strip_space`: a space at
        the very beginning is not part of the text."""
        #: Characters so far, an unfinished one not counted.
        self.length = start
        self.tail = tail
        self._strip = strip_space

    def add(self, data: bytes) -> int:
        """Take one token's bytes (none for one that leaves no text); returns where it begins."""
        begin = self.length
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        text, used = codecs.utf_8_decode(self.tail + data, "replace", False)
        self.tail = (self.tail + data)[used:]
        self.length += len(text)
        return begin


def bytes_of(text: str) -> bytes:
    """A token's bytes from Logprob.text, where bytes that are not whole characters are written as `\\xe2\\x80`."""
    data = text.encode()
    if "\\x" not in text:
        return data
    parts = data.split(b"\\x")
    raw = parts[0]
    for part in parts[1:]:
        if len(part) >= 2 and part[:1] in b"89abcdef" and part[1:2] in b"0123456789abcdef":
            raw += bytes([int(part[:2], 16)]) + part[2:]
        else:
            raw += b"\\x" + part
    return raw if raw.decode("utf-8", "backslashreplace") == text else data  # else the text itself spells a backslash
