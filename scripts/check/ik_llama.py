"""Let ik_llama.cpp read a file of ours, and compare what it computes with our own forward pass.

    pip install ik-llama-cpp-python
    python scripts/check/ik_llama.py [MODEL.gguf] [--tokens 128] [--tolerance 0.01]

Without MODEL the file is made of examples/tiny-deepseek-v3, in the layout of attention that ik_llama.cpp
wants, with feed-forward tensors of IQ4_KS, IQ3_K and IQ2_KT. IK_LLAMA_CPP_LIB_PATH names the libllama of
another build than the wheel's; its structs must be those of the same version.

Both programs get the same tokens and the same file. The relative difference of a token is |theirs - ours| /
|ours| over its logits; exits with 1 where the median token has more than --tolerance. Three things keep the
two apart:

  ik_llama.cpp rounds activations to 8 bits. Where two experts are nearly tied it may then choose another one,
  and single tokens differ by several percent.
  Its matrix products multiply weights of IQ2_KT by 1.05 and of IQ3_KT by 1.01, which its own to_float does
  not do. We compare with what is multiplied; --as-decoded compares with to_float.
  It takes no notice of groups of experts (expert_group_count of deepseek2), so the small model has one group.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import convert  # noqa: E402
from gguf_tools import open_gguf  # noqa: E402
from imatrix.forward.open import open_model  # noqa: E402
from imatrix.texts.mixture import read_text  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402
from quantize.formats.base import Decode  # noqa: E402
from quantize.formats.codecs import CODECS  # noqa: E402
from quantize.plan.overrides import parse_custom_q  # noqa: E402
from quantize.plan.plan import PlanOptions  # noqa: E402
from tests.imatrix.forward.small_models import run_all_layers  # noqa: E402

MODEL = ROOT / "examples" / "tiny-deepseek-v3"
MATRIX = ROOT / "tests" / "golden" / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"
TEXT = MODEL / "calibration.txt"
RULES = "ffn_down_exps=iq3_k,ffn_gate_exps=iq2_kt,ffn_up_exps=iq4_ks,ffn=iq4_ks,.*=bf16"
FILE_TYPE = "IQ4_KS"


def make_file(path: Path) -> Path:
    """Write the small model with three of ik_llama.cpp's types, and all experts in one group."""
    folder = path.parent / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_group": 1, "topk_group": 1}))
    types = PlanOptions(overrides=parse_custom_q(RULES))
    convert.convert(folder, path, outtype=FILE_TYPE, importances=MATRIX, types=types)
    return path


def n_groups(path: Path) -> int:
    """Return how many groups of experts the file says there are."""
    with open_gguf(path) as file:
        found = [value.data for key, value in file.metadata.items() if key.endswith("expert_group_count")]
    return int(found[0]) if found else 1


FACTORS = {"IQ2_KT": 1.05, "IQ3_KT": 1.01}
"""Factors of ik_llama.cpp's matrix products that its to_float lacks (iqk_gemm_ktquants.cpp: *_q8_2_x4_T)."""


def decode_as_multiplied() -> None:
    """Have our decoders give the weights that ik_llama.cpp multiplies by."""
    for name, factor in FACTORS.items():
        module = import_module(CODECS[name].module, "quantize.formats")
        module.FORMATS = tuple(
            replace(each, decode=_scaled(each.decode, np.float32(factor))) if each.type.name == name else each
            for each in module.FORMATS
        )


def _scaled(decode: Decode, factor: np.float32) -> Decode:
    return lambda data, n_cols: decode(data, n_cols) * factor


def our_logits(path: Path, tokens: np.ndarray) -> np.ndarray:
    """Return what our forward pass computes, float32 (n_tokens, n_vocab)."""
    with open_model(path) as model:
        logits, _ = run_all_layers(model, tokens[np.newaxis])
    return logits[0]


def their_logits(path: Path, tokens: np.ndarray, n_threads: int) -> np.ndarray:
    """Return what ik_llama.cpp computes, float32 (n_tokens, n_vocab)."""
    import ik_llama_cpp._ctypes_api as api

    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit(f"{path}: ik_llama.cpp can't load it; what it printed says why")
    settings = api.llama_context_default_params()
    settings.n_ctx = settings.n_batch = max(32, len(tokens))
    settings.n_threads = settings.n_threads_batch = n_threads
    settings.logits_all = True
    context = api.llama_init_from_model(model, settings)
    if not context:
        raise SystemExit(f"{path}: ik_llama.cpp makes no context for it; what it printed says why")
    batch = api.llama_batch_init(len(tokens), 0, 1)
    _fill(batch, tokens)
    code = api.llama_decode(context, batch)
    if code:
        raise SystemExit(f"{path}: ik_llama.cpp's llama_decode returns {code}")
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    rows = (api.llama_get_logits_ith(context, i) for i in range(len(tokens)))
    logits = np.stack([np.ctypeslib.as_array(row, (n_vocab,)).copy() for row in rows])
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_free_model(model)
    return logits


def _fill(batch: Any, tokens: Sequence[int] | np.ndarray) -> None:
    """Put the tokens of one sequence into a batch, and ask for the logits of all."""
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i] = int(token)
        batch.pos[i] = i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = 1


def relative_difference(theirs: np.ndarray, ours: np.ndarray) -> float:
    """Return |theirs - ours| / |ours|, over all numbers."""
    difference = theirs.astype(np.float64) - ours
    return float(np.linalg.norm(difference) / np.linalg.norm(ours.astype(np.float64)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL.gguf")
    parser.add_argument("-f", "--text", type=Path, default=TEXT, metavar="TEXT", help="where they come from")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="how many (default: 128)")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument(
        "--as-decoded", action="store_true", help="compare with the weights as its to_float has them"
    )
    parser.add_argument("--tolerance", type=float, default=0.01, help="default: 0.01")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or make_file(Path(folder) / "tiny.gguf")
        with open_gguf(path) as file:
            types = sorted({info.type.name for info in file.tensors.values()})
            n_vocab = len(file.metadata["tokenizer.ggml.tokens"].data)
            text = read_text(args.text, file.metadata, n_vocab, Cut(args.tokens, 0, 1, False))
        tokens = text.inputs[0]
        several_groups = n_groups(path) > 1
        theirs = their_logits(path, tokens, args.threads)
        if not args.as_decoded:
            decode_as_multiplied()
        ours = our_logits(path, tokens)
    difference = relative_difference(theirs, ours)
    by_token = [relative_difference(a, b) for a, b in zip(theirs, ours, strict=True)]
    same = float((theirs.argmax(axis=1) == ours.argmax(axis=1)).mean())
    print(f"types: {', '.join(types)}")
    if several_groups:
        print("note: ik_llama.cpp takes no notice of groups of experts, of which this file has several")
    print(
        f"logits of {args.tokens} tokens: relative difference {difference:.3%}, of the median token"
        f" {np.median(by_token):.3%}, of the worst {max(by_token):.3%}; same best token {same:.1%}"
    )
    return int(not np.median(by_token) <= args.tolerance)


if __name__ == "__main__":
    raise SystemExit(main())
