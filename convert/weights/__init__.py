"""The weights of a checkpoint, whatever format they are stored in.

The registry below is the order in which formats are tried on a module. Plain weights need no line, because
they are what no other format claims. None of the modules loads numba before a weight is decoded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gguf_tools.argument_types import checked
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.lazy import late

if TYPE_CHECKING:
    from convert.checkpoint.checkpoint import Checkpoint
    from convert.weights.base import WeightsLoader
    from convert.weights.model_weights import ModelWeights

MODULES: tuple[str, ...] = (
    "convert.weights.schemes.fp8",
    "convert.weights.schemes.fp4",
    "convert.weights.schemes.gptq",
    "convert.weights.schemes.marlin",
    "convert.weights.schemes.awq",
    "convert.weights.schemes.auto_round",
    "convert.weights.schemes.exl2",
    "convert.weights.schemes.eetq",
    "convert.weights.schemes.bnb",
    "convert.weights.schemes.hqq",
    "convert.weights.schemes.mlx",
    "convert.weights.schemes.integers",
    "convert.weights.schemes.torchao",
    "convert.weights.schemes.integer_tables",
)  # fmt: skip
"""The modules with LOADERS, in the order of trying."""


@checked
def open_checkpoint(folder: str | os.PathLike[str], *, allow_pickle: bool = False) -> ModelWeights:
    """Open the checkpoint in `folder` to read its weights, whatever format they are stored in.

        with open_checkpoint("DeepSeek-V3") as weights:
            weights.names()                                # as in the unquantized model
            weights.read("lm_head.weight")                 # float32, the whole matrix
            weights.read_rows("lm_head.weight", 0, 128)    # float32, some rows

    allow_pickle  read `.bin` and `.pt` files too; see convert.checkpoint.pickle_file
    raises  CheckpointError: a damaged folder, a format that is not read
    """
    from convert.checkpoint.checkpoint import Checkpoint

    checkpoint = Checkpoint(folder, allow_pickle=allow_pickle)
    try:
        return open_weights(checkpoint)
    except BaseException:
        checkpoint.close()
        raise


def all_loaders() -> tuple[WeightsLoader, ...]:
    """Return the loaders of all formats, in the order of trying."""
    return tuple(loader for module in MODULES for loader in late(module).LOADERS)


def open_weights(checkpoint: Checkpoint) -> ModelWeights:
    """Return the weights of `checkpoint`. Its settings and headers decide how they are read.

    raises  UnsupportedCheckpoint naming the format, the key that says so and the first tensor that shows it
    """
    from convert.weights.model_weights import (
        ModelWeights,
        first_quantized,
        refuse,
        refuse_rotations,
        stores_floats,
    )
    from convert.weights.settings import read_settings

    settings = read_settings(checkpoint)
    refuse_rotations(checkpoint)
    # What a format makes of a weight is never all floats: such a checkpoint has none that names no method.
    loaders = () if settings.method is None and stores_floats(checkpoint) else all_loaders()
    if settings.method is not None:
        read = sorted({method for loader in loaders for method in loader.methods})
        if settings.method not in read:
            raise UnsupportedCheckpoint(
                f"{settings.described}, which is not read (read: {', '.join(read)});"
                f" {first_quantized(checkpoint)}"
            )
        loaders = tuple(loader for loader in loaders if settings.method in loader.methods)
    refuse(checkpoint, settings)
    return ModelWeights(checkpoint, settings, loaders)
