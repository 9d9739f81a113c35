"""Editing a model's files: which files an edit changes, and the cheapest safe way to change each.

A file whose new header fits exactly into the room before the data is changed in place (in_place.py).
Any other file is rewritten: a new file is made beside it, the data are copied, and it takes the old name when
it is complete (rewrite.py). In a split set only the files that change are touched: the metadata are in the
first file, and a tensor's name is in the file that holds the tensor.

Each file changes completely or not at all. If a run is killed while several files change, some are new and
some are old, each is complete, and together they still open as a set: another run can finish the work. A file
that a killed run left half changed is restored by the next run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gguf_tools.argument_types import checked
from gguf_tools.edit import in_place
from gguf_tools.edit.header_edits import Change, Edit, Edited
from gguf_tools.edit.rewrite import NewFile, Origin, write_files, written
from gguf_tools.errors import BadRequest, FormatError, OutputError
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.files.partial_file import refuse_inputs
from gguf_tools.format import keys
from gguf_tools.format.header import DEFAULT_ALIGNMENT, alignment_of
from gguf_tools.format.reader import GGUFFile
from gguf_tools.format.shards import (
    MAX_SHARDS,
    FileLayout,
    GGUFSet,
    open_gguf,
    set_of,
    shard_path,
    shard_paths,
)
from gguf_tools.format.values import Metadata, Value
from gguf_tools.progress import Bar, Reporter, Shown
from gguf_tools.system.files import read_at

How = Literal["unchanged", "in place", "rewritten", "written"]


@dataclass(frozen=True)
class FileEdit(NewFile):
    """Edit of one file, and its result.

    how  "unchanged"; "in place": a new header over the old one; "rewritten": a new file in its place;
         "written": a new file elsewhere
    """

    how: How = field(kw_only=True)

    @property
    def bytes_written(self) -> int:
        if self.how == "unchanged":
            return 0
        return self.layout.data_start if self.how == "in place" else self.layout.total_bytes

    def as_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "how": self.how, "bytes_written": self.bytes_written}


@dataclass(frozen=True)
class EditOutcome:
    """Changes of an edit, and how each file was changed."""

    changes: tuple[Change, ...]
    files: tuple[FileEdit, ...]


@checked
def edit_model(
    path: str | os.PathLike[str],
    edit: Edit,
    *,
    output: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    force: bool = False,
    progress: Shown = None,
) -> EditOutcome:
    """Change the header of a file, or of the files of a split set.

        changes = [edit.parse_assignment("general.name=Lite")]
        edit.edit_model("lite.gguf", lambda metadata, names: edit.set_values(metadata, changes))

    edit      see header_edits.py; called with the metadata of the first file and the names of all tensors
    output    None changes the files themselves; else the result is written there, a set as
              OUTPUT-00001-of-0000N.gguf, and the files stay as they are
    dry_run   find out what would be done, and do nothing
    force     replace an output that is there
    progress  True, a function, a bar of tqdm or rich, or a CancelToken
    raises    GGUFError, BadRequest; nothing is changed then

    Tensors that take names from other files are renamed in rounds (see `_rename_rounds`). A run that is
    killed between two of them leaves those of the first renamed.
    """
    if output is not None and not dry_run:
        refuse_inputs(Path(output), [path])
        refuse_to_replace([Path(output)], force=force)
    with Bar("copying", show=progress) as bar:
        return _edit(path, edit, None if output is None else Path(output), bar, dry_run=dry_run)


def _edit(
    path: str | os.PathLike[str], edit: Edit, output: Path | None, progress: Reporter, *, dry_run: bool
) -> EditOutcome:
    """Do what `edit_model` says."""
    with open_gguf(path) as source:
        first = _real(source.shards[0].path)
        edited = _edited(source, edit)
        rounds = [] if output is not None else _rename_rounds(source, edited.new_names)
        if dry_run or output is not None:
            outcome = _plan(source, edited, output)
            if not dry_run:
                write_files(outcome.files, source.paths, progress)
            return outcome
    if len(rounds) < 2:
        return _edit_in_place(path, first, edit, progress)
    outcomes = [_edit_in_place(path, first, _renaming(names), progress) for names in rounds]
    changed = {file.path: file for outcome in outcomes for file in outcome.files if file.how != "unchanged"}
    return EditOutcome(edited.changes, tuple(changed.get(file.path, file) for file in outcomes[-1].files))


def _edit_in_place(path: str | os.PathLike[str], first: Path, edit: Edit, progress: Reporter) -> EditOutcome:
    """Change the files of `path`, the first of which is `first`; see `edit_model`."""
    # Whoever held the lock until now has changed the files, so they are opened anew.
    with ExitStack() as opened:
        locks = {first: opened.enter_context(in_place.locked(first))}
        source = opened.enter_context(open_gguf(path))
        outcome = _plan(source, _edited(source, edit), None)
        for file in outcome.files:
            if file.how == "in place" and file.path not in locks:
                locks[file.path] = opened.enter_context(in_place.locked(file.path))
        # The first file comes last of those that get a new one in their place: until then its lock keeps
        # others from the whole set.
        with written([file for file in outcome.files if file.how == "rewritten"], (), progress):
            _replace_headers([file for file in outcome.files if file.how == "in place"], locks)
        return outcome


def _replace_headers(edits: Sequence[FileEdit], locks: Mapping[Path, int]) -> None:
    """Overwrite the headers of files; where one can't be, those before it get their old ones back.

    locks  descriptors by path, from `in_place.locked`
    """
    replaced: list[tuple[FileEdit, bytes]] = []
    try:
        for edit in edits:
            old = read_at(locks[edit.path], len(edit.layout.header), 0)
            in_place.replace_header(locks[edit.path], edit.path, edit.layout.header)
            replaced.append((edit, old))
    except BaseException:
        for edit, old in replaced:
            with suppress(OutputError):  # its NAME.undo is then left for `recover`
                in_place.replace_header(locks[edit.path], edit.path, old)
        raise


def recover(path: str | os.PathLike[str], *, dry_run: bool = False) -> list[Path]:
    """Undo an interrupted edit of a file, or of the set that it belongs to; returns the files restored.

        edit.recover("lite.gguf")

    dry_run  restore nothing
    raises   OutputError if something can't be restored, or under `dry_run` if something should be
    """
    restored = []
    for file in _files_by_name(Path(path)):
        file = _real(file)
        if dry_run and in_place.undo_path(file).exists():
            raise OutputError(
                f"{file}: an edit was interrupted; run without --dry-run to restore it from "
                f"{in_place.undo_path(file).name}"
            )
        if in_place.restore(file):
            restored.append(file)
    return restored


def _real(path: Path) -> Path:
    """Return the file behind a path: a symbolic link is kept, and its target is changed."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _files_by_name(path: Path) -> list[Path]:
    """Return the files of the set that a path belongs to, by name alone: their headers may be unreadable."""
    if not path.name:
        return []
    prefix, count = set_of(path) or (path, 0)
    if not 1 <= count <= MAX_SHARDS:
        return [path]
    return [shard_path(prefix, index, count) for index in range(count)]


