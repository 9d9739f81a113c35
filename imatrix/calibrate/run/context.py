"""The context of a run: the models that go through the text, their hidden states, and what all layers share.

    OUT.work/hidden.0, .1, .2   of the original model, after the latest layers
    OUT.work/student.0, .1, .2  of the model that is being written
    OUT.work/middle*, ...       scratch, where states don't fit in memory

Both models are recorded together, so a run that is killed finds both after the same layer.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from gguf_tools.files.early_checks import refuse_small_disk
from gguf_tools.format.tensors import TensorInfo
from imatrix.calibrate.plan import CalibrationPlan
from imatrix.calibrate.run.encode import GroupEncoder, RowGroup
from imatrix.calibrate.run.kept import Kept
from imatrix.calibrate.run.original import OriginalPass
from imatrix.calibrate.statistics.conditions import Conditions, Trust, conditions_of
from imatrix.calibrate.statistics.gradient_factors import TokenWeights
from imatrix.calibrate.statistics.inputs import Held, HoldoutSplit, Inputs, Statistics
from imatrix.forward.hidden_states import FileStates, MemoryStates, States, copy
from imatrix.forward.layer import Layer
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.rope import Rotation
from imatrix.forward.network import Network
from imatrix.forward.run import embed
from imatrix.forward.work_folder import EMBEDDING, WorkFolder
from imatrix.forward.workers import Workers

SAVE_SECONDS = 60.0
"""Least time between two saves of states that are in memory. What is lost with a run is as much work at most,
and the tensors of these layers are not made again: saving 30 layers of SmolLM2-135M wrote 9 GB."""


@dataclass(frozen=True)
class WorkingStates:
    """Where layers find and put hidden states.

    memory  where even and odd layers put their output, float32; None: they put it in files
    middle  the input of the second half of a layer
    latent  what latent experts multiply; None for a model that has none
    sums    of their outputs, float32
    """

    memory: tuple[States, States] | None
    middle: States
    latent: States | None = None
    sums: States | None = None


@dataclass(frozen=True)
class Stream:
    """The hidden states of one model.

    states  at work
    files   those of the folder, by number; of states in memory, they have what was saved
    """

    states: WorkingStates
    files: tuple[FileStates, ...]
    folder: WorkFolder

    @property
    def middle(self) -> States:
        """The input of the second half of a layer."""
        return self.states.middle

    @property
    def latent(self) -> tuple[States, States]:
        """Inputs of latent experts, and the sums of their outputs."""
        latent, sums = self.states.latent, self.states.sums
        assert latent is not None
        assert sums is not None
        return latent, sums

    @property
    def is_in_memory(self) -> bool:
        """Whether layers work in memory, and files have what was saved last."""
        return self.states.memory is not None

    def before(self, layer: int) -> States:
        """Return where a layer finds its input."""
        return self.after(layer - 1)

    def after(self, layer: int) -> States:
        """Return where a layer puts its output."""
        memory = self.states.memory
        return self.file(layer) if memory is None else memory[layer % 2]

    def file(self, layer: int) -> FileStates:
        """Return the file of a layer's output."""
        return self.files[self.folder.hidden_number(layer)]

    def save(self, layer: int) -> Path:
        """Bring the layer's output to its file, and return that."""
        file = self.file(layer)
        if self.is_in_memory:
            copy(self.after(layer), file)
        return file.path

    def restore(self, layer: int) -> None:
        """Put the layer's output where the next one finds it; it was saved."""
        if self.is_in_memory:
            copy(self.file(layer), self.after(layer))


def open_streams(
    plan: CalibrationPlan, loaders: Sequence[Loader], folder: WorkFolder, opened: ExitStack
) -> list[Stream]:
    """Return a stream for each model, the original first, at the layer where the work folder is.

    The original's states are restored when its first layer comes: they may be those of another run.

    loaders  of the models; they give the embeddings
    raises   OutputError for a disk without room for the states
    """
    text, network, dtype = plan.text, plan.network, plan.dtype
    size, inner = (text.inputs.size, network.state_size), (text.inputs.size, network.hidden_size)
    refuse_small_disk(
        [folder.folder], plan.stored_bytes, "hidden states", "use fewer chunks, or another disk"
    )

    def file(name: str, size: tuple[int, int], dtype: torch.dtype = torch.float32) -> FileStates:
        return opened.enter_context(closing(FileStates(folder.folder / name, *size, dtype)))

    scratch = [(*inner, dtype)]
    if network.latent_cols:
        scratch += [(size[0], network.latent_cols, each) for each in (dtype, torch.float32)]

    def in_memory_states() -> WorkingStates:
        memory = MemoryStates(*size), MemoryStates(*size)
        return WorkingStates(memory, *(MemoryStates(*each) for each in scratch))

    streams = []
    for number, (name, middle) in enumerate(_NAMES[: len(loaders)]):
        files = tuple(file(f"{name}.{each}", size) for each in range(3))
        if not plan.fits:
            ends = ("", ".latent", ".sums")
            made = (
                file(f"{middle}{end}", each[:2], each[2]) for end, each in zip(ends, scratch, strict=False)
            )
            states = WorkingStates(None, *made)
        elif number == 0 and plan.is_in_step:
            states = plan.together.once(WorkingStates, in_memory_states)
        else:
            states = in_memory_states()
        streams.append(Stream(states, files, folder))
    if folder.done < EMBEDDING:
        first = [stream.file(EMBEDDING) for stream in streams]
        for load, each in zip(loaders, first, strict=True):
            embed(load, text.chunks, each, network)
        folder.finish_layer(EMBEDDING, {}, [each.path for each in first])
    for stream in streams[1:]:
        stream.restore(folder.done)
    return streams


