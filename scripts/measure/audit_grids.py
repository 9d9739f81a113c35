"""Count false alarms of `gguf-tools audit` where a base's weights lie on grids, and faults that it misses.

    python scripts/measure/audit_grids.py clean [--layers N] [--calibrated N] [--only FORMAT...]
    python scripts/measure/audit_grids.py faults [--layers N] [--only FORMAT...]

A base is examples/small-llama, its first layers, with matrices on the grid of a format that checkpoints are
stored in, or on that of a GGUF type. `clean` makes files of it by the plain encoder, with importances, and
calibrated: nothing in them is wrong. `faults` puts every fault of
tests/convert/audit/faults.py into such files; one that is found and called otherwise is printed,
and not missed. docs/audit.md has the counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import convert  # noqa: E402
import gguf_tools  # noqa: E402
import quantize  # noqa: E402
from gguf_tools.commands.main import main as command  # noqa: E402
from gguf_tools.findings import Level  # noqa: E402
from quantize.plan.plan import PlanOptions  # noqa: E402
from tests.convert.audit.faults import FAULTS, damage  # noqa: E402
from tests.convert.audit.grids import GRIDS, Grid, encoded_as, on_grid  # noqa: E402
from tests.support.trained_model import calibration_text  # noqa: E402

BASES: dict[str, Grid] = {
    **GRIDS, "Q4_K": encoded_as("Q4_K"), "Q8_0": encoded_as("Q8_0"), "none": lambda weight: weight,
}  # fmt: skip
"""Name -> a grid; `none` is for comparison."""
CLEAN = {
    "plain": (
        "F16",
        "Q8_0",
        "Q6_K",
        "Q5_K_M",
        "Q4_K_M",
        "Q4_0",
        "IQ4_XS",
        "IQ4_NL",
        "Q3_K_M",
        "Q2_K",
        "MXFP4_MOE",
    ),
    "importances": (
        "Q8_0",
        "Q6_K",
        "Q5_K_M",
        "Q4_K_M",
        "Q4_0",
        "Q3_K_M",
        "IQ4_XS",
        "IQ3_XXS",
        "IQ2_XS",
        "IQ4_K",
    ),
    "calibrated": ("Q8_0", "Q4_K_M", "Q3_K_M"),
}
"""How a file is made -> the types that are tried; calibrated ones take long, and are tried in turn."""

FAULTY = {"plain": ("Q4_K_M",), "importances": ("Q6_K",), "calibrated": ("Q4_K_M",)}
N_LAYERS = 6
"""Layers of the model."""


class Workshop:
    """A folder in which bases and files are made."""

    def __init__(self, folder: Path, n_layers: int) -> None:
        self.folder, self.text = folder, folder / "text.txt"
        self.text.write_bytes(calibration_text()[:30000])
        whole, self.exact, self.matrix = folder / "whole.gguf", folder / "f32.gguf", folder / "imatrix.gguf"
        convert.convert(ROOT / "examples" / "small-llama", whole, outtype="f32")
        pruned = PlanOptions(prune_layers=tuple(range(n_layers, N_LAYERS)))
        quantize.quantize(whole, self.exact, "F32", types=pruned)
        self._run("imatrix", "-m", self.exact, "-f", self.text, "-o", self.matrix)

    def _run(self, *words: object) -> None:
        assert command([*map(str, words), "-c", "64", "--chunks", "8", "-q"]) == 0

    def base(self, name: str) -> Path:
        return on_grid(self.exact, self.folder / "base.gguf", BASES[name])

    def file(self, base: Path, how: str, file_type: str) -> Path:
        path = self.folder / "file.gguf"
        path.unlink(missing_ok=True)
        if how == "calibrated":
            self._run("quantize", base, path, file_type, "--calibrate", self.text)
        else:
            importances = self.matrix if how == "importances" else None
            quantize.quantize(base, path, file_type, importances=importances)
        return path


def alarms(shop: Workshop, name: str, n_calibrated: int) -> Iterator[tuple[str, bool]]:
    """Yield each clean file of a base, and whether there was an alarm."""
    base, first = shop.base(name), list(BASES).index(name)
    in_turn = [*CLEAN["calibrated"] * 2][first % 3 :][:n_calibrated]
    for how, types in {**CLEAN, "calibrated": in_turn}.items():
        for file_type in types:
            report = gguf_tools.audit(shop.file(base, how, file_type), base)
            told = [each for each in report.findings if each.level is not Level.NOTE]
            for each in told:
                print(f"ALARM {name}, {how} {file_type}: {each.where}: {each.text}", flush=True)
            yield how, bool(told)


def misses(shop: Workshop, name: str) -> Iterator[tuple[str, bool]]:
    """Yield each fault in files of a base, and whether it was missed."""
    base, broken = shop.base(name), shop.folder / "broken.gguf"
    for how, types in FAULTY.items():
        for file_type in types:
            file = shop.file(base, how, file_type)
            for fault, about in FAULTS.items():
                try:
                    damage(file, base, broken, about)
                except LookupError:
                    continue
                found = {each.kind for each in gguf_tools.audit(broken, base).findings if each.is_bad}
                if not found & set(about.kinds):
                    said = f"called {', '.join(found)}" if found else "MISSED"
                    print(f"{said} {name}, {how} {file_type}: {fault}", flush=True)
                yield how, not found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["clean", "faults"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--calibrated", type=int, choices=[1, 2, 3], default=3, help="types for each base")
    parser.add_argument("--only", nargs="+", choices=BASES, default=list(BASES))
    args = parser.parse_args()
    tried, wrong = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder), args.layers)
        for name in args.only:
            is_clean = args.what == "clean"
            found = alarms(shop, name, args.calibrated) if is_clean else misses(shop, name)
            for how, is_wrong in found:
                tried[how] += 1
                wrong[how] += is_wrong
            print(f"{name}: {wrong.total()} wrong of {tried.total()} so far", flush=True)
    for how, n in tried.items():
        print(f"{how}: {wrong[how]} of {n}")


if __name__ == "__main__":
    main()
