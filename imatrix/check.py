"""Faults of an importance matrix: by itself, for a model, and for a recipe."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gguf_tools.errors import BadImportance, PlanError, QuantError
from gguf_tools.findings import Finding, Level
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from imatrix.stats import entry_stats, gap_text
from quantize.importances.entries import ImportanceEntry, ImportanceFile, Importances, resolve
from quantize.padding.counterparts import fit_importances, without_padding
from quantize.plan.model_facts import ModelFacts
from quantize.plan.plan import build_plan
from quantize.plan.recipe_files import find_mixture
from quantize.roles import Role, in_layer_ranges, layer_of, siblings_with_same_activations, tensor_role

if TYPE_CHECKING:
    from convert.checkpoint.streamed import StreamedFolder


@dataclass(frozen=True)
class CheckedModel:
    """Headers of a model: what is needed to see whether data fit."""

    tensors: tuple[TensorInfo, ...]
    metadata: Metadata

    @cached_property
    def facts(self) -> ModelFacts:
        has_layers = any(layer_of(tensor.name) is not None for tensor in self.tensors)
        return ModelFacts.from_metadata(self.metadata, has_layers=has_layers)

    def fit(self, entries: Importances) -> Importances:
        """Give entries the sizes of this file, which may be padded."""
        return fit_importances(entries, self.metadata, self.tensors)

    def without_padding(self, entries: Importances) -> Importances:
        """Give entries of this file the sizes without padding, whose columns are always zero."""
        real = without_padding(self.metadata, self.tensors)
        return fit_importances(entries, real.metadata(self.metadata), real.infos(self.tensors))


def check(
    contents: ImportanceFile, model: CheckedModel | None = None, recipe: str | None = None
) -> list[Finding]:
    """Find what is wrong, errors first.

    recipe  a file type or a recipe file; needs the model
    raises  ToolkitError for a recipe that can't be read
    """
    if model is not None:
        contents = replace(contents, entries=model.without_padding(model.fit(contents.entries)))
    findings = [bad for name, entry in contents.entries.items() for bad in _check_numbers(name, entry)]
    findings += [
        Finding("gaps", f"{entry.name}: {gap_text(entry)}", Level.WARNING, (entry.name,))
        for entry in entry_stats(contents)
        if 0 < entry.n_unseen < entry.n_mats or entry.n_rare or entry.n_zero_columns
    ]
    if model is not None:
        entries = model.fit(contents.entries)
        findings += _check_model(entries, model)
        if recipe is not None:
            findings += _check_recipe(entries, model, recipe)
    return sorted(findings, key=lambda finding: -finding.level)


def as_text(finding: Finding) -> str:
    """Return the finding on one line; with an error, quantizing with the file would stop or go wrong."""
    return f"{'error' if finding.is_bad else 'warning'}: {finding.text}"


def _check_numbers(name: str, entry: ImportanceEntry) -> Iterator[Finding]:
    def bad(text: str) -> Finding:
        return Finding("numbers", f"{name}: {text}", Level.BAD, (name,))

    sums = entry.read()
    for what, numbers in (("values", sums), ("counts", entry.counts)):
        n_bad = int((~np.isfinite(numbers)).sum())
        if n_bad:
            yield bad(f"{n_bad} of {numbers.size} {what} are not finite")
        n_negative = int((numbers < 0).sum())
        if n_negative:
            yield bad(f"{n_negative} of {numbers.size} {what} are negative")
    if not entry.counts.any():
        yield bad("has seen nothing")
    elif not sums.any():
        yield bad("all sums are zero")


def _check_model(entries: Importances, model: CheckedModel) -> Iterator[Finding]:
    names = {tensor.name for tensor in model.tensors}
    used: set[str] = set()
    without: list[str] = []
    for tensor in model.tensors:
        role = tensor_role(tensor.name, tensor.shape, model.facts.architecture)
        try:
            resolved = resolve(tensor, entries, model.facts.n_heads)
        except BadImportance as error:
            yield Finding("unfit data", str(error), Level.BAD, (tensor.name,))
            used.add(tensor.name)
            continue
        if resolved is not None:
            used.add(resolved.entry)
        elif role.kept_as is None and role.role not in (Role.TOKEN_EMBD, Role.OUTPUT):
            without.append(tensor.name)
    for shown in in_layer_ranges(without):
        yield Finding("no data", f"{shown}: no data", Level.WARNING, (shown,))
    known = names | used  # of matrices that hold each other's rows, a model has one kind
    stray = [name for name in entries if known.isdisjoint((name, *siblings_with_same_activations(name)))]
    for shown in in_layer_ranges(name for name in stray if not _is_of_mtp(name, entries, names)):
        yield Finding("stray data", f"{shown}: not in the model", Level.BAD, (shown,))


def _is_of_mtp(name: str, entries: Importances, names: Container[str]) -> bool:
    """Tell whether data are of an MTP layer, which a file of the same model may be without."""
    projection = f"blk.{layer_of(name)}.nextn.eh_proj.weight"
    return projection in entries and projection not in names


def _check_recipe(entries: Importances, model: CheckedModel, recipe: str) -> Iterator[Finding]:
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
        yield Finding("recipe", f"{mixture.name}: {error}", Level.BAD)
        return
    weighed = [tensor for tensor in plan.tensors if tensor.is_weighed and tensor.entry is None]
    types = {tensor.name: tensor.target_type.name for tensor in weighed}
    for level, names in (
        (Level.BAD, [tensor.name for tensor in weighed if tensor.lacks_data]),
        (Level.WARNING, [tensor.name for tensor in weighed if not tensor.lacks_data]),
    ):
        for shown in _by_type(names, types):
            yield Finding("recipe", f"{mixture.name}: {shown} without data", level)


def _by_type(names: Iterable[str], types: Mapping[str, str]) -> Iterator[str]:
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(types[name], []).append(name)
    for type_name, group in grouped.items():
        for text in in_layer_ranges(group):
            yield f"{text} becomes {type_name}"


def read_model(model: Path | StreamedFolder) -> CheckedModel:
    """Read the headers of a Hugging Face folder, as it would be converted, or of a GGUF file.

    model  its path, or a folder whose weights are on the Hub
    """
    if Path(model).is_dir():
        return _read_folder(model)
    from gguf_tools.format.shards import open_gguf

    with open_gguf(model) as file:
        return CheckedModel(tuple(file.tensors.values()), file.metadata)


def _read_folder(folder: Path | StreamedFolder) -> CheckedModel:
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
    return CheckedModel(infos, metadata)
