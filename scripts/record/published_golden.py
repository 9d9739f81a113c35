"""Record what llama.cpp's own converter makes of the small published models.

    python scripts/record/published_golden.py LLAMA_CPP_SOURCE [NAME ...]

For each model of tests/support/published_models.py, or those named, an entry of
tests/golden/arch/published.json: the keys of the file (without general.*; arrays as sha256 of their JSON),
how many tensors it has, and the sha256 of one line "name type shape sha256" for each in file order, without
those of OTHERWISE. Needs torch and transformers.

The source is a checkout of llama.cpp, or vendor/llama.cpp of the source distribution of llama-cpp-python. Its
converter knows a pre-tokenizer by a hash of ids, which a small vocabulary changes, so PRE names those.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import tempfile
import textwrap
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "arch" / "published.json"

PRE = {
    "smollm3": "llama-bpe", "gemma-3": "qwen2", "gemma-3n": "", "gemma-4": "", "gemma-4-moe": "",
    "gemma-4-e": "", "gemma-4-12b": "", "seed-oss": "seed-coder", "olmo-2": "dbrx", "olmo-3": "dbrx",
    "ministral-3": "llama-bpe", "phi-4": "dbrx", "phi-4-mini": "dbrx",
    "granite-3": "dbrx", "granite-3-moe": "dbrx", "granite-4": "dbrx", "granite-4-h": "dbrx",
    "nemotron-h": "llama-bpe", "nemotron-3-nano": "llama-bpe", "nemotron-3-super": "llama-bpe",
    "qwen3-next": "qwen2", "qwen3.5": "qwen35", "qwen3.5-moe": "qwen35", "qwen4-exp": "qwen35",
    "qwen2.5-vl": "qwen2", "qwen3-vl": "qwen2", "qwen3-vl-moe": "qwen2",
    "qwen2-moe": "qwen2", "olmoe": "dbrx", "hunyuan": "hunyuan-dense", "hunyuan-moe": "hunyuan",
    "hy-v3": "hunyuan-dense", "solar-open": "solar-open", "glm-4": "glm4", "glm-4v": "glm4",
    "exaone-4": "exaone4", "exaone-4-32b": "exaone4", "ernie-4.5": "", "ernie-4.5-moe": "", "gemma-2": "",
    "qwen3-embedding": "qwen2", "qwen3-reranker": "qwen2", "qwen3-reranker-8b": "qwen2",
    "command-r7b": "llama-bpe", "command-a-plus": "llama-bpe", "lfm2": "llama-bpe", "lfm2-moe": "llama-bpe",
    "ling-mini-2": "llama-bpe", "laguna": "laguna", "falcon-h1": "llama-bpe", "embeddinggemma": "qwen2",
    "embeddinggemma-dense": "qwen2",
    "kimi-linear": "llama-bpe", "kimi-k3": "llama-bpe", "kimi-k3-bf16": "llama-bpe",
    "ling-3-flash": "llama-bpe", "ling-3-tiny": "llama-bpe",
    "glm-5.3-flash": "glm4", "glm-5.3-shared": "glm4",
    "minimax-m3": "minimax-m2", "llama-4": "llama4", "muse-glimmer": "llama4", "starcoder2": "gpt-2",
    "mimo-v2-flash": "qwen2", "mimo-v2.5": "qwen2", "k-exaone": "exaone-moe", "phi-3.5-moe": "",
    "apertus": "llama-bpe", "step-3.5": "qwen2", "step-3.7": "qwen2",
}  # fmt: skip
"""Model -> the name of its pre-tokenizer; "" where its kind of tokenizer has no names."""

OTHERWISE = {"nemotron-3-super": ["blk.5.ffn_gate_inp.weight"]}
"""Model -> tensors that are not compared: the converter loses track of the layer of this router, and stores
it as any other matrix where it means F32."""


UNKNOWN = ("nemotron_h", "nomic_bert", "minimax_m3_vl", "qwen4_exp", "bailing_hybrid", "glm5_next",
           "mimo_v2_flash", "mimo_v2", "step3p5", "step3p7")  # fmt: skip
"""Kinds of models whose config.json the converter is given as it is."""


def renumber(kind: type, method: str, published: int, ours: int) -> None:
    """Put the id of a token in a small vocabulary in place of the published one in the converter's code."""
    function = getattr(kind, method)
    scope: dict[str, Any] = {}
    source = textwrap.dedent(inspect.getsource(function)).replace(str(published), str(ours))
    exec(source, function.__globals__, scope)
    setattr(kind, method, scope[method])


