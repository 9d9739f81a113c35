"""Folder beside the output, which an interrupted run leaves behind so that the next one can resume.

    OUT.work/
      run.json              what decides the run's numbers: model, text, options
      record                the layers that are done: the files of each, with size and digest
      hidden.0, .1, .2      hidden states after the latest layers
      hidden.00012          or, where those of all layers are kept, after the layer before 12
      middle                scratch, where hidden states don't fit in memory
      sums.00012.npz        what the observer kept of layer 12

A layer reads one of the files of hidden states and writes another. So a run that is killed at any moment
still has the input of the layer that it was computing. A file that is not as its record says, after a crash
of the machine for instance, is not used: its layer is computed again, and so are those that need it.

Once a minute, all is brought to the disk itself, and no layer writes to the hidden states that are sure to be
there until the next ones are. So a crash of the machine costs a minute's work, or the layer's that took
longer. That takes a third file of hidden states, where layers take less than a minute.

The folder belongs to the run only if it carries our mark, in `record` and in run.json. Of the files in it,
those with names of ours are replaced and removed; others stay, and then the folder stays, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gguf_tools.errors import OutputError
from gguf_tools.files.inputs import InputWatch
from gguf_tools.files.owned_folder import (
    OF_LAYERS,
    RECORD,
    WORK,
    ClaimedFolder,
    Entry,
    files_of,
    remove_files,
    work_path,
    write_whole_of,
)
from gguf_tools.files.run_lock import refusals_of
from gguf_tools.findings import remark
from gguf_tools.text import counted
from imatrix.forward.options import ForwardOptions
from imatrix.texts.chunks import Chunks

if TYPE_CHECKING:
    from imatrix.forward.observe import Arrays


def run_identity(chunks: Chunks, forward: ForwardOptions) -> dict[str, Any]:
    """Return the facts that every run over a text shares, as JSON data made to be compared.

    A run adds what its own numbers depend on. An interrupted one resumes only under the same facts.
    """
    from imatrix.forward.device import device_name  # torch comes when a model is to be computed

    return {
        "text": chunks.digest(),
        "chunks": chunks.n_chunks,
        "context": chunks.longest,
        "dtype": forward.dtype,
        "device": device_name(forward.device),
        **({} if forward.rounded is None else {"rounded": forward.rounded}),
    }


VERSION = 4
"""Number of the folder's format; it also changes whenever a run could give other numbers."""

EMBEDDING = -1
"""Number of the step before layer 0, which looks up the embeddings of the tokens."""

HIDDEN = "hidden."
"""How the names of files of hidden states begin."""

_NOTHING = EMBEDDING - 1
"""Number of what comes before: the run has begun."""


