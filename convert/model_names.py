"""Takes a model's name apart into organization, family, size, fine-tune and version; names output files.

Names on the Hugging Face hub look like `organization/Basename-16B-Chat-v2`. The parts are told apart by
their form. The rules are those of get_model_id_components in gguf-py, so that general.basename and the other
keys come out as in other GGUF files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gguf_tools.errors import BadArgument

_VERSION = re.compile(r"(v|iter)?\d+([.]\d+)*", re.IGNORECASE)
_FILE_TYPE = re.compile(r"i?q\d(_\w)*|b?fp?(16|32)", re.IGNORECASE)
_SIZE = re.compile(r"((a|\d+x)?\d+([._]\d+)?[kmbt]\d?|small|mini|medium|large|x?xl)", re.IGNORECASE)
_FINETUNE = re.compile(r"chat|instruct|vision|lora", re.IGNORECASE)
_KEEPS_ITS_CASE = re.compile(r"v\d+(\.\d+)*|\d.*")

BASENAME, SIZE, FINETUNE, VERSION, FILE_TYPE = "basename", "size_label", "finetune", "version", "type"


@dataclass(frozen=True)
class ModelName:
    """The parts of a model's name, None for what it doesn't say; `name` is all but the organization."""

    name: str
    organization: str | None = None
    basename: str | None = None
    finetune: str | None = None
    version: str | None = None
    size_label: str | None = None


def parse_model_name(model_id: str, n_params: int = 0) -> ModelName:
    """Return the parts of `model_id`, which is `name` or `organization/name`.

    n_params  weights of the model, 0 when unknown; a "size" far from it is taken for something else,
              usually a context length (`-128k`)

    `deepseek-ai/DeepSeek-V2-Lite-Chat` -> basename DeepSeek-V2-Lite, finetune Chat
    """
    if " " in model_id:  # a sentence and no identifier
        return ModelName(model_id)
    organization, slash, name = model_id.partition("/")
    if not slash:
        organization, name = "", model_id
    if organization.startswith("."):  # ./folder
        organization = ""

    parts: list[str] = []
    kinds: list[set[str]] = []
    for index, part in enumerate(filter(None, name.split("-"))):
        part, kind = _look_at(part, index, n_params)
        parts.append(part)
        kinds.append({kind} if kind else set())
    _drop_word_sizes(parts, kinds)
    _mark_basename(parts, kinds)

    def joined(kind: str, without: str = "") -> str | None:
        chosen = [part for part, of in zip(parts, kinds, strict=True) if kind in of and without not in of]
        if kind == SIZE:
            chosen = list(dict.fromkeys(chosen))
        return "-".join(chosen) or None

    basename, finetune, size = joined(BASENAME), joined(FINETUNE), joined(SIZE)
    version = joined(VERSION, without=BASENAME)
    if not (size or finetune or version):
        basename = None  # a name that tells nothing apart may be all family or all fine-tune
    return ModelName(name, organization or None, basename, finetune, version, size)


def title(identifier: str) -> str:
    """Return an identifier as a heading: `tiny-deepseek-v3` -> `Tiny Deepseek v3`."""
    words = identifier.strip().replace("-", " ").split()
    return " ".join(
        word.title() if word.islower() and not _KEEPS_ITS_CASE.fullmatch(word) else word for word in words
    )


def _look_at(part: str, index: int, n_params: int) -> tuple[str, str | None]:
    """Return the part, in its usual spelling, and what it is, judged by its form alone."""
    if _VERSION.fullmatch(part):
        return part, VERSION
    if _FILE_TYPE.fullmatch(part):
        return part.upper(), FILE_TYPE
    if index == 0:
        return part, None
    if _SIZE.fullmatch(part):
        return _size(part, n_params)
    if _FINETUNE.fullmatch(part):
        return part, FINETUNE
    return part, None


def _size(part: str, n_params: int) -> tuple[str, str]:
    part = part.replace("_", ".")
    if part[-1].isdecimal():  # 7b1 is 7.1b
        part = f"{part[:-2]}.{part[-1]}{part[-2]}"
    if part[-2].isdecimal() and part[-1] in "kmbt":
        part = part[:-1] + part[-1].upper()
    try:
        stated = float(part[:-1]) * 1000 ** " KMBT".find(part[-1])
    except ValueError:  # a word, or 8x7B, or A3B
        return part, SIZE
    if n_params > 0 and abs(stated - n_params) > 7 * n_params // 8:
        return part[:-1] + part[-1].lower(), FINETUNE
    return part, SIZE


def _drop_word_sizes(parts: list[str], kinds: list[set[str]]) -> None:
    """Mark `mini` or `large` beside a number as part of the name: it is not a size then."""
    sizes = [part for part, kind in zip(parts, kinds, strict=True) if SIZE in kind]
    if any(char.isdecimal() for size in sizes for char in size):
        for part, kind in zip(parts, kinds, strict=True):
            if part.isalpha():
                kind.discard(SIZE)


def _mark_basename(parts: list[str], kinds: list[set[str]]) -> None:
    """Mark the first parts, with versions among them, as the family, and the rest as the fine-tune."""
    at_start = True
    for part, kind in zip(parts, kinds, strict=True):
        if at_start and (VERSION in kind or (not kind and part[0].isalpha())):
            kind.add(BASENAME)
            continue
        at_start = False
        if not kind:
            kind.add(FINETUNE)
    for kind in reversed(kinds):  # a version at the very end is one
        if BASENAME not in kind or len(kind) == 1:
            break
        kind.discard(BASENAME)


def default_file_name(
    name: str | None,
    basename: str | None,
    finetune: str | None,
    version: str | None,
    size_label: str | None,
    file_type: str,
    *,
    vocab_only: bool = False,
) -> str:
    """Return BASENAME-SIZE-FINETUNE-VERSION-TYPE.gguf, the naming convention of GGUF files.

    file_type   "BF16", "Q8_0" ...
    vocab_only  a vocabulary has neither size nor type, and says -vocab
    """
    stem = (basename or name or "ggml-model").strip().replace(" ", "-").replace("/", "-")
    if vocab_only:
        parts = [stem, finetune, version, "vocab"]
    else:
        parts = [stem, size_label, finetune, version, file_type.upper()]
    return "-".join(part.strip().replace(" ", "-").replace("/", "-") for part in parts if part) + ".gguf"


def fill_outfile_template(file_name: str, file_type: str) -> str:
    """Return `file_name` with {ftype} or {outtype} replaced by the file type; {FTYPE} gives it in capitals.

    raises  BadRequest for another placeholder
    """
    values = {
        "": file_type.lower(),
        "ftype": file_type.lower(),
        "outtype": file_type.lower(),
        "FTYPE": file_type.upper(),
        "OUTTYPE": file_type.upper(),
    }

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise BadArgument(f"--outfile {file_name}: unknown placeholder {match[0]}; known is {{ftype}}")
        return values[match[1]]

    return re.sub(r"\{([^{}]*)\}", value, file_name)
