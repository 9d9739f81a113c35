"""Types and metadata values that a user sets by hand, parsed from command line words.

`REGEX=TYPE` is for every tensor whose name contains a match. It names the tensor's type (`--tensor-type`), or
the type to fall back to when rows do not fit (`--fallback`); the first expression that matches wins. With
commas between them these are ik_llama.cpp's `--custom-q`.
`KEY=TYPE:VALUE` sets a metadata value.

Both are llama-quantize's notations (quantize.cpp: parse_tensor_type; common.cpp: string_parse_kv_override).
llama-quantize lowers the case of a pattern; we ignore case instead. For the lower-case names of tensors that
is the same, and expressions like `\\S` keep their meaning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gguf_tools.argument_types import NumberType, checked
from gguf_tools.errors import BadArgument, BadOverride, FormatError
from gguf_tools.expressions import Expression, parse_expression
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import TYPES, GGMLType, by_name
from gguf_tools.format.hparams import architecture_of
from gguf_tools.format.shards import SPLIT_KEYS
from gguf_tools.format.shown import value_text
from gguf_tools.format.values import Kind, Metadata, Value
from gguf_tools.text import did_you_mean, quoted
from quantize.plan.recipes import ALIASES, RECIPES, foreign_type
from quantize.roles import layer_of

_LAYER = re.compile(r"^\^?blk\\?\..*?\\?\.")
_UINT32 = NumberType(0, 2**32 - 1)
_INT32_MAX = 2**31 - 1
_LARGEST_FLOAT32 = 2**128 - 2**104
_FLOAT32 = NumberType(-_LARGEST_FLOAT32, _LARGEST_FLOAT32, whole=False)


@dataclass(frozen=True)
class Override:
    """A type for tensors, by their names.

    pattern     names that contain a match of it are meant
    type        what these tensors become
    text        how the user wrote it
    must_match  it was typed for this one model, so it is a mistake where it matches nothing; rules of a
                shared file or recipe may be for tensors that other models have
    """

    pattern: Expression
    type: GGMLType
    text: str
    must_match: bool = False

    def matches(self, name: str) -> bool:
        """Whether a tensor's name contains a match of the pattern."""
        return self.pattern.matches(name)

    def at(self, place: str) -> Override:
        """Return it with the place where it was written, "FILE: line 3: ", for the messages of matching."""
        return replace(self, pattern=replace(self.pattern, place=place + self.pattern.place))

    def mistake(self, names: Iterable[str]) -> str:
        """Describe the mistake of a rule that has to match one of the tensors `names`, with the nearest."""
        parts = dict.fromkeys(_LAYER.sub("", name).removesuffix(".weight") for name in names)
        word = re.sub(r"\W", "", _LAYER.sub("", self.text.rpartition("=")[0]).removesuffix(".weight"))
        return f"{quoted(self.text)} matches no tensor{did_you_mean(word, parts)}"


def parse_override(text: str, *, must_match: bool = False) -> Override:
    """Read an override written as `REGEX=TYPE`, for instance `ffn_down_exps=Q4_K`.

    raises  BadOverride for a missing part, an invalid expression or an unknown type
    """
    regex, equals, type_name = text.partition("=")
    if not equals or not regex or not type_name:
        raise BadOverride(f"{quoted(text)}: expected REGEX=TYPE, for instance ffn_down_exps=Q4_K")
    pattern = parse_expression(regex, place=f"{quoted(text)}: ", ignore_case=True, error=BadOverride)
    return Override(pattern, parse_type(type_name, text), text, must_match)


@checked
def parse_overrides(words: Iterable[str], *, must_match: bool = False) -> tuple[Override, ...]:
    """Read one override per word, in order.

        types = PlanOptions(overrides=parse_overrides(["ffn_down=Q6_K", "attn_v=Q8_0"]))
        quantize("lite-bf16.gguf", "lite.gguf", "Q4_K_M", types=types)

    must_match  a rule that matches no tensor is a mistake, as of --tensor-type
    raises  BadOverride, as `parse_override`
    """
    return tuple(parse_override(word, must_match=must_match) for word in words)


