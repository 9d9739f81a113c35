"""Keyword arguments of public functions are the fields of their options, each with its type."""

from __future__ import annotations

import ast
from dataclasses import MISSING, Field, fields
from typing import Any

import pytest

from convert.audit.options import AuditChoices, AuditOptions
from convert.options import ConvertChoices, ConvertOptions
from convert.rederive.options import RederiveChoices, RederiveOptions
from convert.sources import SourceChoices, SourceOptions
from gguf_tools.commands.functions import CalibrateChoices
from imatrix.calibrate.options import CalibrationChoices, CalibrationOptions
from imatrix.calibrate.refine.options import RefineChoices, RefineOptions
from imatrix.evaluate.options import EvaluateChoices, EvaluateOptions
from imatrix.forward.options import ForwardOptions
from imatrix.options import CollectChoices, CollectOptions
from imatrix.sensitivities.options import SensitivityChoices, SensitivityOptions
from imatrix.texts.tokens import Cut
from quantize.mla_layout.pipeline import LayoutChoices, LayoutOptions
from quantize.options import FileChoices, FileOptions, QuantizeChoices, QuantizeOptions
from quantize.repack.pipeline import RepackChoices
from quantize.repack.rules import RepackOptions
from quantize.run_options import RunOptions
from tests.contract.import_graph import PACKAGES, files_of, tree_of

CHOICES: dict[Any, tuple[Any, ...]] = {
    FileChoices: (FileOptions,),
    QuantizeChoices: (QuantizeOptions, RunOptions),
    ConvertChoices: (ConvertOptions, RunOptions),
    LayoutChoices: (LayoutOptions, RunOptions),
    RepackChoices: (RepackOptions, RunOptions),
    CollectChoices: (CollectOptions, Cut, ForwardOptions),
    AuditChoices: (AuditOptions,),
    RederiveChoices: (RederiveOptions,),
    EvaluateChoices: (EvaluateOptions, Cut, ForwardOptions),
    SensitivityChoices: (SensitivityOptions, Cut, ForwardOptions),
    RefineChoices: (RefineOptions, Cut, ForwardOptions),
    SourceChoices: (SourceOptions, RunOptions),
    CalibrationChoices: (CalibrationOptions, Cut, ForwardOptions),
    CalibrateChoices: (SourceOptions, RunOptions, CalibrationOptions, Cut, ForwardOptions),
}

WITH_A_PLACE = {ConvertChoices: {"outtype"}}
"""Fields that are parameters of their own."""

OF_THE_RUN = {"n_threads", "scheduler"}
"""Fields of ForwardOptions that a calibration has from its run."""


@pytest.mark.parametrize("choices", CHOICES, ids=lambda each: each.__name__)
def test_choices_are_the_fields_of_the_options(choices: Any) -> None:
    left_out = OF_THE_RUN if CalibrationOptions in CHOICES[choices] else set()
    of_each = [{each.name: each.type for each in fields(options) if _is_choice(each)
                and not (options is ForwardOptions and each.name in left_out)}
               for options in CHOICES[choices]]  # fmt: skip
    together = {name: type_ for own in of_each for name, type_ in own.items()}
    assert len(together) == sum(map(len, of_each)), "a name is a field of two options"
    for name in WITH_A_PLACE.get(choices, ()):
        del together[name]
    assert {name: hint.__forward_arg__ for name, hint in choices.__annotations__.items()} == together


def _is_choice(each: Field[Any]) -> bool:
    """Whether a field is chosen by name; one without a default has a place of its own."""
    return each.init and (each.default is not MISSING or each.default_factory is not MISSING)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_function_with_choices_has_a_row(package: str) -> None:
    known = {f"Unpack[{choices.__name__}]" for choices in CHOICES}
    for path in files_of(package):
        for node in tree_of(path).body:
            last = node.args.kwarg if isinstance(node, ast.FunctionDef) else None
            if last is not None and last.arg == "choices":
                annotation = "" if last.annotation is None else ast.unparse(last.annotation)
                assert annotation in known, f"{path}: line {node.lineno}"
