"""A device that is not the CPU, where there is none: tensors that say they are elsewhere.

Their numbers are in ordinary memory, but no operation may mix them with tensors of the CPU, and they can't be
made into arrays: what works here works on CUDA as far as places are concerned. torch's name for a device
without memory, "meta", stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

PRETENDED = torch.device("meta")

_TRANSFERS = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})


class PretendedTensor(torch.Tensor):
    """A tensor elsewhere.

    here  its numbers
    """

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> PretendedTensor:
        made: PretendedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=PRETENDED,
        )
        made.here = here
        return made

    def __repr__(self, **_: Any) -> str:
        return f"PretendedTensor({self.here})"

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(operation, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Makes new tensors pretend when that is their device."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(operation, args, kwargs or {})


def _run(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    pretends = [isinstance(x, PretendedTensor) for x in tensors]
    mixed = any(pretends) and not all(e or x.dim() == 0 for e, x in zip(pretends, tensors, strict=True))
    if mixed and operation not in _TRANSFERS:
        raise RuntimeError(f"{operation}: tensors are on different devices")
    is_pretended = any(pretends)
    if kwargs.get("device") is not None:
        is_pretended = torch.device(kwargs["device"]) == PRETENDED
        kwargs = kwargs | {"device": torch.device("cpu")}
    in_place = operation._schema.name.endswith("_")
    if operation == torch.ops.aten._conj.default:
        # A view that is only marked as conjugate would lose its mark here.
        operation = torch.ops.aten._conj_physical.default

    def here(x: Any) -> Any:
        return x.here if isinstance(x, PretendedTensor) else x

    result = operation(*tree_map(here, args), **tree_map(here, kwargs))
    if in_place:
        return args[0]
    if not is_pretended:
        return result
    return tree_map(lambda x: PretendedTensor(x) if isinstance(x, torch.Tensor) else x, result)


def keep_to_one_thread(monkeypatch: pytest.MonkeyPatch, *users: str) -> None:
    """Keep to one thread, and out of inference mode: neither knows such tensors.

    users  modules that import what computes in inference mode, beside those of the forward pass
    """
    from imatrix.forward import logits, sweep

    plain = {
        function.__name__: torch.no_grad()(function.__wrapped__)
        for function in (sweep.run_layer, logits.sweep_vocabulary)
    }
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    for name in (
        "imatrix.forward.workers",
        "imatrix.forward.run",
        "imatrix.forward.layers.experts",
        "imatrix.forward.logits",
        *users,
    ):
        module = import_module(name)
        for called, other in {"ThreadPoolExecutor": AtOnce, **plain}.items():
            if hasattr(module, called):
                monkeypatch.setattr(module, called, other)


@contextmanager
def pretended() -> Iterator[torch.device]:
    """Let tensors be elsewhere in this thread, and give the device to ask for."""
    with _Mode():
        yield PRETENDED


class AtOnce:
    """An executor that runs a task when it is submitted: tensors are elsewhere in one thread only."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, task: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(task(*args))
        return future

    def shutdown(self, **_: Any) -> None: ...
