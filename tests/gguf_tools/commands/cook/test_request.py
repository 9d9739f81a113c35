"""What is asked for: types, sizes, names; and the record of what was made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gguf_tools.commands.cook.record import Record
from gguf_tools.commands.cook.request import model_name, parse_wanted
from gguf_tools.errors import BadOverride, BadRequest, OutputError
from gguf_tools.files.named_files import sha256_of


def test_types_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("name: mine\nfile_type: Q4_K_M\n")
    wanted = parse_wanted("q2_k, 3.2bpw,12.5GiB,mine.yaml,Q4_K")
    assert [each.label for each in wanted] == ["Q2_K", "3.2bpw", "12.5GiB", "mine", "Q4_K_M"]
    assert [each.size is not None for each in wanted] == [False, True, True, False, False]
    before = wanted[3].decides
    Path("mine.yaml").write_text("name: mine\nfile_type: Q5_K_M\n")
    assert parse_wanted("mine.yaml")[0].decides != before
    assert parse_wanted("q2_k")[0].decides == wanted[0].decides


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("Q4_KM", "did you mean|Q4_KM"),
        ("Q4_K_M,Q2_K,Q4_K", "Q4_K_M is named twice"),
        (",", "expected types or sizes"),
        ("3.2bqw", "unknown unit"),
        ("0bpw", "above 0"),
    ],
)
def test_what_is_no_type(text: str, part: str) -> None:
    with pytest.raises((BadRequest, BadOverride), match=part):
        parse_wanted(text)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("lite-bf16-00001-of-00003.gguf", "lite"), ("lite.F16.gguf", "lite"), ("lite-v2.gguf", "lite-v2"),
        ("bf16.gguf", "bf16"),
    ],
)  # fmt: skip
def test_names(path: str, name: str) -> None:
    assert model_name(Path(path)) == name


def test_a_folder_gives_its_name(tmp_path: Path) -> None:
    (tmp_path / "DeepSeek-V2-Lite").mkdir()
    assert model_name(tmp_path / "DeepSeek-V2-Lite") == "DeepSeek-V2-Lite"


# ---- the record


def test_a_step_is_finished_when_all_its_outputs_are_there(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with Record(tmp_path) as record:
        assert not record.is_finished("step", {"x": 1}, [a, b])
        record.begin("step", {"x": 1})
        assert not record.is_finished("step", {"x": 1}, [a, b])
        a.write_text("a")
        assert not record.is_finished("step", {"x": 1}, [a, b])
        b.write_text("b")
    with Record(tmp_path) as record:  # after a kill between the output and its note
        assert record.is_finished("step", {"x": 1}, [a, b])
        record.finish("step", [a, b])
        assert record.digest(a) == sha256_of(a)
        assert re.findall(r"\b\d{16,}\b(?!\")", (tmp_path / ".cook" / "record.json").read_text()) == []
        a.write_text("another")
        assert record.digest(a) == sha256_of(a)


def test_other_decisions_are_refused(tmp_path: Path) -> None:
    a = tmp_path / "a"
    with Record(tmp_path) as record:
        record.begin("step", {"x": 1, "y": 2})
        a.write_text("a")
        with pytest.raises(BadRequest, match=r"was begun with another y \(2, now 3\); .* restart=True"):
            record.is_finished("step", {"x": 1, "y": 3}, [a])
        assert record.differs("step", {"x": 1, "y": 3})
        record.forget("step", [a])
        assert not a.exists()
        assert not record.is_finished("step", {"x": 1, "y": 3}, [a])


def test_what_nobody_cooked_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with Record(tmp_path) as record, pytest.raises(BadRequest, match="was not cooked here"):
        record.is_finished("step", {}, [tmp_path / "a"])


def test_one_process_a_folder(tmp_path: Path) -> None:
    with Record(tmp_path), pytest.raises(OutputError, match="another process is cooking here"):
        Record(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"steps": []}', '{"steps": {"a": {}}}', '{"steps": [1]}'])
def test_a_damaged_record_is_one_line(content: str, tmp_path: Path) -> None:
    with Record(tmp_path):
        pass
    (tmp_path / ".cook" / "record.json").write_text(content)
    with pytest.raises(BadRequest, match="is no record of what was cooked"):
        Record(tmp_path)
