"""The inputs of all commands: a model of half a million weights in every form that a command reads."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.checkpoints import micro_checkpoint, read_tensors
from tests.support.tokenizer_files import copy_tokenizer
from tests.support.trained_model import calibration_text

VOCAB = 4096
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256,
    "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": None, "n_group": 1,
    "topk_group": 1, "tie_word_embeddings": True,
}  # fmt: skip

TEXT_OPTIONS = "-c 32 --chunks 3 -t 1"


def make(folder: Path) -> Path:
    """Write the inputs into `folder`, which is made, and return it.

    model       a checkpoint
    pickled     the same with a pytorch_model.bin
    in.gguf     its BF16 file, and in-00001-of-00003.gguf, the same in parts
    q8.gguf     quantized, q4.gguf too
    both.gguf   with the layout of ik_llama.cpp
    r4.gguf     with interleaved rows
    m.imatrix   its importances, and n.imatrix, those of another text
    losses.json what its tensors cost at three types
    report.json what `evaluate` says about q4.gguf
    *.txt       texts
    """
    folder.mkdir(parents=True)
    text = calibration_text().decode()
    (folder / "text.txt").write_text(text[:6000])
    (folder / "other.txt").write_text(text[20000:26000])
    model = micro_checkpoint(folder / "model", "v3", **_SIZES)
    copy_tokenizer("tiny", model)
    _pickled(folder)
    with in_folder(folder):
        for line in (
            "convert-hf-to-gguf model --outfile in.gguf --outtype bf16 --threads 1",
            "gguf-tools split in.gguf in --max-tensors 12",
            f"imatrix -m model -f text.txt -o m.imatrix.gguf {TEXT_OPTIONS}",
            f"imatrix -m model -f other.txt -o n.imatrix.gguf {TEXT_OPTIONS}",
            "quantize in.gguf q8.gguf Q8_0 1",
            "quantize --imatrix m.imatrix.gguf in.gguf q4.gguf Q4_K_M 1",
            "gguf-tools mla-layout in.gguf both.gguf --to both --threads 1",
            "gguf-tools repack q4.gguf r4.gguf --threads 1",
            f"sensitivity model -f text.txt -o losses.json --types Q2_K,Q4_K,Q8_0 --rows 16 {TEXT_OPTIONS}",
            f"evaluate in.gguf q4.gguf -f text.txt --json report.json {TEXT_OPTIONS}",
        ):
            call(line)
    return folder


def call(line: str) -> None:
    """Run a command in this process; raises RuntimeError, with what it said, if it fails."""
    name, *words = line.split()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main_of(name)(words)
    if code:
        raise RuntimeError(f"{line}: exit code {code}: {said.getvalue()}")


def main_of(name: str) -> Callable[[list[str]], int]:
    """Return the main function of a command."""
    import convert.cli
    import gguf_tools.cli
    import imatrix.cli
    import quality.cli
    import quantize.cli

    return {
        "convert-hf-to-gguf": convert.cli.main,
        "evaluate": quality.cli.main,
        "gguf-tools": gguf_tools.cli.main,
        "imatrix": imatrix.cli.main,
        "quantize": quantize.cli.main,
        "sensitivity": quality.cli.sensitivity,
    }[name]


def _pickled(folder: Path) -> None:
    import torch

    (folder / "pickled").mkdir()
    for path in (folder / "model").iterdir():
        if path.suffix == ".json":
            (folder / "pickled" / path.name).write_bytes(path.read_bytes())
    tensors = read_tensors(folder / "model")
    torch.save(
        {name: torch.from_numpy(array.astype("float32")) for name, array in tensors.items()},
        folder / "pickled" / "pytorch_model.bin",
    )


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Work in `folder` in this block."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