class WorkFolder(ClaimedFolder):
    """An open work folder; no other run can open it until it is closed.

    about     what decides the run's numbers, as JSON data
    keep_all  keep the hidden states after every layer
    may_skip  a run can go on after any layer that is recorded, if it needs nothing of those that are not
    watch     of the model: a layer is not done if its files have changed meanwhile
    done      the last layer that is done; EMBEDDING - 1 when the embeddings are missing, too
    raises    BadRequest when another run has the folder open, or began it with another `about`, or when it is
              somebody else's; OutputError when it can't be written
    """

    def __init__(
        self,
        output: Path,
        about: Mapping[str, Any],
        *,
        restart: bool = False,
        keep_all: bool = False,
        may_skip: bool = False,
        watch: InputWatch | None = None,
    ) -> None:
        if output.is_dir():
            raise OutputError(f"{output}: is a folder, expected a file to write")
        self._keep_all, self._may_skip, self._watch = keep_all, may_skip, watch
        self._numbers: dict[int, int] = {}  # of the files of hidden states, by layer
        self._safe = _NOTHING  # the layer whose hidden states are on the disk itself
        folder, about = work_path(output), {**WORK.mark, "version": VERSION, **about}
        super().__init__(folder, WORK, about, refusals_of(folder), restart=restart)

    def _begin(self) -> None:
        about, begun = WORK.read_about(self.folder), _by_layer(self._record.entries).get(_NOTHING)
        if begun is not None and self._damaged(begun, latest=False):
            about = None
        if about is not None:
            self._run_lock.refuse_another(about)
        if about is None or begun is None:
            self.done, damaged = _NOTHING, [WORK.about if about is None else RECORD]
        else:
            self.done, damaged = self._last_whole()
            damaged = [RECORD] if self._record.is_torn else damaged
        has_layers = any(OF_LAYERS.fullmatch(path.name) for path in files_of(self.folder))
        if damaged and has_layers:
            self._say(damaged[0])
        if self.done == _NOTHING and (has_layers or about is None or begun is None):
            self._forget_layers()
        else:
            self._secure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, KeyboardInterrupt) and self.done > EMBEDDING:
            note = f"{counted(self.done + 1, 'layer')} done and kept: the same command resumes from there"
            if not getattr(error, "__notes__", []):  # those of another pass, which came later
                error.add_note(note)
        self.close()

    def hidden_path(self, layer: int) -> Path:
        """The file of the hidden states after `layer`."""
        number = f"{layer + 1:05d}" if self._keep_all else self.hidden_number(layer)
        return self.folder / f"{HIDDEN}{number}"

    def hidden_number(self, layer: int) -> int:
        """Return the number, 0 to 2, of the file of the hidden states after `layer`.

        Of the layer that is computed, it is none that the run can go on from, after a crash of the machine
        or without one.
        """
        if layer not in self._numbers:
            kept = {each: self._numbers[each] for each in (self.done, self._safe) if each in self._numbers}
            free = (each for each in (layer % 2, 1 - layer % 2, 2) if each not in kept.values())
            self._numbers = kept | {layer: next(free)}
        return self._numbers[layer]

    @property
    def middle_path(self) -> Path:
        """The scratch file for hidden states between the two halves of a layer."""
        return self.folder / "middle"

    def finish_layer(self, layer: int, arrays: Arrays, states: Iterable[Path] = ()) -> None:
        """Record that `layer` is done, and what was kept of it.

        states  files of hidden states after the layer, in this folder
        raises  OutputError
        """
        if self._watch is not None:
            self._watch.refuse_changed()
        kept, latest = [], [path.name for path in states]
        if self._keep_all:
            kept, latest = latest, kept
        if arrays:
            path = self._layer_path(layer)
            save_arrays(path, arrays)
            kept.append(path.name)
        self._record.add({"layer": layer, "latest": latest}, [*kept, *latest])
        self.done = layer
        if not self._record.unsynced:
            self._safe = layer

    def arrays(self, layer: int) -> Arrays:
        """Load what was kept of `layer`.

        raises  OutputError for a file that another program has changed meanwhile
        """
        entry = _by_layer(self._record.entries).get(layer)
        path = self._layer_path(layer)
        if entry is None or path.name not in entry.files:
            return {}
        return load_arrays(path)

    def start_over(self, why: str | None) -> None:
        """Have all layers computed again; `why` begins a line that says so, None: there is none."""
        if why is not None:
            remark(f"{why}; computing all layers again")
        self._forget_layers()

    def _forget_layers(self) -> None:
        remove_files(self.folder, OF_LAYERS)
        WORK.write_about(self.folder, self._run_lock.about)
        self._record.forget()
        self._record.add({"layer": _NOTHING, "latest": []}, [WORK.about])
        self.done = self._safe = _NOTHING
        self._numbers = {}

    def _secure(self) -> None:
        """Bring what an earlier run has left to the disk itself, which that run may not have done."""
        entries = _by_layer(self._record.entries)
        latest = entries[self.done].what["latest"]
        names = [name for name in latest if name.startswith(HIDDEN)]
        self._numbers = {self.done - at: int(name.removeprefix(HIDDEN)) for at, name in enumerate(names)}
        for layer, entry in entries.items():
            if layer <= self.done:
                self._record.unsynced |= entry.files.keys() - set(entry.what["latest"])
        self._record.unsynced |= set(latest)
        self._record.sync()
        self._safe = self.done

    def _layer_path(self, layer: int) -> Path:
        return self.folder / ("embedding.npz" if layer == EMBEDDING else f"sums.{layer:05d}.npz")

    def _last_whole(self) -> tuple[int, list[str]]:
        """Return the last layer after which a run can go on, and the damaged files that it is not for."""
        layers = _by_layer(self._record.entries)
        damaged: list[str] = []
        whole = [_NOTHING]
        for layer in sorted(layers.keys() - whole):
            if layer != whole[-1] + 1 and not self._may_skip:
                break
            damaged = self._damaged(layers[layer], latest=False)
            if damaged:
                break
            whole.append(layer)
        # The latest states are those of the last layer; where they are damaged, those of the layer before may
        # not be overwritten yet.
        while whole[-1] > _NOTHING and (bad := self._damaged(layers[whole[-1]], latest=True)):
            damaged += bad
            whole.pop()
        return whole[-1], damaged

    def _damaged(self, entry: Entry, *, latest: bool) -> list[str]:
        """List the files of a layer that are not as they were written.

        latest  look at the states that later layers overwrite, instead of what stays
        """
        return [
            name
            for name, seal in entry.files.items()
            if (name in entry.what["latest"]) == latest and not self._record.fits(name, seal)
        ]

    def _say(self, name: str) -> None:
        again = "all layers" if self.done < 0 else f"layers after {self.done}"
        remark(f"{self.folder / name}: missing, or not as it was written; computing {again} again")


def _by_layer(entries: Iterable[Entry]) -> dict[int, Entry]:
    """Return the entry of each layer; one that was done again takes those behind it along."""
    layers: dict[int, Entry] = {}
    for entry in entries:
        number = entry.what["layer"]
        layers = {layer: each for layer, each in layers.items() if layer < number} | {number: entry}
    return layers


def paths_of_parts(output: Path, *names: str) -> tuple[Path, ...]:
    """Return the paths with which to open the work folders of a run that has several, all in OUT.work."""
    return tuple(work_path(output) / name for name in names)


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays to a file; raises OutputError."""
    write_whole_of(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


def load_arrays(path: Path) -> Arrays:
    """Return the arrays of a file that was whole when the run began.

    raises  OutputError for a file that another program has changed meanwhile
    """
    try:
        with np.load(path) as stored:
            return dict(stored)
    except Exception as error:  # numpy and zipfile raise all sorts
        raise OutputError(f"{path}: can't be read ({error}); was it changed meanwhile?") from error
