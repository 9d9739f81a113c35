"""Where the forward pass gets its weights: a Hugging Face folder, or a GGUF file with any layout of MLA.

Both are seen the same way: a network, and tensors under their GGUF names, unread. A folder is taken as the
conversion that the converter would make of it with plain attention, which has attn_kv_b: its network is
made of the keys that would be written, so it computes what the file computes. A GGUF file may have
attn_kv_b, or attn_k_b and attn_v_b, as stacks of heads or as one matrix.

That a network uses all tensors of a model shows in a rehearsal of reading them, which reads no weight.
Every layer is built once with tensors of the right shapes that have no values. What is asked for on the way
is what the network uses. A tensor that nothing asks for would have no part in what is computed, whatever it
is meant for, so a model that has one is refused, as llama.cpp refuses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from convert.architectures import find_architecture
from convert.architectures.base import build
from convert.architectures.options import LatentOptions
from convert.architectures.reranker import CLASSIFIER
from convert.checkpoint.adapted_folder import AdaptedFolder
from convert.checkpoint.checkpoint import Checkpoint
from convert.embedding_files import read_embedding_files
from convert.weights import open_weights
from gguf_tools.errors import BadRequest, UnexpectedTensors, UnsupportedCheckpoint
from gguf_tools.files.early_checks import refuse_missing_model
from gguf_tools.files.inputs import AnyInput, InputWatch, gguf_inputs
from gguf_tools.findings import Finding, Level
from gguf_tools.format import keys
from gguf_tools.format.hparams import HParams, architecture_of, read_hparams
from gguf_tools.format.loaders import without_effect
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.system.files import Closing
from imatrix.forward.device import CPU, choose_device
from imatrix.forward.families import find_family, network_of_family
from imatrix.forward.hidden_states import MemoryStates
from imatrix.forward.layers.llama_rounding import rounding_of
from imatrix.forward.layers.load import Loader
from imatrix.forward.mtp import draft_head, own_embeddings, with_mtp
from imatrix.forward.network import EMBEDDINGS, Network, Pooling
from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Vocabulary
from quantize.fill.scaled import sides_of, with_scales
from quantize.fill.sources import Described, GGUFTensor, SourceTensor
from quantize.padding.counterparts import count_weights
from quantize.roles import layer_of

_USED = 8
"""Experts that a token goes to, in most models."""


@dataclass(frozen=True)
class ModelSource(Closing):
    """An open model: a context manager that closes its files.

    network   how its layers are put together
    tensors   GGUF name -> tensor, unread
    vocab     returns the keys tokenizer.*
    inputs    the files that hold weights
    metadata  of a GGUF file; of a folder, the architecture and its sizes
    adapted   a folder with the adapter that is merged into it; None without one
    """

    path: Path
    network: Network
    tensors: Mapping[str, SourceTensor]
    vocab: Callable[[], Metadata]
    inputs: tuple[AnyInput, ...]
    opened: Closeable
    metadata: Metadata = field(default_factory=dict)
    adapted: AdaptedFolder | None = None

    @property
    def place(self) -> Path | AdaptedFolder:
        """The path, with an adapter if there is one, as `open_model` takes it."""
        return self.adapted or self.path

    def close(self) -> None:
        self.opened.close()

    @cached_property
    def watch(self) -> InputWatch:
        """The files as they are when this is first asked for, which is before weights are read."""
        return InputWatch(self.inputs, by_path=True)

    @cached_property
    def infos(self) -> list[TensorInfo]:
        """Names, shapes and types of its tensors."""
        return [TensorInfo(name, tensor.shape, tensor.type) for name, tensor in self.tensors.items()]

    @cached_property
    def bits_per_weight(self) -> float:
        """Bits that are stored for each weight that is no padding."""
        n_bytes = sum(tensor.type.tensor_bytes(tensor.shape) for tensor in self.tensors.values())
        return 8 * n_bytes / count_weights(self.metadata, self.infos)

    @cached_property
    def head_layers(self) -> float:
        """About as many layers take as long as the logits of all tokens: what bars count them as."""
        active = 0.0
        for name, tensor in self.tensors.items():
            if layer_of(name) is not None and len(tensor.shape) > 1:
                is_routed = name.endswith("_exps.weight")
                active += prod(tensor.shape) * (min(1.0, _USED / tensor.shape[0]) if is_routed else 1.0)
        network = self.network
        return network.vocab_size * network.hidden_size * network.n_layers / max(1.0, active)

    def findings(self, chunk_size: int) -> Iterator[Finding]:
        """Yield what a user should know before the model is computed on chunks of so many tokens."""
        return findings_of(self.path, self.network, self.metadata, chunk_size)

    def loader(self, device: torch.device, dtype: torch.dtype) -> Loader:
        """Make a loader of weights to `device`, and of matrices as `dtype`.

        A folder has attn_kv_b, but is taken as the file that is made of it by default, which has it split.
        """
        return Loader(self.path, self.tensors, device, dtype, splits_kv_b=self.path.is_dir())

    def loader_for(self, options: ForwardOptions) -> Loader:
        """Make a loader of weights to the device, and as the dtype, of the options.

        raises  BadRequest for types that have no kernel in the engine that is to be imitated
        """
        load = self.loader(choose_device(options.device), getattr(torch, options.dtype))
        rounds = options.like is not None or options.rounded == "activations"
        if options.dtype != "float32":
            if options.like is not None:
                raise BadRequest(f"--like {options.like} computes in float32, not in {options.dtype}")
            if options.rounded is not None:
                raise BadRequest(f"a noise floor is computed in float32, not in {options.dtype}")
        if rounds:
            for tensor in self.tensors.values():
                rounding_of(tensor.type)
        return replace(
            load,
            llama_rounding=rounds,
            half_cache=options.half_cache or rounds,
            as_bf16=options.rounded == "weights",
            as_quantized=options.rounded == "activations",
        )


class Closeable(Protocol):
    def close(self) -> None: ...


def open_model(path: str | os.PathLike[str], *, predicts: bool = True) -> ModelSource:
    """Open a Hugging Face folder, or a GGUF file or split set.

    path      or an AdaptedFolder
    predicts  whether it has to be a model that predicts tokens, which an encoder is not
    raises    CheckpointError, GGUFError for what can't be read; UnsupportedCheckpoint for another family;
              BadRequest for an adapter of a file
    """
    source = _open(path)
    try:
        if predicts:
            refuse_encoder(source.path, source.network)
    except BaseException:
        source.close()
        raise
    return source


def refuse_encoder(path: Path, network: Network) -> None:
    """Raise UnsupportedCheckpoint for a model that predicts no tokens."""
    if network.encodes:
        raise UnsupportedCheckpoint(
            f"{path}: an encoder, which predicts no tokens, as this command needs it;"
            " convert-hf-to-gguf, quantize, imatrix and evaluate take such a model"
        )


def _open(path: str | os.PathLike[str]) -> ModelSource:
    adapted = path if isinstance(path, AdaptedFolder) else None
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, adapted)
    if adapted is not None:
        raise BadRequest(f"--lora needs a folder with the adapter's base, and {path} is none")
    refuse_missing_model(path)
    return _open_gguf(path)


def _open_folder(folder: Path, adapted: AdaptedFolder | None) -> ModelSource:
    from convert.tokenizer.tokenizer import read_tokenizer

    checkpoint = Checkpoint(adapted or folder)
    try:
        architecture = find_architecture(checkpoint.config, checkpoint.config_path, checkpoint.names())
        find_family(folder, architecture.gguf_name)
        latent = architecture.options is LatentOptions
        choices = {"mla": "none", "mtp": _has_mtp(checkpoint)} if latent else {}
        conversion = build(architecture, open_weights(checkpoint), choices)
        tensors = {tensor.name: tensor for tensor in conversion.tensors}
        name = architecture.gguf_name
        embedding, _ = read_embedding_files(
            folder, name, conversion.metadata, config=checkpoint.config, ranks=architecture.ranks
        )
        metadata = {keys.ARCHITECTURE: Value.string(name), **conversion.metadata, **embedding}
        return ModelSource(
            path=folder,
            network=network_of_tensors(folder, metadata, tensors),
            tensors=tensors,
            vocab=lambda: Vocabulary(
                read_tokenizer(
                    checkpoint.tokenizer_folder, checkpoint.config, quirks=architecture.quirks
                ).metadata(),
                folder,
            ),
            inputs=checkpoint.inputs(),
            opened=checkpoint,
            metadata=metadata,
            adapted=adapted,
        )
    except BaseException:
        checkpoint.close()
        raise


def _has_mtp(checkpoint: Checkpoint) -> bool:
    """Return whether a folder has the MTP layer that its config.json promises, of a DeepSeek."""
    config = checkpoint.config
    n_mtp = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")
    return bool(n_mtp) and f"model.layers.{config.get('num_hidden_layers')}.enorm.weight" in checkpoint


def _open_gguf(path: Path) -> ModelSource:
    file = open_gguf(path)
    try:
        stored = {name: GGUFTensor(file, name) for name in file.tensors}
        network = network_of_tensors(path, file.metadata, stored)
        vocab = Vocabulary(file.metadata, path)
        return ModelSource(
            path=path,
            network=network,
            tensors=with_scales(stored, path, file.get(keys.ARCHITECTURE), network.own_scales),
            vocab=lambda: vocab,
            inputs=gguf_inputs(file),
            opened=file,
            metadata=file.metadata,
        )
    except BaseException:
        file.close()
        raise


_SHOWN = 4
"""Number of keys, or of tensors, that a message names."""


def findings_of(path: Path, network: Network, metadata: Metadata, chunk_size: int) -> Iterator[Finding]:
    """Yield what is to be said of a model and of chunks of so many tokens.

    metadata  of a GGUF file; of a folder, which has no keys, those that a conversion would write
    """
    unread = () if path.is_dir() else without_effect(metadata, architecture_of(metadata) or "")
    if unread:
        shown = f"{', '.join(unread[:_SHOWN])}{' ...' * (len(unread) > _SHOWN)}"
        text = f"{path}: without effect, as llama.cpp reads no such key for the architecture: {shown}"
        yield Finding("keys without effect", text, Level.NOTE, unread)
    if network.n_positions is not None and network.n_positions < chunk_size:
        raise BadRequest(
            f"{path}: chunks of {chunk_size} tokens, and the model has positions for"
            f" {network.n_positions} (-c)"
        )
    if 0 < network.trained_context < chunk_size:
        yield Finding(
            "long chunks",
            f"{path}: chunks of {chunk_size} tokens, and the model was trained with {network.trained_context}"
            " at most (context_length): it predicts worse beyond these",
        )


def network_of_tensors(path: Path, metadata: Metadata, tensors: Mapping[str, Described]) -> Network:
    """Build the network of a model by its keys, as llama.cpp takes them.

    path      of the model, for messages
    metadata  the keys of a GGUF file, or those that a conversion would write
    tensors   by name; no weight is read
    raises    UnsupportedCheckpoint for a family that can't be computed, or a key that the forward pass does
              not compute as llama.cpp; FormatError, MissingTensor, ShapeError; UnexpectedTensors naming
              tensors that the network does not use
    """
    architecture = architecture_of(metadata)
    family = find_family(path, architecture)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    network = with_mtp(network_of_family(family, family.read_file(metadata, shapes, path)), shapes)
    hparams = read_hparams(metadata, family.gguf_name, path)
    network = replace(network, pooling=_pooling(network, hparams, shapes))
    used = _used(network, path, tensors)
    used |= {CLASSIFIER} if family.ranks else set()
    used |= {side for name in used & tensors.keys() for side in sides_of(tensors[name])}
    left = [name for name in tensors if name not in used and not network.leaves_out(layer_of(name))]
    if left:
        shown = f"{', '.join(left[:_SHOWN])}{' ...' * (len(left) > _SHOWN)}"
        raise UnexpectedTensors(
            f"{path}: {len(left)} tensor{'s' * (len(left) > 1)} that this model has no use for ({shown}),"
            f" expected those of {architecture} alone"
        )
    return network


_POOLINGS: Mapping[int | None, Pooling] = {1: "mean", 2: "cls", 3: "last"}
"""Number of a pooling, of llama.cpp's enum llama_pooling_type; others make no vector of a text."""


