"""Lint: what a recipe would do to a model, and what would stop it, told before a weight is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gguf_tools.argument_types import checked
from gguf_tools.errors import BadRequest, PlanError, QuantError
from gguf_tools.findings import Finding
from gguf_tools.text import counted, html_table, size_text
from quantize.importances import ImportanceSource
from quantize.options import QuantizeOptions
from quantize.padding import PadChoice
from quantize.padding.hidden_size import pads_hidden_size
from quantize.pipeline import plan_run
from quantize.plan.decide import PlanOptions
from quantize.plan.findings import Kind
from quantize.plan.plan import Plan
from quantize.plan.recipe_files import Mixture, find_mixture
from quantize.prepare import Preparation
from quantize.roles import feed_forward_place, in_layer_ranges
from quantize.run import Run
from quantize.type_names import FileType


@dataclass(frozen=True)
class LintReport:
    """Result of linting.

    mixture      the recipe that was looked at
    findings     what it would do to the model, and what would stop a run
    preparation  the plan and the layout of the output; None when not even those can be made
    """

    mixture: Mixture
    findings: tuple[Finding, ...]
    preparation: Preparation | None

    def __repr__(self) -> str:
        return f"<LintReport of {self.mixture.name}: {len(self.findings)} findings>"

    def _repr_html_(self) -> str:
        rows = [(_level(finding), finding.text) for finding in self.findings]
        return html_table(repr(self), ("level", "finding"), rows)

    @property
    def stops(self) -> bool:
        """Whether a run would end with an error."""
        return any(finding.stops for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; sizes are null when there is no plan."""
        done = self.preparation
        return {
            "recipe": self.mixture.name,
            "file_type": self.mixture.recipe.name,
            "total_bytes": None if done is None else done.total_bytes,
            "bits_per_weight": None if done is None else done.plan.bits_per_weight,
            "stops": self.stops,
            "findings": [
                {
                    "kind": finding.kind,
                    "level": _level(finding),
                    "text": finding.text,
                    "tensors": list(finding.tensors),
                }
                for finding in self.findings
            ],
        }


class Planner(Protocol):
    """Plans what a file type does to a model, with its sizes padded or as they are; allows all problems."""

    def __call__(
        self, mixture: Mixture, pad: PadChoice | None = None, *, hidden: bool = False
    ) -> AbstractContextManager[Run]: ...


@checked
def lint(
    file_type: FileType | str | Mixture,
    model: str | os.PathLike[str],
    *,
    importances: ImportanceSource | None = None,
    options: PlanOptions | None = None,
) -> LintReport:
    """Report what `file_type` (Q4_K_M, or a recipe file) would do to the GGUF file `model`.

        report = lint("mine.yaml", "lite-bf16.gguf", importances="lite.imatrix.gguf")
        for finding in report.findings:
            print(finding.text)

    importances  a path, what `imatrix.load` returns, or a mapping tensor name -> Importance or array
    options      on top of the recipe's own, as in `quantize`
    raises  ToolkitError for files that can't be read; whatever would stop a run is a finding
    """
    choices = QuantizeOptions(importances=importances, types=options)

    def plan(
        mixture: Mixture, pad: PadChoice | None = None, *, hidden: bool = False
    ) -> AbstractContextManager[Run]:
        sized = replace(choices, pad=pad, pad_hidden=hidden)
        return plan_run(model, None, mixture, sized, allow_problems=True)

    return lint_plan(file_type, plan)


def lint_plan(file_type: str | Mixture, plan: Planner) -> LintReport:
    """Report what `file_type` would do to a model."""
    mixture = file_type if isinstance(file_type, Mixture) else find_mixture(file_type)
    try:
        with plan(mixture) as run:
            preparation = run.preparation
    except (PlanError, QuantError) as error:
        refusal = Finding.stopping(Kind.REFUSED, str(error), type(error))
        return LintReport(mixture, (refusal,), None)
    padding = _padding_findings(preparation.plan, mixture, plan)
    return LintReport(mixture, (*preparation.plan.findings, *padding), preparation)


def _padding_findings(plain: Plan, mixture: Mixture, plan: Planner) -> Iterator[Finding]:
    """Say which share of the weights falls back, and what padding would give."""
    fallen = [tensor for tensor in plain.tensors if tensor.fell_from is not None]
    if not any(feed_forward_place(tensor.name) for tensor in fallen):
        return
    share = sum(tensor.info.n_elems for tensor in fallen) / sum(info.n_elems for info in plain.infos)
    text = f"{100 * share:.1f} % of the weights have another type than the one asked for"
    try:
        with plan(mixture, "256") as run:
            padded = run.preparation
    except (PlanError, QuantError) as error:
        text = f"{text}; --pad can't help: {error}"
    else:
        text = f"{text}; --pad 256: {padded.plan.notes[-1]}" if padded.padding.pads else text
    with suppress(PlanError, QuantError, BadRequest), plan(mixture, "256", hidden=True) as run:
        if pads_hidden_size(run.preparation.outputs[0].layout.metadata):
            n_bytes = run.preparation.plan.total_bytes
            text += f"; --pad-hidden: {n_bytes:,} bytes of tensors instead of {plain.total_bytes:,},"
            text += f" {run.preparation.plan.notes[-1]}"
    yield Finding(Kind.PADDING, text, about=tuple(tensor.name for tensor in fallen))


def lint_lines(report: LintReport) -> Iterator[str]:
    """Yield the report as text: errors, warnings, notes, sizes."""
    for finding in sorted(report.findings, key=lambda finding: (not finding.stops, -finding.level)):
        yield f"{_level(finding)}: {finding.text}"
        if finding.text.endswith("..."):
            yield from (f"    {name}" for name in in_layer_ranges(finding.tensors))
    levels = [_level(finding) for finding in report.findings]
    counts = ", ".join(counted(levels.count(level), level) for level in ("error", "warning"))
    if report.preparation is None:
        yield f"{report.mixture.name}: {counts}; no plan, so no size"
    else:
        total = report.preparation.total_bytes
        yield (
            f"{report.mixture.name}: {counts}; {total:,} bytes ({size_text(total)}),"
            f" {report.preparation.plan.bits_per_weight:.4f} bits per weight"
        )


def _level(finding: Finding) -> str:
    return "error" if finding.stops else str(finding.level)
