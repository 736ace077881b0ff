"""A Vocabulary rebuilt from the metadata of a GGUF file (keys tokenizer.ggml.*, GGUF specification, "Tokenizer").

Two kinds: "gpt2" is byte-level BPE with a named pre-tokenizer, "llama" is SentencePiece BPE with scores. Everything in the metadata
is checked before use; what is wrong is a ModelLoadError naming the key.
Stateless. Not here: reading the file (loading/), encoding (tokenizer.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from octavo.errors import ModelLoadError
from octavo.tokenizer import pre_tokenizers
from octavo.tokenizer.vocab import ControlToken, Vocabulary, library_calls, looks_like_control

_log = logging.getLogger(__name__)
_PREFIX = "tokenizer.ggml."
#: Token types of the format.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_MAX_TOKENS = 2**22
#: Tokens that end a turn or a text. A GGUF file names one end token, but chat models were trained to use several.
_END_TOKENS = (
    "<|endoftext|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|> <|end_of_turn|> <end_of_turn> <eos> </s> <EOT> [EOT] [EOS] "
    "<|return|> <|call|> <end_of_utterance> <｜end▁of▁sentence｜>"
)
SPACE = "\u2581"


def build(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a GGUF file. `metadata`: key -> value, arrays as any sequence. Raises ModelLoadError."""
    reader = _Reader(metadata)
    model = reader.text("model")
    if model not in ("gpt2", "llama"):
        raise ModelLoadError(f"{_PREFIX}model is {model!r}; only 'gpt2' and 'llama' can be rebuilt: use a folder with tokenizer.json")
    tokens = _tokens(reader.array("tokens", str))
    types = reader.array("token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    with library_calls(lambda message: ModelLoadError(f"the GGUF file's vocabulary is damaged: {message}")):
        vocab = _byte_level(reader, tokens, types) if model == "gpt2" else _sentencepiece(reader, tokens, types)
        _add_tokens(vocab, tokens, types)
    _special_ids(vocab, reader, tokens, types, model)
    vocab.chat_template = reader.text("chat_template", prefix="tokenizer.") or None
    return vocab


class _Reader:
    """Typed access to hostile metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def _get(self, key: str, prefix: str = _PREFIX) -> Any:
        return self._metadata.get(prefix + key)

    def text(self, key: str, *, prefix: str = _PREFIX) -> str:
        value = self._get(key, prefix)
        if value is not None and not isinstance(value, str):
            raise ModelLoadError(f"{prefix}{key} must be a string, got {type(value).__name__}")
        return value or ""

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if value not in (True, False):
            raise ModelLoadError(f"{_PREFIX}{key} must be a boolean, got {value!r}")
        return bool(value)

    def token_id(self, key: str, num_tokens: int) -> int | None:
        value = self._get(key)
        if value is None or value == 0xFFFFFFFF:  # some writers store -1 for "none"
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) < num_tokens:
            raise ModelLoadError(f"{_PREFIX}{key} is {value!r}, but the vocabulary has {num_tokens} tokens")
        return int(value)

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        """The elements, each checked to be of `kind`; empty when the key is missing."""
        value = self._get(key)
        if value is None:
            return []
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
            raise ModelLoadError(f"{_PREFIX}{key} must be an array, got {type(value).__name__}")
        if len(value) > _MAX_TOKENS or (length is not None and len(value) != length):
            raise ModelLoadError(f"{_PREFIX}{key} has {len(value)} entries, expected {length if length is not None else 'fewer'}")
        items = value.tolist() if hasattr(value, "tolist") else list(value)
        wrong = set(map(type, items)) - ({int, float} if kind is float else {kind})
        if wrong:
            raise ModelLoadError(f"{_PREFIX}{key} must hold {kind.__name__} values, got {wrong.pop().__name__}")
        return items


def _tokens(tokens: list[str]) -> list[str]:
    if not tokens:
        raise ModelLoadError(f"{_PREFIX}tokens is missing or empty: the GGUF file has no vocabulary")
    if "" in tokens:
        _log.warning("the vocabulary holds empty tokens; they can never be produced from text")
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(t for t in tokens if t in seen or seen.add(t))  # type: ignore[func-returns-value]
        raise ModelLoadError(f"{_PREFIX}tokens holds {twice!r:.60} twice")
    return tokens


def _byte_level(reader: _Reader, tokens: list[str], types: list[int]) -> Vocabulary:
    name = reader.text("pre")
    spec = pre_tokenizers.build(name or "default")
    if spec is None or not name:
        what = f"is {name!r}, which Octavo does not know" if name else "is missing"
        _log.warning(
            "%spre %s: text is split by the default rules, so token ids may differ from the model's own and answers get worse; "
            "use a newer GGUF file or a folder with tokenizer.json",
            _PREFIX,
            what,
        )
        spec = spec or pre_tokenizers.build("default")
        assert spec is not None
    merges = [tuple(merge.split(" ")) for merge in reader.array("merges", str)]
    if set(map(len, merges)) - {2}:
        wrong = next(merge for merge in merges if len(merge) != 2)
        raise ModelLoadError(f"{_PREFIX}merges holds {' '.join(wrong)!r:.60}, which is not two tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=spec.ignore_merges))
    if spec.normalizer is not None:
        backend.normalizer = spec.normalizer
    backend.pre_tokenizer = spec.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    result = Vocabulary(backend, "byte_level", len(tokens), {})
    if reader.flag("add_bos_token", spec.add_bos):
        result.prefix_ids = (-1,)  # the id is filled in by _special_ids
    return result


def _sentencepiece(reader: _Reader, tokens: list[str], types: list[int]) -> Vocabulary:
    """SentencePiece BPE (Kudo & Richardson 2018): the pair whose union has the best score is merged first.

    As in the tokenizer.json files made from such models, scores become merge ranks: a piece may arise from any two pieces.
    """
    scores = reader.array("scores", float, len(tokens))
    if not scores:
        raise ModelLoadError(f"{_PREFIX}scores is missing: a 'llama' vocabulary cannot be used without them")
    if not all(map(math.isfinite, scores)):
        raise ModelLoadError(f"{_PREFIX}scores holds values that are not finite")
    vocab = {token: i for i, token in enumerate(tokens)}
    pieces = {t: i for t, i in vocab.items() if types[i] == NORMAL or (types[i] == USER_DEFINED and t.strip(" "))}
    unknown = reader.token_id("unknown_token_id", len(tokens))
    if unknown is None:
        unknown = types.index(UNKNOWN) if UNKNOWN in types else None
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(pieces, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    prefix = reader.flag("add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    result = Vocabulary(backend, "sentencepiece", len(tokens), {}, byte_fallback=BYTE in types, strip_leading_space=prefix, fold_u2581=True)
    if reader.flag("add_bos_token", True):
        result.prefix_ids = (-1,)
    return result


def _merges(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in pieces.items():
        cuts = [c for c in range(1, len(piece)) if piece[:c] in pieces and piece[c:] in pieces]
        cuts.sort(key=lambda c: pieces[piece[:c]])  # noqa: B023  (used at once)
        found += [(scores[index], c, len(piece) - c, piece[:c], piece[c:]) for c in cuts]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3:] for merge in found]


def _add_tokens(vocab: Vocabulary, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Whole-matched tokens: control ones are hidden from the text (the backend passes them over), user-defined ones always match."""
    plain, hidden = [], []
    whole = [(i, kind) for i, kind in enumerate(types) if kind != NORMAL and kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    for i, kind in whole:
        if kind != USER_DEFINED or looks_like_control(tokens[i]):
            vocab.controls[tokens[i]] = ControlToken(i, special=kind != USER_DEFINED)
            hidden.append(AddedToken(tokens[i], special=True, normalized=False))
        else:
            plain.append(AddedToken(tokens[i], special=False, normalized=False))
    vocab.backend.add_special_tokens(hidden)
    vocab.backend.add_tokens(plain)
    vocab.backend.encode_special_tokens = True
    vocab.added_ids = frozenset(i for i, _ in whole)


def _special_ids(vocab: Vocabulary, reader: _Reader, tokens: Sequence[str], types: Sequence[int], model: str) -> None:
    defaults = {"bos": 1, "eos": 2} if model == "llama" and len(tokens) > 2 else {}
    ids: dict[str, int | None] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("eom", "eom"), ("pad", "padding"), ("unk", "unknown")):
        found = reader.token_id(f"{key}_token_id", len(tokens))
        ids[name] = defaults.get(name) if found is None else found
    vocab.bos_token_id = ids["bos"]
    _wrap(vocab, ids, add_bos=bool(vocab.prefix_ids), add_eos=reader.flag("add_eos_token", False))
    named = _present(ids[name] for name in ("eos", "eot", "eom"))
    known = _END_TOKENS.split()
    ends = [i for i in sorted(vocab.added_ids) if types[i] == CONTROL and tokens[i] in known]
    if any(tokens[i] == "<|return|>" for i in ends):  # there <|end|> only closes one message of an answer
        ends = [i for i in ends if tokens[i] != "<|end|>"]
    vocab.eos_token_ids = tuple(dict.fromkeys([*named, *ends]))
    vocab.special_tokens_map = {f"{n}_token": tokens[i] for n in ("bos", "eos", "pad", "unk") if (i := ids[n]) is not None}


def _wrap(vocab: Vocabulary, ids: Mapping[str, int | None], *, add_bos: bool, add_eos: bool) -> None:
    for wanted, name in ((add_bos, "bos"), (add_eos, "eos")):
        if wanted and ids[name] is None:
            _log.warning("%sadd_%s_token is set, but the file names no such token: none is added", _PREFIX, name)
    vocab.prefix_ids = tuple(_present([ids["bos"]])) if add_bos else ()
    vocab.suffix_ids = tuple(_present([ids["eos"]])) if add_eos else ()


def _present(ids: Iterable[int | None]) -> list[int]:
    return [i for i in ids if i is not None]