def _pooling(network: Network, hparams: HParams, tensors: Container[str]) -> Pooling | None:
    """Return how a text gets a vector. An encoder always has one: its classifier's, or else the mean."""
    stated = _POOLINGS.get(hparams.first("pooling_type"))
    if stated is not None or not network.encodes:
        return stated
    return _POOLINGS.get(hparams.first("classifier_pooling_type"), "cls") if CLASSIFIER in tensors else "mean"


@dataclass(frozen=True)
class _Rehearsal(Loader):
    """Gives tensors without values, and notes their names."""

    used: set[str] = field(default_factory=set)

    def tensor(self, name: str) -> Any:
        tensor = super().tensor(name)
        self.used.add(name)
        return tensor

    def leave(self, *names: str) -> None:
        self.used.update(names)

    def rows(self, tensor: Any, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        if len(tensor.shape) == 1:
            return torch.ones((stop - start, tensor.shape[-1]), dtype=dtype)
        return torch.empty((stop - start, tensor.shape[-1]), dtype=dtype, device="meta")

    def numbers(self, tensor: Any) -> npt.NDArray[np.int32]:
        return np.zeros(tensor.shape, np.int32)


def _used(network: Network, path: Path, tensors: Mapping[str, Described]) -> set[str]:
    """Return the names of the tensors that a network reads."""
    load = _Rehearsal(path, cast(Mapping[str, Any], tensors), CPU, torch.float32)
    rotate = network.rope.rotation(1, load.device)
    for name in dict.fromkeys((EMBEDDINGS, network.output)):
        load.matrix(name, network.vocab_size, network.hidden_size)
    network.load_end(load)
    network.load_output_bias(load)
    network.load_projections(load)
    for number in range(network.n_all_layers):
        layer = network.build(load, number, rotate)
        if layer.experts is not None:
            layer.experts.read(0)
    if network.n_mtp:
        head = draft_head(network, load, MemoryStates(1, network.state_size))
        load.tensor(head.matrix)
        own_embeddings(network, load)
    return load.used
