"""The best file of a given size: from sensitivities and a size to a mixture that a run is planned with.

The plan of a stock file type comes first. It says what surrounds the tensors that can be chosen: the header,
and the tensors that stay as they are. What is left of the size is the budget of `choose_types`. Its answer
becomes the rules of a mixture, so the run, its resume and its report are those of any other mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod

from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.header import align_up
from quantize.formats.codecs import CODECS
from quantize.padding import PadChoice
from quantize.padding.counterparts import count_weights, without_padding
from quantize.padding.hidden_size import pads_hidden_size
from quantize.plan.plan import PlanOptions
from quantize.plan.recipe import Recipe
from quantize.plan.recipe_files import Mixture
from quantize.plan.recipes import RECIPES, find_recipe
from quantize.plan.sensitivities import Sensitivities, TensorSensitivity
from quantize.prepare import TYPES_CHOSEN_BYTES, Preparation
from quantize.run import Run
from quantize.size.choose_types import ChosenTypes, Share, TypeRules, choose_types, is_expert_stack
from quantize.size.parse import Size

Planner = Callable[[Mixture], AbstractContextManager[Run]]
"""Plans a run for a mixture, with the source, output and options that the front knows. It must yield a plan
even where it could not be run, as a dry run does."""


@dataclass(frozen=True)
class SizeRequest:
    """The size that is asked for, and what it is chosen by.

    size       of the whole file; None with vram and ram
    vram, ram  bytes: routed experts must fit `ram`, everything else `vram`. Both or neither
    sensitivities     what each tensor costs at each type
    rules      which types may be chosen
    calibrated the file will be encoded with calibration
    base       file type whose number the file gets and that decides about tensors that were not measured;
               None: the one of the size, or the one that comes nearest; see `size_padded`
    """

    sensitivities: Sensitivities
    size: Size | None = None
    vram: int | None = None
    ram: int | None = None
    rules: TypeRules = field(default_factory=TypeRules)
    calibrated: bool = False
    base: str | None = None


@dataclass(frozen=True)
class Sized:
    """A mixture for a size.

    base         file type that it grew from
    budget       bytes that the file may take
    total_bytes  bytes that it will take, exactly
    """

    mixture: Mixture
    chosen: ChosenTypes
    base: str
    budget: int
    total_bytes: int

    @property
    def used(self) -> float:
        """The share of the budget that the file takes."""
        return self.total_bytes / self.budget


def size_mixture(planner: Planner, request: SizeRequest) -> Sized:
    """Return the mixture with the least predicted divergence for a size.

    raises  BadRequest for a budget that no choice fits, sensitivities of another model, rules that leave a
            tensor no type, and what the planner raises
    """
    base, budget = _base_and_budget(planner, request)
    with planner(_mixture(base)) as run:
        frame = _FixedPart.of(run.preparation, request, base)
    chosen = frame.choose(_shares(request, budget, frame))
    types = {name: by_name(type_) for name, type_ in chosen.types.items()}
    mixture = Mixture(f"{base}-sized", find_recipe(base), PlanOptions(types=types))
    with planner(mixture) as run:
        total = run.preparation.total_bytes
        _check(run.preparation, chosen)
        mixture = replace(mixture, name=f"{run.preparation.plan.bits_per_weight:.2f}bpw")
    if total > budget:
        raise BadRequest(f"a size of {budget:,} bytes: the chosen file takes {total:,}")
    return Sized(mixture, chosen, base, budget, total)


def _base_and_budget(planner: Planner, request: SizeRequest) -> tuple[str, int]:
    """Find the file type that a file grows from, and the bytes that it may take."""
    base = request.base or _base_of(request)
    size = request.size
    with planner(_mixture(size.recipe if size is not None and size.kind == "recipe" else base)) as run:
        return base, _budget(request, run.preparation)


def size_padded(
    planner_of: Callable[[PadChoice | None], Planner], request: SizeRequest, pad: PadChoice | None
) -> tuple[Sized, PadChoice | None]:
    """Return the best mixture of the same bytes, with some inner sizes padded or none, and which they were.

    pad     None or auto: each size that can be padded is tried with zeros and without; otherwise that alone
    raises  what `size_mixture` raises
    """
    if pad not in (None, "auto"):
        return size_mixture(planner_of(pad), request), pad
    base, budget = _base_and_budget(planner_of(None), request)
    same_bytes = replace(request, size=request.size and Size("bytes", budget), base=base)
    found: list[tuple[Sized, PadChoice | None]] = []
    refusals = []
    for keys in (None, *_padded_choices(planner_of, base)):
        try:
            found.append((size_mixture(planner_of(keys), same_bytes), keys))
        except BadRequest as error:  # too few bytes for the zeros, or for what rows fall back to without
            refusals.append(error)
    if not found:
        raise refusals[0]
    return min(found, key=lambda each: each[0].chosen.predicted)


def _padded_choices(
    planner_of: Callable[[PadChoice | None], Planner], base: str
) -> Iterator[tuple[str, ...]]:
    """Yield the keys of inner sizes that zeros would change, in all combinations but none."""
    try:
        with planner_of(None)(_mixture(base)) as plain, planner_of("256")(_mixture(base)) as padded:
            known, changes = plain.preparation.padding.changes, padded.preparation.padding.changes
            found = [each.key for each in changes if each.before != each.after and each not in known]
    except BadRequest:
        return
    for n_keys in range(1, len(found) + 1):
        yield from combinations(found, n_keys)


def curve(
    sized: Sized, request: SizeRequest, planner: Planner, n_points: int = 10
) -> list[tuple[int, float]]:
    """Return (bytes of the file, predicted divergence) for sizes from the smallest file to the largest."""
    with planner(_mixture(sized.base)) as run:
        frame = _FixedPart.of(run.preparation, request, sized.base)
    sizes = {
        name: [
            frame.padded(by_name(type_).tensor_bytes(each.shape))
            for type_ in frame.rules.allowed(name, each.by_type)
        ]
        for name, each in frame.sensitivities.tensors.items()
    }
    least, most = (sum(pick(each) for each in sizes.values()) for pick in (min, max))
    points = []
    for number in range(n_points):
        # Equal steps of the logarithm: small files are where a byte saves most.
        budget = int(least * (most / least) ** (number / (n_points - 1)))
        chosen = frame.choose([Share(lambda name: True, max(budget, least))])
        taken = sum(frame.padded(each.n_bytes) for each in chosen.tensors.values())
        points.append((frame.n_bytes + taken, chosen.predicted))
    return points


@dataclass(frozen=True)
class _FixedPart:
    """The rest of the file around the tensors that can be chosen, and what they are chosen by.

    n_bytes     of header, padding and the tensors that can't be chosen
    experts     of these, routed experts' bytes
    sensitivities      of the tensors that can be chosen, in file order
    rules       those of the request, which know the tensors that have no importances
    calibrated  the file will be encoded with calibration
    """

    n_bytes: int
    experts: int
    alignment: int
    sensitivities: Sensitivities
    rules: TypeRules
    calibrated: bool

    @classmethod
    def of(cls, preparation: Preparation, request: SizeRequest, base: str) -> _FixedPart:
        """Return the frame of a file planned as `base`.

        raises  BadRequest for sensitivities of another model
        """
        plan, recipe = preparation.plan, find_recipe(base)
        measured = _fitted(request.sensitivities, preparation)
        unweighed = {
            tensor.name: frozenset(
                type_ for type_ in CODECS if recipe.refuses_without_importances(tensor.role, type_)
            )
            for tensor in plan.tensors
            if tensor.name not in plan.weighed
        }
        alignment = preparation.outputs[0].layout.alignment
        padded = {info.name: align_up(info.n_bytes, alignment) for info in plan.infos}
        kept = [name for name in padded if name not in measured and is_expert_stack(name)]
        tensors = {name: measured[name] for name in padded if name in measured}
        return cls(
            n_bytes=preparation.total_bytes
            + _chosen_bytes(alignment)
            - sum(padded[name] for name in tensors),
            experts=sum(padded[name] for name in kept),
            alignment=alignment,
            sensitivities=replace(request.sensitivities, tensors=tensors),
            rules=replace(request.rules, unweighed=unweighed),
            calibrated=request.calibrated,
        )

    def choose(self, shares: Sequence[Share]) -> ChosenTypes:
        """Return the types with the least predicted divergence within the shares."""
        return choose_types(
            self.sensitivities, shares, self.rules, calibrated=self.calibrated, alignment=self.alignment
        )

    def padded(self, n_bytes: int) -> int:
        """Return the bytes that a tensor takes in the file."""
        return align_up(n_bytes, self.alignment)


def _fitted(sensitivities: Sensitivities, preparation: Preparation) -> dict[str, TensorSensitivity]:
    """Give the tensors of a file, which may be padded, the sensitivities of the model's.

    raises  BadRequest for sensitivities of another model
    """
    infos = preparation.plan.infos
    metadata = preparation.outputs[0].layout.metadata
    real = without_padding(metadata, infos)
    measured = sensitivities.fitted_to(real.infos(infos)).tensors
    if pads_hidden_size(metadata) and not sensitivities.text.get("pad_hidden"):
        raise BadRequest(
            "the losses have no types for rows of a padded hidden size; measure them with --pad-hidden"
        )
    shaped = {info.name: measured[info.name].in_shape(info.shape) for info in infos if info.name in measured}
    return {name: each for name, each in shaped.items() if each.by_type}  # no type fits some odd rows


def _chosen_bytes(alignment: int) -> int:
    """How much longer a header is that says that types were chosen, at most."""
    return align_up(TYPES_CHOSEN_BYTES, alignment)


def _mixture(file_type: str) -> Mixture:
    recipe = find_recipe(file_type)
    return Mixture(recipe.name, recipe)


def _base_of(request: SizeRequest) -> str:
    """Return the file type that the file grows from, if none was named."""
    if request.size is not None and request.size.kind == "recipe":
        return request.size.recipe
    n_elems = sum(prod(each.shape) for each in request.sensitivities.tensors.values())
    n_bytes = (request.vram or 0) + (request.ram or 0)
    bits = 8 * n_bytes / n_elems
    if request.size is not None:
        bits = request.size.amount if request.size.kind == "bpw" else 8 * request.size.amount / n_elems
    return nearest_recipe(bits).name


def nearest_recipe(bits: float) -> Recipe:
    """Return the stock mixture whose default type comes nearest to some bits per weight.

    Those of one kind of model, such as MXFP4_MOE, give no other file their number.
    """
    mixtures = [
        recipe
        for recipe in RECIPES.values()
        if recipe.rules and recipe.default is not None and not recipe.name.endswith("_MOE")
    ]
    return min(mixtures, key=lambda recipe: abs(by_name(recipe.default or "").bits_per_weight - bits))


def _budget(request: SizeRequest, preparation: Preparation) -> int:
    """Return the bytes that the whole file may take."""
    size = request.size
    if size is None:
        if request.vram is None or request.ram is None:
            raise BadRequest("no size: expected one for the file, or both --vram and --ram")
        return request.vram + request.ram
    if size.kind == "bytes":
        return int(size.amount)
    if size.kind == "bpw":
        infos, layout = preparation.plan.infos, preparation.outputs[0].layout
        header = preparation.total_bytes - sum(info.n_bytes for info in infos)
        header += _chosen_bytes(layout.alignment)
        return header + int(size.amount * count_weights(layout.metadata, infos) / 8)
    return preparation.total_bytes


def _shares(request: SizeRequest, budget: int, frame: _FixedPart) -> list[Share]:
    if request.size is not None:
        return [Share(lambda name: True, budget, "the file", frame.n_bytes)]
    assert request.vram is not None
    assert request.ram is not None
    return [
        Share(is_expert_stack, request.ram, "routed experts (--ram)", frame.experts),
        Share(lambda name: True, request.vram, "the rest (--vram)", frame.n_bytes - frame.experts),
    ]


def _check(preparation: Preparation, chosen: ChosenTypes) -> None:
    """Raise BadRequest for a tensor that did not get the type that was chosen for it."""
    for tensor in preparation.plan.tensors:
        wanted = chosen.types.get(tensor.name)
        if wanted is not None and tensor.target_type.name != wanted:
            raise BadRequest(
                f"{tensor.name}: {wanted} was chosen, and the plan says {tensor.target_type}"
                f" ({tensor.reason}); leave out the option that sets it"
            )
