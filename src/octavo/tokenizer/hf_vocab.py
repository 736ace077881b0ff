"""A Vocabulary from tokenizer.json and tokenizer_config.json (the Hugging Face formats).

Stateless. Not here: which files to read (loading/), encoding (tokenizer.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.errors import ModelLoadError
from octavo.tokenizer.vocab import ControlToken, Vocabulary, library_calls, looks_like_control

_log = logging.getLogger(__name__)
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPACE = "\u2581"


def build(tokenizer_json: Path, config: Mapping[str, Any]) -> Vocabulary:
    """`config`: the content of tokenizer_config.json; may be empty. Raises ModelLoadError."""
    if not isinstance(config, Mapping):
        raise ModelLoadError(f"tokenizer_config.json must be a JSON object, got {type(config).__name__}")
    with library_calls(lambda message: ModelLoadError(f"cannot read {tokenizer_json}: {message}")):
        return _build(tokenizers.Tokenizer.from_file(str(tokenizer_json)), config)


def _build(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> Vocabulary:
    backend.no_truncation()  # some published files cut text at 512 tokens
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None  # a training aid: encoding must not be random
    vocab = Vocabulary(backend, "byte_level", _size(backend), {})
    _read_decoder(vocab)
    names = _named_tokens(config)
    _mark_special(backend, names, config)
    prefix, suffix = _wrapping(backend)
    _hide_controls(vocab)
    _set_ids(vocab, names, config, prefix, suffix)
    _detach_first_prefix(vocab)
    vocab.chat_template = pick_template(config.get("chat_template"))
    return vocab


def token_text(value: Any) -> str | None:
    """A token as configs write it: a string, or an object with `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) and content else None


def pick_template(value: Any) -> str | None:
    """chat_template of a config: a string, or a list of {"name", "template"} of which "default" is meant."""
    if isinstance(value, str) or value is None:
        return value or None
    named = {}
    if isinstance(value, Sequence):
        named = {v.get("name"): v.get("template") for v in value if isinstance(v, Mapping)}
    found = named.get("default")
    if not isinstance(found, str):
        raise ModelLoadError("tokenizer_config.json: chat_template is neither a string nor a list with a 'default' template")
    return found


def _size(backend: tokenizers.Tokenizer) -> int:
    """One more than the highest id; a published file may leave numbers out."""
    vocab = backend.get_vocab(with_added_tokens=True)
    if not vocab:
        raise ModelLoadError("tokenizer.json holds no tokens")
    return max(vocab.values()) + 1


def _component(part: Any) -> list[dict[str, Any]]:
    """The JSON of a pre-tokenizer or decoder as a flat list of steps."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return state.get("pretokenizers") or state.get("decoders") or [state]


def _read_decoder(vocab: Vocabulary) -> None:
    steps = _component(vocab.backend.decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return
    if not steps:
        vocab.decoding, vocab.strip_leading_space = "spaced", True
        return
    replaces = [s for s in steps if s["type"] == "Replace"]
    strips = [s for s in steps if s["type"] == "Strip"]
    metaspace = [s for s in steps if s["type"] == "Metaspace"]
    odd = (
        kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        or any(s["pattern"] != {"String": _SPACE} or s["content"] != " " for s in replaces)
        or any(s["content"] != " " or s["start"] > 1 or s["stop"] for s in strips)
        or any(s.get("replacement", _SPACE) != _SPACE for s in metaspace)
        or not (replaces or metaspace)
    )
    if odd:
        raise ModelLoadError(f"tokenizer.json has a decoder Octavo does not support: {', '.join(sorted(kinds))}")
    vocab.decoding = "sentencepiece"
    vocab.byte_fallback = "ByteFallback" in kinds
    vocab.strip_leading_space = any(s["start"] == 1 for s in strips) or any(s.get("prepend_scheme") != "never" for s in metaspace)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _NAMED:
        value = config.get(name)
        text = token_text(value)
        if text is not None:
            found[name] = text
        elif value is not None and value != "":
            _log.warning("tokenizer_config.json: %s is %.60r, neither a string nor an object with content: ignored", name, value)
    return found


def _mark_special(backend: tokenizers.Tokenizer, names: dict[str, str], config: Mapping[str, Any]) -> None:
    """Tokens that only the config calls special become so, as in transformers; one that is no token of the file is left out."""
    extra = config.get("additional_special_tokens") or []
    texts = [*names.values(), *(token_text(v) for v in (extra if isinstance(extra, Sequence) and not isinstance(extra, str) else ()))]
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        texts += [token_text(v) for v in listed.values() if isinstance(v, Mapping) and v.get("special") is True]
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    missing: set[str] = set()
    for text in dict.fromkeys(texts):
        if text is None or text in special:
            continue
        if backend.token_to_id(text) is None:
            missing.add(text)
            _log.warning("tokenizer_config.json names the token %.60r, which tokenizer.json does not have: ignored", text)
        else:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    for name in [name for name, text in names.items() if text in missing]:
        del names[name]


def _wrapping(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the file's post-processor puts before and after a text."""
    plain, full = (backend.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return [], []


def _hide_controls(vocab: Vocabulary) -> None:
    backend = vocab.backend
    added = backend.get_added_tokens_decoder()
    vocab.added_ids = frozenset(added)
    hidden = []
    for index, token in added.items():
        if token.content and (token.special or looks_like_control(token.content)):
            flags = (token.lstrip, token.rstrip, token.single_word)
            vocab.controls[token.content] = ControlToken(index, token.special, *flags)
            if not token.special:
                hidden.append(AddedToken(token.content, special=True, normalized=token.normalized))
    if hidden:
        backend.add_special_tokens(hidden)
    backend.encode_special_tokens = True


def _set_ids(vocab: Vocabulary, names: dict[str, str], config: Mapping[str, Any], prefix: list[int], suffix: list[int]) -> None:
    ids = {name: vocab.backend.token_to_id(text) for name, text in names.items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    for flag, token, ends in (("add_bos_token", bos, prefix), ("add_eos_token", eos, suffix)):
        wanted = config.get(flag)
        if wanted not in (None, True, False):
            raise ModelLoadError(f"tokenizer_config.json: {flag} must be true or false, got {wanted!r:.60}")
        if token is None:
            if wanted:
                _log.warning("tokenizer_config.json: %s is set, but there is no such token: none is added", flag)
        elif wanted and token not in ends:
            ends.insert(0 if ends is prefix else len(ends), token)
        elif wanted is False and token in ends:
            ends.remove(token)
    vocab.prefix_ids, vocab.suffix_ids = tuple(prefix), tuple(suffix)
    vocab.bos_token_id = bos
    vocab.eos_token_ids = () if eos is None else (eos,)
    vocab.special_tokens_map = names


def _detach_first_prefix(vocab: Vocabulary) -> None:
    """Metaspace "first" puts a space only before the first segment of a text. The tokenizer cuts segments itself, so it must know."""
    steps = _component(vocab.backend.pre_tokenizer)
    if not any(s["type"] == "Metaspace" and s.get("prepend_scheme") == "first" for s in steps):
        return
    for step in steps:
        if step["type"] == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    blank = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    blank["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    vocab.backend.pre_tokenizer = tokenizers.Tokenizer.from_str(json.dumps(blank)).pre_tokenizer
    vocab.prefix_first_segment = True
