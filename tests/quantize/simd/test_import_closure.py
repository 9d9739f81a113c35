"""The mark of a cached kernel changes with what the kernel is made of, and with nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantize.simd import kernel
from quantize.simd.kernel import closure_hash

REPOSITORY = Path(__file__).parents[3]

MODULES = (
    "quantize.formats.k_quants.affine",
    "quantize.formats.k_quants.symmetric",
    "quantize.formats.iq.iq2",
    "quantize.formats.finite",
    "convert.weights.kernels",
)


class Copy:
    """A copy of the packages whose files a test may change."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, module: str) -> Path:
        return self.root.joinpath(*module.split(".")).with_suffix(".py")

    def edit(self, module: str, change: Callable[[str], str]) -> None:
        path = self.path(module)
        before = path.read_text()
        path.write_text(change(before))
        assert path.read_text() != before

    def marks(self) -> dict[str, str]:
        """Return the mark of each of MODULES, as a process that starts now finds it."""
        for cached in (kernel._text, kernel._imports, kernel._file_of, closure_hash):
            cached.cache_clear()
        return {module: closure_hash(module, self.path(module)) for module in MODULES}


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    for package in ("gguf_tools", "quantize", "convert"):
        shutil.copytree(
            REPOSITORY / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    monkeypatch.setattr(kernel, "_ROOT", tmp_path)
    return Copy(tmp_path)


def add_constant(source: str) -> str:
    return source + "\n_ADDED = 1\n"


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("quantize.formats.k_quants.affine", {"quantize.formats.k_quants.affine"}),
        ("quantize.formats.k_quants.super_block", set(MODULES[:3])),
        ("quantize.simd.lanes", set(MODULES)),
        ("quantize.simd.kernel", set(MODULES)),
        ("quantize.formats.iq.grids.cached_search_4", {"quantize.formats.iq.iq2"}),
        ("quantize.formats.fp4", set()),
        ("quantize.formats.codecs", set()),
        ("gguf_tools.format.ggml_types", set()),
    ],
)
def test_a_change_marks_what_is_made_of_it(copy: Copy, changed: str, stale: set[str]) -> None:
    before = copy.marks()
    copy.edit(changed, add_constant)
    after = copy.marks()
    assert {module for module in MODULES if after[module] != before[module]} == stale


def test_a_module_imported_as_a_name_of_its_package_is_part_of_the_closure(copy: Copy) -> None:
    before = copy.marks()
    copy.edit("quantize.formats.iq.grids.__init__", add_constant)  # `from quantize.formats.iq import grids`
    assert copy.marks()["quantize.formats.iq.iq2"] != before["quantize.formats.iq.iq2"]
