"""Saves the hidden states of a run, so that an interrupted one goes on near where it was."""

from __future__ import annotations

import time
from collections.abc import Sequence

from imatrix.calibrate.run.context import Model
from imatrix.forward.work.work_folder import WorkFolder

SAVE_SECONDS = 60.0
"""Least time between two saves of states that are in memory. What is lost with a run is as much work at most,
and the tensors of these layers are not made again: saving 30 layers of SmolLM2-135M wrote 9 GB."""


class StateSaver:
    """Saves the states after a layer when it is time.

    States in files are saved after every layer: the next one but one overwrites them. Those in memory go to
    files by turns, for even and for odd layers, so that the latest ones stay whole while others are written.
    """

    def __init__(self, folder: WorkFolder, models: Sequence[Model]) -> None:
        self._folder, self._models = folder, models
        self._saved = time.monotonic()

    def after(self, layer: int) -> None:
        """Save the states after a layer if it is time."""
        streams = [model.stream for model in self._models]
        if all(stream.is_in_memory for stream in streams) and not self._is_due(layer):
            return
        self._folder.finish_layer(layer, {}, [stream.save(layer) for stream in streams])
        self._saved = time.monotonic()

    def _is_due(self, layer: int) -> bool:
        has_other_file = (layer - self._folder.done) % 2 == 1
        return has_other_file and time.monotonic() - self._saved >= SAVE_SECONDS
