"""A folder of a model together with one of an adapter, as a value that stands for the model's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"


@dataclass(frozen=True)
class AdaptedFolder:
    """A folder with the adapter that is to be merged into its weights. It can be pickled.

    folder   of the base, or a StreamedFolder
    adapter  folder of the adapter
    scale    what all that is added to weights is multiplied by
    """

    folder: str | os.PathLike[str]
    adapter: Path
    scale: float = 1.0

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def weights_path(self, *, allow_pickle: bool) -> Path:
        """Return the file of the adapter's weights; raises CheckpointError where there is none to read."""
        path = self.adapter / WEIGHTS_NAME
        pickle = self.adapter / PICKLE_NAME
        if not (self.adapter / CONFIG_NAME).exists():
            raise CheckpointError(
                f"{self.adapter}: no {CONFIG_NAME}; --lora expects the folder of an adapter, as PEFT saves it"
            )
        if path.exists() or not pickle.exists():
            return path
        if not allow_pickle:
            raise UnsupportedCheckpoint(
                f"{pickle}: a pickle, and reading one can run any code; expected {WEIGHTS_NAME} (save the"
                " adapter again with safe_serialization=True, or read it with --allow-pickle)"
            )
        return pickle
