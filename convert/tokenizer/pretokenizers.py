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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from convert.tokenizer.files import library_errors
from gguf_tools.errors import BadTokenizer

Step = tuple[str, ...]

MAX_DESCRIPTION = 1000

PATIENCE = 50
PATIENCE_SECONDS = 0.5
"""Time that an unknown pipeline may take: this many times as long as one of KNOWN, and this many seconds."""

GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Letters of the alphabets with upper and lower case, as deepseek-llm's own file spells them out.
_CASED_LETTERS = (
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
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


# A word of the o200k regex: upper case letters, lower case letters, and what may stand around them.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_HAN = r"&&[^\p{Han}]"
_WORD_START, _WORD_END = "[^\r\n\\p{L}\\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _words_by_case(but: str = "", end: str = _WORD_END) -> str:
    """Return the o200k regex of words that end with `end`; their letters are none of the class `but`."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return "|".join(
        f"{_WORD_START}{letters}{end}" for letters in (f"{upper}*{lower}+", f"{upper}+{lower}*")
    )


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


KNOWN: tuple[PreTokenizer, ...] = (
    PreTokenizer(
        # DeepSeek-LLM, V2, V2-Lite, V2.5, Coder-V2. llama.cpp leaves runs of digits whole, which is the
        # same to these vocabularies: they have no token of two digits.
        "deepseek-llm",
        _isolated(
            "[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
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
    PreTokenizer(
        "llama-bpe",
        _isolated(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
            "| ?[^\\s\\p{L}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
        ignore_merges=True,
    ),
    PreTokenizer(
        "qwen2",
        _isolated(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
            "| ?[^\\s\\p{L}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
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
            f"{_words_by_case()}|"
            "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\r\n/]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
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

SAME_CUTTING: Mapping[str, str] = {
    "glm4": "llama-bpe", "gigachat": "gpt-2", "deepseek-r1-qwen": "qwen2", "minimax-m2": "gpt-4o",
}  # fmt: skip
"""Other names of llama.cpp's -> the one in KNOWN that cuts alike."""


def find_known(name: object) -> PreTokenizer | None:
    """Return the pipeline that llama.cpp calls `name`, None for one whose steps are not in KNOWN."""
    same = SAME_CUTTING.get(name, name) if isinstance(name, str) else None
    return next((known for known in KNOWN if known.name == same), None)


# Every name that llama.cpp's vocabulary loader accepts for a byte-level BPE.
NAMES: tuple[str, ...] = (
    "a.x-4.0", "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chameleon", "chatglm-bpe", "codeshell",
    "cohere2moe", "command-r", "dbrx", "deepseek-coder", "deepseek-llm", "deepseek-r1-qwen", "deepseek-v3",
    "default", "exaone", "exaone-moe", "exaone4", "f2llmv2", "falcon", "falcon-h1", "falcon3", "gigachat",
    "glm4", "glm5", "gpt-2", "gpt-4o", "gpt3-finnish", "granite-docling", "granite-embed-multi-97m", "grok-2",
    "hunyuan", "hunyuan-dense", "hy_v4", "jais", "jais-2", "jina-de", "jina-es", "jina-v1-en", "jina-v2-code",
    "jina-v2-de", "jina-v2-es", "jina-v5-nano", "joyai-llm", "kanana2", "kimi-k2", "kormo", "laguna", "lfm2",
    "llada-moe", "llama-bpe", "llama-v3", "llama3", "llama4", "megrez", "mellum", "mellum2", "midm-2.0",
    "minerva-7b", "minicpm5", "minimax-m2", "modern-bert", "mpt", "olmo", "phi-2", "pixtral", "poro-chat",
    "qwen2", "qwen35", "refact", "roberta-bpe", "seed-coder", "smaug-bpe", "smollm", "solar-open", "spark2_5",
    "stablelm2", "starcoder", "superbpe", "talkie", "tekken", "tiny_aya", "trillion", "ufakzeka", "viking",
    "youtu",
)  # fmt: skip


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
        pipeline = build_pipeline(path, pre_tokenizer)
        with library_errors(path, "pre_tokenizer can't be tried"):
            for known in KNOWN:
                if known.suits(ignore_merges) and cuts_alike(pipeline, known.build()):
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
    shown = [json.dumps(part, ensure_ascii=False) if i == 1 else part for i, part in enumerate(step)]
    return " ".join(shown[:2] if shown[0] == "split" and shown[2:] == ["Isolated"] else shown)


# --- the second way: by splits -------------------------------------------------------------------------


def build_pipeline(path: Path, pre_tokenizer: Mapping[str, Any] | None) -> Any:
    """Return the pipeline as an object of the tokenizers library.

    raises  BadTokenizer when the library can't build it
    """
    from tokenizers import Tokenizer

    shell: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": pre_tokenizer,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    with library_errors(path, "pre_tokenizer can't be built"):
        return Tokenizer.from_str(json.dumps(shell)).pre_tokenizer


def cuts_alike(one: Any, other: Any) -> bool:
    """Return whether two pipelines cut every line of the probe text into the same words of bytes.

    raises  TimeoutError when `one` takes very much longer. A regular expression can take time that is
            exponential in the length of a line, and the library gives up only after 0.1 s
    """
    seconds = [0.0, 0.0]
    for line in probe_lines():
        words = []
        for index, pipeline in enumerate((one, other)):
            start = time.thread_time()
            words.append(_words(pipeline, line))
            seconds[index] += time.thread_time() - start
        if words[0] != words[1]:
            return False
        if seconds[0] > PATIENCE_SECONDS + PATIENCE * seconds[1]:
            raise TimeoutError(f"it takes {seconds[0]:.1f} s where others take {seconds[1]:.1f} s")
    return True


def _words(pipeline: Any, line: str) -> list[str]:
    return [word for word, _ in pipeline.pre_tokenize_str(line)]


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
