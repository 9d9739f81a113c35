"""Files that the user has named for a page; those that don't fit are refused before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from imatrix.evaluate.evaluation import EvaluatedText, Evaluation, TensorSize
from imatrix.evaluate.report.page import report_page
from imatrix.evaluate.report.points import (
    Earlier,
    is_of_base,
    prices_of,
    refuse_another_base,
    refuse_another_text,
    refuse_other_classes,
)
from imatrix.evaluate.report.suite_page import suite_page
from imatrix.evaluate.suite.result import SuiteEvaluation
from imatrix.texts.suite import Suite
from quantize.plan.sensitivities import Sensitivities


@dataclass(frozen=True)
class PageInputs:
    """Files for the page.

    earlier  evaluations whose files are shown beside
    losses   what each tensor costs at each type; None: the page gets no map of that
    """

    earlier: tuple[Earlier, ...]
    losses: Sensitivities | None

    def refuse_other_suites(self, suite: Suite) -> None:
        """Raise BadRequest for evaluations on other classes than those of a suite."""
        for each in self.earlier:
            refuse_other_classes(each, [text_class.name for text_class in suite.classes])

    def refuse_unfit(self, text: EvaluatedText, files: Sequence[tuple[TensorSize, ...]]) -> None:
        """Raise BadRequest, before anything is computed, for what would not fit in the end.

        files  the tensors of each model
        """
        for each in self.earlier:
            refuse_another_text(each, text)
        if self.losses is not None:
            for tensors in files:
                prices_of(tensors, self.losses)

    def page(self, evaluation: Evaluation | SuiteEvaluation) -> str:
        """Return the page, without evaluations that turn out to be of another base."""
        fit = [each for each in self.earlier if is_of_base(each, evaluations_of(evaluation))]
        if isinstance(evaluation, SuiteEvaluation):
            return suite_page(evaluation, fit, self.losses)
        return report_page(evaluation, fit, self.losses)

    def refuse_other_bases(self, evaluation: Evaluation | SuiteEvaluation) -> None:
        """Raise BadRequest for an evaluation that the page is without: only the perplexity shows its base."""
        for each in self.earlier:
            refuse_another_base(each, evaluations_of(evaluation))


def evaluations_of(evaluation: Evaluation | SuiteEvaluation) -> Sequence[Evaluation]:
    """Return the evaluation on the one text, or that on each class."""
    return list(evaluation.by_class.values()) if isinstance(evaluation, SuiteEvaluation) else [evaluation]
