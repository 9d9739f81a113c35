"""Decide which type each tensor gets.

The first of these that applies decides (facts of llama.cpp, llama-quant.cpp: llama_tensor_get_type):

  1. the tensor stays as it is: 1-D, norm, expert router, ..., or every tensor under COPY
  2. --token-embedding-type, --output-tensor-type
  3. a recipe of a float type (F32, F16, BF16): that type
  4. the type that was chosen for a size, or that of the first --tensor-type whose expression matches
     somewhere in the name
  5. --pure: the recipe's default type
  6. the recipe's rules

Some rules ask how many tensors of a kind came before. llama-quantize counts while it works. Here the counts
are known up front, so the order of work changes nothing. Only tensors that the rules decide are counted, in
the order of the file that llama-quantize would write.

ik_llama.cpp's file types are its own in this, too: its llama-quantize counts in the order of the input, and
counts tensors that an override names.

A type whose blocks do not divide the rows then falls back to another: the type of the first --fallback whose
expression matches, or else the one of llama.cpp's table (llama-quant.cpp: tensor_type_fallback). There a type
of large blocks gives way to one of 32 with about as many bits; where not even 32 divides the row, to F16. For
a few types nothing is defined.

In DeepSeek models the tensor concerned is `attn_k_b`: its rows are one head's keys before rotation, 128
elements, which no block of 256 divides. What the table gives it is kept as the default, because so its bytes
are llama-quantize's, and because it never has fewer bits than what was asked for: Q4_0 for Q2_K and Q3_K,
Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K, IQ4_NL for the IQ types. `attn_k_b` is 0.2 % of V2-Lite's weights
and 0.08 % of V3's, so the difference in size is small.

ik_llama.cpp's table is another one (llama-quantize.cpp: change_type_if_necessary). It holds for its own types
and under its own file types. A matrix whose rows fill no group of an interleaved type gets the base type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from gguf_tools.argument_types import CheckedFields
from gguf_tools.errors import BadOverride, BadRequest, NoFallback
from gguf_tools.format.ggml_types import F16, Q4_0, Q4_1, GGMLType, by_name
from gguf_tools.format.tensors import TensorInfo
from quantize.formats.codecs import CODECS, LOOSE_BASES, REGROUPED, codec_of, ignores_importances
from quantize.plan.model_facts import ModelFacts
from quantize.plan.overrides import Override, find_override
from quantize.plan.recipe import V_LIKE, Recipe, Situation
from quantize.roles import (
    Program,
    Role,
    TensorRole,
    file_order,
    in_layer_ranges,
    layer_of,
    n_dims,
    tensor_role,
)

KEEPING = (Q4_0, Q4_1)
"""Types that can keep a grid code by code."""


@dataclass(frozen=True)
class KeptGrid:
    """The type that holds a tensor's weights as they were stored or trained, on a grid of few bits.

    type  its codes are the grid
    text  what was found, in a phrase
    """

    type: GGMLType
    text: str


@dataclass(frozen=True)
class PlanOptions(CheckedFields):
    """Options of a plan besides the recipe; the defaults are llama-quantize's.

    overrides         --tensor-type; the first that matches wins
    fallbacks         --fallback, types for rows that do not fit; the first that matches wins
    pure              give every tensor the file type's default type, no mixture
    leave_output      keep output.weight as it is
    output_type       type of output.weight, also of token_embd.weight when the two are one
    embedding_type    type of token_embd.weight
    prune_layers      numbers of layers to leave out
    allow_requantize  quantize tensors that are quantized already
    keep_order        count positions in the order of the input (llama-quantize --keep-split), not by layer
                      and name
    types             types by tensor name, as they were chosen for a size; they go before `overrides`
    grids             tensors by name that lie on a grid, which they keep unless `types` or `overrides` say
                      something else
    """

    overrides: tuple[Override, ...] = ()
    fallbacks: tuple[Override, ...] = ()
    pure: bool = False
    leave_output: bool = False
    output_type: GGMLType | None = None
    embedding_type: GGMLType | None = None
    prune_layers: tuple[int, ...] = ()
    allow_requantize: bool = False
    keep_order: bool = False
    types: Mapping[str, GGMLType] = field(default_factory=dict)
    grids: Mapping[str, KeptGrid] = field(default_factory=dict)


class Decider(Enum):
    """Source of the decision about a tensor's type."""

    KEPT = "kept"
    OPTION = "option"
    FLOAT_RECIPE = "float recipe"
    OVERRIDE = "override"
    GRID = "grid"
    PURE = "pure"
    RULES = "rules"


