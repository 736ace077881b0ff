"""Tokenizer: text to token ids and back.

Owner: the Vocabulary it was built from and a cache of token bytes; neither changes the outcome of a call, so one Tokenizer
serves any number of threads.
Not here: file formats (hf_vocab.py, gguf_vocab.py), streaming (engine/detokenizer.py), chat templates (chat_template.py).

Control tokens (`<|im_end|>`, `<s>`, `<think>`) are cut out of the text here, never by the library, so that it is decided per
position whether such text is a token or just text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.tokenizer import gguf_vocab, hf_vocab
from octavo.tokenizer.vocab import ControlTokens, Vocabulary, library_calls

_SPACE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of the GPT-2 byte alphabet: printable Latin-1 stands for itself, the rest moves to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if chr(b) not in table]
    return table | {chr(256 + i): b for i, b in enumerate(others)}


def _cannot_encode(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"the model's tokenizer cannot encode this text: {message}", code="tokenizer_failed")


class Tokenizer:
    """One model's tokenizer. Build it with `from_file` or `from_gguf`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocab = vocabulary
        self._backend = vocabulary.backend
        self.controls = ControlTokens(vocabulary.controls)
        self._alphabet = _byte_alphabet() if vocabulary.decoding == "byte_level" else {}
        self._pieces: dict[int, bytes] = {}
        self._unprefixed = self._added_texts() if vocabulary.prefix_first_segment else None
        #: Number of ids, control tokens included; the model's logits may have more columns (padding).
        self.vocab_size = vocabulary.vocab_size
        self.bos_token_id = vocabulary.bos_token_id
        #: Every id that ends a text according to the tokenizer's own files, the main one first.
        self.eos_token_ids = vocabulary.eos_token_ids
        #: Ids that skip_special_tokens leaves out.
        self.special_ids = frozenset(token.id for token in vocabulary.controls.values() if token.special)
        #: bos_token, eos_token ... as chat templates see them.
        self.special_tokens_map = dict(vocabulary.special_tokens_map)
        #: The template stored with the tokenizer, or None.
        self.chat_template = vocabulary.chat_template
        #: True: the first space of a whole text is not part of it (see engine/detokenizer.py).
        self.strip_leading_space = vocabulary.strip_leading_space

    @classmethod
    def from_file(cls, tokenizer_json: Path, config: Mapping[str, Any] | None = None) -> Tokenizer:
        """From tokenizer.json and the content of tokenizer_config.json. Raises ModelLoadError."""
        return cls(hf_vocab.build(tokenizer_json, config or {}))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file (key -> value, arrays as sequences). Raises ModelLoadError."""
        return cls(gguf_vocab.build(metadata))

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def id_of(self, token: str) -> int | None:
        """The id of a token by its exact string (in the vocabulary's own spelling), or None."""
        return self._backend.token_to_id(token)

    # ---- text -> ids

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a raw prompt.

        add_special_tokens: put BOS before (and EOS after) where the model wants them. A BOS the text already starts with is
        that BOS: there is never a second one. parse_special: control tokens written in the text become tokens; else they stay text.
        Raises InvalidRequestError for text that is not valid Unicode (lone surrogates).
        """
        prefix: Sequence[int] = self._vocab.prefix_ids if add_special_tokens else ()
        suffix: Sequence[int] = self._vocab.suffix_ids if add_special_tokens else ()
        bos = self.special_tokens_map.get("bos_token")
        while bos and self.bos_token_id in prefix and text.startswith(bos):
            text = text[len(bos) :]
        body = self.encode_rendered(text) if parse_special else self._encode_segment(text, first=True)
        return [*prefix, *body, *suffix]

    def encode_rendered(self, text: str, literal_marks: Sequence[int] = ()) -> list[int]:
        """Token ids of a rendered chat template: control tokens are parsed, no BOS or EOS is added.

        literal_marks: sorted offsets into `text`; a control token with one inside came from a message and stays text
        (chat_template.py).
        """
        ids: list[int] = []
        position = 0
        for start, end, token in self.controls.find(text, literal_marks):
            before = text[position:start]
            ids += self._encode_segment(before.rstrip() if token.lstrip else before, first=position == 0)
            ids.append(token.id)
            position = end
            if token.rstrip:
                position += len(text[end:]) - len(text[end:].lstrip()) if text[end : end + 1].isspace() else 0
        return ids + self._encode_segment(text[position:], first=position == 0)

    def _encode_segment(self, text: str, *, first: bool) -> list[int]:
        if not text:
            return []
        if first and self._unprefixed is not None and not text.startswith(self._unprefixed):
            text = " " + text
        if self._vocab.fold_u2581:
            text = text.replace(_SPACE, " ")
        with library_calls(_cannot_encode):
            try:
                return self._backend.encode(text, add_special_tokens=False).ids
            except (TypeError, UnicodeError) as error:
                raise InvalidRequestError("the text is not valid Unicode (it holds a lone surrogate)", code="invalid_unicode") from error

    def _added_texts(self) -> tuple[str, ...]:
        """Beginnings of a text before which Metaspace "first" puts no space: a space, or a token that is matched whole."""
        hidden = {token.id for token in self._vocab.controls.values()}
        return (" ", _SPACE, *(self._backend.id_to_token(i) or " " for i in self._vocab.added_ids - hidden))

    # ---- ids -> text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, as UTF-8 bytes (maybe part of a character). Raises InvalidRequestError."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._make_bytes(self._checked(token_id))
            self._pieces[token_id] = piece
        return piece

    def token_text(self, token_id: int) -> str:
        """The token for a person to read: text, or `\\xe2\\x80` for bytes that are not whole characters.

        Ids beyond the vocabulary (a model's padded logits have some) read as "".
        """
        return self.token_bytes(token_id).decode("utf-8", "backslashreplace") if token_id < self.vocab_size else ""

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids. Bytes that are no UTF-8, an incomplete last character included, become U+FFFD.

        Raises InvalidRequestError for ids outside the vocabulary.
        """
        skip = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in token_ids if self._checked(i) not in skip)
        if self.strip_leading_space and data.startswith(b" "):
            data = data[1:]
        return codecs.decode(data, "utf-8", "replace")

    def _checked(self, token_id: int) -> int:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(f"token id {token_id!r} is not in [0, {self.vocab_size})", code="invalid_token_id")
        return token_id

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # a hole in the numbering
            return b""
        added = token_id in self._vocab.added_ids
        if self._vocab.decoding == "byte_level":
            if not added and all(char in self._alphabet for char in token):
                return bytes(self._alphabet[char] for char in token)
            return token.encode()
        if self._vocab.decoding == "spaced":
            return b" " + token.encode()
        if self._vocab.byte_fallback and not added and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(_SPACE, " ").encode()