def parse_custom_q(text: str) -> tuple[Override, ...]:
    """Return the overrides in ik_llama.cpp's notation, `REGEX=TYPE` words with commas between them.

    raises  BadOverride, as `parse_override`; an expression can't have a comma
    """
    for word in text.split(","):
        if "=" not in word:
            raise BadOverride(
                f"{quoted(text)}: found {quoted(word)} between commas, expected REGEX=TYPE; an expression"
                " can't have a comma"
            )
    return parse_overrides(text.split(","))


def rules_for(names: Iterable[str], others: Iterable[str], type_name: str) -> tuple[str, ...]:
    r"""Write the rules that give tensors a type, `REGEX=TYPE`: whole layers where no other is in them.

    names   the tensors
    others  tensors that keep their types

    >>> rules_for(["blk.2.attn_q.weight", "blk.2.ffn_up.weight"], ["blk.1.attn_q.weight"], "Q4_K")
    ('blk\\.2\\.=Q4_K',)
    """
    mixed = {layer_of(name) for name in others}
    parts: dict[int | None, list[str]] = {}
    for name in names:
        parts.setdefault(layer_of(name), []).append(name)
    expressions = [f"^{re.escape(name)}$" for name in parts.pop(None, ())]
    layers: dict[str, list[str]] = {}
    for layer, group in parts.items():
        ends = [re.escape(name.removeprefix(f"blk.{layer}.")) for name in group]
        layers.setdefault(f"{_either(ends)}$" if layer in mixed else "", []).append(str(layer))
    expressions += [rf"blk\.{_either(numbers)}\.{end}" for end, numbers in layers.items()]
    return tuple(f"{expression}={type_name}" for expression in expressions)


