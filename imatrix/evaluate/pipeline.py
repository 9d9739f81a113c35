"""Evaluate models against their base; what needs torch is in `imatrix.evaluate.run`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from gguf_tools.argument_types import checked
from gguf_tools.choices import with_choices
from gguf_tools.errors import BadRequest
from gguf_tools.files.early_checks import refuse_early, refuse_to_replace
from gguf_tools.files.leftovers import is_unfinished
from gguf_tools.files.named_files import AnyPath, Paths, paths_of
from gguf_tools.progress import NO_REPORT, Reporter, Shown, reporting
from imatrix.evaluate.options import EvaluateChoices, EvaluateOptions, LogitsFile
from imatrix.forward.options import require_torch
from imatrix.texts.suite import Suite, read_suite
from imatrix.texts.tokens import Cut

if TYPE_CHECKING:
    from imatrix.evaluate.evaluation import Check, Evaluation

LABEL = "evaluating"
"""Label of the bar of an evaluation."""


@checked
def evaluate(
    base: AnyPath | LogitsFile,
    text: AnyPath | None,
    quants: Paths,
    options: EvaluateOptions | None = None,
    progress: Shown | Reporter = None,
    **choices: Unpack[EvaluateChoices],
) -> Evaluation:
    """Measure how well `base` predicts a text, and how far every other model is from it.

        evaluate("lite-bf16.gguf", "wiki.test.raw", ["lite-Q4_K_M.gguf"], n_chunks=40)

    base     Hugging Face folder, or GGUF file; it may be gone if `options.keep` has its states. Or a file of
             log probabilities that llama-perplexity has written
    text     UTF-8 file; with a file of log probabilities it may be None
    quants   GGUF files made of the base, one or several; a folder can be compared, too
    progress True, a function, a bar of tqdm or rich, a CancelToken, or a Reporter
    choices  fields of EvaluateOptions, and of the Cut and ForwardOptions in it, as keyword arguments:
             chunk_size=512, device="cpu". They replace those of `options`
    raises   ToolkitError; BadRequest, before anything is computed, for a file of another model (tokens,
             special tokens, sizes), or a text without a whole chunk; BadActivation naming model, layer and
             tensor for NaN or infinity; OutputError for a file that can't be written
    """
    options = with_choices(choices, options or EvaluateOptions())
    with (
        reporting(progress, LABEL) as report,
        evaluating(base, text, quants, options, report) as evaluation,
    ):
        return evaluation


@checked
def evaluate_suite(
    base: AnyPath | LogitsFile,
    suite: Suite | AnyPath,
    quants: Paths,
    options: EvaluateOptions | None = None,
    progress: Shown | Reporter = None,
    **choices: Unpack[EvaluateChoices],
) -> Evaluation:
    """Measure how far models are from `base` on every class of a suite, all in one run.

        evaluate_suite("lite-bf16.gguf", "default", ["lite-Q4_K_M.gguf"]).to_dataframe()

    The numbers of a class are those that `evaluate` gives for it alone.
    Errors are over chunks, see `Figures`.

    base     Hugging Face folder, or GGUF file; it may be gone if `options.keep` has its states
    suite    what `read_suite` gives or takes: `default`, a folder, or a YAML file
    quants   GGUF files made of the base, one or several; a folder can be compared, too
    progress True, a function, a bar of tqdm or rich, a CancelToken, or a Reporter
    choices  fields of EvaluateOptions, and of the ForwardOptions in it, as keyword arguments
    raises   ToolkitError; BadRequest, before anything is computed, for options that are for one text: a cut,
             as classes have contexts of their own, and a file of log probabilities. Else as `evaluate`
    """
    options = with_choices(choices, options or EvaluateOptions())
    _refuse_for_a_suite(base, options)
    whole = suite if isinstance(suite, Suite) else read_suite(suite)
    with (
        reporting(progress, LABEL) as report,
        evaluating(base, whole, quants, options, report) as evaluation,
    ):
        return evaluation


@contextmanager
def evaluating(
    base: AnyPath | LogitsFile,
    texts: Suite | AnyPath | None,
    quants: Paths,
    options: EvaluateOptions | None = None,
    report: Reporter = NO_REPORT,
    check: Check = lambda text, files: None,
) -> Iterator[Evaluation]:
    """Give what `evaluate` or, of a suite, `evaluate_suite` returns.

    Finished layers stay until the block has ended without an error. So what is made of the evaluation can be
    written there, and a run that is killed meanwhile can go on.

    check  called for each class, or for the text alone, before anything is computed
    """
    options, paths = options or EvaluateOptions(), paths_of("quants", quants)
    if isinstance(texts, Suite):
        _refuse_for_a_suite(base, options)
    else:
        texts = None if texts is None else Path(texts)
        if options.work is None or not is_unfinished(options.work):  # which may have written it
            refuse_to_replace([options.logits], force=options.force)
        refuse_early([options.logits], [texts])
    source, needed = (base, base.path) if isinstance(base, LogitsFile) else (Path(base), Path(base))
    may_be_gone = options.keep is not None and not isinstance(base, LogitsFile)
    refuse_early(models=[*paths, options.against, None if may_be_gone else needed])
    require_torch("evaluating models")
    from imatrix.evaluate.run import open_evaluation

    with open_evaluation(source, texts, paths, options, report, check) as evaluation:
        yield evaluation


def _refuse_for_a_suite(base: AnyPath | LogitsFile, options: EvaluateOptions) -> None:
    """Raise BadRequest for options that are for one text."""
    if options.cut != Cut():
        raise BadRequest("a cut is for one text: each class of a suite has its own context and chunks")
    if isinstance(base, LogitsFile) or options.logits is not None:
        path = base.path if isinstance(base, LogitsFile) else options.logits
        raise BadRequest(f"{path}: a file of log probabilities is of one text, not of a suite")
