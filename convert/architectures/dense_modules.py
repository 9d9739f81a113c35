"""Dense modules of sentence-transformers: matrices that the vector of a text is multiplied by.

llama.cpp reads up to two for embeddings of Gemma, without biases and activations. Its converter writes them
where it is asked for them, as `dense_2` and `dense_3`.
"""

from __future__ import annotations

from itertools import pairwise

from convert.architectures.config_reader import ConfigReader
from convert.architectures.rules import OutputTensor, Renamed
from convert.checkpoint.checkpoint import Checkpoint, read_json_object
from convert.checkpoint.modules import DENSE, MODULES_NAME, read_modules
from convert.weights.base import PlainWeight
from gguf_tools.errors import BadRequest, CheckpointError, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.values import Value

_NAMES = (
    ("dense_2.weight", keys.DENSE_2_FEAT_IN, keys.DENSE_2_FEAT_OUT),
    ("dense_3.weight", keys.DENSE_3_FEAT_IN, keys.DENSE_3_FEAT_OUT),
)
_WEIGHT = "linear.weight"


def read_dense_modules(
    checkpoint: Checkpoint, architecture: str, hidden_size: int
) -> tuple[tuple[OutputTensor, ...], dict[str, Value]]:
    """Return the matrices of a folder's Dense modules, unread, and their keys.

    architecture  general.architecture of the file
    raises  BadRequest for a folder without such modules, UnsupportedCheckpoint for those that llama.cpp does
            not compute, CheckpointError for files that don't fit each other
    """
    path = checkpoint.folder / MODULES_NAME
    places = [place for kind, place in read_modules(path) if kind == DENSE] if path.exists() else []
    if not places:
        raise BadRequest(f"--sentence-transformers-dense-modules: {path} has no module {DENSE}")
    if len(places) > len(_NAMES):
        raise UnsupportedCheckpoint(f"{path}: {len(places)} modules {DENSE}, and llama.cpp has room for two")
    sizes = [_sizes(checkpoint, place) for place in places]
    ends = [(hidden_size, hidden_size), *sizes, (hidden_size, hidden_size)]
    if any(before[1] != after[0] for before, after in pairwise(ends)):
        found = ", ".join(f"{n_in} to {n_out}" for n_in, n_out in sizes)
        raise UnsupportedCheckpoint(
            f"{path}: modules {DENSE} make {found} columns, expected a chain from {hidden_size} to"
            f" {hidden_size}: llama.cpp has vectors as wide as the model"
        )
    tensors, metadata = [], {}
    for place, (n_in, n_out), (name, key_in, key_out) in zip(places, sizes, _NAMES, strict=False):
        tensors.append(_matrix(checkpoint, place, name, (n_out, n_in)))
        metadata[key_in.format(arch=architecture)] = Value.u32(n_in)
        metadata[key_out.format(arch=architecture)] = Value.u32(n_out)
    return tuple(tensors), metadata


def _sizes(checkpoint: Checkpoint, place: str) -> tuple[int, int]:
    """Return the columns that a module takes and gives."""
    path = checkpoint.folder / place / "config.json"
    read = ConfigReader(read_json_object(path), path)
    for key, value in (("module_input_name", "sentence_embedding"), ("bias", False)):
        read.fixed(key, value, "llama.cpp has no other")
    if not str(read.raw.get("activation_function")).endswith(".Identity"):
        raise UnsupportedCheckpoint(
            f"{path}: activation_function is {read.raw.get('activation_function')!r}, expected Identity:"
            " llama.cpp has none"
        )
    return read.size("in_features"), read.size("out_features")


def _matrix(checkpoint: Checkpoint, place: str, name: str, shape: tuple[int, int]) -> OutputTensor:
    stored = checkpoint.open_module(place)
    found = {stem: tensor.shape for stem, tensor in stored.items()}
    if found != {_WEIGHT: shape}:
        raise CheckpointError(
            f"{checkpoint.folder / place}: has {found}, expected {_WEIGHT} of {shape} by config.json"
        )
    weight = PlainWeight(stored[_WEIGHT])
    return Renamed(name, weight.shape, weight.type, weight)
