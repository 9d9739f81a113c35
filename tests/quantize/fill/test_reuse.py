"""Tensors taken from older files: which, that they are right, and that runs stay resumable."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from gguf_tools.errors import BadTensor, ExecutionError, OutputError, ToolkitError, TruncatedError
from gguf_tools.files.partial_file import PartialFile
from gguf_tools.format.ggml_types import F32, Q4_0, Q4_1, Q8_0, GGMLType
from gguf_tools.format.header import Endian
from gguf_tools.format.shards import open_gguf, shard_paths
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.fill import filling
from quantize.fill.chunks import UNKNOWN, RowRange, RowsDigest
from quantize.fill.encode import RowSources, Target, encode_strips
from quantize.fill.filling import FillJob
from quantize.fill.outputs import Written, write_outputs
from quantize.fill.provenance import PROVENANCE_KEY, provenance_value, read_provenance
from quantize.importances.entries import Importance, ResolvedImportance
from quantize.prepare import lay_out
from quantize.run_options import RunOptions
from tests.support import samples
from tests.support.killing import Mode, killed_at

SHAPE = (3, 2, 64)
NAMES = tuple(f"blk.{i}.ffn_up_exps.weight" for i in range(5))
COPIED = "blk.0.attn_norm.weight"


@dataclass(frozen=True)
class Rows:
    """A source tensor of random rows, the same each time."""

    name: str
    seed: int
    shape: tuple[int, ...] = SHAPE
    type: GGMLType = F32
    by_rows: ClassVar[bool] = True

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return samples.rows("normal", (int(np.prod(self.shape[:-1])), self.shape[-1]), self.seed)[start:stop]

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


def importance(seed: int) -> ResolvedImportance:
    """Return a row of importances for each matrix."""
    values = np.stack([samples.importances("random", SHAPE[-1], 10 * seed + i) for i in range(SHAPE[0])])
    return ResolvedImportance("", Importance(values, np.ones(SHAPE[0], np.float32)), SHAPE[1], 0, "")


@dataclass(frozen=True)
class Setup:
    """What a run makes: by default five tensors as Q4_0 with importances, and one that is copied."""

    types: Mapping[str, GGMLType]
    sources: Mapping[str, Rows]
    importances: Mapping[str, ResolvedImportance]
    n_parts: int = 1
    provenance: bool = True
    endian: Endian = "little"

    def write(
        self,
        path: Path,
        reuse: Iterable[Path] = (),
        *,
        n_threads: int = 1,
        verify: bool = False,
    ) -> Written:
        infos = [TensorInfo(name, self.sources[name].shape, type_) for name, type_ in self.types.items()]
        metadata = {"general.name": Value.string("x")}
        if self.provenance:
            metadata[PROVENANCE_KEY] = provenance_value([UNKNOWN] * len(infos))
        groups = [infos] if self.n_parts == 1 else [infos[:2], infos[2:3], infos[3:]]
        outputs = lay_out(path, metadata, groups, self.endian)
        job = FillJob(outputs, RowSources(self.sources, self.importances))
        return write_outputs([job], RunOptions(n_threads, reuse=reuse, verify=verify))[0]

    def paths(self, path: Path) -> list[Path]:
        return shard_paths(path, self.n_parts)

    def expected(self, folder: Path) -> dict[str, bytes]:
        """Return what a run without older files writes to out.gguf, by file name."""
        folder.mkdir()
        self.write(folder / "out.gguf")
        return {path.name: path.read_bytes() for path in folder.iterdir()}


SETUP = Setup(
    {**dict.fromkeys(NAMES, Q4_0), COPIED: F32},
    {**{name: Rows(name, i) for i, name in enumerate(NAMES)}, COPIED: Rows(COPIED, 9, (64,))},
    {name: importance(i) for i, name in enumerate(NAMES)},
)


def warm_up() -> None:
    """Load what a run needs into the process that forks children."""
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old.gguf"
        SETUP.write(old, verify=True)
        SETUP.write(Path(folder) / "new.gguf", [old], verify=True)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that runs encode, a name for every chunk; what is only copied doesn't count."""
    names: list[str] = []

    def counted(
        rows: RowRange, targets: Sequence[Target], digest: RowsDigest | None = None
    ) -> Iterator[tuple[np.ndarray, ...]]:
        if any(target.sources.is_encoded(rows.tensor, target.type) for target in targets):
            names.append(rows.tensor)
        yield from encode_strips(rows, targets, digest)

    monkeypatch.setattr(filling, "encode_strips", counted)
    return names


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that SETUP has made."""
    path = tmp_path / "old.gguf"
    SETUP.write(path)
    return path


def numbers(path: Path) -> dict[str, int] | None:
    with open_gguf(path) as file:
        return read_provenance(file)


# --- provenance -----------------------------------------------------------------------------


def test_every_tensor_that_is_encoded_has_a_number_of_its_own(old: Path) -> None:
    found = numbers(old)
    assert found is not None
    assert tuple(found) == NAMES
    assert len(set(found.values())) == len(NAMES)


@pytest.mark.parametrize("n_threads", [2, 5])
@pytest.mark.parametrize("n_parts", [1, 3])
def test_it_depends_on_neither_threads_nor_parts(
    old: Path, tmp_path: Path, n_threads: int, n_parts: int
) -> None:
    replace(SETUP, n_parts=n_parts).write(tmp_path / "new.gguf", n_threads=n_threads)
    assert numbers(shard_paths(tmp_path / "new.gguf", n_parts)[-1]) == numbers(old)


def test_it_is_left_out_when_there_is_no_place_for_it(old: Path, tmp_path: Path) -> None:
    replace(SETUP, provenance=False).write(tmp_path / "new.gguf")
    with open_gguf(tmp_path / "new.gguf") as new, open_gguf(old) as with_numbers:
        assert {*with_numbers.metadata} - {*new.metadata} == {PROVENANCE_KEY}
        assert all((new.raw(name) == with_numbers.raw(name)).all() for name in new.tensors)


# --- what is reused -------------------------------------------------------------------------


def changed_importances() -> Setup:
    return replace(SETUP, importances={**SETUP.importances, **{name: importance(77) for name in NAMES[1:4]}})


def changed_types() -> Setup:
    return replace(SETUP, types={**SETUP.types, NAMES[0]: Q8_0, NAMES[4]: Q4_1})


def changed_source() -> Setup:
    return replace(SETUP, sources={**SETUP.sources, NAMES[2]: Rows(NAMES[2], 2000)})


def no_importances() -> Setup:
    return replace(SETUP, importances={})


CHANGES = {
    "nothing": (lambda: SETUP, ()),
    "importances": (changed_importances, NAMES[1:4]),
    "types": (changed_types, (NAMES[0], NAMES[4])),
    "source": (changed_source, (NAMES[2],)),
    "no importances": (no_importances, NAMES),
}


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("n_parts", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_only_what_has_changed_is_made(
    old: Path, tmp_path: Path, encoded: list[str], change: str, n_parts: int, n_threads: int
) -> None:
    make, remade = CHANGES[change]
    setup = replace(make(), n_parts=n_parts)
    expected = setup.expected(tmp_path / "expected")
    encoded.clear()
    (tmp_path / "new").mkdir()
    written = setup.write(tmp_path / "new/out.gguf", [old], n_threads=n_threads, verify=True)
    assert sorted(encoded) == sorted(name for name in remade for _ in range(SHAPE[0]))
    assert written.reused == {old: len(NAMES) - len(remade)}
    assert written.notes == ()
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == expected


def test_from_a_split_set_and_over_it(tmp_path: Path, encoded: list[str]) -> None:
    """The parts that are read are those that are replaced."""
    folder = tmp_path / "out"
    folder.mkdir()
    replace(SETUP, n_parts=3).write(folder / "out.gguf")
    setup = replace(changed_importances(), n_parts=3)
    expected = setup.expected(tmp_path / "expected")
    encoded.clear()
    old = setup.paths(folder / "out.gguf")[1]
    assert setup.write(folder / "out.gguf", [old]).reused == {old: 2}
    assert set(encoded) == {*NAMES[1:4]}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


def test_from_several_files(old: Path, tmp_path: Path, encoded: list[str]) -> None:
    other = tmp_path / "other.gguf"
    changed_importances().write(other)
    mixed = replace(
        SETUP,
        types={**SETUP.types, NAMES[4]: Q8_0},
        importances={**SETUP.importances, NAMES[1]: importance(77)},
    )
    encoded.clear()
    written = mixed.write(tmp_path / "new.gguf", [old, other])
    assert set(encoded) == {NAMES[4]}
    assert written.reused == {old: 3, other: 1}


def test_renamed_and_reshaped_tensors_are_others(old: Path, tmp_path: Path, encoded: list[str]) -> None:
    source = Rows(NAMES[0], 0, (6, 64))
    setup = Setup(
        {NAMES[0]: Q4_0, "other": Q4_0}, {NAMES[0]: source, "other": replace(SETUP.sources[NAMES[1]])}, {}
    )
    encoded.clear()
    assert setup.write(tmp_path / "new.gguf", [old]).reused == {old: 0}
    assert set(encoded) == {NAMES[0], "other"}


# --- what is not ----------------------------------------------------------------------------


def test_a_file_without_provenance(tmp_path: Path, encoded: list[str]) -> None:
    old = tmp_path / "plain.gguf"
    replace(SETUP, provenance=False).write(old)
    encoded.clear()
    written = SETUP.write(tmp_path / "new.gguf", [old])
    assert written.notes == (f"{old}: doesn't say what its tensors were made of; none is reused",)
    assert written.reused == {}
    assert set(encoded) == {*NAMES}


def test_a_file_in_the_other_byte_order(tmp_path: Path) -> None:
    old = tmp_path / "big.gguf"
    big = replace(SETUP, endian="big")
    big.write(old)
    assert SETUP.write(tmp_path / "new.gguf", [old]).notes == (
        f"{old}: is big endian, unlike the output; none is reused",
    )
    assert big.write(tmp_path / "again.gguf", [old], verify=True).reused == {old: len(NAMES)}
    assert (tmp_path / "again.gguf").read_bytes() == old.read_bytes()


def test_a_tensor_that_is_damaged(old: Path, tmp_path: Path, encoded: list[str]) -> None:
    expected = old.read_bytes()
    with open_gguf(old) as file:
        offset = file.data_offset(NAMES[3])
    data = bytearray(expected)
    data[offset + 40] ^= 1
    old.write_bytes(data)
    encoded.clear()
    written = SETUP.write(tmp_path / "new.gguf", [old])
    assert written.notes == (f"{old}: {NAMES[3]} is damaged; it was made anew",)
    assert written.reused == {old: len(NAMES) - 1}
    assert set(encoded) == {NAMES[3]}
    assert (tmp_path / "new.gguf").read_bytes() == expected


def test_files_that_can_t_be_opened(old: Path, tmp_path: Path) -> None:
    old.write_bytes(old.read_bytes()[:-100])
    for path, error in ((old, TruncatedError), (tmp_path / "absent", FileNotFoundError)):
        with pytest.raises(error, match=path.name):
            SETUP.write(tmp_path / "new.gguf", [path])
    assert list(tmp_path.iterdir()) == [old]


def test_the_partial_of_the_output_is_no_older_file(old: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "new.gguf.partial"
    old.rename(unfinished)
    before = unfinished.read_bytes()
    with pytest.raises(OutputError, match=r"new\.gguf\.partial: is an input of this run"):
        SETUP.write(tmp_path / "new.gguf", [unfinished])
    assert unfinished.read_bytes() == before


# --- runs that are interrupted --------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_parts", "mode"),
    [
        (1, "before"),
        (1, "torn"),
        *(pytest.param(3, mode, marks=pytest.mark.slow) for mode in ("before", "torn")),
    ],
)
def test_killed_at_any_call_the_next_run_ends_it(old: Path, tmp_path: Path, n_parts: int, mode: Mode) -> None:
    """With an older file in the first run, in the second, or in both: it is the same run."""
    setup = replace(changed_importances(), n_parts=n_parts)
    expected = setup.expected(tmp_path / "expected")
    for n in itertools.count(step=2):
        folder = tmp_path / str(n)
        folder.mkdir()
        first, second = [([old], []), ([], [old]), ([old], [old])][n // 2 % 3]
        killed = killed_at(n, partial(setup.write, folder / "out.gguf", first, verify=True), mode)
        setup.write(folder / "out.gguf", second, verify=True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
        if not killed:
            break
    assert n > 20 * n_parts


@dataclass(frozen=True)
class Failing(Rows):
    """A source tensor that can't be read."""

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        raise OSError("gone")


