"""One measurement of sensitivities: a forward pass, a backward pass, and a small file.

The forward pass collects importances, which the stock encoder is given as from an importance matrix. In the
backward pass every layer's tensors are encoded, some rows of each at every candidate type, while the
gradients at their products pass by.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from convert.architectures import find_architecture
from convert.architectures.base import build
from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from gguf_tools import __version__
from gguf_tools.files.leftovers import forget
from gguf_tools.files.owned_folder import work_path
from gguf_tools.findings import tell_all
from gguf_tools.format import keys
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.progress import Reporter
from imatrix.forward.gradients.backward import (
    BackwardPass,
    Folders,
    forward_backward,
    refuse_full_disk,
    state_bytes,
    work_folders,
)
from imatrix.forward.observe import Accumulator, sums_of
from imatrix.forward.open import ModelSource, open_model
from imatrix.forward.work_folder import run_identity
from imatrix.forward.workers import torch_threads
from imatrix.sensitivities.observe import (
    Ratios,
    SensitivityObserver,
    Together,
    of_draft_output,
    of_embeddings_and_output,
    ratios_of,
    sensitivities_of,
)
from imatrix.sensitivities.options import SensitivityOptions
from imatrix.sensitivities.type_errors import CANDIDATES, RowLengths, TypeErrors
from imatrix.texts.mixture import read_text
from imatrix.texts.quality import admit
from imatrix.texts.tokens import Text
from quantize.fill.sources import SourceTensor
from quantize.padding.counterparts import whole_padding, without_padding
from quantize.plan.sensitivities import Sensitivities, TensorSensitivity, write_sensitivities
from quantize.roles import layer_of, tensor_role


def measure(
    model: str | os.PathLike[str], path: Path, output: Path, options: SensitivityOptions, report: Reporter
) -> Sensitivities:
    """Measure a model on the text at `path`, and write the file; see `gguf_tools.sensitivity`."""
    with open_measurement(model, path, options, report) as measurement:
        source, text = measurement.source, measurement.text
        tensors = measurement.run(output, report)
        source.watch.refuse_changed()
        sensitivities = Sensitivities(
            tensors,
            model={"path": source.path.name, "files": source.watch.recognised_by()},
            text={
                "path": path.name,
                "sha256": text.sha256,
                "chunks": text.n_chunks,
                "context": text.chunk_size,
                "seed": options.seed,
                "rows": options.rows,
                **options.hidden_facts,
                "version": __version__,
            },
        )
    write_sensitivities(sensitivities, output)
    forget(work_path(output))
    return sensitivities


@contextmanager
def open_measurement(
    model: str | os.PathLike[str], path: Path, options: SensitivityOptions, report: Reporter
) -> Iterator[Measurement]:
    """Open what a measurement reads; raises what `gguf_tools.sensitivity` refuses before it computes."""
    with ExitStack() as opened:
        opened.enter_context(torch_threads(options.forward.n_threads))
        whole = opened.enter_context(open_model(options.adapted(model)))
        metadata, targets = opened.enter_context(_targets(whole))
        source = _as_far_as(whole, targets)
        text = read_text(path, source.vocab(), source.network.vocab_size, options.cut)
        admit(text, str(path), report.tell, any_text=options.any_text)
        tell_all(source.findings(text.chunk_size), report.tell)
        yield Measurement(source, _quantized(targets), metadata, text, options)


@contextmanager
def _targets(source: ModelSource) -> Iterator[tuple[Metadata, Mapping[str, SourceTensor]]]:
    """Give the sizes and the tensors of the file that would be quantized."""
    if not source.path.is_dir():
        yield source.metadata, source.tensors
        return
    with Checkpoint(source.place) as checkpoint:
        architecture = find_architecture(checkpoint.config, checkpoint.config_path)
        conversion = build(architecture, open_weights(checkpoint))
        metadata = {keys.ARCHITECTURE: Value.string(architecture.gguf_name), **conversion.metadata}
        yield metadata, {tensor.name: tensor for tensor in conversion.tensors}


def _as_far_as(source: ModelSource, targets: Mapping[str, SourceTensor]) -> ModelSource:
    """Leave out an MTP layer that the file would not have."""
    network = source.network
    if not network.n_mtp or any(layer_of(name) == network.n_layers for name in targets):
        return source
    return replace(source, network=replace(network, n_mtp=0))


def _quantized(targets: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return the tensors that can have another type than their own."""
    return {
        name: tensor
        for name, tensor in targets.items()
        if len(tensor.shape) > 1 and tensor_role(name, tensor.shape).kept_as is None
    }


