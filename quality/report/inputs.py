"""What a page is made of besides the evaluation itself, and whether it goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quality.evaluation import EvaluatedText, Evaluation, TensorSize
from quality.report.points import Earlier, is_of_base, refuse_another_base, refuse_another_text
from quality.report.prices import prices_of
from quantize.plan.sensitivities import Sensitivities


@dataclass(frozen=True)
class PageInputs:
    """Files that the user has named for the page.

    earlier  evaluations whose files are shown beside
    losses   what each tensor costs at each type; None: the page gets no map of that
    """

    earlier: tuple[Earlier, ...]
    losses: Sensitivities | None

    def refuse_unfit(self, text: EvaluatedText, files: Sequence[tuple[TensorSize, ...]]) -> None:
        """Raise BadRequest, before anything is computed, for what would not fit in the end.

        files  the tensors of each model
        """
        for each in self.earlier:
            refuse_another_text(each, text)
        if self.losses is not None:
            for tensors in files:
                prices_of(tensors, self.losses)

    def page(self, evaluation: Evaluation) -> str:
        """Return the page, without evaluations that turn out to be of another base."""
        from quality.report.page import report_page

        ppl = evaluation.base_ppl.value
        return report_page(evaluation, [each for each in self.earlier if is_of_base(each, ppl)], self.losses)

    def refuse_other_bases(self, evaluation: Evaluation) -> None:
        """Raise BadRequest for an evaluation that the page is without: only the perplexity shows its base."""
        for each in self.earlier:
            refuse_another_base(each, evaluation.base_ppl.value)
