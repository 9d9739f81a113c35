"""How well losses predict the divergence of stock files: 13 file types from IQ1_M to Q6_K.

    sensitivity MODEL -f CALIBRATION -o losses.json
    python scripts/measure/predicted_divergence.py MODEL.gguf losses.json TEXT --imatrix MATRIX [--chunks 40]

Each file type is made with the importance matrix and evaluated on TEXT, which should be neither the text of
the losses nor that of the matrix. Predicted is the sum of the damages, with what they do to the routes of a
model with experts (quantize/plan/sensitivities.py). What is printed last is the standard deviation of the
logarithm of real over predicted: 0.1 says that files are told apart to 10 %, up to one factor for all.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf_tools
import quantize
from gguf_tools.format.shards import open_gguf
from imatrix import load
from imatrix.texts.tokens import Cut
from quantize.plan.sensitivities import is_routed, level_of, read_sensitivities

RECIPES = (
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_M", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K_M", "IQ4_XS", "Q4_0", "Q4_K_M",
    "Q5_K_M", "Q6_K",
)  # fmt: skip


def types_of(path: Path) -> dict[str, str]:
    """Return the type of every tensor in a file."""
    with open_gguf(path) as file:
        return {name: info.type.name for name, info in file.tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="GGUF file, F32 or BF16")
    parser.add_argument("losses", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--imatrix", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=40)
    args = parser.parse_args()
    losses, importances = read_sensitivities(args.losses), load(args.imatrix)
    with TemporaryDirectory(prefix="predict-") as folder:
        files = [Path(folder, f"{recipe}.gguf") for recipe in RECIPES]
        for recipe, path in zip(RECIPES, files, strict=True):
            quantize.quantize(args.model, path, recipe, importances=importances)
        options = gguf_tools.EvaluateOptions(cut=Cut(n_chunks=args.chunks))
        evaluation = gguf_tools.evaluate(args.model, args.text, files, options)
        routed = is_routed(losses)
        predicted = [level_of(losses.predict(types_of(path)), routed=routed) for path in files]
    ratios = []
    for recipe, each, guess in zip(RECIPES, evaluation.models, predicted, strict=True):
        real = each.divergence.kld.mean.value
        ratios.append(math.log(real / guess))
        print(f"{recipe:8}  real {real:.5f}  predicted {guess:.5f}  real / predicted {real / guess:.2f}")
    factor = math.exp(statistics.mean(ratios))
    print(f"factor {factor:.2f}, standard deviation of the logarithm {statistics.stdev(ratios):.3f}")


if __name__ == "__main__":
    main()
