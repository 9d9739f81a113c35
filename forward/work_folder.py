"""What a run leaves behind so that the next one can go on: a folder beside the output.

    OUT.work/
      run.json              what the run is about: model, text, options
      hidden.0, hidden.1    hidden states after the latest even and odd layer
      middle                scratch, where hidden states don't fit in memory
      sums.00012.npz        what layer 12 has seen; its appearing means that the layer is done

A layer reads one of the two files of hidden states and writes the other, so a run that is killed at any
moment has the input of the layer it was in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from gguf_tools.claim import Refusals, claim_run
from gguf_tools.errors import BadRequest, OutputError
from imatrix.accumulate import Accumulator

VERSION = 1
"""Changes whenever a run could give other numbers, or the folder gets another form."""

EMBEDDING = -1
"""The layer before the first: hidden states are the tokens' embeddings."""


class Journal:
    """An open work folder; nobody else can use it meanwhile.

    about   what the run is about, as JSON data
    done    the last layer that is done, EMBEDDING - 1 when not even the embeddings are there
    raises  BadRequest when the folder is in use or belongs to a run about something else
    """

    def __init__(self, output: Path, about: Mapping[str, Any], *, restart: bool = False) -> None:
        self.folder = output.with_name(output.name + ".work")
        try:
            self.folder.mkdir(parents=False, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{self.folder}: can't be written ({error.strerror})") from error
        about = {"version": VERSION, **about}
        self._claim = claim_run(self.folder / "lock", about, _refusals(self.folder))
        try:
            self._begin(restart)
        except BaseException:
            self._claim.close()
            raise
        self.done = self._last_done()

    def _begin(self, restart: bool) -> None:
        path = self.folder / "run.json"
        if restart:
            for old in self.folder.iterdir():
                if old.name != "lock":
                    old.unlink()
        if path.exists():
            self._claim.refuse_another(json.loads(path.read_text()))
        else:
            _write_whole(path, json.dumps(self._claim.about, indent=1).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._claim.close()

    def hidden_path(self, layer: int) -> Path:
        """Return where the hidden states after `layer` are."""
        return self.folder / f"hidden.{layer % 2}"

    @property
    def middle_path(self) -> Path:
        return self.folder / "middle"

    def finish_layer(self, layer: int, seen: Accumulator) -> None:
        """Remember that `layer` is done; its hidden states must be in their file."""
        path = self._sums_path(layer)
        partial = path.with_suffix(".partial")
        arrays = {f"sums:{name}": sums.numpy() for name, sums in seen.sums.items()}
        arrays |= {f"counts:{name}": counts for name, counts in seen.counts.items()}
        try:
            with partial.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            raise OutputError(f"{path}: can't be written ({error.strerror})") from error
        self.done = layer

    def seen(self, layer: int) -> Accumulator:
        """Return what `layer` has seen."""
        with np.load(self._sums_path(layer)) as stored:
            return Accumulator(
                {name[5:]: torch.from_numpy(stored[name]) for name in stored if name.startswith("sums:")},
                {name[7:]: stored[name] for name in stored if name.startswith("counts:")},
            )

    def _sums_path(self, layer: int) -> Path:
        return self.folder / ("embedding.npz" if layer == EMBEDDING else f"sums.{layer:05d}.npz")

    def _last_done(self) -> int:
        layer = EMBEDDING - 1
        while self._sums_path(layer + 1).exists():
            layer += 1
        return layer


def _refusals(folder: Path) -> Refusals:
    """Return how a work folder refuses."""
    return Refusals(
        unwritable=lambda reason: OutputError(f"{folder}: can't be written ({reason})"),
        taken=lambda: BadRequest(f"{folder}: another run is writing this output"),
        another=lambda difference: BadRequest(
            f"{folder}: begun with another {difference.where} ({str(difference.old)[:60]}, now"
            f" {str(difference.new)[:60]}); --restart begins anew"
        ),
    )


def _write_whole(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: can't be written ({error.strerror})") from error
