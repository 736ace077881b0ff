"""Pre-tokenizers by name: how a byte-level BPE vocabulary of a GGUF file splits text before merging.

The names are those the GGUF format stores under tokenizer.ggml.pre; the patterns are the ones published in the models' own
tokenizer.json files (https://github.com/ggml-org/llama.cpp lists which name means which).
Not here: anything about tokens; SentencePiece vocabularies have no pre-tokenizer.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
#: GPT-2 (Radford et al. 2019): Split pattern of the original byte-level BPE.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
#: The cl100k pattern of tiktoken and its kin, which differ in how many digits go together.
_LLAMA3 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}|{_SYMBOLS}{_SPACES}"
_QWEN35 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str) -> str:
    """Words split where lower case turns to upper case (o200k and Tekken)."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    symbols = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|"
    return f"{lead}{_UPPER}*{_LOWER}+{ending}|{lead}{_UPPER}+{_LOWER}*{ending}|{digits}|{symbols}{_SPACES}"


#: Letters with case as of Unicode 10, Armenian and Georgian small ones left out. Characters that NFC would replace are escaped.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|""" + _SPACES
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

#: Pattern sequences; each one isolates its matches within the pieces the one before left.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt2": (_GPT2,),
    "digits": (r"\p{N}", _GPT2),
    "llama3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "deepseek-llm": (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3),
    "bloom": (_BLOOM,),
    "viking": (_BLOOM, r"\p{N}"),
    "tekken": (_cased("", r"\p{N}"),),
    "gpt-4o": (_cased(_CONTRACTION + "?", r"\p{N}{1,3}"),),
    "bailingmoe": (rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}",),
    "seed-coder": (rf"{_CONTRACTION}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}",),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
}

_NAMES = {
    "default": "default",
    "gpt2": "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 jina-es jina-de gigachat a.x-4.0 mellum modern-bert",
    "digits": "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama3": "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe",
    "qwen2": "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2 kormo",
    "qwen35": "qwen35",
    "falcon": "falcon",
    "deepseek-llm": "deepseek-llm",
    "deepseek-coder": "deepseek-coder",
    "deepseek-v3": "deepseek-v3 hunyuan-dense joyai-llm",
    "bloom": "bloom poro-chat gpt3-finnish",
    "viking": "viking",
    "tekken": "tekken",
    "gpt-4o": "gpt-4o llama4 kanana2 minimax-m2",
    "bailingmoe": "bailingmoe bailingmoe2 llada-moe",
    "seed-coder": "seed-coder",
    "superbpe": "superbpe",
}
#: Models whose published tokenizer composes characters first (Unicode NFC); GGUF does not say so.
_NFC = frozenset({"qwen2", "qwen35", "stablelm2", "mpt", "olmo", "command-r"})
#: A piece that is a token as it stands is taken whole, without merging.
_IGNORE_MERGES = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"})


class PreTokenizerSpec(NamedTuple):
    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None
    ignore_merges: bool
    #: What add_bos_token means where the file does not say.
    add_bos: bool


def known_names() -> dict[str, str]:
    """GGUF name -> key of its pattern sequence."""
    return {name: patterns for patterns, names in _NAMES.items() for name in names.split()}


def build(name: str) -> PreTokenizerSpec | None:
    """The pre-tokenizer that GGUF calls `name`, or None for an unknown name."""
    patterns = known_names().get(name)
    if patterns is None:
        return None
    splits: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(p), "isolated") for p in _PATTERNS[patterns]]
    # The last step only maps bytes to the byte alphabet; the splitting is done.
    sequence = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ignore = name in _IGNORE_MERGES
    return PreTokenizerSpec(sequence, normalizers.NFC() if name in _NFC else None, ignore, ignore)
