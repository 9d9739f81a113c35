"""Methods of calibration: those of the table, and the one that docs/add-a-method.md adds."""

from __future__ import annotations

from pathlib import Path

import pytest

import convert
import gguf_tools
import quantize
from gguf_tools import open_gguf
from gguf_tools.errors import BadArgument

pytest.importorskip("torch")

from quantize.rounding import methods
from quantize.rounding.methods import METHODS, Method
from tests.imatrix.calibrate import powers as example
from tests.imatrix.calibrate.powers import POWERS

PAGE = Path(__file__).parents[3] / "docs" / "add-a-method.md"
CUT = gguf_tools.Cut(64, n_chunks=6)


@pytest.fixture
def powers(monkeypatch: pytest.MonkeyPatch) -> Method:
    """The method of the page, with its row in the table."""
    monkeypatch.setattr(methods, "METHODS", {**METHODS, POWERS.name: POWERS})
    return POWERS


@pytest.fixture(scope="module")
def base(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    convert.convert(tiny_folder, path, outtype="f32")
    return path


def tensor_bytes(base: Path, text: Path, output: Path, method: str, n_threads: int = 1) -> dict[str, bytes]:
    """Return the tensors of a file that is calibrated by a method, without a pass back."""
    calibration = gguf_tools.Calibration(text, CUT, sequential=False, method=method, embedding=False)
    quantize.quantize(base, output, "Q2_K", calibration=calibration, n_threads=n_threads)
    with open_gguf(output) as file:
        return {name: file.raw(name).tobytes() for name in file.tensors}


@pytest.mark.slow
def test_the_method_of_the_page_goes_all_the_way(
    powers: Method, base: Path, text: Path, tmp_path: Path
) -> None:
    one = tensor_bytes(base, text, tmp_path / "one.gguf", powers.name)
    two = tensor_bytes(base, text, tmp_path / "two.gguf", powers.name, n_threads=2)
    diagonal = tensor_bytes(base, text, tmp_path / "diagonal.gguf", "diagonal")
    assert one == two
    changed = {name for name, data in one.items() if data != diagonal[name]}
    assert changed
    assert all(name.startswith("blk.") or name == "output.weight" for name in changed)


@pytest.mark.slow
def test_a_run_is_estimated_and_verified_under_any_method(
    powers: Method, base: Path, text: Path, tmp_path: Path
) -> None:
    calibration = gguf_tools.Calibration(text, CUT, method=powers.name, embedding=False)
    but_experts = quantize.PlanOptions(overrides=quantize.parse_overrides(("exps=f16",)))
    options = quantize.QuantizeOptions(types=but_experts, calibration=calibration)
    from quantize.pipeline import plan_run
    from quantize.run_options import RunOptions

    with plan_run(base, tmp_path / "out.gguf", "Q2_K", options) as run:
        assert [line.split()[0] for line in run.needs(RunOptions(1))][:4] == [
            "calibration:", "memory", "disk", "time",
        ]  # fmt: skip
        assert run.execute(RunOptions(1, verify=True)).written.verification is not None


def test_the_code_of_the_page_is_the_code() -> None:
    assert f"```python\n{Path(example.__file__).read_text()}```" in PAGE.read_text()


def test_a_method_describes_what_decides_its_bytes(powers: Method) -> None:
    assert powers.describe() == {"name": "powers", "version": 1, "powers": [0.5, 1.0, 1.5]}
    described = [str(each.describe()) for each in methods.METHODS.values()]
    assert len(set(described)) == len(described)


def test_an_unknown_method_is_refused_at_once() -> None:
    with pytest.raises(BadArgument, match="calibration method 'gptq': expected one of two-sided, one-sided"):
        gguf_tools.Calibration("text.txt", method="gptq")
