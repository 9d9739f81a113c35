"""Small encoders: BERT, RoBERTa, XLM-RoBERTa, ModernBERT and Nomic BERT, some with a classifier.

`write(name, folder)` makes one. Weights are a formula on integers, the same bits everywhere. Vocabularies are
made of a text of the repository; those of WordPiece and of a SentencePiece model need no training.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.checkpoints import formula, write_checkpoint
from tests.support.piece_model import CONTROL, NORMAL, UNKNOWN, piece

_TEXT = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3" / "calibration.txt"
_WIDTH, _INNER, _LAYERS, _POSITIONS = 64, 96, 2, 130
_Shape = tuple[str, tuple[int, ...]]
_BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_XLM_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def _words(most: int) -> list[str]:
    text = _TEXT.read_text(encoding="utf-8")[:20000].lower()
    return [word for word, _ in Counter(word for word in text.split() if word.isalpha()).most_common(most)]


def _of_texts(cls: str, sep: str, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the post-processor that puts tokens around one text, and between two."""
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    start, end = ({"SpecialToken": {"id": text, "type_id": 0}} for text in (cls, sep))
    tokens = {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in (cls, sep)}
    pair = [start, first, end, second, end]
    return {
        "type": "TemplateProcessing",
        "single": [start, first, end],
        "pair": pair,
        "special_tokens": tokens,
    }


def _added(tokens: tuple[str, ...], ids: Mapping[str, int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": ids[text], "content": text, **flags} for text in tokens]


def _wordpiece(folder: Path) -> int:
    letters = [chr(code) for code in range(33, 127)] + ["é", "ü", "界"]
    pieces = [*_BERT_TOKENS, *letters, *(f"##{letter}" for letter in letters), *_words(300), "##ing", "##ed"]
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(_BERT_TOKENS, ids),
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _of_texts("[CLS]", "[SEP]", ids),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": ids},
    }  # fmt: skip
    _save(
        folder, content, "BertTokenizer", zip(("pad", "unk", "cls", "sep", "mask"), _BERT_TOKENS, strict=True)
    )
    return len(ids) + 3


def _unigram(folder: Path, table: bytes = b"", *, has_model: bool) -> int:
    """Write tokenizer.json, and the SentencePiece model that it is made of if there is one.

    table  of characters that are replaced first
    """
    letters = [*map(chr, range(33, 127)), "é", "ü", "界", "▁"]
    scored = [(letter, -9.0 - number / 64) for number, letter in enumerate(letters)]
    scored += [(f"▁{word}", -3.0 - number / 64) for number, word in enumerate(_words(300))]
    scores = dict(scored)
    vocab = [*((text, 0.0) for text in _XLM_TOKENS[:4]), *scores.items(), ("<mask>", 0.0)]
    ids = {text: number for number, (text, _) in enumerate(vocab)}
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    if table:
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": b64encode(table).decode()})
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(_XLM_TOKENS, ids),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
        "post_processor": _of_texts("<s>", "</s>", ids),
        "decoder": spaces,
        "model": {"type": "Unigram", "unk_id": 3, "vocab": vocab},
    }  # fmt: skip
    if has_model:
        pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
        pieces += [(text, score, NORMAL) for text, score in scores.items()]
        model = b"".join(b"".join(piece(text.encode(), score, kind)) for text, score, kind in pieces)
        (folder / "sentencepiece.bpe.model").write_bytes(model)
    named = zip(("bos", "pad", "eos", "unk", "mask"), _XLM_TOKENS, strict=True)
    _save(folder, content, "XLMRobertaTokenizer", [*named, ("cls", "<s>"), ("sep", "</s>")])
    return len(vocab)


def _byte_level(folder: Path) -> int:
    from tokenizers.implementations import ByteLevelBPETokenizer
    from tokenizers.processors import RobertaProcessing

    library = ByteLevelBPETokenizer()
    text = _TEXT.read_text(encoding="utf-8")[:20000]
    library.train_from_iterator([text], 400, special_tokens=list(_XLM_TOKENS), show_progress=False)
    library._tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    named = zip(("bos", "pad", "eos", "unk", "mask"), _XLM_TOKENS, strict=True)
    content = json.loads(library._tokenizer.to_str())
    _save(folder, content, "RobertaTokenizer", [*named, ("cls", "<s>"), ("sep", "</s>")])
    return int(library.get_vocab_size())


