"""Make files of llama.cpp's own llama_model_quantize again, and say which have the same bytes.

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    python scripts/check/rederived.py package [NUMBER ...]

There are 60 files: 12 file types, each with five sets of options, of small models of three architectures. The
only hints are the source and the importances. Exits with 1 if a file is not the same, or if llama.cpp refuses
to write it.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import gguf_tools  # noqa: E402
from gguf_tools import PlanOptions, parse_overrides  # noqa: E402
from gguf_tools.format import keys  # noqa: E402
from gguf_tools.format.ggml_types import F64, by_name  # noqa: E402
from quantize.importances.entries import Importance, ImportanceFile  # noqa: E402
from scripts.check.whole_files import find_library, made_by_llama  # noqa: E402
from tests.quantize.whole_files import Case  # noqa: E402
from tests.quantize.whole_models import SmallModel, draw_model  # noqa: E402

FILE_TYPES = (
    "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_S", "Q6_K", "IQ2_XS", "IQ3_XXS", "IQ4_XS",
    "TQ2_0",
)  # fmt: skip
MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3.2")
OPTIONS: tuple[tuple[bool, PlanOptions], ...] = (
    (False, PlanOptions()),
    (True, PlanOptions()),
    (True, PlanOptions(pure=True)),
    (False, PlanOptions(output_type=by_name("Q8_0"), embedding_type=by_name("Q5_0"))),
    (True, PlanOptions(overrides=parse_overrides(["attn_q=Q8_0", "ffn_up=IQ4_NL"]), prune_layers=(0,))),
)
"""Whether there are importances, and the options of the plan."""


def draw(number: int) -> Case:
    """Draw a case, from 0 to 59."""
    file_type = FILE_TYPES[number // len(OPTIONS)]
    is_weighed, types = OPTIONS[number % len(OPTIONS)]
    random = np.random.default_rng(number)
    model = draw_model(random, MODELS[number % len(MODELS)])
    while keys.ALIGNMENT in model.metadata or any(info.type == F64 for info in model.tensors):
        model = draw_model(random, MODELS[number % len(MODELS)])  # llama.cpp can't write those
    model = replace(model, kinds=dict.fromkeys(model.kinds, "normal"))
    is_weighed |= file_type in ("IQ2_XS", "IQ3_XXS")
    return Case(
        seed=number,
        model=model,
        file_type=file_type,
        types=replace(types, allow_requantize=True),
        keep_split=False,
        kv_overrides=(),
        importances=_draw_importances(model, random) if is_weighed else None,
        n_threads=1 + number % 3,
    )


def _draw_importances(model: SmallModel, random: np.random.Generator) -> ImportanceFile:
    entries = {
        info.name: Importance(
            random.lognormal(size=(info.n_mats, info.n_cols)).astype(np.float32),
            np.ones(info.n_mats, np.float32),
        )
        for info in model.tensors
        if len(info.shape) > 1
    }
    return ImportanceFile(entries, datasets=("wiki.txt",), chunk_count=17, path=Path("a.imatrix.gguf"))


def is_same(case: Case, library: Path, folder: Path) -> bool:
    """Let llama.cpp write a file, and make it again; print what is not the same."""
    source = case.model.write(folder / "in.gguf")
    made = made_by_llama(case, source, library, folder / "theirs")
    if not made.paths:
        print(f"{case}: llama.cpp refuses: {made.said}", flush=True)
        return False
    result = gguf_tools.rederive(made.paths[0], source, importances=case.importances, n_threads=2)
    if not result.is_as_claimed:
        print(case, *result.lines(), sep="\n    ", flush=True)
    return result.is_as_claimed


def main() -> int:
    package, *numbers = sys.argv[1:]
    chosen = list(map(int, numbers)) or range(len(FILE_TYPES) * len(OPTIONS))
    n_same = 0
    for number in chosen:
        with tempfile.TemporaryDirectory() as name:
            n_same += is_same(draw(number), find_library(Path(package)), Path(name))
    print(f"{n_same} of {len(chosen)} files of llama.cpp are the same")
    return int(n_same < len(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
