"""Rounds activations as llama.cpp's CPU kernels do, to reproduce its numbers rather than the file's own.

Before it multiplies a quantized matrix, llama.cpp rounds the activations to 8 bits, in the blocks that the
matrix's type asks for (vec_dot_type in ggml-cpu.c):

    Q8_K   blocks of 256, scale float32: for K types, IQ types but IQ4_NL, TQ types
    Q8_0   blocks of 32, scale float16: for all others; Q8_1, for Q4_1 and Q5_1, has the same codes
    F16    for F16
    BF16   for BF16

A matrix remembers how, and rounds whatever it multiplies, so that the layers of a model need not know.

What attention keeps in its cache is F16: keys and values, or the latents that they are made of. Queries stay
float32, as in the tiles that flash attention (llama-perplexity's default) takes chunks in
(ggml_compute_forward_flash_attn_ext_tiled in ops.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import GGMLType, by_name
from quantize.fill.sources import SourceTensor
from quantize.formats.codecs import CODECS
from quantize.roles import tensor_role

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Function that rounds float32 activations, (..., n_cols), before a matrix multiplies them."""


def round_q8_k(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as Q8_K holds it: n_cols is a multiple of 256."""
    blocks = x.unflatten(-1, (-1, 256))
    places = blocks.abs().argmax(-1, keepdim=True)
    largest = blocks.gather(-1, places)
    inverse = _quotient(-127, largest)
    codes = (inverse * blocks).round_().clamp_(max=127)
    scales = _quotient(1, inverse)
    return codes.mul_(scales).flatten(-2)


def round_q8_0(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as Q8_0 holds it: n_cols is a multiple of 32."""
    blocks = x.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * _quotient(127, largest)).round_()
    return codes.mul_((largest / 127).half().float()).flatten(-2)


def round_f16(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as F16 holds it."""
    return x.half().float()


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as BF16 holds it."""
    return x.bfloat16().float()


def _quotient(number: float, divisors: torch.Tensor) -> torch.Tensor:
    """Return a number divided by each divisor, 0 where that is 0.

    torch would divide a plain number by multiplying with the reciprocal, which rounds twice.
    """
    return torch.where(divisors != 0, torch.full_like(divisors, number) / divisors, 0.0)


_OF_LLAMA = [type_ for type_ in map(by_name, CODECS) if not (type_.is_only_in_ik or type_.is_internal)]

ROUNDINGS: Mapping[str, Rounding | None] = {
    **{each.name: round_q8_k if each.block_elems == 256 else round_q8_0 for each in _OF_LLAMA},
    "F32": None,
    "F16": round_f16,
    "BF16": round_bf16,
}
"""Rounding of the input of a matrix in llama.cpp's CPU kernels, by the matrix's type; None: no rounding."""


@dataclass(frozen=True)
class AttentionRounding:
    """How latent attention rounds what no matrix of a file multiplies.

    expands  whether the cache has keys and values that attn_kv_b makes; latents and the shared key otherwise
    query    of the part of a query that attn_k_b multiplies; None: not at all
    """

    expands: bool
    query: Rounding | None = None

    def absorbed(
        self, query: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, latents and shared key as they are compared where the cache has latents.

        query  (n_tokens, n_heads, nope + rope): the shared key has the columns of the rotated part
        """
        if self.query is not None:
            unrotated, rotated = query.split(
                (query.shape[-1] - shared_key.shape[-1], shared_key.shape[-1]), -1
            )
            query = torch.cat((self.query(unrotated), rotated), -1)
        return query, round_f16(latent), round_f16(shared_key)


def rounding_of(type_: GGMLType) -> Rounding | None:
    """Look up how activations are rounded for a matrix of a type; None: not at all.

    raises  BadRequest for a type that llama.cpp does not have
    """
    try:
        return ROUNDINGS[type_.name]
    except KeyError:
        raise BadRequest(f"--like llama.cpp: llama.cpp has no kernel for {type_}") from None


def rounding_if_quantized(tensor: SourceTensor, n_cols: int) -> Rounding | None:
    """Look up how `n_cols` activations would be rounded for a float matrix if its file were quantized.

    A matrix that is never quantized rounds as it does now. Rows that K types can't hold get a type of blocks
    of 32, and those that no type can hold stay F16.
    """
    if tensor_role(tensor.name, tensor.shape).kept_as is not None:
        return rounding_of(tensor.type)
    return round_q8_k if n_cols % 256 == 0 else round_q8_0 if n_cols % 32 == 0 else round_f16


class RoundingMatrix(torch.Tensor):
    """A matrix that rounds what it multiplies. Parts and views of it do, too."""

    rounding: Rounding

    @classmethod
    def of(cls, weight: torch.Tensor, rounding: Rounding) -> RoundingMatrix:
        """Return `weight`, (..., n_cols), with how activations of n_cols columns are rounded."""
        matrix: RoundingMatrix = weight.as_subclass(cls)
        matrix.rounding = rounding
        return matrix

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (linear, torch.bmm):
            x, matrix, *bias = args
            args = matrix.rounding(x), matrix, *bias
            return _plain(super().__torch_function__(func, types, args, kwargs))
        result = super().__torch_function__(func, types, args, kwargs or {})
        parts = args[0] if func is torch.cat else args
        first = next(part for part in parts if isinstance(part, cls))
        if isinstance(result, torch.Tensor) and result.dim() > 1:
            return cls.of(result, first.rounding)
        return _plain(result)


def _plain(result: Any) -> Any:
    """Return a result of torch with no matrix of ours in it: torch gives it the class of its arguments."""
    if isinstance(result, list | tuple):
        return type(result)([_plain(each) for each in result])
    return without_rounding(result) if isinstance(result, RoundingMatrix) else result


def without_rounding(matrix: torch.Tensor) -> torch.Tensor:
    """View a matrix as one that rounds nothing."""
    return matrix.as_subclass(torch.Tensor)
