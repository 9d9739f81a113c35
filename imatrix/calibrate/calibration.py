"""A calibration as `quantize` and `convert` take it: it promises importances, and opens runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args

from gguf_tools.errors import BadArgument
from gguf_tools.findings import Tell, tell_all, tell_nobody
from gguf_tools.format import keys
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from imatrix.calibrate.options import CalibrationOptions
from imatrix.calibrate.shapes import network_of_model, promises
from imatrix.calibrate.together import SharedWork
from imatrix.forward.options import DType, ForwardOptions, require_torch
from imatrix.texts.mixture import mixture_sha256, read_text
from imatrix.texts.quality import TextQuality, admit, judge, script_findings
from imatrix.texts.tokens import Cut, Text, Vocabulary
from quantize.fill.filling import Calibrator, FillJob, Output
from quantize.importances.entries import ImportanceFile, PromisedImportance
from quantize.importances.text_sketch import TextSketch
from quantize.options import METHOD_KEY
from quantize.plan.plan import Plan
from quantize.rounding.methods import METHODS
from quantize.run_options import RunOptions

if TYPE_CHECKING:
    from imatrix.calibrate.estimate import Cost
    from imatrix.calibrate.plan import CalibrationPlan
    from imatrix.forward.network import Network


_NUMBERS = {"chunk_size": "chunks of {} tokens", "from_chunk": "from chunk {}", "seed": "seed {}"}
_DEFAULTS = {"chunk_size": Cut.chunk_size, "from_chunk": Cut.from_chunk, "seed": CalibrationOptions.seed}
"""Words of the label for numbers that are not the default, and the defaults."""


@dataclass(frozen=True)
class Calibration(CalibrationOptions):
    """A calibration, as `quantize` and `convert` take it; its fields are those of `CalibrationOptions`.

    >>> import gguf_tools
    >>> gguf_tools.Calibration("calibration.txt").label
    'two-sided, layer after layer'
    """

    @property
    def label(self) -> str:
        """The method in a few words, for metadata and cards, with the settings that are not the default."""
        words = [self.method, "layer after layer" if self.sequential else "each tensor by itself"]
        words += [f"in {self.forward.dtype}"] if self.forward.dtype != "float32" else []
        words += [] if self.embedding else ["token_embd left out"]
        words += ["special tokens read"] if self.cut.parse_special else []
        numbers = {"seed": self.seed, **vars(self.cut)}
        words += [
            said.format(numbers[name]) for name, said in _NUMBERS.items() if numbers[name] != _DEFAULTS[name]
        ]
        return ", ".join(words)

    @classmethod
    def like(cls, file: GGUFSource, text: str | os.PathLike[str]) -> Self:
        """Take the settings that a calibrated file names.

        raises  BadArgument for a method that this version has not
        """
        found, chunks = file.metadata.get(METHOD_KEY), file.metadata.get(keys.QUANTIZE_IMATRIX_CHUNKS_COUNT)
        said = cls(text).label if found is None else str(found.data)
        numbers = dict(_DEFAULTS)
        for name, words in _NUMBERS.items():
            if number := re.search(words.format(r"(\d+)"), said):
                numbers[name] = int(number[1])
        seed, n_chunks, either = numbers.pop("seed"), None if chunks is None else chunks.data, (True, False)
        cuts = [Cut(**numbers, n_chunks=n_chunks, parse_special=special) for special in (False, True)]
        choices = product(cuts, METHODS, get_args(DType), either, either)
        for cut, method, dtype, sequential, embedding in choices:
            forward = ForwardOptions(dtype=dtype)
            options = cls(text, cut, sequential, method, embedding, seed, forward=forward)
            if said == options.label:
                return options
        raise BadArgument(f"{file.path}: {METHOD_KEY} is {said!r}, which this version does not know")

    def begin(self) -> BegunCalibration:
        """Begin to plan; what plans and runs share is kept in what this returns."""
        return BegunCalibration(self)


_MODEL = Path("the model")
"""Stands for the path of a model of which only keys and tensors are known."""


class BegunCalibration:
    """A calibration at work. Plans and runs of one model share the text, and what follows from it.

    The text is read anew only where its words or the tokenizer are others. Runs of several types share what
    depends on the original alone. A model that is padded otherwise is another one.
    """

    def __init__(self, options: Calibration) -> None:
        self._options = options
        self._read: tuple[Any, Text] | None = None
        self._together: dict[tuple[tuple[str, tuple[int, ...]], ...], SharedWork] = {}

    @property
    def label(self) -> str:
        return self._options.label

    def begin(self) -> Self:
        return self

    def promise(self, metadata: Metadata, tensors: Sequence[TensorInfo]) -> ImportanceFile:
        """See `quantize.options.BegunCalibrating`."""
        require_torch("calibrating")
        path = Path(self._options.text)
        network = network_of_model(_MODEL, metadata, tensors)
        entries = {
            tensor.name: PromisedImportance.of(tensor) for tensor in tensors if promises(network, tensor)
        }
        text = self._text(metadata, network)
        self._admit(text, tell_nobody)
        sketch = TextSketch.of(text.tokens.ravel(), text.sha256)
        return ImportanceFile(entries, (path.name,), text.n_chunks, text.chunk_size, sketch=sketch)

    @contextmanager
    def open(self, plan: Plan, job: FillJob, options: RunOptions) -> Iterator[Calibrator]:
        """See `quantize.options.BegunCalibrating`."""
        from imatrix.calibrate.estimate import amount_findings, dtype_findings
        from imatrix.calibrate.run.run import CalibratedRun

        what = self.plan_run(plan, job.outputs, lambda text: self._admit(text, options.tell))
        with CalibratedRun(what, job, options) as run:
            amount = (*dtype_findings(what), *amount_findings(what, options.threads))
            tell_all((*script_findings(what.spelling), *amount, *what.findings()), options.tell)
            yield run

    def estimate(self, plan: Plan, outputs: Sequence[Output], options: RunOptions) -> Iterator[str]:
        """See `quantize.options.BegunCalibrating`."""
        from imatrix.calibrate.estimate import amount_findings, dtype_findings, estimate_lines

        what = self.plan_run(plan, outputs, judge)
        yield from estimate_lines(what, options.threads, options.scheduler)
        amount = (*dtype_findings(what), *amount_findings(what, options.threads))
        text = (*what.quality.findings(), *script_findings(what.spelling))
        for finding in (*text, *amount, *what.findings()):
            yield f"note: {finding.text}"

    def cost(self, plan: Plan, outputs: Sequence[Output], n_threads: int) -> Cost:
        """Estimate what a run takes."""
        from imatrix.calibrate.estimate import cost_of

        return cost_of(self.plan_run(plan, outputs, judge), n_threads)

    def plan_run(
        self, plan: Plan, outputs: Sequence[Output], judged: Callable[[Text], TextQuality]
    ) -> CalibrationPlan:
        """Decide what is calibrated; see `imatrix.calibrate.plan.CalibrationPlan.of`."""
        require_torch("calibrating")
        from imatrix.calibrate.plan import CalibrationPlan

        shapes = tuple((info.name, info.shape) for info in plan.infos)
        together = self._together.setdefault(shapes, SharedWork())
        together.join(outputs[0].path)
        return CalibrationPlan.of(self._options, plan, outputs, self._text, judged, together)

    def _text(self, metadata: Metadata, network: Network) -> Text:
        """Read the chunks of the text, as the tokenizer of a model cuts it."""
        path, vocab_size, vocab = Path(self._options.text), network.vocab_size, Vocabulary(metadata)
        asked = mixture_sha256(path), vocab, vocab_size
        if self._read is None or self._read[0] != asked:
            self._read = asked, read_text(path, vocab, vocab_size, self._options.cut)
        return self._read[1]

    def _admit(self, text: Text, tell: Tell) -> TextQuality:
        return admit(text, str(self._options.text), tell, any_text=self._options.any_text)