@dataclass(frozen=True)
class Measurement:
    """A measurement of a model on a text.

    tensors   those that would be quantized, by name
    metadata  of the file that they would be in: its sizes
    """

    source: ModelSource
    tensors: Mapping[str, SourceTensor]
    metadata: Metadata
    text: Text
    options: SensitivityOptions

    @cached_property
    def _shapes(self) -> tuple[dict[str, tuple[int, ...]], RowLengths]:
        """The shapes of the model's tensors without padding, and the lengths of their rows."""
        infos = [TensorInfo(name, tensor.shape, tensor.type) for name, tensor in self.tensors.items()]
        padded = whole_padding(self.metadata, infos, hidden=self.options.pad_hidden)
        real = without_padding(self.metadata, infos).infos(infos)
        return {info.name: info.shape for info in real}, RowLengths(
            real={info.name: info.n_cols for info in real},
            padded={info.name: info.n_cols for info in padded.infos(infos) if info.name in padded.resized},
        )

    @property
    def types(self) -> tuple[str, ...]:
        return self.options.types or CANDIDATES

    def run(self, output: Path, report: Reporter) -> dict[str, TensorSensitivity]:
        """Compute the layers that are not done, and return the sensitivities of all tensors."""
        source, options = self.source, self.options
        about = {"model": source.watch.recognised_by(), **run_identity(self.text.chunks, options.forward)}
        about |= {"seed": options.seed, "keeps": "damages", "types": list(self.types)}
        about |= {"rows": options.rows, "least": options.least_rows, **options.hidden_facts}
        with work_folders(output, about, source.watch, restart=options.restart) as folders:
            refuse_full_disk(folders, state_bytes(source.network, self.text.inputs.size))
            if folders.back.done < source.network.n_layers:
                self._compute(folders, report)
            return self._collected(folders)

    def _compute(self, folders: Folders, report: Reporter) -> None:
        """Fill the folders: importances of every layer, then the sensitivities of its tensors."""
        n_tokens, options = self.text.chunk_size, self.options

        def observe(layer: int) -> Together:
            errors = SensitivityObserver(self._errors(folders, layer), n_tokens)
            return Together([errors, Ratios(self.tensors, n_tokens, self._shapes[1])])

        passes = self.source, self.text, options.forward, options.seed, folders, report
        errors = self._errors(folders, -1)

        def take_draft(draft: BackwardPass) -> None:
            for _ in draft.layers(observe):
                pass
            draft.finish(lambda states: of_draft_output(draft, errors, options.tokens))

        with forward_backward(*passes, take_draft, Accumulator) as backward:
            for _ in backward.layers(observe):
                pass
            backward.finish(lambda states: of_embeddings_and_output(backward, states, errors, options.tokens))

    def _errors(self, folders: Folders, layer: int) -> TypeErrors:
        """Return the errors of a layer's tensors; -1: of those outside all layers, without importances."""
        sums = sums_of(folders.there.arrays(layer)) if layer >= 0 else {}
        importances = {name: each.importance() for name, each in sums.items()}
        options, device = self.options, self.source.loader_for(self.options.forward).device
        rows = options.rows, options.least_rows
        return TypeErrors(self.tensors, importances, self.types, *rows, device, self._shapes[1])

    def _collected(self, folders: Folders) -> dict[str, TensorSensitivity]:
        """Read what the folders have of all layers."""
        by_type: dict[str, dict[str, float]] = {}
        ratios: dict[str, float] = {}
        steps = [(folders.back, step) for step in range(self.source.network.n_layers, -1, -1)]
        for folder, step in [*steps, (folders.draft, 0), (folders.draft, 1)]:
            arrays = folder.arrays(step)
            by_type |= sensitivities_of(arrays, self.text.inputs.size)
            ratios |= ratios_of(arrays)
        return {
            name: TensorSensitivity.of(self._shapes[0][name], by_type[name], ratios.get(name, 1.0))
            for name in self.tensors
            if name in by_type
        }
