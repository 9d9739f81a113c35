"""Finds the pre-tokenizer of llama.cpp that does what a tokenizer.json asks for.

A byte-level BPE first cuts the text into words, then merges bytes inside each word. tokenizer.json describes
the cutting as a pipeline. llama.cpp has its pipelines built in, and a GGUF file only names one
(`tokenizer.ggml.pre`). So the pipeline must be recognised, by what it does:

1. by its steps: both pipelines are brought to one canonical form and compared;
2. by its splits: an equivalent spelling cuts a long probe text at the same places. The probe has
   hand-picked lines and, each in several contexts, characters of all scripts.

The steps of KNOWN are those of the models' own tokenizer.json files. llama.cpp spells some of them
differently where its regex engine needs it; tests/convert compares token ids.
"""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from convert.tokenizer.cuttings import CASED_LETTERS, CUTTINGS
from convert.tokenizer.files import library_errors
from gguf_tools.errors import BadTokenizer
from gguf_tools.text import cut_short

Step = tuple[str, ...]

Cut = Callable[[str], list[tuple[str, tuple[int, int]]]]
"""A pipeline's pre_tokenize_str: a line's words, and where each begins and ends."""

MAX_DESCRIPTION = 1000

PATIENCE = 50
PATIENCE_SECONDS = 0.5
"""Time that an unknown pipeline may take: this many times as long as one of KNOWN, and this many seconds."""

GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


# A word of the o200k regex: upper case letters, lower case letters, and what may stand around them.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_HAN = r"&&[^\p{Han}]"
_WORD_START, _WORD_END = "[^\r\n\\p{L}\\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _words_by_case(but: str = "", end: str = _WORD_END) -> str:
    """Return the o200k regex of words that end with `end`; their letters are none of the class `but`."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return "|".join(f"{_WORD_START}{letters}{end}" for letters in (f"{upper}*{lower}+", f"{upper}+{lower}*"))


def _isolated(*regexes: str) -> tuple[Step, ...]:
    return (*(("split", regex, "Isolated") for regex in regexes), ("bytes",))


@dataclass(frozen=True)
class PreTokenizer:
    """A pipeline that llama.cpp has built in.

    name           what tokenizer.ggml.pre says
    steps          the canonical pipeline of the models that use it
    ignore_merges  a word that is itself a token is not merged from its bytes
    either_merges  it is the one for tokenizers that say the opposite of that, too
    """

    name: str
    steps: tuple[Step, ...]
    ignore_merges: bool = False
    either_merges: bool = False

    def suits(self, ignore_merges: bool) -> bool:
        """Return whether it can stand for a tokenizer with this setting."""
        return self.either_merges or self.ignore_merges == ignore_merges

    def build(self) -> Any:
        """Return it as an object of the tokenizers library."""
        parts = [
            {"type": "Split", "pattern": {"Regex": step[1]}, "behavior": step[2], "invert": False}
            for step in self.steps
            if step[0] == "split"
        ]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        return build_pipeline(Path(self.name), {"type": "Sequence", "pretokenizers": [*parts, byte_level]})


_CL100K = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

_QWEN2 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

KNOWN: tuple[PreTokenizer, ...] = (
    PreTokenizer(
        # DeepSeek-LLM, V2, V2-Lite, V2.5, Coder-V2. llama.cpp leaves runs of digits whole, which is the
        # same to these vocabularies: they have no token of two digits.
        "deepseek-llm",
        _isolated(
            "[\r\n]",
            rf"\s?[{CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+".replace("\\u3000", "\u3000"),
            r"\s+$",
            _CJK,
            r"\p{N}",
        ),
    ),
    PreTokenizer("deepseek-coder", _isolated("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    PreTokenizer(
        "deepseek-v3",  # V3, V3.1, R1
        _isolated(
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
            "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+"
            r"|\s+(?!\S)|\s+",
        ),
    ),
    PreTokenizer("llama-bpe", _isolated(_CL100K), ignore_merges=True),
    PreTokenizer("dbrx", _isolated(_CL100K)),  # Phi 4, OLMo 2 and 3, Granite 4
    PreTokenizer("smollm", _isolated(r"\p{N}", GPT2_REGEX)),  # SmolLM and SmolLM 2, Granite 3
    PreTokenizer(
        "seed-coder",  # Seed-OSS
        _isolated(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}"
            "| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
    ),
    PreTokenizer("qwen2", _isolated(_QWEN2)),
    PreTokenizer("laguna", _isolated("[^\n]+|\n+", _QWEN2)),
    PreTokenizer(
        "qwen35",
        _isolated(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
            "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
    ),
    PreTokenizer(
        "exaone-moe",
        _isolated(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?(?:\\p{L}\\p{M}*(?: \\p{L}\\p{M}*)*)+|\\p{N}"
            "| ?[^\\s\\p{L}\\p{N}]+[\r\n/]?|\\s*[\r\n]|\\s+(?!\\S)|\\s+"
        ),
    ),
    PreTokenizer(
        "gpt-4o",  # gpt-oss, whose tokenizer.json ignores merges, and llama.cpp does not
        _isolated(
            f"{_words_by_case()}|"
            "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\r\n/]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
        either_merges=True,
    ),
    PreTokenizer("gpt-2", _isolated(GPT2_REGEX)),
    PreTokenizer(
        "tekken",  # Mistral Nemo, Mistral Large 3
        _isolated(
            f"{_words_by_case(end='')}|"
            "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\r\n/]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
        ignore_merges=True,
    ),
    PreTokenizer(
        "youtu",  # Youtu-LLM
        _isolated(
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
            f"{_words_by_case()}|\\p{{N}}| ?[^\\s\\p{{L}}\\p{{N}}]+[\r\n/]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        ),
        ignore_merges=True,
    ),
    PreTokenizer(
        "kimi-k2",  # Kimi K2, K2.5, Kimi-VL, Moonlight
        _isolated(
            rf"[\p{{Han}}]+|{_words_by_case(_NOT_HAN)}"
            "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
    ),
)

NAMES: tuple[str, ...] = tuple(sorted(name for name, cutting in CUTTINGS.items() if cutting.is_byte_level))
"""Every name that llama.cpp's vocabulary loader accepts for a byte-level BPE."""


