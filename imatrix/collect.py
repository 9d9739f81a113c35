"""Collect importances from a model: every layer's weights are read once, for all chunks of text.

    tokens -> embeddings -> layer 0 (all chunks) -> layer 1 (all chunks) -> ... -> output

What is kept between layers is a hidden state per token. Memory is that, or a file when it is above the
budget, plus one layer's attention, and per thread a chunk's activations and one or two experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gguf_tools.errors import BadRequest
from imatrix.merge import merge
from forward.text import Cut, Text, read_text
from quantize.importance import ImportanceFile, refuse_nonfinite

if TYPE_CHECKING:
    from forward.open import ModelSource
    from forward.perplexity import Perplexity

DType = Literal["float32", "bfloat16"]


class Reporter(Protocol):
    """Is told how far a collection has come."""

    def start(self, n_layers: int, done: int) -> None: ...

    def advance(self, layers: float) -> None:
        """So much of a layer has been computed since the last call."""
        ...

    def layer_done(self, layer: int, seen: Callable[[], ImportanceFile]) -> None:
        """A layer is done; `seen` gives what is known now."""
        ...

    def perplexity(self, found: Perplexity) -> None:
        """One more chunk has been taken in."""
        ...


@dataclass(frozen=True)
class CollectOptions:
    """What to collect, and how.

    process_output  count what output.weight multiplies, too
    perplexity      measure it
    all_experts     show every token to every expert; what the model computes stays the same
    dataset         name of the text in the file
    device          "cpu", "cuda" ...; None: CUDA where there is one
    dtype           what matrices are multiplied in
    n_threads       threads that torch uses; None: as it likes
    memory_bytes    hidden states above this go to a file
    restart         don't go on with what an earlier run has left
    earlier         importances to add to
    """

    cut: Cut = field(default_factory=Cut)
    process_output: bool = False
    perplexity: bool = True
    all_experts: bool = False
    dataset: str | None = None
    device: str | None = None
    dtype: DType = "float32"
    n_threads: int | None = None
    memory_bytes: int = 4 << 30
    restart: bool = False
    earlier: Sequence[ImportanceFile] = ()


@dataclass(frozen=True)
class Collected:
    """Importances, the perplexity if it was measured, and lines for the report."""

    importances: ImportanceFile
    perplexity: Perplexity | None
    notes: tuple[str, ...]


def require_torch() -> None:
    """Raise BadRequest saying what to install where torch is missing."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise BadRequest("collecting importances needs torch: pip install 'gguf-tools[torch]'")


def collect(
    model: Path, text: Path, output: Path, options: CollectOptions, report: Reporter | None = None
) -> Collected:
    """Return the importances that `text` gives the weights of `model`.

    output  where they will be saved; beside it, layers are remembered until `forget` is called
    raises  ToolkitError; what was done stays for the next run
    """
    require_torch()
    import torch

    from forward.work_folder import Journal
    from forward.open import open_model
    from imatrix.run import run

    if options.n_threads is not None:
        torch.set_num_threads(options.n_threads)
    with open_model(model) as source:
        chunks = read_text(text, source.vocab(), source.config.vocab_size, options.cut)
        about = _about(source, chunks, options)
        with Journal(output, about, restart=options.restart) as journal:
            found = run(source, chunks, options, journal, report or _Silent(), options.dataset or text.name)
    refuse_nonfinite(found.importances.entries)
    merged = merge([*options.earlier, found.importances])
    return replace(found, importances=merged.importances, notes=(*found.notes, *merged.notes))


def forget(output: Path) -> None:
    """Delete what layers have left beside `output`, which has been saved."""
    import shutil

    shutil.rmtree(output.with_name(output.name + ".work"), ignore_errors=True)


def _about(source: ModelSource, text: Text, options: CollectOptions) -> dict[str, Any]:
    """Return what decides about the numbers of a run."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.paths]
    return {
        "model": files,
        "text": text.digest(),
        "chunks": text.n_chunks,
        "context": text.chunk_size,
        "dtype": options.dtype,
        "device": device_name(options.device),
        "all_experts": options.all_experts,
    }


def device_name(wanted: str | None) -> str:
    """Return the torch device to use; BadRequest if torch can't use the wanted one."""
    import torch

    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BadRequest(f"--device {wanted}: torch can't use it ({reason})") from error
    return wanted


class _Silent:
    def start(self, n_layers: int, done: int) -> None:
        pass

    def advance(self, layers: float) -> None:
        pass

    def layer_done(self, layer: int, seen: Callable[[], ImportanceFile]) -> None:
        pass

    def perplexity(self, found: Perplexity) -> None:
        pass
