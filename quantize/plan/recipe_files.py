"""Recipe files: a file type and the options that go with it, kept in a file.

The file is JSON or YAML, by the ending of its name: .json, .yaml or .yml. It can stand wherever a file type
can, on the command line and in `quantize.quantize`. Its keys are the command's options, in the command's own
notation:

    name: attention-8bit                # for people and the default output's name; by default the file's name
    file_type: Q4_K_M                   # required: decides everything that the other keys leave open
    tensor-type:                        # REGEX=TYPE, the first that matches wins
      - attn_(q|k|v|kv|output)=Q8_0
      - ffn_down_exps=Q6_K
    custom-q: ffn_up=IQ3_K,ffn_=IQ4_KS  # the same in ik_llama.cpp's notation; tried after tensor-type
    fallback:                           # REGEX=TYPE, for rows that do not fit the type they got
      - attn_k_b=Q8_0
    output-tensor-type: Q8_0
    token-embedding-type: Q8_0
    pure: false
    leave-output-tensor: false

Rules are lists and not mappings because their order counts. An unknown key, a key given twice and a value
of the wrong kind are errors that name the file and the key: a rule that is silently ignored costs a day of
quantizing. Options on the command line come first: their rules are tried before the file's, and their types
win. A flag is on if either sets it.

A recipe file may name types that only one program reads: llama.cpp and ik_llama.cpp share most types, and
each lacks some of the other's. A file with types of both kinds can be read by neither. What ik_llama.cpp
lacks is what its ggml.h lacks, in 8337e4c (2026-08-15); MXFP4 and Q1_0 (as Q1_0_G128) are there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadOverride, BadRequest
from gguf_tools.files.documents import read_document
from gguf_tools.format.ggml_types import TYPES, GGMLType, by_name
from gguf_tools.text import quoted
from quantize.formats.codecs import CODECS
from quantize.plan.decide import PlanOptions
from quantize.plan.overrides import Override, parse_custom_q, parse_override, parse_type
from quantize.plan.recipes import Recipe, find_recipe
from quantize.roles import Program

_SUFFIXES = (".json", ".yaml", ".yml")
_NAME = re.compile(r"[\w.+-]{1,80}")


@dataclass(frozen=True)
class Mixture:
    """Which tensor gets which type: the meaning of a word like Q4_K_M, or of a recipe file.

    name     name of the file type, or of the recipe file
    recipe   the file type's rules
    options  what the recipe file sets; its overrides are tried before the rules
    """

    name: str
    recipe: Recipe
    options: PlanOptions = field(default_factory=PlanOptions)

    def with_options(self, options: PlanOptions | None) -> Mixture:
        """Return the mixture with `options` on top: their rules are tried before its own."""
        if options is None:
            return self
        own = self.options
        merged = replace(
            options,
            types={**own.types, **options.types},
            overrides=(*options.overrides, *own.overrides),
            fallbacks=(*options.fallbacks, *own.fallbacks),
            pure=options.pure or own.pure,
            leave_output=options.leave_output or own.leave_output,
            output_type=options.output_type or own.output_type,
            embedding_type=options.embedding_type or own.embedding_type,
        )
        return replace(self, options=merged)


def find_mixture(text: str) -> Mixture:
    """Return the mixture that `text` names: a file type (Q4_K_M, 15), or a recipe file (mine.yaml).

    raises  BadRequest   for an unknown file type, and a recipe file that can't be read
            BadOverride  for a recipe file that is wrong
    """
    if is_recipe_file(text):
        return read_recipe_file(Path(text))
    recipe = find_recipe(text)
    return Mixture(recipe.name, recipe)


def is_recipe_file(text: str) -> bool:
    """Return whether `text` is the name of a recipe file, by its ending."""
    return text.lower().endswith(_SUFFIXES)


def read_recipe_file(path: Path) -> Mixture:
    """Return the mixture that a recipe file describes.

    raises  BadOverride  naming the file and the key
            BadRequest   when the file can't be read
    """
    entries = read_document(path, BadOverride)
    if not isinstance(entries, dict):
        raise BadOverride(f"{path}: found no keys, expected at least file_type: TYPE")
    unknown = [key for key in entries if key not in _READERS]
    if unknown:
        raise BadOverride(f"{path}: unknown key {quoted(unknown[0])}, expected one of {', '.join(_READERS)}")
    if "file_type" not in entries:
        raise BadOverride(f"{path}: file_type is missing, expected a file type such as Q4_K_M")
    values: dict[str, Any] = {}
    for key, value in entries.items():
        try:
            values[key] = _READERS[key](value)
        except (BadOverride, BadRequest) as error:
            raise BadOverride(f"{path}: {key}: {error}") from error
        if isinstance(values[key], tuple):
            values[key] = tuple(rule.at(f"{path}: {key}: ") for rule in values[key])
    return Mixture(
        name=values.get("name", path.stem),
        recipe=values["file_type"],
        options=PlanOptions(
            overrides=(*values.get("tensor-type", ()), *values.get("custom-q", ())),
            fallbacks=values.get("fallback", ()),
            pure=values.get("pure", False),
            leave_output=values.get("leave-output-tensor", False),
            output_type=values.get("output-tensor-type"),
            embedding_type=values.get("token-embedding-type"),
        ),
    )


# ---- values


def _read_name(value: Any) -> str:
    name = _expect(value, str, "a name")
    if not _NAME.fullmatch(name):
        raise BadOverride(f"found {quoted(name)}, expected up to 80 letters, digits and any of . _ + -")
    return name


def _read_rules(value: Any) -> tuple[Override, ...]:
    rules = _expect(value, list, "a list of REGEX=TYPE")
    return tuple(parse_override(_expect(rule, str, "REGEX=TYPE")) for rule in rules)


def _read_type(value: Any) -> GGMLType:
    return parse_type(_expect(value, str, "a ggml type such as Q8_0"))


def _read_flag(value: Any) -> bool:
    flag: bool = _expect(value, bool, "true or false")
    return flag


def _expect(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise BadOverride(f"found {quoted(value)}, expected {what}")
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "name": _read_name,
    "file_type": lambda value: find_recipe(_expect(value, str, "a file type such as Q4_K_M")),
    "tensor-type": _read_rules,
    "custom-q": lambda value: parse_custom_q(_expect(value, str, "REGEX=TYPE,...")),
    "fallback": _read_rules,
    "output-tensor-type": _read_type,
    "token-embedding-type": _read_type,
    "pure": _read_flag,
    "leave-output-tensor": _read_flag,
}


LACKED_BY: Mapping[Program, frozenset[str]] = {
    "llama.cpp": frozenset(type_.name for type_ in TYPES if type_.is_only_in_ik),
    "ik_llama.cpp": frozenset(name for name, codec in CODECS.items() if codec.lacked_by == "ik_llama.cpp"),
}
"""Names of the types that a program does not know."""


def only_in_ik(mixture: Mixture) -> GGMLType | None:
    """Return a type that a mixture names and that only ik_llama.cpp reads; None if there is none."""
    return next((type_ for type_ in _named(mixture) if type_.name in LACKED_BY["llama.cpp"]), None)


def _named(mixture: Mixture) -> Iterator[GGMLType]:
    options = mixture.options
    if mixture.recipe.default is not None:
        yield by_name(mixture.recipe.default)
    yield from (rule.type for rule in (*options.overrides, *options.fallbacks))
    yield from (type_ for type_ in (options.output_type, options.embedding_type) if type_ is not None)
