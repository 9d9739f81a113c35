"""Several types at once: the files of making each alone, from one walk over the source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_tools.commands.convert
import gguf_tools.commands.quantize
import imatrix
import quantize
from gguf_tools.format.ggml_types import F32
from quantize.fill.sources import GGUFTensor
from tests.end_to_end.test_commands import MATRIX

TYPES = ["Q4_K_M", "IQ3_XXS", "Q8_0", "COPY"]
NAMES = [f"out-{name}.gguf" for name in TYPES]


@pytest.fixture(scope="module")
def alone(tiny_gguf: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Each type by itself."""
    folder, matrix = tmp_path_factory.mktemp("alone"), imatrix.load(MATRIX)
    for name, file in zip(TYPES, NAMES, strict=True):
        quantize.quantize(tiny_gguf("bf16"), folder / file, name, importances=matrix)
    return [(folder / file).read_bytes() for file in NAMES]


def made(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in NAMES]


def test_the_files_are_those_of_each_alone(
    alone: list[bytes], tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--imatrix", str(MATRIX), "--verify", str(tiny_gguf("bf16")), str(tmp_path / "out-{FTYPE}.gguf")]
    assert gguf_tools.commands.quantize.main([*words, ",".join(TYPES), "3"]) == 0
    assert made(tmp_path) == alone
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    said = capsys.readouterr().out
    assert [name for name in NAMES if f"wrote {tmp_path / name} in " not in said] == []


def test_rows_are_read_once(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []
    read_rows = GGUFTensor.read_rows

    def counted(self: GGUFTensor, start: int, stop: int) -> object:
        if self.type != F32:  # vectors, which are copied as they are stored
            seen.append((self.name, start, stop))
        return read_rows(self, start, stop)

    monkeypatch.setattr(GGUFTensor, "read_rows", counted)
    quantize.quantize_many(tiny_gguf("bf16"), tmp_path / "{ftype}.gguf", ["Q4_K_M", "Q5_K_M", "Q6_K"])
    assert len(seen) == len(set(seen)) > 100


def test_an_interrupted_set_resumes(
    alone: list[bytes], tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    matrix, output = imatrix.load(MATRIX), tmp_path / "out-{FTYPE}.gguf"

    class Stop(Exception):
        pass

    left = [100]

    def count(state: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stop

    with pytest.raises(Stop) as stopped:
        quantize.quantize_many(
            tiny_gguf("bf16"), output, TYPES, importances=matrix, n_threads=1, progress=count
        )
    assert all("chunks are done and kept" in note for note in stopped.value.__notes__)
    # One of them alone, and then the rest.
    one = quantize.quantize(tiny_gguf("bf16"), tmp_path / NAMES[0], TYPES[0], importances=matrix)
    assert one.written.n_resumed
    rest = quantize.quantize_many(tiny_gguf("bf16"), output, TYPES[1:], importances=matrix)
    assert all(result.written.n_resumed for result in rest)
    assert made(tmp_path) == alone


def test_reuse_of_older_files(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    source, output = tiny_gguf("bf16"), tmp_path / "{ftype}.gguf"
    first = quantize.quantize_many(source, output, ["Q4_K_S", "Q6_K"])
    before = [result.paths[0].read_bytes() for result in first]
    old = [result.paths[0].rename(tmp_path / f"old-{result.paths[0].name}") for result in first]
    again = quantize.quantize_many(source, output, ["Q4_K_S", "Q6_K"], reuse=iter(old))
    assert [result.written.reused[path] > 0 for result, path in zip(again, old, strict=True)] == [True, True]
    assert [result.paths[0].read_bytes() for result in again] == before


def test_the_converter_makes_several_too(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_folder), "--outfile", str(tmp_path / "m-{ftype}.gguf"), "--outtype"]
    assert gguf_tools.commands.convert.main([*words, "bf16,Q4_K_M"]) == 0
    together = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("bf16", "Q4_K_M"):
        assert gguf_tools.commands.convert.main([*words, name, "--force"]) == 0
        assert (tmp_path / f"m-{name.lower()}.gguf").read_bytes() == together[f"m-{name.lower()}.gguf"]
    assert len(together) == 2


def test_one_name_for_several_is_refused(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        gguf_tools.commands.quantize.main([str(tiny_gguf("bf16")), str(tmp_path / "o.gguf"), "Q4_0,Q8_0"])
        == 2
    )
    assert "put {ftype} into the name of the output" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
