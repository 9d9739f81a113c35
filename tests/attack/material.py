"""The inputs of all commands: a model of three million weights in every form that a command reads."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.attack.commands import FORWARD, PARTS
from tests.support.checkpoints import add_mtp_layer, micro_checkpoint, read_tensors
from tests.support.tokenizer_files import copy_tokenizer
from tests.support.trained_model import calibration_text

_SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256,
    "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": None,
    "n_group": 1, "topk_group": 1, "tie_word_embeddings": True,
}  # fmt: skip

_LINES = {
    "in.gguf": "convert-hf-to-gguf model --outfile in.gguf --outtype bf16 --threads 1",
    **dict.fromkeys(PARTS, "gguf-tools split in.gguf in --max-tensors 12"),
    "q8.gguf": "quantize in.gguf q8.gguf Q8_0 1",
    "q4.gguf": "quantize --imatrix m.imatrix.gguf in.gguf q4.gguf Q4_K_M 1",
    "both.gguf": "gguf-tools mla-layout in.gguf both.gguf --to both --threads 1",
    "r4.gguf": "gguf-tools repack q4.gguf r4.gguf --threads 1",
    "m.imatrix.gguf": f"imatrix -m model -f text.txt -o m.imatrix.gguf -t 1 {FORWARD}",
    "n.imatrix.gguf": f"imatrix -m model -f other.txt -o n.imatrix.gguf -t 1 {FORWARD}",
    "losses.json": "sensitivity model -f text.txt -o losses.json --types Q2_K,Q4_K,Q8_0 --rows 16 -t 1"
    f" {FORWARD}",
    "odd.gguf": "convert-hf-to-gguf odd --outfile odd.gguf --outtype bf16 --threads 1",
    "report.json": f"evaluate in.gguf q4.gguf -f text.txt --json report.json -t 1 {FORWARD}",
}


def provide(folder: Path, name: str) -> Path:
    """Return the path of an input in `folder`; it is made, with its own inputs, if it is not there."""
    path = folder / name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    if name in _LINES:
        for other in _LINES[name].split()[1:]:
            if other != name and (other in _LINES or other in _MAKERS):
                provide(folder, other)
        with in_folder(folder):
            call(_LINES[name])
    else:
        _MAKERS[name](path)
    return path


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
    import gguf_tools.commands.convert
    import gguf_tools.commands.evaluate
    import gguf_tools.commands.imatrix
    import gguf_tools.commands.main
    import gguf_tools.commands.quantize
    import gguf_tools.commands.sensitivity

    return {
        "convert-hf-to-gguf": gguf_tools.commands.convert.main,
        "evaluate": gguf_tools.commands.evaluate.main,
        "gguf-tools": gguf_tools.commands.main.main,
        "imatrix": gguf_tools.commands.imatrix.main,
        "quantize": gguf_tools.commands.quantize.main,
        "sensitivity": gguf_tools.commands.sensitivity.main,
    }[name]


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Work in `folder` in this block."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _model(path: Path) -> None:
    copy_tokenizer("tiny", micro_checkpoint(path, "v3", **_SIZES))


def _pickled(path: Path) -> None:
    """Write the same model as a pickle of torch."""
    import torch

    model = provide(path.parent, "model")
    path.mkdir()
    for file in model.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    tensors = {name: torch.from_numpy(array.astype("float32")) for name, array in read_tensors(model).items()}
    torch.save(tensors, path / "pytorch_model.bin")


def _mtp(path: Path) -> None:
    copy_tokenizer("tiny", add_mtp_layer(micro_checkpoint(path, "v3", vocab_size=_SIZES["vocab_size"])))


def _odd(path: Path) -> None:
    """Write a model whose inner sizes are no multiples of 256."""
    copy_tokenizer("tiny", micro_checkpoint(path, "v3", **_SIZES | {"intermediate_size": 320}))


def _texts(path: Path, n_bytes: int = 6000) -> None:
    """Write a folder of two classes, of which one is conversations."""
    path.mkdir()
    (path / "prose.txt").write_bytes(calibration_text()[:n_bytes])
    (path / "chats.jsonl").write_text(CHATS)
    (path / "suite.yaml").write_text(SUITE)
    (path / "plain.jinja").write_text(TEMPLATE)


def _chat(n: int) -> str:
    answer = f"That is {n * n}, and I am quite sure of it. " * 3
    said = {"user": f"What is {n} times {n}?", "assistant": answer}
    return json.dumps({"messages": [{"role": role, "content": words} for role, words in said.items()]})


CHATS = "".join(f"{_chat(n)}\n" for n in range(6))
"""Conversations, as OpenAI's API has them."""

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SUITE = """\
context: 64
classes:
  prose:
    texts: prose.txt
  chats:
    texts: chats.jsonl
    template: plain.jinja
"""
RECIPE = """\
file_type: Q4_K_M
tensor-type: [attn_output=Q8_0, ffn_down_exps=Q6_K]
fallback: [attn_k_b=Q8_0]
"""

_MAKERS: dict[str, Callable[[Path], object]] = {
    "model": _model,
    "pickled": _pickled,
    "mtp": _mtp,
    "odd": _odd,
    "texts": _texts,
    "suite": lambda path: _texts(path, 900),
    "recipe.yaml": lambda path: path.write_text(RECIPE),
    "text.txt": lambda path: path.write_bytes(calibration_text()[:6000]),
    "other.txt": lambda path: path.write_bytes(calibration_text()[20000:26000]),
}
