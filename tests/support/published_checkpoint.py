"""A published model, small, as a checkpoint: its configuration, weights by a formula, and a tokenizer."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.support.checkpoints import Tensors, formula, write_checkpoint
from tests.support.gemma_tokenizer import write_gemma_tokenizer, write_sentencepiece_model
from tests.support.packers import pack_low_first
from tests.support.published_shapes import Config, Shapes

MODELS = Path(__file__).parents[1] / "golden" / "arch" / "models"


COMMON: Config = {
    "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 576,
    "bos_token_id": 556, "eos_token_id": 557, "attention_bias": False,
}  # fmt: skip
"""What most configurations begin with."""


@dataclass(frozen=True)
class Published:
    """A model as it is published, small.

    config     config.json, or the part of it that is about the text
    shapes     config -> name and shape of every tensor
    tokenizer  name of the recorded model whose tokenizer it gets; "" for one in Gemma 4's form,
               "sentencepiece" for a tokenizer.model, "hy.tiktoken" for that
    edit       what is done to the tensors before they are written
    around     the rest of a config.json whose text_config is `config`; None: `config` is all of it
    prefix     of all names
    extra      name and shape of tensors that have no prefix
    cutting    pre-tokenizer that takes the place of the recorded one's; "" for none
    generation generation_config.json
    renamed    text of a token of the recorded tokenizer -> the text that it has here
    words      that its tokenizer has besides, each as a token
    files      name and content of files beside
    dense      columns that Dense modules behind a mean take and give, one pair each
    tokenizer_class  that of the recorded one in tokenizer_config.json is replaced; "" for as it is
    """

    config: Config
    shapes: Callable[[Config], Shapes]
    tokenizer: str
    edit: Callable[[Tensors], Tensors] = lambda tensors: tensors
    around: Config | None = None
    prefix: str = ""
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cutting: str = ""
    generation: Config | None = None
    tokenizer_class: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    dense: tuple[tuple[int, int], ...] = ()


_STAY_NULL = ("q_lora_rank", "num_global_key_value_heads", "moe_intermediate_size", "sliding_window")
"""Keys that config.json says null for: the converter asks for them, or a class has another default."""


def with_int4_experts(tensors: Tensors) -> Tensors:
    """Return the tensors with routed experts as int4 in groups of 32 columns, as in Kimi K2-Thinking."""
    packed: Tensors = {}
    for name, weight in tensors.items():
        if ".experts." not in name:
            packed[name] = weight
            continue
        rows, cols = weight.shape
        groups = weight.astype(np.float32).reshape(rows, cols // 32, 32)
        scale = (np.abs(groups).max(-1, keepdims=True) / 7).astype(ml_dtypes.bfloat16)
        codes = (np.clip(np.rint(groups / scale.astype(np.float32)), -8, 7) + 8).astype(np.uint8)
        packed[f"{name}_packed"] = pack_low_first(codes.reshape(rows, cols), 4).view(np.int32)
        packed[f"{name}_scale"] = scale[..., 0]
        packed[f"{name}_shape"] = np.array(weight.shape, np.int64)
    return packed


def beside_vision(tensors: Tensors) -> Tensors:
    """Return the tensors under the names that they have in a model with a vision part, as in Qwen 3.5."""
    return {name.replace("model.", "model.language_model."): weight for name, weight in tensors.items()}


def with_ngrams(tensors: Tensors) -> Tensors:
    """Return the tensors of a Qwen4Exp beside a vision part, with numbers of n-grams that fit its table."""
    numbers = {
        "layer_multipliers": [23703573299843, 35184372088831, 12345678901235],
        "ngram_heads_offsets": [0, 59, 120, 187], "ngram_heads_vocab_sizes": [59, 61, 67, 69],
    }  # fmt: skip
    stored = {
        name: np.array(numbers[end], np.int64) if (end := name.rpartition(".")[2]) in numbers else weight
        for name, weight in tensors.items()
    }
    return beside_vision(stored)


def write_published(model: Published, folder: Path) -> Path:
    """Write the checkpoint of a model to a folder, and return that."""
    config = {key: value for key, value in model.config.items() if value is not None or key in _STAY_NULL}
    tensors: Tensors = {}
    for seed, (tensor, shape) in enumerate(model.shapes(model.config)):
        values = formula(shape, seed)
        if tensor.endswith("k_norm.bias"):
            values -= 1  # else all positions of some tokens score 0, and which are chosen is chance
        is_bias = tensor.endswith(("e_score_correction_bias", "expert_bias"))
        tensors[tensor] = values if is_bias else values.astype(ml_dtypes.bfloat16)
    tensors = {model.prefix + tensor: values for tensor, values in model.edit(tensors).items()}
    tensors |= {tensor: formula(shape, 1) for tensor, shape in model.extra.items()}
    whole = config if model.around is None else {**model.around, "text_config": config}
    write_checkpoint(folder, whole, tensors)
    if model.generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(model.generation))
    _write_tokenizer(model, folder)
    for name, content in model.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    if model.dense:
        write_dense_modules(folder, model.dense)
    return folder


def write_dense_modules(folder: Path, sizes: Sequence[tuple[int, int]], **changes: object) -> None:
    """Give a folder a pooling and Dense modules, with `changes` in their config.json."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(sizes), "Normalize"]
    places = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"idx": idx, "name": str(idx), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for idx, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for number, (n_in, n_out) in enumerate(sizes, 2):
        config = {
            "in_features": n_in, "out_features": n_out, "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        } | changes  # fmt: skip
        weights = {"linear.weight": formula((n_out, n_in), number)}
        write_checkpoint(folder / f"{number}_Dense", config, weights)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": sizes[0][0], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def _write_tokenizer(model: Published, folder: Path) -> None:
    if not model.tokenizer:
        write_gemma_tokenizer(folder)
        return
    if model.tokenizer == "sentencepiece":
        write_sentencepiece_model(folder)
        return
    if model.tokenizer == "hy.tiktoken":
        _write_ranks(folder / model.tokenizer)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "HYTokenizer"}')
        return
    for path in (MODELS / model.tokenizer).iterdir():
        if path.name not in ("config.json", "model.safetensors") and not (folder / path.name).exists():
            shutil.copy(path, folder / path.name)
            for old, new in model.renamed.items():
                text = (folder / path.name).read_text(encoding="utf-8").replace(old, new)
                (folder / path.name).write_text(text, encoding="utf-8")
    if model.tokenizer_class:
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text()) | {"tokenizer_class": model.tokenizer_class}
        path.write_text(json.dumps(settings))
    if model.cutting:
        _cut_as(model.cutting, folder / "tokenizer.json")
    if model.words:
        _with_words(model.words, folder)


