"""Decide: who says which type a tensor gets, and where it stands when position matters.

The first of these that has a say (facts of llama.cpp, llama-quant.cpp: llama_tensor_get_type):

  1. the tensor stays as it is: 1-D, norm, expert router, ..., or every tensor under COPY
  2. --token-embedding-type, --output-tensor-type
  3. a recipe of a float type (F32, F16, BF16): that type
  4. the first --tensor-type whose expression is found in the name
  5. --pure: the recipe's default type
  6. the recipe's rules

Then a row that is no whole number of blocks makes the type fall back: to what the first --fallback whose
expression is found in the name says, else to what llama-quantize would take.

Some rules ask how many tensors of a kind came before. llama-quantize counts while it works; here the count is
a column that is known up front, so the order of work changes nothing. Only tensors that the rules decide are
counted, in the order of the file that llama-quantize would write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from gguf_tools.errors import BadOverride, BadRequest, NoFallback
from gguf_tools.ggml_types import GGMLType, by_name
from gguf_tools.tensors import TensorInfo
from quantize.plan.fallback import fit
from quantize.plan.model_facts import ModelFacts
from quantize.plan.overrides import Override, find_override
from quantize.plan.recipes import V_LIKE, Recipe, Situation
from quantize.roles import Role, TensorRole, file_order, in_layer_ranges


@dataclass(frozen=True)
class PlanOptions:
    """What a user may decide besides the recipe; the defaults are llama-quantize's.

    overrides         --tensor-type; the first that matches wins
    fallbacks         --fallback: types for rows that do not fit; the first that matches wins
    pure              the file type's default for all, no mixture
    leave_output      output.weight stays as it is
    output_type       of output.weight, also of token_embd.weight when the two are one
    embedding_type    of token_embd.weight
    prune_layers      numbers of layers to leave out
    allow_requantize  quantize what is quantized already
    keep_order        count positions in the order given (llama-quantize --keep-split), not by layer and name
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


@dataclass(frozen=True)
class Candidate:
    """A tensor that needs a type.

    info  under its name in the output, with the type it has
    role  what the name says
    """

    info: TensorInfo
    role: TensorRole

    @property
    def name(self) -> str:
        return self.info.name


class Decider(Enum):
    """Who decided about a tensor."""

    KEPT = "kept"
    OPTION = "option"
    FLOAT_RECIPE = "float recipe"
    OVERRIDE = "override"
    PURE = "pure"
    RULES = "rules"


@dataclass(frozen=True)
class Decision:
    """The type a tensor gets, who decided so, and why in a phrase.

    fell_from  the type that was decided, when a row does not fit it and another took its place
    """

    type: GGMLType
    decider: Decider
    reason: str
    fell_from: GGMLType | None = None


@dataclass(frozen=True)
class _Place:
    """Where a tensor stands among its kind; see Situation."""

    n_visited: int = 0
    position: int = 0
    total: int = 0


def decide(
    tensors: Sequence[Candidate],
    recipe: Recipe,
    facts: ModelFacts,
    has_importances: bool,
    options: PlanOptions,
) -> tuple[Decision, ...]:
    """Return one decision per tensor, in the same order.

    raises  NoFallback   when rows fit no type, listing every such tensor
            BadOverride  when rows do not fit the fallback that the user names, listing every such tensor
            BadRequest   when a name has a layer that the metadata does not know
    """
    early = [_without_rules(tensor, recipe, options) for tensor in tensors]
    to_rules = [tensor for tensor, decision in zip(tensors, early, strict=True) if decision is None]
    places = _places(to_rules, tensors, facts, options.keep_order)
    tied = all(tensor.role.role is not Role.OUTPUT for tensor in tensors)

    def by_rules(tensor: Candidate) -> Decision:
        role = tensor.role.role
        if tied and role is Role.TOKEN_EMBD:
            role = Role.OUTPUT
            if options.output_type is not None:
                return Decision(options.output_type, Decider.OPTION, "--output-tensor-type, tied embeddings")
        place = places[tensor.name]
        situation = Situation(
            role=role,
            facts=facts,
            has_importances=has_importances,
            n_visited=place.n_visited,
            position=place.position,
            total=place.total,
            fits_default=tensor.info.n_cols % _default(recipe).block_elems == 0,
            is_stacked=tensor.info.n_mats > 1,
        )
        type_name, reason = recipe.choose(situation)
        return Decision(by_name(type_name), Decider.RULES, reason)

    wanted = [decision or by_rules(tensor) for tensor, decision in zip(tensors, early, strict=True)]
    return _fitted(tensors, wanted, options.fallbacks)


