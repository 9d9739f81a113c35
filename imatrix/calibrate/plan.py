"""The plan of a calibrated run: all that is decided before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gguf_tools.errors import BadArgument, BadRequest
from gguf_tools.findings import Finding
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from imatrix.calibrate.options import CalibrationOptions
from imatrix.calibrate.probe import Probe
from imatrix.calibrate.shapes import Shapes, makes, network_of_model
from imatrix.calibrate.statistics.conditions import Trust
from imatrix.calibrate.together import SharedWork
from imatrix.evaluate.options import SHORTEST_CHUNK
from imatrix.forward.device import device_name
from imatrix.forward.network import Network
from imatrix.forward.open import findings_of
from imatrix.forward.work_folder import run_identity
from imatrix.texts.mixture import read_text
from imatrix.texts.quality import TextQuality
from imatrix.texts.spelling import spelled
from imatrix.texts.tokens import Cut, Text, Vocabulary
from quantize.fill.filling import Output
from quantize.padding.counterparts import without_padding
from quantize.plan.plan import Plan
from quantize.prepare import Preparation


@dataclass(frozen=True)
class CalibrationPlan:
    """The tensors to calibrate, the text, and how.

    path      of the first output; work folders stand beside it
    metadata  of the outputs: it says how layers are put together
    infos     all tensors of the outputs
    made      those that are calibrated, by name
    network   of the model
    quality   of the text
    together  what the runs of several types of the model share
    """

    options: CalibrationOptions
    path: Path
    metadata: Metadata
    infos: Sequence[TensorInfo]
    made: Mapping[str, TensorInfo]
    network: Network
    text: Text
    quality: TextQuality
    together: SharedWork

    @classmethod
    def of(
        cls,
        options: CalibrationOptions,
        plan: Plan,
        outputs: Sequence[Output],
        read: Callable[[Metadata, Network], Text],
        judged: Callable[[Text], TextQuality],
        together: SharedWork,
    ) -> CalibrationPlan:
        """Decide what is calibrated.

        read    gives the text, as the tokenizer of a model cuts it
        judged  gives its quality, or refuses it
        """
        path, metadata = outputs[0].path, outputs[0].layout.metadata
        network = network_of_model(path, metadata, plan.infos)
        made = {
            each.name: each.info
            for each in plan.tensors
            if makes(network, each, options.rounding, embedding=options.embedding)
        }
        text = read(metadata, network)
        return cls(options, path, metadata, plan.infos, made, network, text, judged(text), together)

    @property
    def is_first(self) -> bool:
        """Whether this run computes what all of them share."""
        return self.together.paths[0] == self.path

    @property
    def collects_gradients(self) -> bool:
        """Whether this run collects the gradients that it needs, and no run before it."""
        return self.options.needs_gradients and self.is_first

    @property
    def n_models(self) -> int:
        """The original, and the models of all runs that follow it."""
        return 1 + len(self.together.paths) * (self.options.n_models - 1)

    @property
    def state_bytes(self) -> int:
        """Bytes of the hidden states in memory, of all runs together."""
        return state_bytes(self.text, self.network, self.dtype, self.n_models, 0)[0]

    @property
    def fits(self) -> bool:
        """Whether hidden states are in memory; else they are in files."""
        return self.state_bytes <= self.options.forward.memory_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the hidden states in the work folder of this run."""
        budget = self.options.forward.memory_bytes if self.fits else 0
        return state_bytes(self.text, self.network, self.dtype, self.options.n_models, budget)[1]

    @property
    def is_in_step(self) -> bool:
        """Whether runs of several types go from layer to layer in step."""
        return self.options.sequential and self.fits

    @property
    def kept_bytes(self) -> int:
        """Memory for what was computed and is needed again."""
        return max(0, self.options.forward.memory_bytes - self.state_bytes)

    def findings(self) -> Iterator[Finding]:
        """Yield what is to be said of the model and of the length of chunks."""
        return findings_of(self.path, self.network, self.metadata, self.text.chunk_size)

    @property
    def spelling(self) -> str:
        """The words of the chunks that are used."""
        pieces = spelled(self.metadata)
        return b"".join(pieces[token] for token in self.text.tokens.ravel()).decode(errors="replace")

    @cached_property
    def trust(self) -> Trust:
        """How far the moments of the text are trusted."""
        return Trust.of(self.text, self.quality)

    @cached_property
    def real_cols(self) -> Mapping[str, int]:
        """Columns without padding of the tensors whose rows are padded, by name."""
        resized = without_padding(self.metadata, self.infos).resized
        return {name: resize.cols.new for name, resize in resized.items() if resize.cols is not None}

    def n_cols(self, info: TensorInfo) -> int:
        """How many columns of a tensor are not padding."""
        return self.real_cols.get(info.name, info.n_cols)

    @cached_property
    def device(self) -> torch.device:
        return torch.device(device_name(self.options.forward.device))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.options.forward.dtype)
        return dtype

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes of the model, for estimates."""
        return Shapes.of(self.network, self.infos, list(self.made.values()), self.metadata)

    @cached_property
    def probe(self) -> Probe:
        """Measures how fast this machine computes the model."""
        return Probe(self.shapes, self.text.chunk_size, self.options.forward, self.options.rounding)

    @cached_property
    def about(self) -> Mapping[str, Any]:
        """The facts that decide the bytes besides sources, types and importances, as JSON data."""
        options = self.options
        return {
            "method": options.rounding.describe(),
            **run_identity(self.text.chunks, options.forward),
            "sequential": options.sequential,
            "embedding": options.embedding,
            "seed": options.seed,
            "trust": asdict(self.trust),
            **({"classes": list(self.text.classes)} if self.text.classes else {}),
        }


def state_bytes(
    text: Text, network: Network, dtype: torch.dtype, n_models: int, memory_bytes: int
) -> tuple[int, int]:
    """Return the bytes of the states of `n_models` models in memory, and in the work folder.

    Where they fit in memory, the folder has what was saved last and the time before. Else it has three sets,
    see `imatrix.forward.work_folder`, and scratch.
    """
    n_tokens = n_models * text.inputs.size
    # Latent experts and the block beside them multiply rows of their own.
    row = network.scratch_bytes(dtype.itemsize) + dtype.itemsize * network.latent_cols
    states, scratch = 4 * n_tokens * network.state_size, n_tokens * row
    in_memory = 2 * states + scratch
    return in_memory, 2 * states if in_memory <= memory_bytes else 3 * states + scratch


def refuse_text(path: Path, cut: Cut, preparation: Preparation, *, measured: bool = False) -> None:
    """Read a text as the model that is about to be made will read it.

    measured  whether predictions of it will be measured
    raises    BadRequest for a file that is no text or too short, BadArgument for chunks that are too short,
              UnsupportedCheckpoint for a model that can't be computed
    """
    if measured and cut.chunk_size < SHORTEST_CHUNK:
        raise BadArgument(f"a context of {cut.chunk_size} tokens, expected {SHORTEST_CHUNK} or more")
    if measured and path.is_dir():
        raise BadRequest(f"{path}: is a folder, expected a file; evaluate --suite measures classes of texts")
    output = preparation.outputs[0]
    metadata = output.layout.metadata
    network = network_of_model(output.path, metadata, preparation.plan.infos)
    read_text(path, Vocabulary(metadata), network.vocab_size, cut)
