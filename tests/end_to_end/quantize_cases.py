"""The command lines for which llama-quantize's output is recorded, byte for byte.

scripts/record/quantizer_golden.py walks this table to record, and test_quantize_files.py to compare. IN and
SPLIT stand for the trained model's BF16 file, whole and in three parts, OUT for the output, and MATRIX for
the model's importance matrix. BOTH and NONE have the MLA tensors in the other layouts (with a 2-D attn_kv_b).
They are quantized without the matrix: llama-quantize finds no data for them in it, or refuses the data. TIED
has no output matrix.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import convert
from tests.support.checkpoints import edit_config, edit_tensors
from tests.support.trained_model import GOLDEN, trained_model

CASES: dict[str, str] = {
    "Q4_K_M": "IN OUT Q4_K_M",
    "Q8_0": "IN OUT Q8_0",
    "F32": "IN OUT F32",
    "COPY": "IN OUT COPY",
    "number": "IN OUT 15",
    "imatrix": "--imatrix MATRIX IN OUT Q2_K",
    "include": "--imatrix MATRIX --include-weights ffn_down --include-weights attn_v_b IN OUT Q4_0",
    "exclude": "--imatrix MATRIX --exclude-weights exps IN OUT Q3_K_L",
    "pure": "--pure --imatrix MATRIX IN OUT Q3_K_S",
    "leave-output": "--leave-output-tensor IN OUT Q5_K_S",
    "output-and-embedding": "--output-tensor-type q5_1 --token-embedding-type Q8_0 IN OUT Q4_K_S",
    "tensor-type": "--tensor-type ffn_down_exps=q6_k --tensor-type blk\\.[01]\\.attn_=Q5_1 IN OUT Q4_K_M",
    "tensor-type-order": "--tensor-type attn=q8_0 --tensor-type attn_q_a=q4_0 IN OUT Q2_K",
    "prune": "--prune-layers 2 IN OUT Q4_K_M",
    "prune-imatrix": "--imatrix MATRIX --prune-layers 1 IN OUT Q4_1",
    "override-kv": "--override-kv general.name=str:Other --override-kv a.b=int:7 --override-kv a.c=float:0.5"
    " --override-kv a.d=bool:true IN OUT Q5_0",
    "keep-split": "--keep-split SPLIT OUT Q4_K_M",
    "join": "SPLIT OUT Q6_K",
    "Q2_K_S": "--imatrix MATRIX IN OUT Q2_K_S",
    "IQ4_XS": "--imatrix MATRIX TIED OUT IQ4_XS",
    "MXFP4_MOE": "BOTH OUT MXFP4_MOE",
    "TQ1_0": "NONE OUT TQ1_0",
    "both": "BOTH OUT Q4_K_M",
    "both-Q3_K_M": "BOTH OUT Q3_K_M",
    "none": "NONE OUT Q5_K_M",
    "none-override": "--tensor-type attn_kv_b=q8_0 --prune-layers 1 NONE OUT Q2_K",
    "tied": "TIED OUT Q4_K_M",
    "tied-imatrix": "--imatrix MATRIX TIED OUT Q3_K_S",
    "tied-output-type": "--output-tensor-type q8_0 TIED OUT Q2_K",
    "tied-embedding-type": "--token-embedding-type q5_0 --output-tensor-type q8_0 TIED OUT Q4_0",
    "tied-pure": "--pure TIED OUT Q4_1",
    "keep-split-imatrix": "--imatrix MATRIX --keep-split --prune-layers 1 SPLIT OUT Q4_K_S",
}

MATRIX_NAME = "tiny.imatrix.gguf"


def make_inputs(folder: Path) -> None:
    """Write the trained model as BF16, in every form that a case names, and its importance matrix."""
    folder.mkdir(parents=True)
    model = trained_model(folder)
    convert.convert(model, folder / "in.gguf", outtype="bf16")
    convert.convert(model, folder / "split.gguf", outtype="bf16", split_max_tensors=20)
    for mla in ("both", "none"):
        convert.convert(model, folder / f"{mla}.gguf", outtype="bf16", mla=mla)
    edit_config(model, tie_word_embeddings=True)
    edit_tensors(model, lambda tensors: tensors.pop("lm_head.weight"))
    convert.convert(model, folder / "tied.gguf", outtype="bf16")
    shutil.rmtree(model)
    shutil.copy(GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf", folder / MATRIX_NAME)


def arguments(case: str, inputs: Path, output: Path, matrix: str | Path) -> list[str]:
    """Return the command line of a case."""
    places = {
        "IN": inputs / "in.gguf",
        "BOTH": inputs / "both.gguf",
        "NONE": inputs / "none.gguf",
        "TIED": inputs / "tied.gguf",
        "SPLIT": inputs / "split-00001-of-00003.gguf",
        "OUT": output,
        "MATRIX": matrix,
    }
    return [str(places.get(word, word)) for word in CASES[case].split()]


def file_hashes(folder: Path) -> dict[str, str]:
    """Return name -> sha256 of the files in `folder`."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.gguf"))
    }