_RANKED = (" the", " of", " value", " function", " returns", "list", "order", " model", " token", "weights")


def _write_ranks(path: Path) -> None:
    """Write a file of tiktoken: all bytes, and words with their beginnings."""
    parts = dict.fromkeys(word[:end] for word in _RANKED for end in range(2, len(word) + 1))
    tokens = [*(bytes([byte]) for byte in range(256)), *(part.encode() for part in parts)]
    lines = (b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens))
    path.write_bytes(b"".join(lines))


def _with_words(words: tuple[str, ...], folder: Path) -> None:
    """Give a tokenizer a token for each word."""
    content, settings = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("tokenizer", "tokenizer_config")
    )
    added, decoder = content["added_tokens"], settings["added_tokens_decoder"]
    last = added[-1]["id"]
    for number, word in enumerate(words, last + 1):
        plain = {**decoder[str(last)], "content": word, "special": False, "normalized": True}
        added.append({"id": number, **plain})
        decoder[str(number)] = plain
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _cut_as(name: str, path: Path) -> None:
    """Have a tokenizer.json cut text as the model does that `name` is known from."""
    content = json.loads(path.read_text(encoding="utf-8"))
    steps = content["pre_tokenizer"]["pretokenizers"]
    at, split = next((at, part) for at, part in enumerate(steps) if part["type"] == "Split")
    regexes = CUTS[name] if isinstance(CUTS[name], tuple) else (CUTS[name],)
    steps[at : at + 1] = [{**split, "pattern": {"Regex": regex}} for regex in regexes]
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CUTS: Mapping[str, str | tuple[str, ...]] = {
    "laguna": (r"[^\n]+|\n+", _QWEN2),
    "exaone-moe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "dbrx": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "seed-coder": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Expressions of published tokenizers whose vocabulary is that of an older one."""
