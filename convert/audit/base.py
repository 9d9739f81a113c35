"""The base that a file is compared with, by GGUF names: a folder, a model on the Hub, or a GGUF file.

A folder is taken as the file that the converter would make of it, in the file's own layout of latent
attention and with its layers for multi-token prediction if it has some. Only what is asked for is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from convert.architectures.base import build
from convert.architectures.options import DENSE_MODULES
from convert.architectures.vision import holds_tower
from convert.checkpoint.checkpoint import Checkpoint
from convert.checkpoint.streamed import StreamedFolder
from convert.options import ConvertOptions
from convert.pipeline import architecture_of, prepare
from convert.weights import open_weights
from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.hparams import HParams, known_hparams
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from quantize.fill.scaled import scaled_tensors
from quantize.fill.sources import SourceTensor
from quantize.mla_layout.layouts import ARCHITECTURE, HeadSizes, tensor_name
from quantize.mla_layout.moves import JoinedHeads, key_half, key_rows, value_half
from quantize.padding.counterparts import padding_like
from quantize.roles import MLALayout, Role, layer_of

EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"

MTP = ".nextn."
"""Part of the names of tensors that only layers for multi-token prediction have."""


@dataclass(frozen=True)
class AuditBase:
    """An open base.

    path        as the user named it
    is_remote   whether rows come over a network
    tensors     GGUF name -> tensor, unread: those of a file in the same layout
    others      the same model in other layouts of latent attention, for what a file may hold by mistake
    metadata    keys of such a file
    mla         the layout that a folder is converted to; None for a file, and for a family without a choice
    """

    path: Path
    is_remote: bool
    tensors: Mapping[str, SourceTensor]
    others: Mapping[str, SourceTensor]
    metadata: Metadata
    mla: MLALayout | None = None

    @property
    def architecture(self) -> str:
        value = self.metadata.get(keys.ARCHITECTURE)
        return str(value.data) if value is not None else ""

    @property
    def hparams(self) -> HParams:
        return known_hparams(self.metadata, self.architecture)

    @property
    def heads(self) -> HeadSizes | None:
        """Sizes of latent attention; None for a model without."""
        return head_sizes(self.metadata, self.path)

    def find(self, name: str) -> SourceTensor | None:
        """Find a tensor in any layout; the embeddings where they serve as the output matrix, too."""
        found = self.tensors.get(name) or self.others.get(name)
        return self.tensors.get(EMBEDDINGS) if found is None and name == OUTPUT else found


def head_sizes(metadata: Metadata, path: Path) -> HeadSizes | None:
    """Read the sizes of latent attention from metadata; None for a model without."""
    name = metadata.get(keys.ARCHITECTURE)
    if name is None or name.data != ARCHITECTURE:
        return None
    try:
        return HeadSizes.from_metadata(metadata, path)
    except BadRequest:
        return None


def layout_in(names: Iterable[str]) -> MLALayout | None:
    """Tell the layout of latent attention from names of tensors; None where there is none."""
    names = set(names)
    whole = any(name.endswith(".attn_kv_b.weight") for name in names)
    halves = any(name.endswith(".attn_k_b.weight") for name in names)
    if not whole and not halves:
        return None
    return "both" if whole and halves else "split" if halves else "none"


@contextmanager
def open_audit_base(
    path: str | os.PathLike[str], file: GGUFSource, *, allow_pickle: bool = False
) -> Iterator[AuditBase]:
    """Open a base as the file that `file` claims to be.

    raises  CheckpointError, GGUFError and UnsupportedCheckpoint for what can't be read or converted
    """
    with ExitStack() as opened:
        if isinstance(path, StreamedFolder) or Path(path).is_dir():
            checkpoint = opened.enter_context(Checkpoint(path, allow_pickle=allow_pickle))
            yield _in_sizes_of(file, _of_folder(checkpoint, file, isinstance(path, StreamedFolder)))
        else:
            yield _in_sizes_of(file, _of_file(opened.enter_context(open_gguf(path)), Path(path)))


def _in_sizes_of(file: GGUFSource, base: AuditBase) -> AuditBase:
    """Give the base the sizes of a file that is padded, or that is not and the base is."""
    infos = [TensorInfo(name, tensor.shape, tensor.type) for name, tensor in base.tensors.items()]
    padding = padding_like(base.metadata, infos, file.metadata)
    tensors, others = padding.tensors(base.tensors), padding.tensors(base.others)
    return replace(base, tensors=tensors, others=others, metadata=padding.metadata(base.metadata))


def _of_folder(checkpoint: Checkpoint, file: GGUFSource, is_remote: bool) -> AuditBase:
    mmproj = holds_tower(file.metadata)
    architecture = architecture_of(checkpoint, mmproj=mmproj)
    choices: dict[str, Any] = {}
    declared = {option.name for option in fields(architecture.options)}
    layout = layout_in(file.tensors)
    if "mla" in declared and layout is not None:
        choices["mla"] = layout
    has_mtp = any(MTP in name for name in file.tensors)
    stated = checkpoint.config.get("num_nextn_predict_layers")
    if "mtp" in declared and (stated or (stated is None and not has_mtp)):
        choices["mtp"] = has_mtp
    if DENSE_MODULES in declared and "dense_2.weight" in file.tensors:
        choices["family"] = {DENSE_MODULES: True}
    options = ConvertOptions(outtype="f32", provenance=False, mmproj=mmproj, **choices)
    preparation, rows = prepare(checkpoint, None, options, allow_problems=True)
    others: Mapping[str, SourceTensor] = {}
    if "mla" in choices:
        conversion = build(architecture, open_weights(checkpoint), {**choices, "mla": "both"})
        others = {tensor.name: tensor for tensor in conversion.tensors}
    metadata = preparation.outputs[0].layout.metadata
    mla = choices.get("mla")
    return AuditBase(Path(checkpoint.folder), is_remote, rows.tensors, others, metadata, mla)


def _of_file(file: GGUFSource, path: Path) -> AuditBase:
    tensors = scaled_tensors(file)
    sizes = head_sizes(file.metadata, path)
    others = {} if sizes is None else dict(_relaid(tensors, sizes))
    return AuditBase(path, False, tensors, others, file.metadata)


def _relaid(tensors: Mapping[str, SourceTensor], sizes: HeadSizes) -> Iterator[tuple[str, SourceTensor]]:
    """Yield each layer's attn_kv_b, attn_k_b and attn_v_b, made of those that are there."""
    layers = {layer for name in tensors if (layer := layer_of(name)) is not None}
    for layer in sorted(layers):
        whole, keys_, values = (
            tensor_name(layer, role) for role in (Role.ATTN_KV_B, Role.ATTN_K_B, Role.ATTN_V_B)
        )
        if whole in tensors:
            yield from halves_of(tensors[whole], sizes, keys_, values)
        elif keys_ in tensors and values in tensors:
            yield whole, _joined(tensors[keys_], tensors[values], sizes, whole)


def halves_of(
    kv_b: SourceTensor, sizes: HeadSizes, keys_: str, values: str
) -> Iterator[tuple[str, SourceTensor]]:
    """Yield the key half of attn_kv_b, transposed head by head, and its value half, under these names."""
    yield keys_, key_half(keys_, (sizes.n_heads * sizes.kv_lora, sizes.nope), kv_b, sizes)
    yield values, value_half(values, (sizes.n_heads * sizes.value, sizes.kv_lora), kv_b, sizes)


def _joined(k_b: SourceTensor, v_b: SourceTensor, sizes: HeadSizes, name: str) -> SourceTensor:
    shape = (sizes.n_heads * sizes.head_rows, sizes.kv_lora)
    return JoinedHeads(name, shape, key_rows(name, k_b, sizes), sizes.nope, v_b, sizes.value)
