"""Measure what each tensor of a model costs at each type: a forward pass, a backward pass, and a small file.

The forward pass collects importances, which the stock encoder is given as from an importance matrix. On the
way back every layer's tensors are encoded, some rows of each at every candidate type, while the gradients at
their products pass by.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from forward.device import require_torch
from forward.options import ForwardChoices, ForwardOptions
from forward.text.quality import admit
from forward.text.tokens import Cut, CutChoices, Text, read_text
from gguf_tools import __version__
from gguf_tools.choices import with_choices
from gguf_tools.errors import OutputError
from gguf_tools.files.named_files import output_path, read_input
from gguf_tools.progress import NoReport, Reporter
from quantize.formats import get_format
from quantize.plan.sensitivities import Sensitivities, TensorSensitivity, write_sensitivities

if TYPE_CHECKING:
    from forward.open import ModelSource
    from quantize.fill.sources import SourceTensor


@dataclass(frozen=True)
class SensitivityOptions:
    """What to measure, and how.

    cut         the part of the text that is used
    types       candidate types by name; None: those that llama.cpp's recipes use
    rows        how many rows of a tensor are encoded at every type; of a stack, of all matrices together
    least_rows  how many rows of each matrix are encoded at least
    tokens      tokens of the text whose rows of the embeddings and of the output are encoded
    seed        decides which labels are drawn
    forward     how the model is computed
    restart     start over instead of resuming
    any_text    use the text even if it is nonsense; see forward/text/quality.py
    """

    cut: Cut = field(default_factory=Cut)
    types: tuple[str, ...] | None = None
    rows: int = 512
    least_rows: int = 8
    tokens: int = 8192
    seed: int = 0
    forward: ForwardOptions = field(default_factory=ForwardOptions)
    restart: bool = False
    any_text: bool = False


class SensitivityChoices(CutChoices, ForwardChoices, total=False):
    """The fields of SensitivityOptions, Cut and ForwardOptions as keyword arguments."""

    cut: Cut
    types: tuple[str, ...] | None
    rows: int
    least_rows: int
    tokens: int
    seed: int
    forward: ForwardOptions
    restart: bool
    any_text: bool


def sensitivity(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: SensitivityOptions | None = None,
    report: Reporter | None = None,
    **choices: Unpack[SensitivityChoices],
) -> Sensitivities:
    """Return what each tensor of a model costs at each type, and write it to a file.

    model    Hugging Face folder, or GGUF file. A folder is seen as the file that the converter makes of it
    text     UTF-8 file
    output   where the sensitivities go. Work folders beside it keep finished layers until all is done
    report   is told how far it has come
    choices  fields of SensitivityOptions, and of the Cut and ForwardOptions in it, as keyword arguments; they
             replace those of `options`
    raises   ToolkitError: BadActivation naming layer and tensor for NaN or infinity, BadRequest for a text or
             options that don't fit, OutputError for a disk that is too small or an output that can't be
             written. Finished layers stay for the next run
    """
    require_torch("measuring sensitivities")
    import torch

    from forward.gradients.forward_backward import forget_folders
    from forward.open import open_model

    options = with_choices(options or SensitivityOptions(), choices)
    text, output = Path(text), output_path(output)
    for name in options.types or ():
        get_format(name)  # says now if there is no such codec
    if not output.parent.is_dir():
        raise OutputError(f"{output}: can't be written (no such folder)")
    if options.forward.n_threads is not None:
        torch.set_num_threads(options.forward.n_threads)
    with open_model(model) as source, _targets(source) as targets:
        chunks = read_text(text, source.vocab(), source.network.vocab_size, options.cut)
        report = report or NoReport()
        admit(chunks, str(text), report.tell, any_text=options.any_text)
        tensors = _measure(source, targets, chunks, output, options, report)
        source.watch.refuse_changed()
        sensitivities = Sensitivities(
            tensors,
            model={
                "path": source.path.name,
                "files": source.watch.recognised_by(),
            },
            text={
                "path": text.name,
                "sha256": hashlib.sha256(read_input(text)).hexdigest(),
                "chunks": chunks.n_chunks,
                "context": chunks.chunk_size,
                "seed": options.seed,
                "rows": options.rows,
                "version": __version__,
            },
        )
    write_sensitivities(sensitivities, output)
    forget_folders(output)
    return sensitivities


@contextmanager
def _targets(source: ModelSource) -> Iterator[Mapping[str, SourceTensor]]:
    """Give the tensors of the file that would be quantized."""
    from convert.architectures import find_architecture
    from convert.architectures.base import build
    from convert.checkpoint.checkpoint import Checkpoint
    from convert.weights import open_weights

    if not source.path.is_dir():
        yield source.tensors
        return
    with Checkpoint(source.path) as checkpoint:
        architecture = find_architecture(checkpoint.config, checkpoint.config_path)
        conversion = build(architecture, open_weights(checkpoint))
        yield {tensor.name: tensor for tensor in conversion.tensors}


def _measure(
    source: ModelSource,
    targets: Mapping[str, SourceTensor],
    text: Text,
    output: Path,
    options: SensitivityOptions,
    report: Reporter,
) -> dict[str, TensorSensitivity]:
    """Compute the layers that are not done, and return the sensitivity of all tensors."""
    from calibrate.sensitivities.observe import (
        SensitivityObserver,
        of_embeddings_and_output,
        sensitivities_of,
    )
    from calibrate.sensitivities.ratios import Ratios, Together, ratios_of
    from calibrate.sensitivities.type_errors import CANDIDATES, TypeErrors
    from forward.accumulate import Accumulator, sums_of
    from forward.gradients.forward_backward import (
        forward_backward,
        refuse_small_disk,
        state_bytes,
        what_decides,
        work_folders,
    )
    from quantize.roles import tensor_role

    types, n_layers = options.types or CANDIDATES, source.network.n_layers
    quantized = {
        name: tensor
        for name, tensor in targets.items()
        if len(tensor.shape) > 1 and tensor_role(name, tensor.shape).kept_as is None
    }
    about = what_decides(source, text, options.forward, options.seed)
    about |= {"keeps": "damages", "types": list(types), "rows": options.rows, "least": options.least_rows}
    with ExitStack() as opened:
        folders = opened.enter_context(work_folders(output, about, source.watch, restart=options.restart))
        refuse_small_disk(folders, state_bytes(source, text))

        def errors_of_layer(layer: int) -> TypeErrors:
            sums = sums_of(folders.there.arrays(layer)) if layer >= 0 else {}
            importances = {name: each.importance() for name, each in sums.items()}
            device = source.loader_for(options.forward).device
            return TypeErrors(quantized, importances, types, options.rows, options.least_rows, device)

        def observe(layer: int) -> Together:
            ratios = Ratios(quantized, text.chunk_size)
            return Together([SensitivityObserver(errors_of_layer(layer), text.chunk_size), ratios])

        if folders.back.done < n_layers:
            passes = source, text, options.forward, options.seed, folders, report
            backward = opened.enter_context(forward_backward(*passes, Accumulator))
            for _ in backward.layers(observe):
                pass
            backward.finish_embeddings(
                lambda states: of_embeddings_and_output(
                    backward, states, errors_of_layer(-1), types, options.tokens
                )
            )
        sensitivities: dict[str, dict[str, float]] = {}
        ratios: dict[str, float] = {}
        for step in range(n_layers, -1, -1):
            arrays = folders.back.arrays(step)
            sensitivities |= sensitivities_of(arrays, text.inputs.size)
            ratios |= ratios_of(arrays)
    return {
        name: TensorSensitivity(tensor.shape, sensitivities[name], ratios.get(name, 1.0))
        for name, tensor in quantized.items()
        if name in sensitivities
    }