@dataclass(frozen=True)
class TensorPlan:
    """Plan of one tensor.

    name, shape   in the output, rows first, without leading dimensions of 1 (ggml counts none: ggml_n_dims)
    source_name   in the input; another layer's number when layers are pruned
    as_if         the type that the source counts as where types are decided, if not its own: a conversion in
                  one pass decides what quantizing the F32 file would
    decider       who chose the type
    reason        why this type, in a phrase
    fell_from     the type that was chosen, when rows do not fit it and another took its place
    entry         name of the importances that weigh its columns, or None
    weighting     how those importances came to this tensor, in a phrase; empty in the plain case
    n_neutral     how many of its matrices have seen nothing and get neutral weights
    lacks_data    its type needs importances, and there are none
    unfit_data    what is wrong with the importances that have its name; empty when nothing is
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    source_name: str
    source_type: GGMLType
    target_type: GGMLType
    decider: Decider
    reason: str
    fell_from: GGMLType | None = None
    as_if: GGMLType | None = None
    entry: str | None = None
    weighting: str = ""
    n_neutral: int = 0
    lacks_data: bool = False
    unfit_data: str = ""

    @property
    def info(self) -> TensorInfo:
        """The tensor as it stands in the output file."""
        return TensorInfo(self.name, self.shape, self.target_type)

    @property
    def is_copied(self) -> bool:
        """Whether its bytes go into the output as they are stored."""
        return self.source_type == self.target_type

    @property
    def keeps_codes(self) -> bool:
        """Whether its weights become the codes that they are, whatever its importances say."""
        return self.decider is Decider.GRID and self.target_type in KEEPING

    @property
    def counts_as(self) -> GGMLType:
        """The type that the source counts as where types are decided."""
        return self.as_if or self.source_type

    @property
    def stays(self) -> bool:
        """Whether the decision leaves its type alone."""
        return self.counts_as == self.target_type

    @property
    def is_weighed(self) -> bool:
        """Whether importances would make a difference to its bytes."""
        return not self.stays and not self.keeps_codes and not ignores_importances(self.target_type.name)


def draft(source: TensorInfo, name: str, role: Role, as_if: GGMLType | None = None) -> TensorPlan:
    """Return the plan of a tensor before a type is decided: it keeps the one that it counts as."""
    shape, type_ = source.shape[-n_dims(source.shape) :], as_if or source.type
    return TensorPlan(name, shape, role, source.name, source.type, type_, Decider.KEPT, "", as_if=as_if)


def decide(
    drafts: Sequence[TensorPlan],
    recipe: Recipe,
    facts: ModelFacts,
    has_importances: bool,
    options: PlanOptions,
) -> tuple[TensorPlan, ...]:
    """Return the plans of tensors with the types that they get, in the same order.

    raises  NoFallback   when no fallback is known for some rows; lists every such tensor
            BadOverride  when rows do not fit the user's fallback either; lists every such tensor
            BadRequest   when a name has a layer that the metadata does not know
    """
    early = [_decide_without_rules(tensor, recipe, facts, options) for tensor in drafts]
    is_ik = recipe.program == "ik_llama.cpp"
    counted = (None, Decider.OVERRIDE) if is_ik else (None,)
    decided_by = [None if tensor is None else tensor.decider for tensor in early]
    visited = [tensor for tensor, decider in zip(drafts, decided_by, strict=True) if decider in counted]
    places = _places(visited, drafts, facts, options.keep_order or is_ik)
    tied = all(tensor.role is not Role.OUTPUT for tensor in drafts)

    def decide_by_rules(tensor: TensorPlan) -> TensorPlan:
        role, info = tensor.role, tensor.info
        if tied and role is Role.TOKEN_EMBD:
            role = Role.OUTPUT
            if options.output_type is not None:
                reason = "--output-tensor-type, tied embeddings"
                return replace(tensor, target_type=options.output_type, decider=Decider.OPTION, reason=reason)
        n_visited, position, total = places[tensor.name]
        situation = Situation(
            role=role,
            facts=facts,
            has_importances=has_importances,
            n_visited=n_visited,
            position=position,
            total=total,
            fits_default=info.n_cols % _default(recipe).block_elems == 0,
            is_stacked=info.n_mats > 1,
            n_cols=info.n_cols,
            layer=layer_of(tensor.name),
            is_tied=tied and tensor.role is Role.TOKEN_EMBD,
            is_shared_expert=_read_name(tensor, recipe, facts).is_shared_expert,
        )
        type_name, reason = recipe.choose(situation)
        return replace(tensor, target_type=by_name(type_name), decider=Decider.RULES, reason=reason)

    decided = [done or decide_by_rules(tensor) for tensor, done in zip(drafts, early, strict=True)]
    return _fit_rows([_embeddings_apart(tensor) for tensor in decided], options.fallbacks, recipe.program)


def _read_name(tensor: TensorPlan, recipe: Recipe, facts: ModelFacts) -> TensorRole:
    return tensor_role(tensor.name, tensor.shape, facts.architecture, recipe.program)


def _embeddings_apart(tensor: TensorPlan) -> TensorPlan:
    """Return the decision, where single rows are looked up with the base type of an interleaved one."""
    base = without_interleaving(tensor.target_type)
    is_looked_up = tensor.role is Role.TOKEN_EMBD and tensor.decider is not Decider.KEPT
    if not is_looked_up or base == tensor.target_type:
        return tensor
    reason = f"{tensor.reason}; rows of embeddings can't be interleaved: {tensor.target_type} -> {base}"
    return replace(tensor, target_type=base, reason=reason)


def _decide_without_rules(
    tensor: TensorPlan, recipe: Recipe, facts: ModelFacts, options: PlanOptions
) -> TensorPlan | None:
    """Return the decision of steps 1 to 5, or None when the recipe's rules decide."""

    def decided(type_: GGMLType, decider: Decider, reason: str) -> TensorPlan:
        return replace(tensor, target_type=type_, decider=decider, reason=reason)

    role = tensor.role
    kept_as = "COPY" if recipe.default is None else _read_name(tensor, recipe, facts).kept_as
    if options.leave_output and tensor.name == "output.weight":
        kept_as = kept_as or "--leave-output-tensor"
    if kept_as is not None:
        return decided(tensor.target_type, Decider.KEPT, kept_as)
    chosen, override = options.types.get(tensor.name), find_override(options.overrides, tensor.name)
    # Some models have embeddings per layer. These follow the option too, unless an override names them.
    is_overridden = (chosen or override) is not None and tensor.name != "token_embd.weight"
    if role is Role.TOKEN_EMBD and options.embedding_type is not None and not is_overridden:
        return decided(options.embedding_type, Decider.OPTION, "--token-embedding-type")
    if role is Role.OUTPUT and options.output_type is not None:
        return decided(options.output_type, Decider.OPTION, "--output-tensor-type")
    default = _default(recipe)
    grid = options.grids.get(tensor.name) if (chosen or override) is None else None
    if grid is not None:
        return decided(grid.type, Decider.GRID, grid.text)
    if not default.is_quantized:
        return decided(default, Decider.FLOAT_RECIPE, f"{recipe.name}: default")
    if chosen is not None:
        return decided(chosen, Decider.OVERRIDE, "chosen for the size")
    if override is not None:
        return decided(override.type, Decider.OVERRIDE, f"override {override.text}")
    if options.pure:
        return decided(default, Decider.PURE, f"{recipe.name}: --pure")
    return None


