"""A vocabulary for a made model: a real byte-level BPE tokenizer.json, or a generated one, as GGUF metadata.

Pure functions. Not here: encoding text (tokenizer/ reads what is written here, as it reads any GGUF file).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from octavo.bench.model_shapes import ModelShape
from octavo.errors import ConfigError

#: Token types of the format (tokenizer.ggml.token_type).
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
ENDOFTEXT, IM_START, IM_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_BYTES = 64 << 20
#: Part of the splitting pattern -> its name in GGUF files: how many digits go together tells them apart.
_PATTERNS = ((r"\p{N}{1,3}", "llama-bpe"), (r"|\p{N}|", "qwen2"))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: list[str]
    types: list[int]
    merges: list[str]
    pre: str

    def gguf_metadata(self) -> dict[str, Any]:
        """The keys under tokenizer.; ids of the special tokens by the text of the usual ones, else the first control token."""
        control = [i for i, kind in enumerate(self.types) if kind == CONTROL]
        ids = {self.tokens[i]: i for i in control}
        end = next((ids[text] for text in (IM_END, ENDOFTEXT) if text in ids), control[0])
        pad = ids.get(ENDOFTEXT, end)
        chat = {"tokenizer.chat_template": CHATML} if IM_START in ids and IM_END in ids else {}
        names = {"model": "gpt2", "pre": self.pre, "tokens": self.tokens, "token_type": self.types, "merges": self.merges}
        numbers = {"eos_token_id": end, "padding_token_id": pad, "bos_token_id": pad, "add_bos_token": False}
        return {**{f"tokenizer.ggml.{key}": value for key, value in {**names, **numbers}.items()}, **chat}


def generated(shape: ModelShape) -> Vocabulary:
    """One token a byte, pairs of small letters and of space and letter, three special tokens; the rest is never made from text."""
    letters = byte_alphabet()
    merges = [f"{a} {b}" for a, b in product(ascii_lowercase + "\u0120", ascii_lowercase)]  # U+0120 stands for the space
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), *SPECIAL]
    types = [NORMAL] * (len(tokens) - len(SPECIAL)) + [CONTROL] * len(SPECIAL)
    return _padded(Vocabulary(tokens, types, merges, shape.pre), shape, "the generated vocabulary")


def byte_alphabet() -> list[str]:
    """GPT-2's character of each byte (Radford et al. 2019): printable Latin-1 as it is, the rest from U+0100 on, in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]


def from_folder(folder: Path, shape: ModelShape) -> Vocabulary:
    """The byte-level BPE vocabulary of folder/tokenizer.json. Raises ConfigError for another kind, and for one that is too large."""
    path = folder / "tokenizer.json"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"--tokenizer: {path} is larger than {MAX_BYTES >> 20} MiB")
        raw = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--tokenizer: {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--tokenizer: {path} is not valid JSON") from None
    try:
        pre = _pre_tokenizer(json.dumps(raw["pre_tokenizer"], ensure_ascii=False))
        if raw["model"]["type"] != "BPE" or pre is None:
            raise ConfigError(
                f"--tokenizer: {path} is no byte-level BPE that GGUF has a name for (try a tokenizer of Qwen, Llama 3 or SmolLM)"
            )
        entries = dict(raw["model"]["vocab"])
        types = dict.fromkeys(entries.values(), NORMAL)
        for added in raw.get("added_tokens") or []:
            entries[added["content"]] = added["id"]
            types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
        texts = {number: text for text, number in entries.items()}
        if not all(type(i) is int and 0 <= i < shape.vocab for i in texts):
            raise ConfigError(f"--tokenizer: {path} has token ids outside the {shape.vocab} of {shape.name}")
        numbers = range(max(texts) + 1)
        tokens = [texts.get(i, f"[HOLE{i}]") for i in numbers]
        found = Vocabulary(tokens, [types.get(i, UNUSED) for i in numbers], merges, pre)
    except ConfigError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"--tokenizer: {path} is not a tokenizer.json of the tokenizers library ({error!r:.80})") from None
    if CONTROL not in found.types:
        raise ConfigError(f"--tokenizer: {path} has no special token, so no end of text")
    return _padded(found, shape, str(path))


def hf_files(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json of a generated vocabulary, by name."""
    added = [{"id": i, "content": t, "special": True} for i, t in enumerate(vocabulary.tokens) if vocabulary.types[i] == CONTROL]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    entries = {text: i for i, text in enumerate(vocabulary.tokens) if vocabulary.types[i] != CONTROL}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{**one, **flags} for one in added],
        "normalizer": None,
        "pre_tokenizer": plain,
        "decoder": plain,
        "model": {"type": "BPE", "vocab": entries, "merges": vocabulary.merges},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": IM_END, "pad_token": ENDOFTEXT, "chat_template": CHATML}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _pre_tokenizer(text: str) -> str | None:
    """GGUF's name of a pre-tokenizer, given as the JSON text of tokenizer.json; None: unknown."""
    pattern = text.replace("\\\\", "\\")
    for part, name in _PATTERNS:
        if part in pattern:
            return name
    if '"ByteLevel"' not in text or "Split" in text:
        return None
    return "smollm" if '"Digits"' in text else "gpt-2"


def _padded(found: Vocabulary, shape: ModelShape, what: str) -> Vocabulary:
    missing = shape.vocab - len(found.tokens)
    if missing < 0:
        raise ConfigError(f"{what} has {len(found.tokens)} tokens, more than the {shape.vocab} of {shape.name}")
    first = len(found.tokens)
    padding = [f"[PAD{i}]" for i in range(first, first + missing)]
    return Vocabulary(found.tokens + padding, found.types + [UNUSED] * missing, found.merges, found.pre)
