"""States of a base that a run keeps in a folder, so that later runs need only the files that are new.

about.json             what the states are of, once all are there: base, text, how they were computed
record                 the files that are there, with size and digest
states.00012           hidden states after layer 12 of the measured tokens, float32
routes.00012.npz       the experts chosen there
output                 the output matrix, in the type that matrices were multiplied in
output_norm.npy        weight of the norm before it, float32
output_input           what it multiplies, float32; only where more than a norm stands before it
draft_norm.npy         weight of the norm behind the MTP layer, whose states are those of the last layer
draft_output           the MTP layer's own output matrix, if it has one
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import BadRequest, OutputError, TruncatedError
from gguf_tools.files.owned_folder import (
    RECORD,
    ClaimedFolder,
    FolderKind,
    write_whole_of,
)
from gguf_tools.files.run_lock import LOCK, JSONDifference, Refusals, plain
from gguf_tools.format.ggml_types import BF16, F32, GGMLType
from imatrix.evaluate.bases.same_model import ModelFacts
from imatrix.forward.device import to_bytes, to_cpu, to_numpy, to_torch
from imatrix.forward.hidden_states import Rows
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.logits import Head, LogitSource, Positions
from imatrix.forward.mtp import DraftEnd, draft_norm
from imatrix.forward.network import End, LogitRule
from imatrix.forward.observe import Arrays
from imatrix.forward.run import ForwardPass
from imatrix.forward.work_folder import load_arrays, save_arrays

VERSION = 4
"""Number of the folder's format; it also changes whenever a run could give other numbers."""

_MATRIX, _NORM, _INPUT, _BIAS = "output", "output_norm.npy", "output_input", "output_bias.npy"
_DRAFT_MATRIX, _DRAFT_NORM = "draft_output", "draft_norm.npy"
_RUN_BYTES = 32 << 20
_WHOLE = "whole"
_KIND = FolderKind(
    "states",
    "about.json",
    re.compile(
        rf"{LOCK}|about\.json|{RECORD}|states\.\d{{5}}|routes\.\d{{5}}\.npz|{_MATRIX}|output_(?:norm|bias)\.npy|output_input"
        rf"|draft_norm\.npy|{_DRAFT_MATRIX}"
    ),
)

_DTYPES: Mapping[torch.dtype, GGMLType] = {torch.float32: F32, torch.bfloat16: BF16}


