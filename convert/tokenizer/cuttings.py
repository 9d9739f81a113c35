"""How llama.cpp cuts a text into words, for every name that `tokenizer.ggml.pre` may have.

A byte-level BPE first cuts the text into words, then merges inside each word. llama.cpp has its cuttings
built in, and a GGUF file only names one. CUTTINGS has all names that its loader knows (src/llama-vocab.cpp,
llama_vocab::impl::load) with the regular expressions and flags that stand for them there. Each expression
cuts the pieces that those before it left, and what lies between two matches is a piece, too.

The expressions say what llama.cpp does, which is not always what the model's own tokenizer.json says:

- A letter is of either case unless it is in A-Z or a-z, in the expressions of words by case.
- Each white space outside of ASCII becomes one control character before an expression is tried, so a class
  that lists one of them never matches it.
- Ideographs are the ranges of `unicode_cpt_is_han`, which lack some of Unicode's script Han.
- Digits in groups of three, counted from the right, take the text in front of them along.

`tests/imatrix/forward/test_cuttings.py` compares the token ids of every name with llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gguf_tools.format import keys
from gguf_tools.format.values import Metadata


@dataclass(frozen=True)
class Cutting:
    """How llama.cpp cuts a text, and what its loader sets beside that.

    regexes          applied one after the other, in the syntax of the tokenizers library
    ignore_merges    a word that is itself a token is not merged from its parts
    adds_bos         a text begins with BOS where the file does not say
    escapes_spaces   tokens have ▁ for a space and are UTF-8; a character without a token becomes <0x0A> etc.
    whole_line_ends  the same as ignore_merges, for line ends alone
    drops_spaces     white space makes no token, and tokens are UTF-8
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    escapes_spaces: bool = False
    whole_line_ends: bool = False
    drops_spaces: bool = False

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens spell each byte as one printable character, as those of GPT-2."""
        return not (self.escapes_spaces or self.drops_spaces)


def _cut(*regexes: str, ignore_merges: bool = False, adds_bos: bool = False) -> Cutting:
    return Cutting(regexes, ignore_merges, adds_bos)


_CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s+(?!\S)|\s+"
_LINE_ENDS = r"\s*[\r\n]+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_OTHERS}|{_SPACES}"


def _words(
    letters: str = r"\p{L}+", digits: str = r"\p{N}", others: str = rf"{_OTHERS}[\r\n]*",
    start: str = _CONTRACTION + "|", spaces: str = _SPACES,
) -> str:  # fmt: skip
    """Return an expression of the kind that begins with Llama 3's."""
    return rf"{start}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{others}|{_LINE_ENDS}|{spaces}"


def _words_by_case(upper: str, lower: str, end: str = "", digits: str = r"\p{N}{1,3}") -> str:
    """Return an expression of the kind that begins with GPT-4o's."""
    words = "|".join(
        rf"[^\r\n\p{{L}}\p{{N}}]?{letters}{end}" for letters in (f"{upper}*{lower}+", f"{upper}+{lower}*")
    )
    return rf"{words}|{digits}|{_OTHERS}[\r\n/]*|{_LINE_ENDS}|{_SPACES}"


def _punctuated(spaces: str = rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINE_ENDS}") -> str:
    """Return an expression of the kind that DeepSeek V3 has: punctuation apart from words."""
    ascii_punctuation = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
    words = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    return rf"{ascii_punctuation}[A-Za-z]+|{words}|{spaces}|{_SPACES}"


_BY_CASE = (r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]")
_BY_CASE_WITH_MARKS = (r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]")
_LETTERS_OF_ANY_CASE = (r"[\p{L}\p{M}]", r"[\p{L}\p{M}]")

_THREES_FROM_THE_RIGHT = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_HAN_AND_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = "[[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]&&\\S]+"
_HAN = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df"
    "\U0002a700-\U0002ebef\U0002f800-\U0002fa1f"
)  # fmt: skip

# Letters of the alphabets with upper and lower case, as DeepSeek-LLM's tokenizer.json spells them out.
CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)

_LLAMA3 = _words(digits=r"\p{N}{1,3}")
_QWEN2 = _words()
_LINES = r"[^\n]+|\n+"

