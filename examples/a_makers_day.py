"""A day of a maker of quantized files, from top to bottom: every step is one call.

    python examples/a_makers_day.py DeepSeek-V2-Lite calibration.txt wiki.test.raw day

makes an importance matrix, files of five types, a calibrated one and one of a size, measures them all, and
writes their card. With `--upload me/DeepSeek-V2-Lite-GGUF` they go to the Hub. Interrupted, it goes on where
it stopped: what is there, as asked, is not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf_tools as gt

TYPES = ["Q2_K", "Q3_K_M", "Q4_K_M", "Q6_K", "Q8_0"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make, measure and publish quantized files of a model.")
    parser.add_argument("model", help="Hugging Face folder, or OWNER/NAME on the Hub")
    parser.add_argument("text", help="calibration text")
    parser.add_argument("held_out", help="another text, to measure on")
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("--chunks", type=int, help="chunks of the texts (default: all)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a chunk (default: 512)")
    parser.add_argument("--upload", metavar="OWNER/NAME", help="repository for the files")
    args = parser.parse_args()
    day(args.model, args.text, args.held_out, args.folder, args.chunks, args.context, args.upload)


def day(
    model: str, text: str, held_out: str, folder: Path, chunks: int | None, context: int, home: str | None
) -> None:
    """Do everything, in the order in which a maker does it."""
    folder.mkdir(exist_ok=True)
    cut = {"n_chunks": chunks, "chunk_size": context}

    # The morning: the model as a GGUF file, and how much its weights matter.
    base = folder / "model-BF16.gguf"
    gt.convert(model, base, outtype="bf16")
    matrix, losses = folder / "model.imatrix.gguf", folder / "model.losses.json"
    if not matrix.exists():
        gt.imatrix.collect(base, text, matrix, **cut)
    gt.sensitivity(base, text, losses, **cut)

    # Five types, from one walk over the weights.
    gt.quantize_many(base, folder / "model-{FTYPE}.gguf", TYPES, importances=matrix)

    # Noon: better bytes at the same size, and the best types for a size.
    calibrated, sized = folder / "model-Q3_K_M-calibrated.gguf", folder / "model-3.4bpw.gguf"
    gt.calibrate(base, calibrated, "Q3_K_M", text, **cut)
    gt.quantize(base, sized, "3.4bpw", losses=losses, importances=matrix)

    # The afternoon: how far each is from the model, on a text that none of them has seen.
    files = [*(folder / f"model-{name}.gguf" for name in TYPES), calibrated, sized]
    evaluation = gt.evaluate(base, held_out, files, **cut)
    for measured in evaluation.by_size().models:
        kld = measured.divergence.kld.mean.value
        print(f"{measured.path.name:32} {measured.n_bytes:>14,}  KLD {kld:.5f}")
    report = folder / "model.evaluation.json"
    report.write_text(json.dumps(evaluation.to_json()))

    # The evening: a card, and the Hub.
    gt.card(files, source=model, report=report, repository=home)
    if home is not None:
        gt.upload([folder], home, private=True)


if __name__ == "__main__":
    main()