@dataclass(frozen=True)
class KeptStates:
    """Rows of a file, float32, for the measured tokens only, by their numbers among all tokens."""

    path: Path
    positions: Positions
    n_cols: int

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows of measured tokens that follow each other in the file."""
        first, n_rows = int(torch.searchsorted(self.positions.tokens, numbers[:1])), len(numbers)
        values = _read_items(self.path, np.dtype(np.float32), first * self.n_cols, n_rows * self.n_cols)
        return to_torch(values.reshape(n_rows, self.n_cols))


@dataclass(frozen=True)
class KeptMatrix:
    """A matrix in a file, as a source of rows."""

    path: Path
    shape: tuple[int, ...]
    type: GGMLType
    name: str = _MATRIX
    by_rows: bool = True

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        dtype = np.dtype(ml_dtypes.bfloat16 if self.type == BF16 else np.float32)
        n_cols = self.shape[-1]
        return _read_items(self.path, dtype, start * n_cols, (stop - start) * n_cols).reshape(-1, n_cols)

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self.read_rows(start, stop).view(np.uint8).ravel()


def is_kept_folder(folder: Path) -> bool:
    """Return whether a run has begun to keep states in a folder."""
    return folder.exists() and _KIND.read_about(folder) is not None


class KeptFolder(ClaimedFolder):
    """An open folder of states; no other run can open it until it is closed.

    about    what the states are of, as `about_states` tells it; None as long as they are not whole
    damaged  the first file of the whole states that is not as it was written; None: all are
    raises   BadRequest when another run has the folder open, or when it is somebody else's
    """

    def __init__(self, folder: Path, *, restart: bool = False) -> None:
        super().__init__(folder, _KIND, {}, _refusals(folder), restart=restart)

    def _begin(self) -> None:
        """Read what the states are of; where they are not whole, see to it that the mark is there."""
        about = _KIND.read_about(self.folder)
        if about is None:
            _KIND.write_about(self.folder, {})
        is_whole = about is not None and about.keys() > _KIND.mark.keys()
        self.about: Mapping[str, Any] | None = about if is_whole else None
        self.damaged = self._first_damaged()

    def refuse_another(self, about: Mapping[str, Any]) -> None:
        """Raise BadRequest if the whole states are of something else than `about`."""
        self._run_lock.about = plain(about)
        self._run_lock.refuse_another(self.about or {})

    def has(self, layer: int) -> bool:
        """Tell whether all of a layer is there, as it was written."""
        return self._fits(f"layer {layer}")

    def states_path(self, layer: int) -> Path:
        return self.folder / f"states.{layer:05d}"

    def routes(self, layer: int) -> Arrays:
        """Return the experts that were chosen in a layer, as `Routes.arrays` does."""
        path = self._routes_path(layer)
        return load_arrays(path) if path.exists() else {}

    def _routes_path(self, layer: int) -> Path:
        return self.folder / f"routes.{layer:05d}.npz"

    def finish_layer(self, layer: int, write: Callable[[IO[bytes]], object], routes: Arrays) -> None:
        """Keep a layer: `write` fills the file of its states; raises OutputError."""
        paths = [self.states_path(layer)]
        write_whole_of(paths[0], write)
        if routes:
            paths.append(self._routes_path(layer))
            save_arrays(paths[1], routes)
        self._record.add(f"layer {layer}", [path.name for path in paths])

    def finish(self, about: Mapping[str, Any], paths: Iterable[Path]) -> None:
        """Say that everything is there; `paths` are the files besides those of layers."""
        self.about = plain(about)
        _KIND.write_about(self.folder, self.about)
        self._record.add(_WHOLE, [*(path.name for path in paths), _KIND.about])
        self._record.sync()

    def _first_damaged(self) -> Path | None:
        """Return the first file that is not as it was written, of states that were whole."""
        names = {entry.what: entry.files for entry in self._record.entries}
        if self.about is None and _WHOLE not in names:
            return None
        if self._record.is_torn or _WHOLE not in names:
            return self.folder / RECORD
        files = (pair for sealed in names.values() for pair in sealed.items())
        bad = next((name for name, seal in files if not self._record.fits(name, seal)), None)
        return None if bad is None else self.folder / bad

    def _fits(self, what: str) -> bool:
        entry = next((each for each in reversed(self._record.entries) if each.what == what), None)
        return entry is not None and all(self._record.fits(*pair) for pair in entry.files.items())


@dataclass(frozen=True)
class StatesKeeper:
    """Keeps in a folder what later runs need of a base.

    about  what decides the states, as JSON data
    """

    folder: KeptFolder
    positions: Positions
    n_layers: int
    about: Mapping[str, Any]

    def gap(self, n_done: int) -> Path | None:
        """Return the states of the first of the layers that an earlier run has computed that are not kept."""
        missing = next((layer for layer in range(n_done) if not self.folder.has(layer)), None)
        return None if missing is None else self.folder.states_path(missing)

    def keep_layer(self, layer: int, states: Rows, routes: Arrays) -> None:
        self.folder.finish_layer(layer, lambda file: self._write_rows(file, states), routes)

    def _write_rows(self, file: IO[bytes], states: Rows, end: End | None = None) -> None:
        """Write the measured rows, as `end` leaves them."""
        for chunk in range(self.positions.n_chunks):
            rows = states.rows(self.positions.of_chunk(chunk))
            file.write(to_bytes(rows if end is None else end(rows)))

    def keep_head(self, base: ForwardPass) -> None:
        load, end, folder, network = base.load, base.output_norm(), self.folder.folder, base.source.network
        write_whole_of(folder / _MATRIX, lambda file: _write_matrix(file, load, network.output))
        if type(end) is RMSNorm and end.bias is None:  # not a subclass of it, which computes otherwise
            weight, second = to_numpy(end.weight), folder / _NORM
            (folder / _INPUT).unlink(missing_ok=True)
            write_whole_of(second, lambda file: np.save(file, weight))
        else:
            second = folder / _INPUT
            with torch.inference_mode():
                write_whole_of(
                    second,
                    lambda file: self._write_rows(
                        file, base.last(), lambda rows: to_cpu(end(rows.to(load.device)))
                    ),
                )
        others = self._keep_draft(base) if network.n_mtp else []
        if (bias := network.load_output_bias(load)) is not None:
            others.append(folder / _BIAS)
            write_whole_of(others[-1], lambda file: np.save(file, to_numpy(bias)))
        base.source.watch.refuse_changed()
        self.folder.finish(self.about, [folder / _MATRIX, second, *others])

    def _keep_draft(self, base: ForwardPass) -> list[Path]:
        """Keep the end of the MTP layer, and return the files."""
        network, load, folder = base.source.network, base.load, self.folder.folder
        weight, matrix = to_numpy(draft_norm(network, load).weight), base.draft_head().matrix
        paths = [folder / _DRAFT_NORM]
        write_whole_of(paths[0], lambda file: np.save(file, weight))
        if matrix != network.output:
            paths.append(folder / _DRAFT_MATRIX)
            write_whole_of(paths[1], lambda file: _write_matrix(file, load, matrix))
        return paths


def _write_matrix(file: IO[bytes], load: Loader, name: str) -> None:
    """Write an output matrix, some rows at a time."""
    tensor = load.tensor(name)
    n_rows = prod(tensor.shape[:-1])
    step = max(1, _RUN_BYTES // (4 * tensor.shape[-1]))
    for start in range(0, n_rows, step):
        rows = to_cpu(load.rows(tensor, start, min(n_rows, start + step), load.dtype))
        file.write(to_bytes(rows))


@dataclass(frozen=True)
class KeptBase:
    """A LayeredBase of kept states: nothing of it has to be computed."""

    path: Path
    folder: KeptFolder
    positions: Positions
    device: torch.device
    dtype: torch.dtype
    norm_eps: float
    rule: LogitRule
    n_layers: int
    hidden_size: int
    vocab_size: int

    @property
    def n_layers_done(self) -> int:
        return self.n_layers + self.has_draft

    def compute(self, layer: int) -> None:
        """Nothing is left to do."""

    def after(self, layer: int) -> Rows:
        return KeptStates(self.folder.states_path(layer), self.positions, self.hidden_size)

    def routes(self, layer: int) -> Arrays:
        return self.folder.routes(layer)

    def head(self) -> LogitSource:
        states, end = self._before_output()
        return self._head(states, end, self.folder.folder / _MATRIX, states.n_cols)

    def _head(self, states: KeptStates, end: End, path: Path, n_cols: int) -> LogitSource:
        matrix = KeptMatrix(path, (self.vocab_size, n_cols), _DTYPES[self.dtype])
        load = Loader(self.path, {_MATRIX: matrix}, self.device, self.dtype)
        bias = self.folder.folder / _BIAS
        added = to_torch(np.load(bias), self.device) if bias.exists() else None
        return Head(load, states, end, _MATRIX, self.rule, added)

    @property
    def is_kept(self) -> bool:
        return True

    @property
    def has_draft(self) -> bool:
        return (self.folder.folder / _DRAFT_NORM).exists()

    def draft_head(self) -> LogitSource:
        folder = self.folder.folder
        weight = to_torch(np.load(folder / _DRAFT_NORM), self.device)
        states = KeptStates(self.folder.states_path(self.n_layers), self.positions, self.hidden_size)
        end, own = DraftEnd(RMSNorm(weight, self.norm_eps)), folder / _DRAFT_MATRIX
        return self._head(states, end, own if own.exists() else folder / _MATRIX, len(weight))

    def _before_output(self) -> tuple[KeptStates, End]:
        """Return the last states that are kept, and what makes of them what the output matrix multiplies."""
        path, positions = self.folder.folder / _INPUT, self.positions
        if path.exists():
            n_rows = len(positions.tokens)
            return KeptStates(path, positions, path.stat().st_size // (4 * n_rows)), lambda rows: rows
        weight = to_torch(np.load(self.folder.folder / _NORM), self.device)
        last = KeptStates(self.folder.states_path(self.n_layers - 1), positions, self.hidden_size)
        return last, RMSNorm(weight, self.norm_eps)


def about_states(
    facts: ModelFacts, norm_eps: float, rule: LogitRule, run: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Describe what a folder has states of.

    run  what else decides the states
    """
    known = asdict(facts)
    for name in ("n_zeros", "digests"):
        if not known[name]:
            del known[name]
    end = {"norm_eps": norm_eps, "logits": asdict(rule)}
    return {**_KIND.mark, "version": VERSION, "run": run, "facts": known, **end}


def _read_items(path: Path, dtype: np.dtype[Any], start: int, count: int) -> npt.NDArray[Any]:
    with BadRequest.from_os(f"{path}: can't be read"):
        values = np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
    if len(values) != count:
        raise TruncatedError(f"{path}: shorter than it was written; was it changed meanwhile?")
    return values


def _refusals(folder: Path) -> Refusals:
    def another(difference: JSONDifference) -> BadRequest:
        what = difference.where.rpartition(", ")[2]
        return BadRequest(
            f"{folder}: has states of another {what} ({str(difference.old)[:60]}, now"
            f" {str(difference.new)[:60]}); name another folder, or --restart computes the base again"
        )

    return Refusals(
        unwritable=lambda reason: OutputError(f"{folder}: can't be written ({reason})"),
        taken=lambda: BadRequest(f"{folder}: another run is using these states"),
        another=another,
    )