_NAMES = ("hidden", "middle"), ("student", "student.middle")
"""Files of the models' hidden states, the original's first: those before and after layers, and amid them."""


@dataclass(frozen=True)
class Model:
    """One of the models."""

    network: Network
    load: Loader
    rotate: Rotation
    stream: Stream

    def layer(self, number: int) -> Layer:
        """Return a layer with its weights, as they are now."""
        return self.network.build(self.load, number, self.rotate)


class StateSaver:
    """Saves the states after a layer when it is time: in memory once a minute, in files always."""

    def __init__(self, folder: WorkFolder, models: Sequence[Model]) -> None:
        self._folder, self._models = folder, models
        self._saved = time.monotonic()

    def after(self, layer: int) -> None:
        """Save the states after a layer if it is time."""
        streams = [model.stream for model in self._models]
        is_due = time.monotonic() - self._saved >= SAVE_SECONDS
        if is_due or not all(stream.is_in_memory for stream in streams):
            self._folder.finish_layer(layer, {}, [stream.save(layer) for stream in streams])
            self._saved = time.monotonic()


@dataclass(frozen=True)
class RunContext:
    """Values that stay the same for all layers.

    models    the original, and the model that is being written; the original alone where tensors are encoded
              under the original's inputs
    wanted    the tensors to make, by name
    real_cols  columns without padding of the tensors that are padded, by name
    tokens    ids of the whole text, int64 (n_tokens,)
    trust     how far the text's moments are trusted
    weights   of the tokens
    passed    how far the original has come
    """

    models: tuple[Model, ...]
    holdout: HoldoutSplit
    device: torch.device
    dtype: torch.dtype
    wanted: Mapping[str, TensorInfo]
    real_cols: Mapping[str, int]
    encoder: GroupEncoder
    workers: Workers
    tokens: torch.Tensor
    trust: Trust
    weights: TokenWeights
    passed: OriginalPass

    @property
    def is_followed(self) -> bool:
        """Whether the model that is being written goes through the text, too."""
        return len(self.models) > 1

    @property
    def corrects_drift(self) -> bool:
        """Whether tensors are corrected for what the ones before them have changed."""
        return self.is_followed and self.trust.is_proven

    @property
    def kept(self) -> Kept:
        """Rows that were computed and are needed again."""
        return self.passed.kept

    @property
    def original(self) -> Model:
        return self.models[0]

    @property
    def own(self) -> Model:
        """The model whose inputs count."""
        return self.models[-1]

    def is_missing(self, name: str, first: int = 0, n_rows: int | None = None) -> bool:
        """Whether rows of a tensor are to be made and not all written; all rows, or `n_rows` from `first`."""
        return name in self.wanted and self.encoder.writer.is_missing(name, first, n_rows)

    def conditions_of(
        self, inputs: Collection[tuple[Statistics, Held | None]], name: str
    ) -> Iterator[Conditions]:
        """Yield the conditions that follow from statistics; see `statistics.conditions.conditions_of`."""
        return conditions_of(inputs, name, self.workers, self.trust, self.real_cols.get(name))

    def make(self, inputs: Inputs, key: tuple[str, ...], names: Collection[str]) -> None:
        """Encode those of `names` that are not written, under the inputs of `key`."""
        missing = [name for name in names if self.is_missing(name)]
        if not missing:
            return

        mats = range(len(inputs.moments[key].own))
        shown = [(inputs.statistics(key, mat), inputs.held(key, mat)) for mat in mats]
        all_mats = list(self.conditions_of(shown, missing[0]))
        groups = []
        for name in missing:
            info = self.wanted[name]
            n_rows = info.n_rows // len(mats)
            groups += [RowGroup(info, mat * n_rows, n_rows, each) for mat, each in enumerate(all_mats)]
        self.encoder.make(groups)