def test_what_an_interrupted_run_has_taken_is_not_taken_again(
    old: Path, tmp_path: Path, encoded: list[str]
) -> None:
    failing = replace(SETUP, sources={**SETUP.sources, NAMES[4]: Failing(NAMES[4], 4)})
    with pytest.raises(ExecutionError, match="gone"):
        failing.write(tmp_path / "new.gguf", [old])
    encoded.clear()
    written = SETUP.write(tmp_path / "new.gguf", [old])
    assert written.n_resumed == SHAPE[0] * 4
    assert written.reused == {old: 1}
    assert encoded == []
    assert (tmp_path / "new.gguf").read_bytes() == old.read_bytes()


@pytest.mark.parametrize("n_parts", [1, 3])
def test_a_tensor_that_is_not_what_was_written_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[str], n_parts: int
) -> None:
    """A bit flips on its way to the file; the check finds it, and the same command mends it."""
    setup = replace(SETUP, n_parts=n_parts)
    expected = setup.expected(tmp_path / "expected")
    folder = tmp_path / "out"
    folder.mkdir()
    write = PartialFile.write
    with open_gguf(setup.paths(tmp_path / "expected" / "out.gguf")[0]) as file:
        place = f"{file.file_of(NAMES[3]).path.name}.partial", file.data_offset(NAMES[3])

    def flip(self: PartialFile, offset: int, data: memoryview) -> None:
        if (self.path.name, offset) == place:
            data = memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))
        write(self, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "write", flip)
        with pytest.raises(ToolkitError, match=rf"{NAMES[3]}: row 0 is not what encoding it") as caught:
            setup.write(folder / "out.gguf", verify=True)
    assert isinstance(caught.value, BadTensor | ExecutionError)
    (note,) = caught.value.__notes__
    assert note.endswith("chunks are done and kept: the same command resumes from there")
    encoded.clear()
    setup.write(folder / "out.gguf", verify=True)
    assert encoded == [NAMES[3]] * SHAPE[0]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
