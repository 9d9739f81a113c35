"""Where a pass keeps hidden states between layers: in memory, or in the files of its work folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from forward.hidden_states import FileStates, MemoryStates, States, copy
from forward.observe import Arrays
from forward.sweep import LayerBuffers
from forward.work.work_folder import EMBEDDING, WorkFolder


class LayerStates:
    """Where hidden states are kept: two sets that change places with each layer, and what experts multiply.

    In memory, each layer's output is copied to the work folder's files. Else, layers work on those files
    themselves.

    size   (n_tokens, n_strands * hidden_size + n_handed)
    dtype  of what experts multiply, (n_tokens, hidden_size)
    inner  hidden_size
    """

    def __init__(
        self,
        folder: WorkFolder,
        size: tuple[int, int],
        dtype: torch.dtype,
        *,
        in_memory: bool,
        opened: ExitStack,
        inner: int,
    ) -> None:
        self.in_memory = in_memory
        self._folder, self._size, self._dtype, self._opened = folder, size, dtype, opened
        self._files: dict[Path, FileStates] = {}
        self._sets = (MemoryStates(*size), MemoryStates(*size)) if in_memory else None
        self._middle: States
        self._middle_size = size[0], inner
        if in_memory:
            self._middle = MemoryStates(*self._middle_size, dtype)
        else:
            self._middle = self._open_middle()

    def begin(self, fill: Callable[[States], Arrays]) -> None:
        """Have `fill` write what the first layer begins with, unless an earlier run has.

        fill  returns what is to be kept beside it in the work folder
        """
        if self._folder.done < EMBEDDING:
            first = self.stored(EMBEDDING)
            arrays = fill(first)
            first.sync()
            self._folder.finish_layer(EMBEDDING, arrays, [first.path])
        if self.in_memory:
            copy(self.stored(self._folder.done), self.after(self._folder.done))

    def stored(self, layer: int) -> FileStates:
        """Return the file of a layer's output."""
        path = self._folder.hidden_path(layer)
        if path not in self._files:
            self._files[path] = self._opened.enter_context(closing(FileStates(path, *self._size)))
        return self._files[path]

    def after(self, layer: int) -> States:
        """The rows of a layer's output, float32."""
        return self.stored(layer) if self._sets is None else self._sets[layer % 2]

    def around(self, layer: int) -> LayerBuffers:
        """The rows that a layer reads and writes."""
        return LayerBuffers(self.after(layer - 1), self._middle, self.after(layer))

    def finish(self, layer: int, arrays: Arrays) -> None:
        """Bring the layer's output to the disk itself, and record that the layer is done.

        arrays  what is to be kept beside it in the work folder
        """
        stored = self.stored(layer)
        if self.in_memory:
            copy(self.after(layer), stored)
        stored.sync()
        self._folder.finish_layer(layer, arrays, [stored.path])

    def let_go(self) -> None:
        """Free what is in memory; from now on layers' outputs are those in their files."""
        self.in_memory, self._sets = False, None
        self._middle = self._open_middle()

    def _open_middle(self) -> FileStates:
        files = FileStates(self._folder.middle_path, *self._middle_size, self._dtype)
        return self._opened.enter_context(closing(files))
