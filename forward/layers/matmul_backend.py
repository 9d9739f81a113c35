"""Matrix products in float32, by the faster of the two libraries that torch has for them.

torch multiplies float32 with MKL, which uses half of the vector units of processors that are not Intel's. It
asks oneDNN, whose kernels are made for the processor at hand, only where it is told that bfloat16 would do.
On processors without matrix units oneDNN then computes in float32 all the same, as exactly as MKL: 200
against 95 GFLOP/s a core on an AMD EPYC with AVX-512. Where it does round to bfloat16, nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from forward.device import is_cpu

_CACHES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
"""Environment variables of oneDNN and of torch: how many kernels each keeps. The default is 1024."""

_KEPT = 64
"""Number of kernels to keep. There is one for every shape, of half a megabyte, and each expert sees another
number of tokens. To make one takes 0.4 milliseconds."""

_PROBE = 256
"""Size of the matrices whose product shows whether it was computed in float32."""


@contextmanager
def fast_products(device: torch.device | str) -> Iterator[None]:
    """Have the faster library multiply while the context is open; sums may differ in their last digits.

    device  a torch device; all but the CPU stay as they are
    """
    for name in _CACHES:
        os.environ.setdefault(name, str(_KEPT))  # looked up at the first product
    if not is_cpu(device) or not _is_exact():
        yield
        return
    with _told("medium"):
        yield


@cache
def _is_exact() -> bool:
    """Whether products are those of float32 even if bfloat16 would do."""
    numbers = torch.arange(_PROBE * _PROBE, dtype=torch.float32).view(_PROBE, _PROBE).sin()
    with _told("medium"):
        product = numbers @ numbers
    expected = numbers.double() @ numbers.double()
    # Sums of float32 are right to 1e-6 of their terms, those of bfloat16 to 1e-3.
    return float((product - expected).abs().max()) < 1e-5 * float(numbers.square().sum(0).max())


@contextmanager
def _told(precision: str) -> Iterator[None]:
    """Tell torch for the time being how exact products of float32 must be."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
