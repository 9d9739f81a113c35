"""The inputs of all chains: models of every family, files made of them, and broken ones.

They are made once, by one build, and both builds work on copies. Checkpoints come from the makers of tests/.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from scripts.builds.chains import Chain, Command
from scripts.builds.outcomes import Build
from tests.end_to_end.arch_models import CASES as RECORDED
from tests.end_to_end.arch_models import model as recorded_model
from tests.end_to_end.test_convert_packed import FORMATS as PACKED
from tests.end_to_end.test_convert_scaled import FORMATS as SCALED
from tests.hostile import gguf_cases
from tests.support import checkpoints, published_models
from tests.support.hidden_modules import hide_modules
from tests.support.tokenizer_files import copy_tokenizer
from tests.support.trained_model import calibration_text, trained_model

FORWARD = "-c 32 --chunks 3 -t 1"
"""How much text goes through a model."""

PARTS = tuple(f"in-{n:05d}-of-00003.gguf" for n in (1, 2, 3))

_SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256,
    "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": None,
    "kv_lora_rank": 256, "qk_nope_head_dim": 128, "v_head_dim": 64, "n_group": 1, "topk_group": 1,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Rows as long as those of the published models' kinds: whole blocks of 256, but 128 for attn_k_b."""

LINES = {
    "in.gguf": "convert-hf-to-gguf model --outfile in.gguf --outtype bf16 --threads 1",
    "f32.gguf": "convert-hf-to-gguf model --outfile f32.gguf --outtype f32 --threads 1",
    "none.gguf": "convert-hf-to-gguf model --outfile none.gguf --outtype f16 --mla none --threads 1",
    "both.gguf": "convert-hf-to-gguf model --outfile both.gguf --outtype bf16 --mla both --threads 1",
    "llama.gguf": "convert-hf-to-gguf llama-r1-distill --outfile llama.gguf --outtype bf16 --threads 1",
    "tiny.gguf": "convert-hf-to-gguf tiny-deepseek-v3 --outfile tiny.gguf --outtype bf16 --threads 1",
    **dict.fromkeys(PARTS, "gguf-tools split in.gguf in --max-tensors 12"),
    "q8.gguf": "quantize in.gguf q8.gguf Q8_0 1",
    "q4.gguf": "quantize --imatrix m.imatrix.gguf in.gguf q4.gguf Q4_K_M 1",
    "q4both.gguf": "quantize --imatrix m.imatrix.gguf both.gguf q4both.gguf Q4_K_M 1",
    "r4.gguf": "gguf-tools repack q4.gguf r4.gguf --threads 1",
    "m.imatrix.gguf": f"imatrix -m model -f text.txt -o m.imatrix.gguf {FORWARD}",
    "n.imatrix.gguf": f"imatrix -m model -f other.txt -o n.imatrix.gguf {FORWARD}",
    "m.dat": "imatrix convert m.imatrix.gguf m.dat",
    "llama.imatrix.gguf": f"imatrix -m llama-r1-distill -f text.txt -o llama.imatrix.gguf {FORWARD}",
    "losses.json": "sensitivity model -f text.txt -o losses.json --types Q2_K,Q3_K,Q4_K,Q6_K,Q8_0 --rows 16"
    f" {FORWARD}",
    "report.json": f"evaluate in.gguf q4.gguf -f text.txt --json report.json {FORWARD}",
    "base.kld": f"evaluate in.gguf q8.gguf -f text.txt --kl-divergence-base base.kld {FORWARD}",
}
"""Inputs that are made by a command."""