def _edited(source: GGUFSet, edit: Edit) -> Edited:
    try:
        return edit(source.shards[0].metadata, list(source.tensors))
    except BadRequest as error:
        raise BadRequest(f"{source.path}: {error}") from None


def _renaming(new_names: dict[str, str]) -> Edit:
    """Return the edit of one round of a renaming."""
    return lambda metadata, _names: Edited(dict(metadata), new_names)


def _plan(source: GGUFSet, edited: Edited, output: Path | None) -> EditOutcome:
    """Find out what an edit does, and how; nothing is written."""
    if output is None:
        paths = [_real(file.path) for file in source.shards]
    else:
        paths = _output_paths(output, len(source.shards))
    metadata = _metadata_of_files(source, edited)
    files = [
        _plan_file(file, path, own, edited.new_names, in_its_place=output is None)
        for file, path, own in zip(source.shards, paths, metadata, strict=True)
    ]
    return EditOutcome(edited.changes, tuple(files))


def _output_paths(output: Path, count: int) -> list[Path]:
    """Return the paths of the result; `output` may be the name of one of them."""
    named = set_of(output)
    if count > 1 and named is not None and named[1] == count:
        return _files_by_name(output)
    return shard_paths(output, count)


def _plan_file(
    file: GGUFFile, path: Path, metadata: Metadata, new_names: Mapping[str, str], *, in_its_place: bool
) -> FileEdit:
    tensors = [replace(info, name=new_names.get(name, name)) for name, info in file.tensors.items()]
    try:
        layout = FileLayout.of(metadata, tensors, endian=file.endian, version=file.version)
    except FormatError as error:
        raise FormatError(f"{file.path}: {error}") from None
    how: How = "rewritten"
    if not in_its_place:
        how = "written"
    elif list(file.metadata.items()) == list(metadata.items()) and not new_names.keys() & file.tensors.keys():
        how = "unchanged"
    elif _fits(layout, file):
        how = "in place"
    origins = tuple(Origin(file, name) for name in file.tensors)
    permissions = stat.S_IMODE(os.stat(path).st_mode) if how == "rewritten" else None
    return FileEdit(path, layout, origins, permissions, how=how)


