"""What an interrupted run leaves behind so that the next one can resume: a folder beside the output.

    OUT.work/
      run.json              what decides the run's numbers: model, text, options
      hidden.0, hidden.1    hidden states after the latest even and odd layer
      hidden.00012          or, where those of all layers are kept, after the layer before 12
      middle                scratch, where hidden states don't fit in memory
      sums.00012.npz        what the observer kept of layer 12; once this file exists, the layer is done

A layer reads one of the two files of hidden states and writes the other. So a run that is killed at any
moment still has the input of the layer that it was computing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from forward.observe import Arrays
from gguf_tools.claim import Refusals, claim_run
from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.inputs import InputWatch
from gguf_tools.whole_file import write_whole

VERSION = 1
"""Number of the folder's format; it also changes whenever a run could give other numbers."""

EMBEDDING = -1
"""Number of the step before layer 0, which looks up the embeddings of the tokens."""


class WorkFolder:
    """An open work folder; no other run can open it until it is closed.

    about     what decides the run's numbers, as JSON data
    keep_all  keep the hidden states after every layer
    watch     of the model: a layer is not done if its files have changed meanwhile
    done      the last layer that is done; EMBEDDING - 1 when the embeddings are missing, too
    raises    BadRequest when another run has the folder open, or began it with another `about`
    """

    def __init__(
        self,
        output: Path,
        about: Mapping[str, Any],
        *,
        restart: bool = False,
        keep_all: bool = False,
        watch: InputWatch | None = None,
    ) -> None:
        self.folder = _folder_of(output)
        self._keep_all, self._watch = keep_all, watch
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
            write_whole(path, json.dumps(self._claim.about, indent=1).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._claim.close()

    def hidden_path(self, layer: int) -> Path:
        """Return where the hidden states after `layer` are."""
        return self.folder / (f"hidden.{layer + 1:05d}" if self._keep_all else f"hidden.{layer % 2}")

    @property
    def middle_path(self) -> Path:
        """The scratch file for hidden states between the two halves of a layer."""
        return self.folder / "middle"

    def finish_layer(self, layer: int, arrays: Arrays) -> None:
        """Record that `layer` is done, and what was kept of it; its hidden states must be in their file."""
        if self._watch is not None:
            self._watch.refuse_changed()
        path = self._layer_path(layer)
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            raise OutputError(f"{path}: can't be written ({error.strerror})") from error
        self.done = layer

    def arrays(self, layer: int) -> Arrays:
        """Return what was kept of `layer`."""
        with np.load(self._layer_path(layer)) as stored:
            return dict(stored)

    def _layer_path(self, layer: int) -> Path:
        return self.folder / ("embedding.npz" if layer == EMBEDDING else f"sums.{layer:05d}.npz")

    def _last_done(self) -> int:
        layer = EMBEDDING - 1
        while self._layer_path(layer + 1).exists():
            layer += 1
        return layer


def _refusals(folder: Path) -> Refusals:
    """Return how a work folder refuses."""
    return Refusals(
        unwritable=lambda reason: OutputError(f"{folder}: can't be written ({reason})"),
        taken=lambda: BadRequest(f"{folder}: another run is writing this output"),
        another=lambda difference: BadRequest(
            f"{folder}: begun with another {difference.where} ({str(difference.old)[:60]}, now"
            f" {str(difference.new)[:60]}); --restart starts over"
        ),
    )


def forget(output: Path) -> None:
    """Delete the work folder of `output`, which is finished."""
    shutil.rmtree(_folder_of(output), ignore_errors=True)


def _folder_of(output: Path) -> Path:
    return output.with_name(output.name + ".work")