def _either(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({'|'.join(expressions)})"


def parse_override_file(content: str, name: str | os.PathLike[str]) -> tuple[Override, ...]:
    """Return the overrides in a file of `REGEX=TYPE` words, separated by spaces or line ends.

    A # at the start of a word begins a comment, as in the recipes of other makers.
    name    of the file, for messages
    raises  BadOverride naming the file and the line, as `parse_override`
    """
    found: list[Override] = []
    for number, line in enumerate(content.removeprefix("\ufeff").splitlines(), 1):
        try:
            rules = parse_overrides(re.sub(r"(^|\s)#.*", "", line).split())
        except BadOverride as error:
            raise BadOverride(f"{name}: line {number}: {error}") from error
        found += (rule.at(f"{name}: line {number}: ") for rule in rules)
    return tuple(found)


def parse_type(name: str, text: str | None = None) -> GGMLType:
    """Return the ggml type called `name`, in any case.

    text    the option that the name is a part of, for the message
    raises  BadOverride for an unknown type, and for a type that files can't use (`is_internal`)
    """
    where = "" if text is None else f"{quoted(text)}: "
    try:
        type_ = by_name(name)
    except FormatError as error:
        raise BadOverride(where + _no_type(name)) from error
    if type_.is_internal:
        raise BadOverride(f"{where}{type_.name} is {type_.note}; expected a type like Q4_K")
    return type_


def _no_type(name: str) -> str:
    """Describe the mistake in a name that is no ggml type: Q4_K_M is a mixture, Q4_KK is near to Q4_K."""
    recipe = RECIPES.get(ALIASES.get(name.upper(), name.upper()))
    if recipe is not None and recipe.default is not None:
        return f"{recipe.name} is a mixture of types; {recipe.default} is the type"
    foreign = foreign_type(name)
    recipe = None if foreign is None else RECIPES.get(foreign[1])
    if foreign is not None and recipe is not None and recipe.default is not None:
        return f"{quoted(name)} is not a ggml type: {foreign[0]}; the nearest here is {recipe.default}"
    near = did_you_mean(name, (type_.name for type_ in TYPES if not type_.note))
    return f"{quoted(name)} is not a ggml type{near or ', expected one like Q4_K'}"


@dataclass(frozen=True)
class IdleOverride:
    """An override that decides nothing.

    names        tensors that it matches
    shadowed_by  earlier overrides that decide these tensors
    """

    override: Override
    names: tuple[str, ...]
    shadowed_by: tuple[Override, ...]


def idle_overrides(overrides: Sequence[Override], names: Sequence[str]) -> Iterator[IdleOverride]:
    """Yield the overrides that decide none of the tensors `names`.

    names  tensors that overrides may decide
    """
    for number, override in enumerate(overrides):
        matching = tuple(name for name in names if override.matches(name))
        deciders = {
            next(first for first, other in enumerate(overrides) if other.matches(name)) for name in matching
        }
        if number not in deciders:
            yield IdleOverride(override, matching, tuple(overrides[i] for i in sorted(deciders)))


def find_override(overrides: Sequence[Override], name: str) -> Override | None:
    """Return the first override that matches `name`, or None."""
    return next((override for override in overrides if override.matches(name)), None)


def parse_kv_override(text: str) -> tuple[str, Value]:
    """Return (key, value) of `KEY=TYPE:VALUE`, where TYPE is int, float, bool or str.

    An int is stored as uint32 and a float as float32, as llama-quantize does.
    raises  BadOverride for a missing part, an unknown type or a value out of range
    """
    key, equals, rest = text.partition("=")
    kind, colon, data = rest.partition(":")
    if not equals or not key or not colon:
        raise BadOverride(f"{quoted(text)}: expected KEY=TYPE:VALUE with TYPE one of int, float, bool, str")
    if kind == "int":
        return key, Value.u32(_parse_uint32(data, text))
    if kind == "float":
        return key, Value.f32(_parse_float(data, text))
    if kind == "bool":
        if data not in ("true", "false"):
            raise BadOverride(f"{quoted(text)}: found {quoted(data)}, expected true or false")
        return key, Value.bool_(data == "true")
    if kind == "str":
        return key, Value.string(data)
    raise BadOverride(f"{quoted(text)}: found type {quoted(kind)}, expected int, float, bool or str")


_WORDS = {"uint32": "int", "int32": "int", "float32": "float", "bool": "bool", "string": "str"}
"""Kind of a value -> the word for it in `KEY=TYPE:VALUE`."""


def fit_kv_overrides(
    overrides: Iterable[tuple[str, Value]], metadata: Metadata
) -> tuple[tuple[str, Value], ...]:
    """Return metadata that a user sets, whole numbers as the kind that llama.cpp reads.

    metadata  of the file that they are for
    raises    BadOverride for a kind that llama.cpp doesn't load, and for the keys of a split set
    """
    overrides = tuple(overrides)
    architecture = architecture_of({**metadata, **dict(overrides)}) or ""
    return tuple((key, _fit_kind(key, value, architecture)) for key, value in overrides)


def _fit_kind(key: str, value: Value, architecture: str) -> Value:
    if key in SPLIT_KEYS:
        raise BadOverride(f"--override-kv {key}: it holds a split set together, and can't be set")
    expected = keys.kinds_instead(key, architecture, value.type_name)
    if not expected:
        return value
    if value.kind is Kind.UINT32 and "int32" in expected and value.data <= _INT32_MAX:
        return Value.i32(value.data)
    words = list(dict.fromkeys(_WORDS[kind] for kind in expected if kind in _WORDS))
    way = f"write {' or '.join(f'{key}={word}:VALUE' for word in words)}" if words else "see gguf-tools set"
    raise BadOverride(
        f"--override-kv {key}: {value_text(value)} is {value.type_name}, llama.cpp reads"
        f" {' or '.join(expected)}; {way}"
    )


def _parse_uint32(data: str, text: str) -> int:
    try:
        return int(_UINT32.parse(data))
    except BadArgument as error:
        raise BadOverride(f"{quoted(text)}: {error}") from None


def _parse_float(data: str, text: str) -> float:
    try:
        return _FLOAT32.parse(data)
    except BadArgument:
        raise BadOverride(
            f"{quoted(text)}: found {quoted(data)}, expected a finite number that float32 can hold"
        ) from None


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layer numbers in a list like `3,4,17`, sorted and without repetitions.

    raises  BadOverride for anything that is not a list of whole numbers
    """
    if not re.fullmatch(r"[0-9]{1,9}(, *[0-9]{1,9})*", text):
        raise BadOverride(f"{quoted(text)}: expected layer numbers separated by commas, for instance 3,4,17")
    return tuple(sorted(set(map(int, text.split(",")))))