_TABLE: Mapping[str, Cutting] = {
    "default": _cut(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _cut(
        _LLAMA3, ignore_merges=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": _cut(_LLAMA3),
    "glm4 glm5": _cut(_LLAMA3, ignore_merges=True),
    "jais-2": _cut(
        _words(
            digits=r"\p{N}{1,3}",
            spaces="|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s",
        )
    ),
    "minicpm5": _cut(r"\p{N}{1,3}", _words(digits=r"\p{N}+"), ignore_merges=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 "
    "llada-moe": _cut(_QWEN2),
    "qwen35": _cut(_words(r"[\p{L}\p{M}]+", others=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")),
    "ufakzeka": _cut(_words(start="")),
    "laguna": _cut(_LINES, _QWEN2),
    "seed-coder": _cut(_words(others=r" ?[^\s\p{L}\p{N}\r\n]+")),
    "exaone-moe": _cut(_words(r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", others=rf"{_OTHERS}[\r\n/]?")),
    "deepseek-llm": _cut(
        "[\r\n]",
        rf"\s?[{CASED_LETTERS}]+",
        r"\s?[[!-/:-~！-／：-～‘-‟\u3000-。]&&\S]+".replace("\\u3000", "\u3000"),
        r"\s+$",
        _CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": _cut("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _cut(r"\p{N}{1,3}", _HAN_AND_KANA, _punctuated()),
    "spark2_5": _cut(r"\p{N}{1,3}", _HAN_AND_KANA, _punctuated(r" ?[\p{P}\p{S}]+|[\r\n]"), r"\p{N}"),
    "afmoe": _cut(
        _THREES_FROM_THE_RIGHT,
        "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff"
        "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        _punctuated(),
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _cut(_words_by_case(*_BY_CASE, end=f"{_CONTRACTION}?")),
    "tekken": _cut(_words_by_case(*_BY_CASE, digits=r"\p{N}"), ignore_merges=True, adds_bos=True),
    "granite-embed-multi-97m": _cut(
        _words_by_case(*_BY_CASE_WITH_MARKS, end=f"{_CONTRACTION}?"), ignore_merges=True
    ),
    "tiny_aya cohere2moe": _cut(
        _THREES_FROM_THE_RIGHT, _words_by_case(*_LETTERS_OF_ANY_CASE, end=f"{_CONTRACTION}?")
    ),
    "youtu": _cut(
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
        _words_by_case(*_LETTERS_OF_ANY_CASE, end=f"{_CONTRACTION}?", digits=r"\p{N}"),
        ignore_merges=True,
    ),
    "kimi-k2": _cut(
        _words(rf"[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?", start=f"[{_HAN}]+|", digits=r"\p{N}{1,3}")
    ),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en "
    "jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling": _cut(_GPT2),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _cut(r"\p{N}", _GPT2),
    "falcon": _cut(r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "chameleon": _cut(
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        "[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        adds_bos=True,
    ),
    "poro-chat bloom gpt3-finnish": _cut(_SENTENCES),
    "viking": _cut(_SENTENCES, r"\p{N}"),
    "superbpe": _cut(r"\p{N}+", r"[\s\S]+?(?=(?:[0-9]{3})+(?![0-9]))"),
    "gemma4 granite-embed-multi-311m": Cutting(
        (_LINES,), adds_bos=True, escapes_spaces=True, whole_line_ends=True
    ),
    "sarvam-moe": Cutting((_LINES,), escapes_spaces=True),
    "whitespace": Cutting((r"\S+",), drops_spaces=True),
}  # fmt: skip

CUTTINGS: Mapping[str, Cutting] = {
    name: cutting for names, cutting in _TABLE.items() for name in names.split()
}
"""Every name that llama.cpp's loader accepts as tokenizer.ggml.pre -> how it cuts."""

DEFAULT = "default"
"""Name that llama.cpp takes for a file that has none."""

BYTE_PAIRS: Mapping[str, str | None] = {"gpt2": None, "gemma4": "gemma4", "whitespace": "whitespace"}
"""Values of tokenizer.ggml.model that are a BPE -> the cutting they mean, None where `pre` names it."""

_NAMED_BY = keys.TOKENIZER_MODEL, keys.TOKENIZER_PRE


def cutting_of(vocab: Metadata) -> Cutting | None:
    """Return how a BPE cuts text; None for another kind of tokenizer, or a name that llama.cpp lacks."""
    model, pre = (None if (value := vocab.get(key)) is None else value.data for key in _NAMED_BY)
    if model is None or model not in BYTE_PAIRS:
        return None
    return CUTTINGS.get(BYTE_PAIRS[model] or (DEFAULT if pre is None else pre))