def provide(chains: Iterable[Chain], build: Build, folder: Path) -> None:
    """Make the inputs that chains mention, with those that they are made of, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (build.work / "home").mkdir(parents=True, exist_ok=True)
    (build.work / "tmp" / folder.name).mkdir(parents=True, exist_ok=True)
    for name in sorted({name for chain in chains for name in chain.mentions()}):
        if name in LINES or name in MAKERS:
            _provide(name, build, folder)


def _provide(name: str, build: Build, folder: Path) -> None:
    path = folder / name
    if os.path.lexists(path):
        return
    if name in MAKERS:
        MAKERS[name](path, lambda other: _made(other, build, folder))
        return
    command = Command(LINES[name])
    for other in command.words[1:]:
        if other != name and (other in LINES or other in MAKERS):
            _provide(other, build, folder)
    code, out, err = build.run(command, folder)
    if code:
        raise RuntimeError(f"{command.line}: exit code {code}: {out}{err}")


def _made(name: str, build: Build, folder: Path) -> Path:
    _provide(name, build, folder)
    return folder / name


Need = Callable[[str], Path]
"""Callback for the path of another input."""
Maker = Callable[[Path, Need], object]


# ---- checkpoints of all families


def _model(path: Path, _need: Need) -> None:
    copy_tokenizer("tiny", checkpoints.micro_checkpoint(path, "v3", **_SIZES))


def _style(style: str) -> Maker:
    return lambda path, _: copy_tokenizer("tiny", checkpoints.micro_checkpoint(path, style, vocab_size=4096))


def _with_mtp(path: Path, need: Need) -> None:
    checkpoints.add_mtp_layer(Path(shutil.copytree(need("deepseek-v3"), path)))


def _in_fp8(path: Path, need: Need) -> None:
    checkpoints.to_fp8(checkpoints.to_older_spelling(Path(shutil.copytree(need("deepseek-v3"), path))))


def _in_shards(path: Path, need: Need) -> None:
    checkpoints.shard(Path(shutil.copytree(need("model"), path)))


def _deepseek4(path: Path, _need: Need) -> None:
    from tests.imatrix.forward.deepseek4_models import v4_model

    v4_model(path)


def _mistral_large3(path: Path, _need: Need) -> None:
    from tests.convert.architectures.test_mistral_large3 import write

    write(path)


def _packed(format_: str) -> Maker:
    """Make a model in a packed format."""

    def make(path: Path, _need: Need) -> None:
        from tests.end_to_end.packed_models import packed_model

        packed, decoded = packed_model(path.parent / "packing", {**PACKED, **SCALED}[format_])
        shutil.rmtree(decoded)
        packed.rename(path)
        packed.parent.rmdir()

    return make


def _pickled(path: Path, need: Need) -> None:
    """Write a model as torch does, or as before torch 1.6."""
    import torch

    path.mkdir()
    for file in need("model").glob("*.json"):
        shutil.copy(file, path)
    arrays = checkpoints.read_tensors(need("model"))
    tensors = {name: torch.from_numpy(array.astype("float32")) for name, array in arrays.items()}
    torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=path.name != "old-pickle")


PACKED_MODELS = {"packed-" + re.sub(r"\W+", "-", name): name for name in (*PACKED, *SCALED)}
FAMILIES: dict[str, Maker] = {
    **{name: lambda path, _, name=name: shutil.copytree(recorded_model(name), path) for name in RECORDED},
    **{
        name: lambda path, _, name=name: published_models.write(name, path)
        for name in published_models.PUBLISHED
    },
    "deepseek-v2": _style("v2"), "deepseek-v2-lite": _style("v2-lite"), "deepseek-v3": _style("v3"),
    "deepseek-v4": _deepseek4, "mistral-large-3": _mistral_large3,
}  # fmt: skip
"""Small checkpoints of every architecture that is converted."""


# ---- broken checkpoints and files


def _changed(name: str, change: Callable[[Path], object]) -> Maker:
    """Make a copy of another input, and change that."""

    def make(path: Path, need: Need) -> None:
        source = need(name)
        shutil.copytree(source, path) if source.is_dir() else shutil.copyfile(source, path)
        change(path)

    return make


def _cut(n_bytes: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, n_bytes if n_bytes > 0 else path.stat().st_size + n_bytes)


def _without(file: str) -> Callable[[Path], object]:
    return lambda path: (path / file).unlink()


def _holding(file: str, content: str) -> Callable[[Path], object]:
    return lambda path: (path / file).write_text(content)


def _configured(**changes: object) -> Callable[[Path], object]:
    return lambda path: checkpoints.edit_config(path, **changes)


def _weighing(edit: Callable[[checkpoints.Tensors], object]) -> Callable[[Path], object]:
    return lambda path: checkpoints.edit_tensors(path, edit)


_NORM = "model.layers.1.input_layernorm.weight"
_GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"


def _with_nan(tensors: checkpoints.Tensors) -> None:
    tensors[_GATE] = tensors[_GATE].copy()
    tensors[_GATE][3, 7] = float("nan")


def _patched(path: Path) -> None:
    """Put NaN and infinity among a file's last weights."""
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(struct.pack("<ff", float("nan"), float("inf")))


