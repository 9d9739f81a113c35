"""Whole runs without what other systems lack: the same bytes, interrupted or not, and the same locks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.other_systems import SYSTEMS

REPOSITORY = Path(__file__).parents[2]


def make_all(source: Path, folder: Path, target: Path) -> None:
    """Convert, split, quantize with an interruption, edit in place, all in `target`, which is empty."""
    import convert
    import quantize
    from gguf_tools.commands.main import main
    from gguf_tools.errors import OutputError

    convert.convert(folder, target / "one-pass.gguf", outtype="Q8_0", n_threads=2)
    assert main(["split", str(source), str(target / "m"), "--max-tensors", "20", "--quiet"]) == 0
    shard = next(target.glob("m-00001-of-*.gguf"))
    output = target / "q-{ftype}.gguf"
    n_left = 60

    def stop_in_the_middle(state: object) -> None:
        nonlocal n_left
        n_left -= 1
        if not n_left:
            raise KeyboardInterrupt
        if n_left == 30:
            with pytest.raises(OutputError, match="another process"):
                quantize.quantize(shard, output, "Q4_0", keep_split=True)

    with pytest.raises(KeyboardInterrupt):
        quantize.quantize(shard, output, "Q4_0", keep_split=True, progress=stop_in_the_middle)
    done = quantize.quantize(shard, output, "Q4_0", keep_split=True, verify=True, n_threads=2)
    assert done.written.n_resumed >= 59
    assert quantize.quantize(shard, output, "Q4_0", keep_split=True).is_found
    assert quantize.quantize(shard, output, "Q4_0", keep_split=True, n_threads=2, force=True).replaced
    (target / "edited.gguf").write_bytes(source.read_bytes())
    assert main(["rename", str(target / "edited.gguf"), "output_norm.weight=output_mron.weight"]) == 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_bytes_are_the_same_elsewhere(
    system: str, tiny_gguf: Callable[[str], Path], tiny_folder: Path, tmp_path: Path
) -> None:
    source = tiny_gguf("bf16")
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    make_all(source, tiny_folder, tmp_path / "here")
    script = (
        "import json, sys; from pathlib import Path; from tests.support.other_systems import SYSTEMS;"
        "called = SYSTEMS[sys.argv[1]](); from tests.end_to_end.test_other_systems import make_all;"
        "make_all(*map(Path, sys.argv[2:])); print(json.dumps(called))"
    )
    made = subprocess.run(
        [sys.executable, "-c", script, system, str(source), str(tiny_folder), str(tmp_path / "there")],
        capture_output=True, text=True, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    called = [Path(name).name for name in json.loads(made.stdout.splitlines()[-1])]
    # That system's own ways were used: of locking in Windows, of emptying the drive's memory in macOS.
    assert {"one-pass.gguf.journal", "one-pass.gguf.partial", "edited.gguf"} <= set(called)
    files = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == files
    assert len([name for name in files if name.startswith("q-q4_0-")]) > 1


@pytest.mark.parametrize("system", SYSTEMS)
def test_threads_share_a_file_elsewhere(system: str, tmp_path: Path) -> None:
    """Where only the position of a file can be had, threads do not move it under each other."""
    path = tmp_path / "numbers"
    script = f"""
import os, sys
from concurrent.futures import ThreadPoolExecutor
from tests.support.other_systems import SYSTEMS
SYSTEMS[sys.argv[1]]()
from gguf_tools.system import files, locks
fd = files.open_file({str(path)!r}, os.O_RDWR | os.O_CREAT)
def write(n):
    assert files.write_at(fd, n.to_bytes(4, "little") * 1000, 4000 * n) == 4000
def read(n):
    buffer = bytearray(4000)
    assert files.read_into(fd, memoryview(buffer), 4000 * n) == 4000
    assert buffer == files.read_at(fd, 4000, 4000 * n) == n.to_bytes(4, "little") * 1000
sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(write, range(300)))
    list(pool.map(read, range(300)))
assert files.read_into(fd, memoryview(bytearray(10)), 4000 * 300) == 0
print(locks.can_limit(), locks.usable_cores() == os.cpu_count())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, system], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True" if system == "macos" else "False", "True"]
    assert path.stat().st_size == 4000 * 300


def test_templates_are_only_searched_where_no_process_can_be_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gguf_tools.format.values import Value
    from gguf_tools.scanning.templates.verdicts import check_templates

    monkeypatch.setitem(sys.modules, "resource", None)
    metadata = {"tokenizer.chat_template": Value.string("{{ ''.__class__.__mro__ }}{{ messages }}")}
    findings = list(check_templates(metadata))
    assert "no process can be limited on this system" in findings[0].text
    assert any("__class__" in finding.text or "__mro__" in finding.text for finding in findings[1:])