def _default(recipe: Recipe) -> GGMLType:
    if recipe.default is None:
        raise BadRequest(f"{recipe.name}: copies every tensor and has no type to give")
    return by_name(recipe.default)


def _places(
    visited: Sequence[TensorPlan], everything: Sequence[TensorPlan], facts: ModelFacts, keep_order: bool
) -> dict[str, tuple[int, int, int]]:
    """Return n_visited, position and total of each of the tensors `visited`, by name; see Situation.

    For attention values the total is the number of such tensors; for feed-forward matrices it is the number
    of layers. In a mixture of experts the position is the layer, because a layer may have several matrices
    of one kind.

    raises  BadRequest  when a name has a layer that the metadata does not know
    """
    n_values = sum(tensor.role in V_LIKE for tensor in everything)
    candidates = {tensor.name: tensor for tensor in visited}
    names = list(candidates) if keep_order else file_order(candidates)
    counts: Counter[Role] = Counter()
    places: dict[str, tuple[int, int, int]] = {}
    for name in names:
        role = candidates[name].role
        if role in V_LIKE:
            n_visited = counts[Role.ATTN_V]
            counts[Role.ATTN_V] += 1
            places[name] = n_visited, n_visited, n_values
        elif role in (Role.FFN_DOWN, Role.FFN_GATE, Role.FFN_UP):
            n_visited = counts[role]
            counts[role] += 1
            position = _layer(name, facts) if facts.n_experts > 1 else n_visited
            places[name] = n_visited, position, facts.n_layers
        else:
            places[name] = 0, 0, 0
    return places