BROKEN: dict[str, Maker] = {
    "no-config": _changed("model", _without("config.json")),
    "no-tokenizer": _changed("model", _without("tokenizer.json")),
    "no-weights": _changed("model", _without("model.safetensors")),
    "half-weights": _changed("model", lambda path: _cut(3_000_000)(path / "model.safetensors")),
    "bad-config": _changed("model", _holding("config.json", '{"architectures": [')),
    "bad-tokenizer": _changed("model", _holding("tokenizer.json", '{"model": {}}')),
    "odd-model": _changed("model", _configured(architectures=["FancyForCausalLM"])),
    "odd-sizes": _changed("model", _configured(hidden_size=-4)),
    "odd-heads": _changed("model", _configured(num_attention_heads="four")),
    "odd-quant": _changed("model", _configured(quantization_config={"quant_method": "fancy"})),
    "less-tensors": _changed("model", _weighing(lambda tensors: tensors.pop(_NORM))),
    "more-tensors": _changed("model", _weighing(lambda tensors: tensors.update(extra=tensors[_NORM]))),
    "odd-shape": _changed("model", _weighing(lambda tensors: tensors.update({_NORM: tensors[_NORM][:7]}))),
    "nan-model": _changed("model", _weighing(_with_nan)),
    "cut.gguf": _changed("in.gguf", _cut(2_000_000)),
    "cut-header.gguf": _changed("in.gguf", _cut(1000)),
    "cut-byte.gguf": _changed("q4.gguf", _cut(-1)),
    "nan.gguf": _changed("f32.gguf", _patched),
    "longer.gguf": _changed("q4.gguf", lambda path: path.open("ab").write(b"stray bytes")),
    "cut.imatrix.gguf": _changed("m.imatrix.gguf", _cut(5000)),
    "cut.dat": _changed("m.dat", _cut(5000)),
    "cut.kld": _changed("base.kld", _cut(500)),
    "cut.json": _changed("losses.json", _cut(200)),
    "lone-00002-of-00003.gguf": _changed(PARTS[1], lambda path: None),
}  # fmt: skip


# ---- texts


def _text(content: str | bytes) -> Maker:
    return lambda path, _: path.write_bytes(content.encode() if isinstance(content, str) else content)


def _hiding(*modules: str) -> Maker:
    """Make a folder for PYTHONPATH that hides modules, as if they were not installed."""

    def make(path: Path, _need: Need) -> None:
        path.mkdir()
        hide_modules(path, *modules)

    return make


_RECIPE = r"""name: mine
file_type: Q4_K_S
tensor-type:
  - blk\.[01]\.attn_output=Q8_0
  - ffn_down_exps=Q6_K
fallback: [attn_k_b=Q4_1]
token-embedding-type: Q5_0
"""
TEXTS: dict[str, Maker] = {
    "text.txt": lambda path, _: path.write_bytes(calibration_text()[:6000]),
    "other.txt": lambda path, _: path.write_bytes(calibration_text()[20000:26000]),
    "short.txt": _text("too short"),
    "empty.txt": _text(""),
    "latin.txt": _text(b"caf\xe9 " * 500),
    "same.txt": _text("the the the the " * 500),
    "mine.yaml": _text(_RECIPE),
    "mine.json": _text(json.dumps({"name": "small", "file_type": "Q4_0", "pure": True})),
    "ik.yaml": _text("file_type: IQ4_KS\ncustom-q: ffn_.*_exps=iq2_ks,attn_output=iq5_k\n"),
    "typo.yaml": _text("file_type: Q4_KM\n"),
    "odd-key.yaml": _text("file_type: Q4_K_M\ntensortype: [a=Q8_0]\n"),
    "odd-value.yaml": _text("file_type: Q4_K_M\npure: [maybe]\n"),
    "broken.yaml": _text("file_type: [Q4_K_M\n"),
    "list.json": _text("[1, 2]"),
    "types.txt": _text("ffn_down_exps=Q6_K blk\\.0\\.=Q5_K\n"),
    "odd-types.txt": _text("ffn_down_exps\n"),
    "meta.json": _text(json.dumps({"general.name": "Other", "general.author": "me"})),
    "chat.jinja": _text("{% for m in messages %}{{ m.content }}{% endfor %}"),
    "evil.jinja": _text("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "mine": _text("another file of mine\n"),
    "pipe": lambda path, _: os.mkfifo(path),
    "loop": lambda path, _: path.symlink_to("loop"),
    "no-torch": _hiding("torch"),
    "no-matplotlib": _hiding("matplotlib"),
    "no-jinja2": _hiding("jinja2"),
    "no-distributed": _hiding("distributed", "dask"),
}


# ---- files that mean harm


def _hostile() -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the hostile files that are short."""
    for number, (_, case) in enumerate(sorted(gguf_cases.CASES.items())):
        content = b"".join(case.fields)
        if not case.total_bytes and len(content) < 200_000:
            yield f"hostile-{number:03d}.gguf", content


HOSTILE = dict(_hostile())

MAKERS: dict[str, Maker] = {
    **FAMILIES, **BROKEN, **TEXTS,
    **{name: _packed(format_) for name, format_ in PACKED_MODELS.items()},
    **{name: _text(content) for name, content in HOSTILE.items()},
    "model": _model, "mtp": _with_mtp, "older-fp8": _in_fp8, "shards": _in_shards, "pickled": _pickled,
    "old-pickle": _pickled, "tiny-deepseek-v3": lambda path, _: trained_model(path.parent),
}  # fmt: skip
