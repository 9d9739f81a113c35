"""What this machine's torch can compute on."""

from __future__ import annotations

from gguf_tools.errors import BadRequest


def require_torch(purpose: str) -> None:
    """Raise BadRequest saying what to install where torch is missing; `purpose` begins the message."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise BadRequest(f"{purpose} needs torch: pip install 'gguf-tools[torch]', or '.[torch]' in a clone")


def device_name(wanted: str | None) -> str:
    """Return the torch device to use: the wanted one, or CUDA where there is one, or the CPU.

    raises  BadRequest if torch can't use the wanted one
    """
    import torch

    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=wanted).item()  # meta has tensors, but no numbers
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BadRequest(f"--device {wanted}: torch can't use it ({reason})") from error
    return wanted
