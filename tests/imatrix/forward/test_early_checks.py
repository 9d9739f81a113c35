"""What is looked at before work begins: outputs, texts, and the room on a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from gguf_tools.errors import BadRequest, MissingFile, OutputError
from gguf_tools.files import early_checks
from gguf_tools.files.early_checks import nearest_folder, refuse_early, refuse_small_disk


def test_what_can_be_written_and_read_is_let_through(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    before = sorted(tmp_path.iterdir())
    refuse_early([tmp_path / "new.gguf", text, tmp_path, None], [text, None])
    assert sorted(tmp_path.iterdir()) == before


def test_what_can_not_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(OutputError, match=r"no/x\.gguf: there is no folder .*no; create it first"):
        refuse_early([tmp_path / "no" / "x.gguf"])
    with pytest.raises(MissingFile, match="can't be read"):
        refuse_early(texts=[tmp_path / "none.txt"])
    with pytest.raises(BadRequest, match="not UTF-8 at byte 3; it looks like ISO-8859-1: iconv"):
        refuse_early(texts=[latin])

    def closed(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(early_checks, "TemporaryFile", closed)
    with pytest.raises(OutputError, match=r"x\.gguf: can't be written \(Permission denied\)"):
        refuse_early([tmp_path / "x.gguf"])


def test_a_disk_must_have_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf_tools.system.files.free_bytes", lambda folder: 1 << 20)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "states").write_bytes(bytes(1 << 20))
    folders = [tmp_path / "work", tmp_path / "none"]
    refuse_small_disk(folders, 2 << 20, "hidden states", "use fewer chunks")
    with pytest.raises(
        OutputError, match=r"work: hidden states need 2\.00 MiB, and the disk has 1\.00 MiB left; use fewer"
    ):
        refuse_small_disk(folders, 3 << 20, "hidden states", "use fewer chunks")


def test_the_nearest_folder_is_one_that_is_there(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    assert nearest_folder(tmp_path) == tmp_path
