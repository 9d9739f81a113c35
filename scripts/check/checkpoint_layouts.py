"""Save a small model of each family in every way that programs save it, and say which come out otherwise.

    python scripts/check/checkpoint_layouts.py [--family NAME] [--layout NAME] [--jobs N] [--no-logits]

Each has to become what the model becomes in its published layout: the same keys, and the same numbers bit by
bit, without a note or with one of the right kind; or to be refused for the right cause. In MLX's quantized
layout the numbers are those that its codes mean. With a file made of the layout of transformers 5,
llama.cpp's logits are compared with those of transformers. Exit status 1 when anything is wrong. Needs torch,
transformers, and xllamacpp for logits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import convert
from gguf_tools.errors import ToolkitError
from tests.end_to_end.config_fields.judge import EFFECT, without_ties
from tests.end_to_end.config_fields.llama import Llama, LlamaError
from tests.end_to_end.config_fields.models import BASES, TOKENS, as_in_llama_cpp, logits_of
from tests.end_to_end.layouts.judge import Made, Outcome, judge, made_of
from tests.end_to_end.layouts.ways import LAYOUTS, Saved, layouts_of, mlx_pair, saved

MLX_SIZES = ((2, 64), (3, 32), (4, 32), (4, 64), (5, 64), (6, 32), (8, 64))
Row = tuple[str, str, Outcome]


def prepare_torch() -> None:
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()


def mlx_outcome(model: Saved, folder: Path, bits: int, group_size: int) -> Outcome:
    """Compare a quantized model of MLX with one of the weights that its codes mean."""
    mlx_pair(model, folder / "codes", folder / "decoded", bits, group_size)
    try:
        codes, decoded = made_of(folder / "codes"), made_of(folder / "decoded")
    except ToolkitError as error:
        return Outcome("wrong", f"refused: {error}")
    names = {**codes.tensors, **decoded.tensors}
    apart = [
        name
        for name in names
        if not np.array_equal(codes.tensors.get(name, ()), decoded.tensors.get(name, ()))
    ]
    if apart or codes.notes != decoded.notes:
        return Outcome("wrong", f"other than its codes mean: {', '.join(apart[:5])} {codes.notes}")
    return Outcome("equal")


def logits_outcome(model: Saved, published: Made, folder: Path, llama: Llama) -> Outcome:
    """Compare llama.cpp's logits of a file with transformers' own."""
    LAYOUTS["transformers 5"].make(model, folder)
    convert.convert(folder, folder / "f32.gguf", outtype="f32")
    expected = logits_of(model.model)
    try:
        found = llama.logits(folder / "f32.gguf", TOKENS)[:, : expected.shape[1]]
    except LlamaError as error:
        return Outcome("noted" if published.notes else "wrong", f"llama.cpp: {error}")
    apart = without_ties(found, expected)
    if apart < EFFECT:
        return Outcome("equal")
    return Outcome("noted" if published.notes else "wrong", f"logits differ by {apart:.1e}")


def sweep(name: str, layout: str, with_logits: bool) -> list[Row]:
    """Return a row for each layout of a model."""
    with tempfile.TemporaryDirectory(prefix="layouts-") as scratch, as_in_llama_cpp():
        folder = Path(scratch)
        model = saved(name, folder / "published")
        published = made_of(model.folder)
        rows = [
            (name, each, judge(made, model, published, folder / f"layout-{number}"))
            for number, (each, made) in enumerate(layouts_of(name).items())
            if layout in each
        ]
        if "MLX" in layouts_of(name) and layout in "MLX":
            for bits, size in MLX_SIZES:
                outcome = mlx_outcome(model, folder / f"mlx-{bits}-{size}", bits, size)
                rows.append((name, f"MLX, {bits} bits in groups of {size}", outcome))
        if with_logits and layout in "logits":
            llama = Llama()
            try:
                rows.append((name, "logits", logits_outcome(model, published, folder / "logits", llama)))
            finally:
                llama.close()
        return rows


def results(names: list[str], jobs: int, layout: str, with_logits: bool) -> Iterator[list[Row]]:
    """Yield the rows of each model as they come."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=prepare_torch) as pool:
        waiting = [pool.submit(sweep, name, layout, with_logits) for name in names]
        for done in as_completed(waiting):
            yield done.result()


def main() -> int:
    """Run the sweep; return 1 when a layout comes out wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="", metavar="NAME", help="only models with this in their names")
    parser.add_argument("--layout", default="", metavar="NAME", help="only layouts with this in their names")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at the same time")
    parser.add_argument("--no-logits", action="store_true", help="compare numbers of tensors alone")
    choices = parser.parse_args()
    names = [name for name in BASES if choices.family in name]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for rows in results(names, choices.jobs, choices.layout, not choices.no_logits):
        for name, layout, outcome in rows:
            counts[outcome.kind] += 1
            if outcome.kind == "wrong":
                wrong.append(f"{name}, {layout}: {outcome.why}")
                print(wrong[-1], flush=True)
            elif outcome.why:
                print(f"{name}, {layout}: {outcome.kind}: {outcome.why}", flush=True)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{counts.total()} layouts of {len(names)} models: {told}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
