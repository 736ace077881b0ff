"""What the tokenizer tests share: nasty text, strategies, and GGUF metadata derived from real tokenizer.json files.

The metadata is made the way llama.cpp's converter makes it (tokens in id order, types, scores, merges), so a tokenizer rebuilt
from it can be compared with the original id for id.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st

from octavo.tokenizer.tokenizer import Tokenizer

NASTY = [
    "",
    " ",
    "Hello, world! It's 12:34 and I'd say WE'LL SEE they'VE gone; DON'T, don’t.",
    "The quick brown fox jumps over the lazy dog. 1234567890 3.14159 1,000,000 ½ ² Ⅷ ٣٤ १२३ 0x1F",
    "def f(x):\n\tif x:\n\t\treturn x**2  # comment\n\n\n    return None\r\n\r\n",
    '#include <stdio.h>\nint main() { printf("%d\\n", 1<<3); return 0; }',
    "   leading and   inner     runs \t\t tabs \n \n  \n\n\n\n end   ",
    "\n\n\n\n\n",
    " " * 70 + "x" + " " * 33 + "\t" * 40 + "\n" * 50,
    "中文测试：你好，世界！我们在北京。 日本語のテスト、カタカナとひらがな。한국어 시험입니다.",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם",
    "नमस्ते दुनिया, क्या हाल है? สวัสดีชาวโลก ทดสอบภาษาไทย ไม่มีเว้นวรรค",
    "Ünïcödé e\u0301 vs é, Ǆ ŉ ﬁ ﬀ, Å Å, ế, n\u0303\u0323, Z\u0351\u036b\u0343a\u0302lgo",
    "😀👍🏽👨‍👩‍👧‍👦🏳️‍🌈🇫🇷🇺🇸 ❤️ ☃ \U0001f9d1\u200d\U0001f680",
    "price: $5.00 €10 £3 ¥100 %^&*()_+-=[]{}|;':\",./<>?`~ «quotes» “curly” … — –",
    "\x00\x01\x07\x1b[31mred\x1b[0m\x7f\x80\x9f\xa0\xad",
    "\u200b\u200c\u200d\u2028\u2029\u202e\ufeff\ufffd\ufffe\uffff\U0010ffff\ue000\U000e0041",
    "▁▁ under▁score ▁",
    "<0x0A><0x41> <s> </s> <unk> <|im_start|> <table><tr><td>1</td></tr></table>",
    "http://example.org/a?b=c&d=e#f user@example.org C:\\path\\to\\file",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 4,
    "9" * 100,
    "camelCaseWord SCREAMING_CASE snake_case XMLHttpRequest iPhone15Pro éÉàÀ",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία.",
]

_CHARS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(" \n\r\t'0123456789aAsStTéßñ中文日ा้😀👍\u0301\u200d▁<>|[]_-"),
    st.sampled_from(["  ", "\n\n", "'s", "'LL", "the ", "ing", " and", "<|im_", "end|>", "<s>", "</s>", "<0x0A>"]),
)
TEXT = st.lists(_CHARS, max_size=40).map("".join)


def load(folder: Path) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    """(the library's own tokenizer, ours) of one real model."""
    path = folder / "tokenizer.json"
    return tokenizers.Tokenizer.from_file(str(path)), Tokenizer.from_file(path, config(folder))


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tokenizer_config.json").read_text())


@functools.cache
def tokenizer_json(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tokenizer.json").read_text())


def _looks_special(text: str) -> bool:
    return text in ("<pad>", "<mask>") or (text[:2], text[-2:]) == ("<|", "|>") or (text.startswith("<unused") and text.endswith(">"))


def gguf_metadata(folder: Path, kind: str, pre: str | None = None) -> dict[str, Any]:
    """kind: "gpt2" or "llama" (then a piece's score is the negative of the place of its first merge)."""
    data = tokenizer_json(folder)
    vocab, added = dict(data["model"]["vocab"]), {t["id"]: t for t in data["added_tokens"]}
    vocab |= {t["content"]: i for i, t in added.items()}
    tokens = [text for text, _ in sorted(vocab.items(), key=lambda item: item[1])]
    assert [vocab[t] for t in tokens] == list(range(len(tokens)))
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in data["model"]["merges"]]
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    types, scores = [1] * len(tokens), [-float(ranks.get(text, 10**6)) for text in tokens]
    for i, text in enumerate(tokens):
        if i in added:
            special = added[i]["special"] or _looks_special(text)
            types[i] = 3 if special else 4
            if kind == "llama":
                scores[i] = -1000.0
                tokens[i] = text if special else text.replace("▁", " ")
        elif kind == "llama" and len(text) == 6 and text.startswith("<0x"):
            types[i] = 6
    own = config(folder)
    meta: dict[str, Any] = {"model": kind, "tokens": tokens, "token_type": types}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown")):
        if own.get(f"{name}_token"):
            meta[f"{key}_token_id"] = vocab[own[f"{name}_token"]]
    meta["add_bos_token"] = bool(own.get("add_bos_token"))
    if kind == "gpt2":
        meta |= {"pre": pre, "merges": [" ".join(m) for m in merges]}
    else:
        meta["scores"] = scores
        if "unknown_token_id" in meta:
            types[meta["unknown_token_id"]] = 2
    return {f"tokenizer.ggml.{key}": value for key, value in meta.items()}
