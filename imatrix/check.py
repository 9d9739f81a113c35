"""What is wrong with an importance matrix: by itself, for a model, and for a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gguf_tools.errors import BadImportance, PlanError, QuantError
from gguf_tools.tensors import TensorInfo
from gguf_tools.values import Metadata, Value
from imatrix.stats import entry_stats, gap_text
from quantize.importance import ImportanceEntry, ImportanceFile, Importances, resolve
from quantize.plan.model_facts import ModelFacts
from quantize.plan.plan import build_plan
from quantize.plan.recipe_files import find_mixture
from quantize.roles import Role, in_layer_ranges, tensor_role


@dataclass(frozen=True)
class Complaint:
    """One thing that was found.

    is_error  whether quantizing with this file would stop, or go wrong; otherwise it is a warning
    """

    text: str
    is_error: bool

    def __str__(self) -> str:
        return f"{'error' if self.is_error else 'warning'}: {self.text}"


@dataclass(frozen=True)
class CheckedModel:
    """Headers of a model: what is needed to see whether data fit."""

    tensors: tuple[TensorInfo, ...]
    facts: ModelFacts


def check(
    contents: ImportanceFile, model: CheckedModel | None = None, recipe: str | None = None
) -> list[Complaint]:
    """Return what is wrong, errors first.

    recipe  a file type or a recipe file; needs the model
    raises  ToolkitError for a recipe that can't be read
    """
    found = [complaint for name, entry in contents.entries.items() for complaint in _of_numbers(name, entry)]
    found += [
        Complaint(f"{entry.name}: {gap_text(entry)}", is_error=False)
        for entry in entry_stats(contents)
        if 0 < entry.n_unseen < entry.n_mats or entry.n_rare or entry.n_zero_columns
    ]
    if model is not None:
        found += _of_model(contents.entries, model)
        if recipe is not None:
            found += _of_recipe(contents.entries, model, recipe)
    return sorted(found, key=lambda complaint: not complaint.is_error)


def _of_numbers(name: str, entry: ImportanceEntry) -> Iterator[Complaint]:
    sums = entry.read()
    for what, numbers in (("values", sums), ("counts", entry.counts)):
        n_bad = int((~np.isfinite(numbers)).sum())
        if n_bad:
            yield Complaint(f"{name}: {n_bad} of {numbers.size} {what} are not finite", is_error=True)
        n_negative = int((numbers < 0).sum())
        if n_negative:
            yield Complaint(f"{name}: {n_negative} of {numbers.size} {what} are negative", is_error=True)
    if not entry.counts.any():
        yield Complaint(f"{name}: has seen nothing", is_error=True)
    elif not sums.any():
        yield Complaint(f"{name}: all sums are zero", is_error=True)


def _of_model(entries: Importances, model: CheckedModel) -> Iterator[Complaint]:
    names = {tensor.name for tensor in model.tensors}
    used: set[str] = set()
    without: list[str] = []
    for tensor in model.tensors:
        role = tensor_role(tensor.name, tensor.shape)
        try:
            data = resolve(tensor, entries, model.facts.n_heads)
        except BadImportance as error:
            yield Complaint(str(error), is_error=True)
            used.add(tensor.name)
            continue
        if data is not None:
            used.add(data.entry)
        elif role.kept_as is None and role.role not in (Role.TOKEN_EMBD, Role.OUTPUT):
            without.append(tensor.name)
    for name in in_layer_ranges(without):
        yield Complaint(f"{name}: no data", is_error=False)
    # attn_kv_b is collected for every layout, and a model may well have the other one.
    stray = [name for name in entries if name not in names | used and "attn_kv_b" not in name]
    for name in in_layer_ranges(stray):
        yield Complaint(f"{name}: not in the model", is_error=True)


def _of_recipe(entries: Importances, model: CheckedModel, recipe: str) -> Iterator[Complaint]:
    mixture = find_mixture(recipe)
    try:
        plan = build_plan(
            model.tensors,
            mixture.recipe,
            model.facts,
            importances=entries,
            options=mixture.options,
            allow_problems=True,
        )
    except (PlanError, QuantError) as error:
        yield Complaint(f"{mixture.name}: {error}", is_error=True)
        return
    weighed = [tensor for tensor in plan.tensors if tensor.is_weighed and tensor.importance is None]
    for is_error, names in (
        (True, [tensor.name for tensor in weighed if tensor.lacks_data]),
        (False, [tensor.name for tensor in weighed if not tensor.lacks_data]),
    ):
        types = {tensor.name: tensor.target_type.name for tensor in weighed}
        for name in _by_type(names, types):
            yield Complaint(f"{mixture.name}: {name} without data", is_error=is_error)


def _by_type(names: Iterable[str], types: Mapping[str, str]) -> Iterator[str]:
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(types[name], []).append(name)
    for type_name, group in grouped.items():
        for text in in_layer_ranges(group):
            yield f"{text} becomes {type_name}"


def read_model(path: Path) -> CheckedModel:
    """Return the headers of a Hugging Face folder, as it would be converted, or of a GGUF file."""
    if path.is_dir():
        return _read_folder(path)
    from gguf_tools.shards import open_gguf

    with open_gguf(path) as file:
        return CheckedModel(tuple(file.tensors.values()), ModelFacts.from_metadata(file.metadata))


def _read_folder(folder: Path) -> CheckedModel:
    from convert.architectures import find_architecture
    from convert.architectures.base import build
    from convert.checkpoint.checkpoint import Checkpoint
    from convert.weights import open_weights

    with Checkpoint(folder) as checkpoint:
        architecture = find_architecture(checkpoint.config, checkpoint.config_path)
        conversion = build(architecture, open_weights(checkpoint))
        infos = tuple(TensorInfo(tensor.name, tensor.shape, tensor.type) for tensor in conversion.tensors)
    metadata: Metadata = {
        "general.architecture": Value.string(architecture.gguf_name),
        **conversion.metadata,
    }
    return CheckedModel(infos, ModelFacts.from_metadata(metadata))