def _fits(layout: FileLayout, file: GGUFFile) -> bool:
    """Whether a layout's header can overwrite the header of a file while the data stay where they are."""
    offsets = tuple(file.data_offset(name) for name in file.tensors)
    return (layout.data_start, layout.offsets) == (file.data_start, offsets) and (
        file.size_bytes >= file.data_start
    )


def _metadata_of_files(source: GGUFSet, edited: Edited) -> list[Metadata]:
    """Return the metadata of each file: the first has the model's, and all have its alignment."""
    first, *others = (file.metadata for file in source.shards)
    before, after = (alignment_of(metadata, str(source.path)) for metadata in (first, edited.metadata))
    if before == after:
        return [edited.metadata, *others]
    own: dict[str, Value] = {} if after == DEFAULT_ALIGNMENT else {keys.ALIGNMENT: Value.u32(after)}
    rest = [{key: value for key, value in metadata.items() if key != keys.ALIGNMENT} for metadata in others]
    return [edited.metadata, *(own | metadata for metadata in rest)]


def _rename_rounds(source: GGUFSet, new_names: Mapping[str, str]) -> list[dict[str, str]]:
    """Return new names in the order in which files can take them, as few rounds of them as possible.

    The files of a set change one after the other, and never do two of them have a tensor of the same name: a
    run that is killed in between would leave a set that does not open. So a tensor that takes a name from
    another file waits until it is free there.

    raises  BadRequest where tensors of several files take each other's names in a circle
    """
    home = {name: source.file_of(name).path for name in source.tensors}
    pending = dict(new_names)
    rounds = []
    while pending:
        ready = _free_names(pending, home)
        if not ready:
            old, new = next(iter(pending.items()))
            raise BadRequest(
                f"{source.path}: tensor {old!r} can't become {new!r} while there is one in {home[new].name};"
                " rename that one first, to an unused name, in a separate run"
            )
        rounds.append(ready)
        files = {old: home.pop(old) for old in ready}
        home |= {new: files[old] for old, new in ready.items()}
        pending = {old: new for old, new in pending.items() if old not in ready}
    return rounds


def _free_names(pending: Mapping[str, str], home: Mapping[str, Path]) -> dict[str, str]:
    """Return the names that can be taken now: free ones, and those that the same file gives up with it."""
    ready = dict(pending)
    while True:
        blocked = [
            old for old, new in ready.items() if new in home and not (home[new] == home[old] and new in ready)
        ]
        if not blocked:
            return ready
        for old in blocked:
            del ready[old]
