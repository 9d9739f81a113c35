"""Evaluate models against their base; what needs torch is in `quality.run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from forward.options import require_torch
from gguf_tools.choices import with_choices
from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.files.named_files import output_path
from gguf_tools.progress import NoReport, Reporter
from quality.options import AnyPath, EvaluateChoices, EvaluateOptions, LogitsFile

if TYPE_CHECKING:
    from quality.evaluation import Check, Evaluation


def evaluate(
    base: AnyPath | LogitsFile,
    text: AnyPath | None,
    quants: Sequence[AnyPath],
    options: EvaluateOptions | None = None,
    report: Reporter | None = None,
    **choices: Unpack[EvaluateChoices],
) -> Evaluation:
    """Measure how well `base` predicts a text, and how far every other model is from it.

        evaluate("lite-bf16.gguf", "wiki.test.raw", ["lite-Q4_K_M.gguf"], n_chunks=40)

    base     Hugging Face folder, or GGUF file; it may be gone if `options.keep` has its states. Or a file of
             log probabilities that llama-perplexity has written
    text     UTF-8 file; with a file of log probabilities it may be None
    quants   GGUF files made of the base; a folder can be compared, too
    report   is told how far it has come
    choices  fields of EvaluateOptions, and of the Cut and ForwardOptions in it, as keyword arguments:
             chunk_size=512, device="cpu". They replace those of `options`
    raises   ToolkitError; BadRequest, before anything is computed, for a model with another vocabulary,
             number of layers or hidden size, or a text without a whole chunk; BadActivation naming model,
             layer and tensor for NaN or infinity; OutputError for a file that can't be written
    """
    options = with_choices(options or EvaluateOptions(), choices)
    with evaluating(base, text, quants, options, report) as evaluation:
        return evaluation


@contextmanager
def evaluating(
    base: AnyPath | LogitsFile,
    text: AnyPath | None,
    quants: Sequence[AnyPath],
    options: EvaluateOptions | None = None,
    report: Reporter | None = None,
    check: Check = lambda text, files: None,
) -> Iterator[Evaluation]:
    """Give what `evaluate` returns. Finished layers stay until the block has ended without an error.

    So what is made of the evaluation can be written there, and a run that is killed meanwhile can go on.

    check  called before anything is computed
    """
    require_torch("evaluating models")
    from quality.run import evaluated

    options, report = options or EvaluateOptions(), report or NoReport()
    if not quants:
        raise BadRequest("no model to compare with the base")
    if options.logits is not None and not output_path(options.logits).parent.is_dir():
        raise OutputError(f"{options.logits}: can't be written (no such folder)")
    base = base if isinstance(base, LogitsFile) else Path(base)
    with evaluated(base, None if text is None else Path(text), quants, options, report, check) as evaluation:
        yield evaluation