def find_pre_tokenizer(
    path: Path, pre_tokenizer: Mapping[str, Any] | None, *, ignore_merges: bool, name: str | None = None
) -> str:
    """Return the name of the built-in pipeline that cuts text as `pre_tokenizer` does.

    path           the tokenizer.json, for messages
    pre_tokenizer  its `pre_tokenizer` entry
    ignore_merges  its `model.ignore_merges`
    name           the user's own choice; taken as it is when llama.cpp knows it
    raises         BadTokenizer for an unknown name, or a pipeline that nothing in KNOWN equals
    """
    if name is not None:
        if name not in NAMES:
            raise BadTokenizer(
                f"--pre-tokenizer {name}: llama.cpp has no such one; it has {', '.join(NAMES)}"
            )
        return name
    steps = canonical_steps(pre_tokenizer)
    for known in KNOWN:
        if known.suits(ignore_merges) and known.steps == steps:
            return known.name
    if steps:
        # A slow one cuts each line once, not once per known one.
        cut = cache(build_pipeline(path, pre_tokenizer).pre_tokenize_str)
        with library_errors(path, "pre_tokenizer can't be tried"):
            for known in KNOWN:
                if known.suits(ignore_merges) and cuts_alike(cut, known.build().pre_tokenize_str):
                    return known.name
    found = " -> ".join(map(_describe, steps)) or "none"
    if len(found) > MAX_DESCRIPTION:
        found = f"{found[:MAX_DESCRIPTION]}..."
    raise BadTokenizer(
        f"{path}: pre-tokenizer not recognised: found {found}"
        f"{' with ignore_merges' if ignore_merges else ''}; "
        f"if you know which of llama.cpp's does the same, say --pre-tokenizer NAME, one of {', '.join(NAMES)}"
    )


def canonical_steps(pre_tokenizer: Mapping[str, Any] | None) -> tuple[Step, ...]:
    """Return the pipeline as flat steps.

    They are ("split", regex, behavior), ("bytes",), ("prefix space",), and others by their type's name.
    Equal pipelines cut alike; unequal ones may still do so.
    """
    if not pre_tokenizer:
        return ()
    if not isinstance(pre_tokenizer, Mapping):  # the library takes an object's values without names, too
        return ((repr(pre_tokenizer),),)
    kind = str(pre_tokenizer.get("type"))
    if kind == "Sequence":
        parts = pre_tokenizer.get("pretokenizers") or ()
        return tuple(step for part in parts for step in canonical_steps(part))
    if kind == "Split":
        behavior = str(pre_tokenizer.get("behavior"))
        inverted = ("inverted",) if pre_tokenizer.get("invert") else ()
        return (("split", _pattern(pre_tokenizer.get("pattern")), behavior, *inverted),)
    if kind == "Digits":
        return (("split", r"\p{N}" if pre_tokenizer.get("individual_digits") else r"\p{N}+", "Isolated"),)
    if kind == "ByteLevel":
        prefix = (("prefix space",),) if pre_tokenizer.get("add_prefix_space", True) else ()
        regex = (("split", GPT2_REGEX, "Isolated"),) if pre_tokenizer.get("use_regex", True) else ()
        return (*prefix, *regex, ("bytes",))
    return ((kind, *(f"{key}={value}" for key, value in pre_tokenizer.items() if key != "type")),)


