"""The device that torch computes on, and all copies between it, this process's memory and numpy.

Files, hidden states, sums and kernels of numba are in ordinary memory; weights and activations are on the
device. Whoever takes something from one side to the other calls this module, which alone knows that the CPU
is both. docs/add-a-device.md says what torch must be able to do on a device.

On the CPU, matrix products in float32 come from the faster of the two libraries that torch has for them.
torch multiplies float32 with MKL, which uses half of the vector units of processors that are not Intel's. It
asks oneDNN, whose kernels are made for the processor at hand, only where it is told that bfloat16 would do.
On processors without matrix units oneDNN then computes in float32 all the same, as exactly as MKL: 200
against 95 GFLOP/s a core on an AMD EPYC with AVX-512. Where it does round to bfloat16, nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import BadRequest
from gguf_tools.system.settings import SharedContext, shared_setting

CPU = torch.device("cpu")
"""The device whose memory is this process's."""


def device_name(wanted: str | None) -> str:
    """Name the torch device to use: the wanted one, or CUDA where there is one, or the CPU.

    raises  BadRequest if torch can't use the wanted one
    """
    if wanted is None:
        return "cuda" if torch.cuda.is_available() else CPU.type
    try:
        torch.zeros(1, device=wanted).item()  # meta has tensors, but no numbers
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        if reason.startswith("Expected one of"):  # a list of all that torch has ever heard of
            reason = "it knows no such device; expected cpu, cuda, cuda:1, xpu, mps or the like"
        raise BadRequest(f"--device {wanted}: torch can't use it ({reason})") from error
    return wanted


def choose_device(wanted: str | None) -> torch.device:
    """Return the device that `device_name` names."""
    return torch.device(device_name(wanted))


def is_cpu(device: torch.device | str) -> bool:
    """Whether tensors on a device are memory that numpy and numba can use."""
    return torch.device(device).type == CPU.type


def threads_on(device: torch.device | str, n_threads: int) -> int:
    """Tell how many of `n_threads` compute tasks of their own; any device but the CPU is fed by one."""
    return n_threads if is_cpu(device) else 1


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to this process's memory; one that is there already is returned as it is."""
    return tensor.cpu()


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Give a tensor as an array, which shares its memory on the CPU; numpy must have its dtype."""
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array


def to_torch(array: npt.NDArray[Any], device: torch.device = CPU) -> torch.Tensor:
    """Give an array as a tensor of the same dtype, bfloat16 included; on the CPU it shares a writeable one's
    memory."""
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def to_bytes(rows: torch.Tensor) -> memoryview:
    """Give the bytes of a tensor in row order; on the CPU, those of a contiguous one are its own memory."""
    return to_numpy(rows.contiguous().view(torch.uint8)).reshape(-1).data


_CACHES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
"""Environment variables of oneDNN and of torch: how many kernels each keeps. The default is 1024."""

_KEPT = 64
"""Number of kernels to keep. There is one for every shape, of half a megabyte, and each expert sees another
number of tokens. To make one takes 0.4 milliseconds."""


@contextmanager
def _few_kernels() -> Iterator[None]:
    """Tell both what is looked up at the first product, unless the user has."""
    unset = [name for name in _CACHES if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, str(_KEPT)))
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)


_FEW_KERNELS = SharedContext(_few_kernels)

_PROBE = 256
"""Size of the matrices whose product shows whether it was computed in float32."""


@contextmanager
def fast_products(device: torch.device | str) -> Iterator[None]:
    """Have the faster library multiply while the context is open; sums may differ in their last digits.

    It may be open several times, and end in any order.

    device  a torch device; all but the CPU stay as they are
    """
    with _FEW_KERNELS, _MEDIUM if is_cpu(device) and _is_exact() else nullcontext():
        yield


@cache
def _is_exact() -> bool:
    """Whether products are those of float32 even if bfloat16 would do."""
    numbers = torch.arange(_PROBE * _PROBE, dtype=torch.float32).view(_PROBE, _PROBE).sin()
    with _MEDIUM:
        product = numbers @ numbers
    expected = numbers.double() @ numbers.double()
    # Sums of float32 are right to 1e-6 of their terms, those of bfloat16 to 1e-3.
    return float((product - expected).abs().max()) < 1e-5 * float(numbers.square().sum(0).max())


_MEDIUM = shared_setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium")
"""Products of float32 as exact as those of bfloat16 would be: see the top of this file."""