def _save(folder: Path, content: Any, kind: str, named: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = {"tokenizer_class": kind, **{f"{name}_token": text for name, text in named}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _shapes(prefix: str, n_tokens: int, n_types: int) -> Iterator[_Shape]:
    """Yield name and shape of what all three have, in the order of transformers."""
    for name, rows in (("word", n_tokens), ("position", _POSITIONS), ("token_type", n_types)):
        yield f"{prefix}embeddings.{name}_embeddings.weight", (rows, _WIDTH)
    yield from _pair(f"{prefix}embeddings.LayerNorm", _WIDTH)
    for layer in range(_LAYERS):
        inside = f"{prefix}encoder.layer.{layer}."
        for name in ("attention.self.query", "attention.self.key", "attention.self.value"):
            yield from _pair(inside + name, _WIDTH, _WIDTH)
        yield from _pair(f"{inside}attention.output.dense", _WIDTH, _WIDTH)
        yield from _pair(f"{inside}attention.output.LayerNorm", _WIDTH)
        yield from _pair(f"{inside}intermediate.dense", _INNER, _WIDTH)
        yield from _pair(f"{inside}output.dense", _WIDTH, _INNER)
        yield from _pair(f"{inside}output.LayerNorm", _WIDTH)


def _pair(name: str, *shape: int) -> Iterator[_Shape]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


TOKENIZERS: Mapping[str, Callable[..., int]] = {
    "bert": _wordpiece,
    "roberta": _byte_level,
    "modern-bert": _byte_level,
    "nomic-bert": _wordpiece,
    "xlm-roberta": partial(_unigram, has_model=False),
    "xlm-roberta-model": partial(_unigram, has_model=True),
    "nomic-bert-moe": lambda folder: _unigram(folder, has_model=True) + 3,
}
"""Kind of encoder -> what writes its tokenizer and returns the number of its tokens."""

WITHOUT_CLASS = "nomic-bert-moe"
"""The encoder for which transformers has no class."""

_UNRANKED = ("xlm-roberta-model", "nomic-bert", WITHOUT_CLASS)
ENCODERS = (
    *(kind for kind in TOKENIZERS if kind != WITHOUT_CLASS),
    *(f"{kind}-rank" for kind in TOKENIZERS if kind not in _UNRANKED),
)


def write(name: str, folder: Path, *table: bytes) -> Path:
    """Write the encoder called `name` in ENCODERS, or WITHOUT_CLASS, to a folder, and return that.

    table  for a tokenizer with a table of characters
    """
    kind, is_ranking = name.removesuffix("-rank"), name.endswith("-rank")
    folder.mkdir(parents=True, exist_ok=True)
    n_tokens = TOKENIZERS[kind](folder, *table)
    make = _MAKERS.get(kind) or partial(_bert, kind)
    config, shapes = make(n_tokens, is_ranking)
    config |= {"vocab_size": n_tokens, "torch_dtype": "bfloat16"}
    if is_ranking:
        config["id2label"] = {"0": "LABEL_0"}
    tensors = {}
    for seed, (tensor, shape) in enumerate(shapes):
        values = formula(shape, seed) - np.float32(tensor.endswith("bias"))
        tensors[tensor] = values.astype(ml_dtypes.bfloat16)
    return write_checkpoint(folder, config, tensors)


_SIZES = {
    "hidden_size": _WIDTH, "intermediate_size": _INNER, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": _POSITIONS,
}  # fmt: skip


def _class_of(name: str, is_ranking: bool) -> list[str]:
    return [f"{name}{'ForSequenceClassification' if is_ranking else 'Model'}"]


def _bert(kind: str, n_tokens: int, is_ranking: bool) -> tuple[dict[str, Any], list[_Shape]]:
    """Return config.json and shapes of a BERT or one of its relatives."""
    class_name = {"bert": "Bert", "roberta": "Roberta"}.get(kind, "XLMRoberta")
    is_bert = kind == "bert"
    prefix = {True: "bert.", False: "roberta."}[is_bert] if is_ranking else ""
    shapes = [*_shapes(prefix, n_tokens, 2 if is_bert else 1)]
    if is_bert:
        shapes += _pair(f"{prefix}pooler.dense", _WIDTH, _WIDTH)
    if is_ranking:
        shapes += _pair("classifier" if is_bert else "classifier.out_proj", 1, _WIDTH)
    if is_ranking and not is_bert:
        shapes += _pair("classifier.dense", _WIDTH, _WIDTH)
    return {
        "architectures": _class_of(class_name, is_ranking),
        "model_type": {"Bert": "bert", "Roberta": "roberta"}.get(class_name, "xlm-roberta"),
        "hidden_act": "gelu", "layer_norm_eps": 1e-12 if is_bert else 1e-5,
        "type_vocab_size": 2 if is_bert else 1, "pad_token_id": 0 if is_bert else 1, **_SIZES,
    }, shapes  # fmt: skip


def _modern_bert(n_tokens: int, is_ranking: bool) -> tuple[dict[str, Any], list[_Shape]]:
    """Return config.json and shapes of a ModernBERT, in the form of transformers 4."""
    prefix = "model." if is_ranking else ""
    shapes: list[_Shape] = [
        (f"{prefix}embeddings.tok_embeddings.weight", (n_tokens, _WIDTH)),
        (f"{prefix}embeddings.norm.weight", (_WIDTH,)),
    ]
    for layer in range(_LAYERS):
        inside = f"{prefix}layers.{layer}."
        if layer:
            shapes.append((f"{inside}attn_norm.weight", (_WIDTH,)))
        shapes += [
            (f"{inside}attn.Wqkv.weight", (3 * _WIDTH, _WIDTH)),
            (f"{inside}attn.Wo.weight", (_WIDTH, _WIDTH)),
            (f"{inside}mlp_norm.weight", (_WIDTH,)),
            (f"{inside}mlp.Wi.weight", (2 * _INNER, _WIDTH)),
            (f"{inside}mlp.Wo.weight", (_WIDTH, _INNER)),
        ]  # fmt: skip
    shapes.append((f"{prefix}final_norm.weight", (_WIDTH,)))
    if is_ranking:
        shapes += [("head.dense.weight", (_WIDTH, _WIDTH)), ("head.norm.weight", (_WIDTH,))]
        shapes += _pair("classifier", 1, _WIDTH)
    return {
        "architectures": _class_of("ModernBert", is_ranking), "model_type": "modernbert",
        "hidden_activation": "gelu", "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "local_attention": 16,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        "classifier_pooling": "mean", "pad_token_id": 1, "cls_token_id": 0, "sep_token_id": 2,
        "bos_token_id": 0, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False, "norm_bias": False,
        **_SIZES,
    }, shapes  # fmt: skip


def _nomic_bert(n_tokens: int, is_ranking: bool) -> tuple[dict[str, Any], list[_Shape]]:
    """Return config.json and shapes of a Nomic BERT, as published."""
    shapes: list[_Shape] = [
        ("embeddings.word_embeddings.weight", (n_tokens, _WIDTH)),
        ("embeddings.token_type_embeddings.weight", (2, _WIDTH)),
        *_pair("emb_ln", _WIDTH),
    ]
    for layer in range(_LAYERS):
        inside = f"encoder.layers.{layer}."
        shapes += [
            (f"{inside}attn.Wqkv.weight", (3 * _WIDTH, _WIDTH)),
            (f"{inside}attn.out_proj.weight", (_WIDTH, _WIDTH)),
            (f"{inside}mlp.fc11.weight", (_INNER, _WIDTH)),
            (f"{inside}mlp.fc12.weight", (_INNER, _WIDTH)),
            (f"{inside}mlp.fc2.weight", (_WIDTH, _INNER)),
            *_pair(f"{inside}norm1", _WIDTH),
            *_pair(f"{inside}norm2", _WIDTH),
        ]
    return {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu",
        "causal": False, "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False,
        "mlp_fc2_bias": False, "n_embd": _WIDTH, "n_head": 4, "n_inner": _INNER, "n_layer": _LAYERS,
        "n_positions": 8192, "parallel_block": False, "prenorm": False, "qkv_proj_bias": False,
        "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2,
        "use_rms_norm": False, "pad_token_id": 0, "use_flash_attn": True, "embd_pdrop": 0.0, **_SIZES,
        "max_position_embeddings": 2048, "layer_norm_eps": 1e-12,
    }, shapes  # fmt: skip


def _nomic_bert_moe(n_tokens: int, is_ranking: bool) -> tuple[dict[str, Any], list[_Shape]]:
    """Return config.json and shapes of a Nomic BERT with experts in every second layer, as published."""
    plain, shapes = _nomic_bert(n_tokens, is_ranking)
    n_experts, own = 8, (*_SIZES, "layer_norm_eps")
    config = {key: value for key, value in plain.items() if key not in own}
    shapes = [(name, (1, *shape[1:]) if "token_type" in name else shape) for name, shape in shapes]
    shapes = [(name, shape) for name, shape in shapes if ".mlp." not in name]
    for layer in range(_LAYERS):
        inside = f"encoder.layers.{layer}."
        shapes += [(f"{inside}attn.Wqkv.bias", (3 * _WIDTH,)), (f"{inside}attn.out_proj.bias", (_WIDTH,))]
        if layer % 2 == 0:
            shapes += [*_pair(f"{inside}mlp.fc1", _INNER, _WIDTH), *_pair(f"{inside}mlp.fc2", _WIDTH, _INNER)]
            continue
        shapes += [
            (f"{inside}mlp.router.layer.weight", (n_experts, _WIDTH)),
            (f"{inside}mlp.experts.mlp.w1", (n_experts * _INNER, _WIDTH)),
            (f"{inside}mlp.experts.mlp.w2", (n_experts * _INNER, _WIDTH)),
            (f"{inside}mlp.experts.bias", (_WIDTH,)),
        ]
    return {
        **config, "activation_function": "gelu", "add_pooling_layer": False, "expert_choice_router": False,
        "ffn_div": 1, "layer_norm_epsilon": 1e-5, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
        "moe_every_n_layers": 2, "moe_impl": "megablocks", "moe_normalize_expert_weights": False,
        "moe_resid_pdrop": 0.0, "moe_top_k": 2, "n_positions": 2048, "num_experts": n_experts,
        "num_shared_experts": 0, "pad_token_id": 1, "pad_vocab_size_multiple": 64, "qkv_proj_bias": True,
        "rotary_emb_base": 10000, "router_aux_loss_coef": 0.1, "type_vocab_size": 1, "use_rms_norm": None,
    }, shapes  # fmt: skip


_MAKERS = {"modern-bert": _modern_bert, "nomic-bert": _nomic_bert, "nomic-bert-moe": _nomic_bert_moe}