def _pattern(pattern: object) -> str:
    if not isinstance(pattern, Mapping):
        return repr(pattern)
    if "String" in pattern:
        return f"literally {pattern['String']!r}"
    # left to right, so that the escaped backslash of \\\\n stays one
    return re.sub(r"\\(.)", lambda escape: _CONTROLS.get(escape[1], escape[0]), str(pattern.get("Regex")))


_CONTROLS = {"r": "\r", "n": "\n", "t": "\t"}


def _describe(step: Step) -> str:
    texts = (json.dumps(part, ensure_ascii=False) if i == 1 else part for i, part in enumerate(step))
    shown = [cut_short(text) for text in texts]
    return " ".join(shown[:2] if shown[0] == "split" and shown[2:] == ["Isolated"] else shown)


# --- the second way: by splits -------------------------------------------------------------------------


def build_pipeline(path: Path, pre_tokenizer: Mapping[str, Any] | None) -> Any:
    """Return the pipeline as an object of the tokenizers library.

    raises  BadTokenizer when the library can't build it
    """
    return build_parts(path, pre_tokenizer=pre_tokenizer).pre_tokenizer


def build_parts(path: Path, **parts: Any) -> Any:
    """Return a tokenizer of the library with some parts of a tokenizer.json and no tokens; raises alike."""
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    shell = {"version": "1.0", "added_tokens": [], "model": model, **parts}
    with library_errors(path, f"{' and '.join(parts)} can't be built"):
        return Tokenizer.from_str(json.dumps(shell))


def cuts_alike(one: Cut, other: Cut) -> bool:
    """Return whether two pipelines cut every line of the probe text into the same words of bytes.

    raises  TimeoutError when `one` takes very much longer. A regular expression can take time that is
            exponential in the length of a line, and the library gives up only after 0.1 s
    """
    seconds = [0.0, 0.0]
    for line in probe_lines():
        words = []
        for index, cut in enumerate((one, other)):
            start = time.thread_time()
            words.append([word for word, _ in cut(line)])
            seconds[index] += time.thread_time() - start
        if words[0] != words[1]:
            return False
        if seconds[0] > PATIENCE_SECONDS + PATIENCE * seconds[1]:
            raise TimeoutError(f"it takes {seconds[0]:.1f} s where others take {seconds[1]:.1f} s")
    return True


_WRITTEN_BY_HAND = (
    "Hello, y'all! I've I'M we'LL he'd it's DON'T 'tis o'clock",
    "def f(x):\n    return x**2  # comment\n\n\tif a!=b: pass\r\n\r\n   \n x = {'k': [1, 22, 333, 55555]}\n",
    "1 12 123 1234 12345678 3.14159 1,000,000 0x1F a1b2c3 ½ Ⅷ ٣٤٥ ²³ v2.0-rc1",
    "我想在apple工作1314151天～ 東京タワーへ行きます。ひらがなカタカナ",
    "한국어 텍스트 ㄱㄴㄷ ภาษาไทย हिन्दी עברית العربية",
    "нещо на Български Ελληνικά Ünïcödé ǅ ſ ﬁ Ａｂｃ１２３ ＡＢ、。「」！？",
    "😶\u200d🌫️ ✅ 🦙🦙 👩\u200d👩\u200d👧 e\u0301 ñ n\u0303 ́x",
    "------======= ''''''```````\"\"\"\"......!!!!!!?????? $€£+<=>~^|` §©®°µ",
    "<|x|> <｜x｜> @user #tag_1 a_b a-b",
    " leading",
    "  two",
    "trailing ",
    "trailing  ",
    "tabs\t\t\ttabs",
    "nbsp\u00a0\u00a0x\u3000y\u2003z",
    "\n",
    " \n \n\n ",
)


# All characters of the scripts with few, every 50th ideograph, Hangul syllable and character of the upper
# planes, and those beside the ends of ranges that tokenizers spell out.
_SAMPLED = (
    *range(0x20, 0x3400),
    *range(0x3400, 0xA000, 50),
    *range(0xA000, 0xAC00),
    *range(0xAC00, 0xD7A0, 50),
    *range(0xD7A0, 0x10000),
    *range(0x10000, 0x30000, 50),
    *(end + beside for end in (0x4E00, 0x9FA5, 0x9FFF, 0xD7A3) for beside in (-1, 0, 1)),
)


@cache
def probe_lines() -> tuple[str, ...]:
    """Return the probe text: lines by hand, and a sample of all characters beside other kinds."""
    chars = [c for c in map(chr, _SAMPLED) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    return (*_WRITTEN_BY_HAND, *(f"a{c}b 1{c}2 {c}{c}x 。{c}!{c}\n{c}  {c}" for c in chars))
