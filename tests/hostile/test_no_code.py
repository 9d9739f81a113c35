"""Nothing in a checkpoint's folder is run: not its Python files, not its pickles, not its templates."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest

from gguf_tools.commands.convert import main as convert
from gguf_tools.commands.main import main as gguf_tools
from tests.support.checkpoints import edit_config, micro_checkpoint
from tests.support.tokenizer_files import copy_tokenizer


class Touches:
    """An object whose unpickling makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.path), 0o777)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The path that hostile code would leave behind."""
    return tmp_path / "was-here"


def write_pickle(path: Path, content: object) -> None:
    """Write a pickle as torch.save does, in a zip file."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
        file.writestr("archive/version", "3")


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_is_not_run(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], *, zipped: bool, allowed: bool
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}))
    content = {"model.norm.weight": Touches(trace)}
    if zipped:
        write_pickle(folder / "pytorch_model.bin", content)
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))
    arguments = [str(folder), *(["--allow-pickle"] if allowed else [])]
    for code in (gguf_tools(["checkpoint", *arguments]), convert(arguments)):
        assert code == 1
    assert capsys.readouterr().err.count("\n") == 2
    assert not trace.exists()


def test_python_files_and_templates_are_not_run(tmp_path: Path, trace: Path) -> None:
    folder = micro_checkpoint(tmp_path / "model", "v3", vocab_size=4096)
    copy_tokenizer("tiny", folder)
    hostile = f"import os\nos.mkdir({str(trace)!r})\n"
    names = ("modeling_deepseek", "configuration_deepseek", "tokenization_deepseek", "sitecustomize")
    for name in (*names, "numpy", "yaml", "json"):
        (folder / f"{name}.py").write_text(hostile)
    auto_map = {"AutoModelForCausalLM": "modeling_deepseek.X", "AutoConfig": "configuration_deepseek.X"}
    edit_config(folder, auto_map=auto_map, trust_remote_code=True)
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for _ in range(10**9) %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "README.md").write_text(f"---\nname: !!python/object/apply:os.mkdir ['{trace}']\n---\n")
    assert convert([str(folder), "--outfile", str(tmp_path / "out.gguf")]) == 0
    assert template.encode() in (tmp_path / "out.gguf").read_bytes()
    assert not trace.exists()