def _layer(name: str, facts: ModelFacts) -> int:
    layer = layer_of(name)
    if layer is None or layer >= facts.n_layers:
        raise BadRequest(
            f"{name}: expected a name blk.N. with N below {facts.n_layers}, the number of layers in"
            " the metadata"
        )
    return layer


def _fit_rows(
    wanted: Sequence[TensorPlan], fallbacks: Sequence[Override], program: Program
) -> tuple[TensorPlan, ...]:
    """Return the decisions `wanted`, with a fallback wherever the type can't hold the rows.

    raises  NoFallback, BadOverride  as `decide`
    """
    fitted: list[TensorPlan] = []
    undefined: dict[str, list[str]] = {}
    misnamed: dict[str, list[str]] = {}
    for tensor in wanted:
        type_, info = tensor.target_type, tensor.info
        n_cols, n_rows = info.n_cols, info.n_rows // info.n_mats
        fallback = find_override(fallbacks, tensor.name)
        fitting = fit(type_, n_cols, fallback, n_rows, program)
        if fitting is not None:
            instead, why = fitting
            reason = f"{tensor.reason}; {why}"
            another = replace(tensor, target_type=instead, reason=reason, fell_from=type_)
            fitted.append(another if why else tensor)
            continue
        misfit = f"{type_.name}: {describe_misfit(type_, n_cols, n_rows)}"
        if fallback is None:
            undefined.setdefault(misfit, []).append(tensor.name)
        else:
            either = f"{misfit}; fallback {fallback.text}: no multiple of {fallback.type.block_elems} either"
            misnamed.setdefault(either, []).append(tensor.name)
    if misnamed:
        raise BadOverride(f"rows do not fit the fallback that is named for {_with_remarks(misnamed)}")
    if undefined:
        raise NoFallback(
            f"no fallback type is known for {_with_remarks(undefined)}; name one with --fallback REGEX=TYPE"
        )
    return tuple(fitted)


def _with_remarks(names: Mapping[str, Sequence[str]]) -> str:
    """Return names by remark as one text, each group followed by its remark."""
    return ", ".join(f"{', '.join(in_layer_ranges(group))} ({remark})" for remark, group in names.items())


def fit(
    wanted: GGMLType,
    n_cols: int,
    named: Override | None = None,
    n_rows: int = 0,
    program: Program = "llama.cpp",
) -> tuple[GGMLType, str] | None:
    """Return the type to use for a matrix of rows of `n_cols` elements where `wanted` was asked for, and why.

    The reason is "" for the same type.
    named    the user's fallback for this tensor, which is asked only when the rows do not fit
    n_rows   rows of the matrix, for types that interleave rows
    program  whose table is asked first
    Returns None when neither fits, or when the type has no fallback.
    """
    misfit = describe_misfit(wanted, n_cols, n_rows)
    if not misfit:
        return wanted, ""
    instead = _by_table(wanted, n_cols, n_rows, program) if named is None else named.type
    if instead is None or describe_misfit(instead, n_cols, n_rows):
        return None
    by_whom = "" if named is None else f" (fallback {named.text})"
    return instead, f"{misfit}: {wanted.name} -> {instead.name}{by_whom}"


def describe_misfit(type_: GGMLType, n_cols: int, n_rows: int) -> str:
    """Return why a type can't hold a matrix, in a phrase, or "" when it can."""
    if n_cols % type_.block_elems:
        return f"row length {n_cols} is no multiple of {type_.block_elems}"
    # Other types without a codec are refused as such, whatever the rows.
    is_known = codec_of(type_.name) is not None or without_interleaving(type_) != type_
    if n_rows % type_.rows_interleaved and is_known:
        return f"{n_rows} rows are no multiple of {type_.rows_interleaved}"
    return ""


def without_interleaving(type_: GGMLType) -> GGMLType:
    """Return the base type of an interleaved type, and any other type as it is."""
    name = REGROUPED.get(type_.name) or LOOSE_BASES.get(type_.name)
    return type_ if name is None else by_name(name)


def _by_table(wanted: GGMLType, n_cols: int, n_rows: int, program: Program) -> GGMLType | None:
    base = without_interleaving(wanted)
    if n_cols % wanted.block_elems == 0 and base != wanted and wanted.name not in CODECS:
        return base
    codec = codec_of(wanted.name) or codec_of(base.name)
    instead = None if codec is None else codec.fallback(program)
    if instead is None and base.block_elems <= 32:
        instead = base.name
    if instead is None:
        return None
    type_ = by_name(instead)
    return F16 if describe_misfit(type_, n_cols, n_rows) else type_