def give_hunyuan_tokenizer(folder: Path, vocab_size: int) -> int:
    """Have transformers give what the published code makes of hy.tiktoken, and return how many ranks it has.

    The converter runs that code; it is not here.
    """
    import transformers

    lines = (folder / "hy.tiktoken").read_bytes().splitlines()
    ranks = {b64decode(line.split()[0]): rank for rank, line in enumerate(lines)}
    named = ("endoftext", "startoftext", "bos", "eos", "pad", *(f"extra_{i}" for i in range(205)))
    made = SimpleNamespace(
        mergeable_ranks=ranks,
        special_tokens={f"<|{name}|>": len(ranks) + i for i, name in enumerate(named)},
        vocab_size=vocab_size,
    )
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: made
    return len(ranks)


def convert(folder: Path, outfile: Path, pre: str) -> None:
    """Run the converter on `folder` in this process, to BF16."""
    import gguf
    import torch
    from conversion import get_model_class
    from conversion.base import ModelBase, TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] in UNKNOWN:
        # The release of transformers that the converter asks for doesn't know these models; later ones
        # rename Qwen4Exp's kinds of layers, and the converter would write no size of blocks, nor the size of
        # Ling 3's heads.
        ModelBase.load_hparams = staticmethod(lambda *_, **__: dict(config))
    if config["model_type"] == "hunyuan_v1_moe":
        n_ranks = give_hunyuan_tokenizer(folder, config["vocab_size"])
        renumber(get_model_class("HunYuanMoEV1ForCausalLM"), "set_vocab", 127959, n_ranks + 2)
    name = config["architectures"][0]
    with torch.inference_mode():
        get_model_class(name)(
            folder,
            gguf.LlamaFileType.MOSTLY_BF16,
            outfile,
            sentence_transformers_dense_modules=(folder / "2_Dense").exists(),
        ).write()


def facts(path: Path, left_out: list[str]) -> dict[str, Any]:
    """Return what is recorded of a file."""
    import gguf

    reader = gguf.GGUFReader(path)
    lines = [
        f"{tensor.name} {tensor.tensor_type.name} {'x'.join(str(n) for n in reversed(tensor.shape))} "
        f"{hashlib.sha256(tensor.data.tobytes()).hexdigest()}"
        for tensor in reader.tensors
        if tensor.name not in left_out
    ]
    keys = []
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "general.")):
            continue
        kind, value = field.types[0].name, field.contents()
        if kind == "ARRAY":
            kind = f"ARRAY[{field.types[-1].name}]"
            value = hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()
        keys.append([name, kind, value])
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    except_for = {"left_out": left_out} if left_out else {}
    return {"n_tensors": len(lines), "sha256_of_tensors": digest, **except_for, "keys": keys}


def main() -> None:
    source, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    # The source has a package "tests" too, so ours is imported before the source is on the path.
    sys.path.insert(0, str(ROOT))
    from tests.support.published_models import PUBLISHED, write

    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for name in names or PRE:
        with tempfile.TemporaryDirectory() as temporary:
            outfile = Path(temporary) / "out.gguf"
            convert(write(name, Path(temporary) / "model"), outfile, PRE[name])
            recorded[name] = facts(outfile, OTHERWISE.get(name, []))
        print(f"{name}: {recorded[name]['n_tensors']} tensors")
    ordered = {name: recorded[name] for name in PUBLISHED if name in recorded}
    entries = (
        f"{json.dumps(name)}: "
        + json.dumps(entry, ensure_ascii=False)
        .replace(": [[", ": [\n[")
        .replace("], [", "],\n[")
        .replace("]]}", "]\n]}")
        for name, entry in ordered.items()
    )
    GOLDEN.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
