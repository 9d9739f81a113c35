"""Vectors of texts: what a model makes of each chunk where it is there for embeddings, not for predictions.

The vectors of a chunk's tokens, behind the last norm, become one: their mean, the first or the last. Some
models multiply that by further matrices. Vectors have length one, as programs compare them by their angles.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, normalize

from gguf_tools.errors import BadActivation
from imatrix.forward.device import to_cpu
from imatrix.forward.network import Pooling
from imatrix.forward.run import ForwardPass


@torch.inference_mode()
def pooled(model: ForwardPass, pooling: Pooling | None = None) -> torch.Tensor:
    """Return the vector of each chunk, float64 (n_chunks, n_cols), once all layers are computed.

    pooling  None: the model's own
    raises  BadActivation for NaN or infinity
    """
    load, end, pooling = model.load, model.output_norm(), pooling or model.source.network.pooling
    matrices = model.source.network.load_projections(load)
    vectors = []
    for chunk in range(model.chunks.n_chunks):
        tokens = end(model.last().read(*model.chunks.rows(chunk)).to(load.device))
        vector = tokens.mean(0) if pooling == "mean" else tokens[0 if pooling == "cls" else -1]
        for matrix in matrices:
            vector = linear(vector.to(matrix.dtype), matrix)
        vectors.append(to_cpu(vector.double()))
    found = normalize(torch.stack(vectors), dim=-1)
    if not bool(torch.isfinite(found).all()):
        raise BadActivation(f"{model.source.path}: the vectors of texts have NaN or infinity")
    return found
