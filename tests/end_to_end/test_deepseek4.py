"""DeepSeek V4 from the published form to a quantized file: importances, one pass, a prompt completed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools.commands.imatrix
import imatrix
from gguf_tools import open_gguf
from imatrix.forward.open import open_model
from tests.convert.architectures.test_deepseek4 import folder as published  # noqa: F401  a fixture
from tests.end_to_end.test_complete import complete
from tests.imatrix.forward.deepseek4_models import LIKE_LLAMA, v4_model
from tests.imatrix.forward.small_models import run_all_layers
from tests.support import oracle

pytest.importorskip("torch")

TOKENS = np.random.default_rng(2).integers(3, 500, (1, 40))
TEXT = "The quick brown fox 12345 jumps; über Stöcke, 他 и так далее.\n" * 30


def test_fp8_and_fp4_are_computed_as_their_file(published: Path, tmp_path: Path) -> None:  # noqa: F811
    """The file's matrices are FP8 as Q8_0, which is all that differs."""
    convert.convert(published, tmp_path / "v4.gguf")
    logits = []
    for path in (published, tmp_path / "v4.gguf"):
        with open_model(path) as source:
            logits.append(run_all_layers(source, TOKENS)[0])
    assert 0 < np.linalg.norm(logits[0] - logits[1]) < 0.03 * np.linalg.norm(logits[0])


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.slow
def test_mixed_files_complete_a_prompt(tmp_path: Path) -> None:
    folder = v4_model(tmp_path / "model", **LIKE_LLAMA | {"hidden_size": 256, "moe_intermediate_size": 256})
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    words = ["-m", str(folder), "-f", str(tmp_path / "text.txt"), "-o", str(tmp_path / "matrix.gguf")]
    assert gguf_tools.commands.imatrix.main([*words, "-c", "128", "--chunks", "1", "--no-ppl"]) == 0
    for importances in (None, imatrix.load(tmp_path / "matrix.gguf")):
        out = tmp_path / f"{importances is None}.gguf"
        convert.convert(folder, out, outtype="Q4_K_M", importances=importances)
        with open_gguf(out) as opened:
            assert opened.tensors["blk.0.attn_output_a.weight"].type.name == "Q4_K"
            n_tokens = len(opened.metadata["tokenizer.ggml.tokens"].plain)
        assert all(0 <= token < n_tokens for token in complete(out, TOKENS[0, :12].tolist()))