def _without_rules(tensor: Candidate, recipe: Recipe, options: PlanOptions) -> Decision | None:
    """Return what is decided before the recipe's rules are asked, or None."""
    role = tensor.role.role
    kept_as = "COPY" if recipe.default is None else tensor.role.kept_as
    if options.leave_output and tensor.name == "output.weight":
        kept_as = kept_as or "--leave-output-tensor"
    if kept_as is not None:
        return Decision(tensor.info.type, Decider.KEPT, kept_as)
    override = find_override(options.overrides, tensor.name)
    # The embeddings that some models have per layer follow the option unless an override names them.
    named = override is not None and tensor.name != "token_embd.weight"
    if role is Role.TOKEN_EMBD and options.embedding_type is not None and not named:
        return Decision(options.embedding_type, Decider.OPTION, "--token-embedding-type")
    if role is Role.OUTPUT and options.output_type is not None:
        return Decision(options.output_type, Decider.OPTION, "--output-tensor-type")
    default = _default(recipe)
    if not default.is_quantized:
        return Decision(default, Decider.FLOAT_RECIPE, f"{recipe.name}: default")
    if override is not None:
        return Decision(override.type, Decider.OVERRIDE, f"override {override.text}")
    if options.pure:
        return Decision(default, Decider.PURE, f"{recipe.name}: --pure")
    return None


def _default(recipe: Recipe) -> GGMLType:
    if recipe.default is None:
        raise BadRequest(f"{recipe.name}: copies every tensor and has no type of its own")
    return by_name(recipe.default)


def _places(
    to_rules: Sequence[Candidate], everything: Sequence[Candidate], facts: ModelFacts, keep_order: bool
) -> dict[str, _Place]:
    """Return where each of the tensors `to_rules` stands, by name.

    Of attention values there are as many as tensors of that kind; of each feed-forward matrix as many as
    layers. In a mixture of experts the layer is the position, because its tensors come in several per layer.
    """
    n_values = sum(tensor.role.role in V_LIKE for tensor in everything)
    in_order = {tensor.name: tensor for tensor in to_rules}
    names = list(in_order) if keep_order else file_order(in_order)
    visited: Counter[Role] = Counter()
    places = {}
    for name in names:
        role = in_order[name].role.role
        if role in V_LIKE:
            n_visited = visited[Role.ATTN_V]
            visited[Role.ATTN_V] += 1
            places[name] = _Place(n_visited, n_visited, n_values)
        elif role in (Role.FFN_DOWN, Role.FFN_GATE, Role.FFN_UP):
            n_visited = visited[role]
            visited[role] += 1
            position = _layer(in_order[name], facts) if facts.n_experts > 1 else n_visited
            places[name] = _Place(n_visited, position, facts.n_layers)
        else:
            places[name] = _Place()
    return places


def _layer(tensor: Candidate, facts: ModelFacts) -> int:
    layer = tensor.role.layer
    if layer is None or layer >= facts.n_layers:
        raise BadRequest(
            f"{tensor.name}: expected a name blk.N. with N below {facts.n_layers}, the number of layers in"
            " the metadata"
        )
    return layer


def _fitted(
    tensors: Sequence[Candidate], wanted: Sequence[Decision], fallbacks: Sequence[Override]
) -> tuple[Decision, ...]:
    """Return the decisions with types that can hold the rows."""
    fitted: list[Decision] = []
    undefined: dict[str, list[str]] = {}
    misnamed: dict[str, list[str]] = {}
    for tensor, decision in zip(tensors, wanted, strict=True):
        n_cols, type_ = tensor.info.n_cols, decision.type
        named = find_override(fallbacks, tensor.name)
        found = fit(type_, n_cols, named)
        if found is not None:
            reason = f"{decision.reason}; {found.reason}"
            fell = found.reason is not None
            fitted.append(Decision(found.type, decision.decider, reason, type_) if fell else decision)
            continue
        misfit = f"{type_.name}: row length {n_cols} is no multiple of {type_.block_elems}"
        if named is None:
            undefined.setdefault(misfit, []).append(tensor.name)
        else:
            either = f"{misfit}; fallback {named.text}: no multiple of {named.type.block_elems} either"
            misnamed.setdefault(either, []).append(tensor.name)
    if misnamed:
        raise BadOverride(f"rows do not fit the fallback that is named for {_with_remarks(misnamed)}")
    if undefined:
        raise NoFallback(
            f"no fallback type is known for {_with_remarks(undefined)}; name one with --fallback REGEX=TYPE"
        )
    return tuple(fitted)


def _with_remarks(names: Mapping[str, Sequence[str]]) -> str:
    """Return names by remark as one text, each group with its remark behind it."""
    return ", ".join(f"{', '.join(in_layer_ranges(group))} ({remark})" for remark, group in names.items())
