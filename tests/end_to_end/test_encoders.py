"""Encoders become files in which llama.cpp cuts, pools and ranks texts as the original does."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer

import convert
import gguf_tools
import imatrix
from convert.audit.pipeline import audit
from convert.tokenizer.sentencepiece_model import read_sentencepiece_model
from gguf_tools import open_gguf
from gguf_tools.errors import BadConfig, BadRequest, CheckpointError, UnsupportedCheckpoint
from imatrix.forward.layers import activations
from imatrix.forward.observe import Silent
from imatrix.forward.open import open_model
from imatrix.forward.options import ForwardOptions
from imatrix.forward.pooled import pooled
from imatrix.forward.run import forward_pass
from imatrix.forward.work_folder import WorkFolder
from imatrix.texts.tokens import Text, bos_of, end_of, make_encoder
from tests.end_to_end.arch_models import GOLDEN
from tests.end_to_end.test_convert_published import described, keys
from tests.imatrix.forward.hostile_text import HOSTILE
from tests.support import oracle
from tests.support.checkpoints import edit_config, read_config, write_checkpoint
from tests.support.encoder_models import ENCODERS, WITHOUT_CLASS, write
from tests.support.published_checkpoint import write_dense_modules
from tests.support.published_models import write as write_published

RECORDED: dict[str, Any] = json.loads((GOLDEN / "encoders.json").read_text(encoding="utf-8"))
TEXT = "The list of the values that a function returns, in order: one, two (3)."
GATED = ("modern-bert", "nomic-bert")
_OTHERWISE = {"\u0085", "\u20e3"}
"""Characters that llama.cpp takes otherwise: a control character that is a space,
and an enclosing mark."""

needs_llama = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


@pytest.mark.parametrize("name", RECORDED)
def test_equals_llama_cpps_converter(name: str, tmp_path: Path) -> None:
    convert.convert(write(name, tmp_path / "model"), tmp_path / "out.gguf", outtype="bf16")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert sorted(keys(file)) == sorted(RECORDED[name]["keys"])
        lines = list(described(file))
    assert len(lines) == RECORDED[name]["n_tensors"]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == RECORDED[name]["sha256_of_tensors"]


@needs_llama
@pytest.mark.parametrize("name", ENCODERS)
def test_llama_cpp_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    folder, path = write(name, tmp_path / "model"), tmp_path / "out.gguf"
    convert.convert(folder, path, outtype="f32")
    published = Tokenizer.from_file(str(folder / "tokenizer.json"))
    kind = "AutoModelForSequenceClassification" if name.endswith("-rank") else "AutoModel"
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    with oracle.Model(path) as ours, torch.no_grad():
        ids = published.encode(TEXT).ids
        assert ours.tokenize(TEXT, add_special=True) == ids
        made = model(torch.tensor([ids]))
        if name.endswith("-rank"):
            expected = {"rank": made.logits[0]}
        else:
            hidden = made.last_hidden_state[0]
            expected = {"mean": hidden.mean(0), "cls": hidden[0]}
        for pooling, vector in expected.items():
            found = ours.pooled(ids, pooling, len(vector))
            limit = 1e-5 if name.startswith(GATED) else 5e-4  # GELU alone is a table of F16 there
            assert np.linalg.norm(found - vector.numpy()) < limit * np.linalg.norm(vector.numpy())


def charsmap(folder: Path) -> bytes:
    """Return the table of characters that SentencePiece gives to all models, XLM-RoBERTa's among them."""
    with (folder / "trained.model").open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(["a b"]), model_writer=file, vocab_size=6, hard_vocab_limit=False,
            minloglevel=2,
        )  # fmt: skip
    return read_sentencepiece_model(folder / "trained.model").normalizer.charsmap


@needs_llama
def test_a_gemma_whose_tokens_see_later_ones(tmp_path: Path) -> None:
    folder, path = write_published("embeddinggemma", tmp_path / "model"), tmp_path / "out.gguf"
    convert.convert(folder, path, outtype="f32")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [5 + 7 * number % 500 for number in range(60)]  # more than a window
    with oracle.Model(path) as ours, torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
        found = ours.pooled(ids, "mean", hidden.shape[1])
    expected = hidden.mean(0).numpy()
    assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected)  # GELU is a table of F16 there


@needs_llama
@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_tokens_are_the_originals(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path / "model", *([charsmap(tmp_path)] if name == "xlm-roberta" else []))
    convert.convert(folder, tmp_path / "out.gguf", vocab_only=True)
    published = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with oracle.Model(tmp_path / "out.gguf", vocab_only=True) as model:
        for text in HOSTILE:
            if _OTHERWISE & set(text):
                continue
            assert model.tokenize(text) == published.encode(text, add_special_tokens=False).ids


def test_what_is_added_to_embeddings_stays_as_it_is(tmp_path: Path) -> None:
    folder = write("xlm-roberta", tmp_path / "model")
    convert.convert(folder, tmp_path / "out.gguf", outtype="Q4_K_M")
    with open_gguf(tmp_path / "out.gguf") as file:
        types = {name: info.type.name for name, info in file.tensors.items()}
        assert types["position_embd.weight"] == types["token_types.weight"] == "F32"
        assert types["blk.0.ffn_up.weight"] != "F32"
        assert file.tensors["position_embd.weight"].shape == (128, 64)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a decoder": ({"is_decoder": True}, UnsupportedCheckpoint, "is_decoder is True, expected False: llama"),
    "another activation": ({"hidden_act": "relu"}, UnsupportedCheckpoint, "hidden_act is 'relu', expected"),
    "positions for padding alone": ({"max_position_embeddings": 2}, BadConfig, "expected more than 2"),
    "heads that do not fit": ({"num_attention_heads": 5}, BadConfig, r"a divisor of hidden_size \(64\)"),
    "a class without a name": (
        {"id2label": {"1": "A"}},
        BadConfig,
        "id2label is .*, expected an object with",
    ),
    "names that are a list": (
        {"id2label": ["A"]},
        BadConfig,
        "id2label is .*, expected an object with a name",
    ),
}


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"moe_normalize_expert_weights": True}, UnsupportedCheckpoint, "the weights of experts as they are"),
        ({"num_shared_experts": 1}, UnsupportedCheckpoint, "num_shared_experts is 1, expected 0"),
        ({"qkv_proj_bias": False}, UnsupportedCheckpoint, "nomic-bert-moe has biases"),
        ({"moe_top_k": 9}, BadConfig, "moe_top_k is 9, expected a whole number from 1 to 8"),
    ],
)
def test_experts_that_llama_cpp_does_not_compute_are_refused(
    changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    folder = write(WITHOUT_CLASS, tmp_path / "model")
    edit_config(folder, **changes)
    with pytest.raises(error, match=says):
        convert.convert(folder, tmp_path / "out.gguf")


@pytest.mark.parametrize(("changes", "error", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_what_llama_cpp_has_no_place_for_is_refused(
    changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    folder = write("roberta-rank", tmp_path / "model")
    edit_config(folder, **changes)
    with pytest.raises(error, match=says):
        convert.convert(folder, tmp_path / "out.gguf")


def test_commands_that_need_predictions_refuse_an_encoder(tmp_path: Path) -> None:
    folder = write("bert", tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 50)
    with pytest.raises(UnsupportedCheckpoint, match=r"model: an encoder, which predicts no tokens"):
        gguf_tools.sensitivity(folder, tmp_path / "text.txt", tmp_path / "x.json", chunk_size=64)
    with pytest.raises(UnsupportedCheckpoint, match=r"model: an encoder, which predicts no tokens"):
        gguf_tools.calibrate(
            folder, tmp_path / "out.gguf", "Q4_0", tmp_path / "text.txt", chunk_size=64, any_text=True
        )


def vectors_of(path: Path, ids: list[int]) -> npt.NDArray[np.float64]:
    """Return the vector that the forward pass makes of a text."""
    tokens = np.array([ids])
    with (
        open_model(path, predicts=False) as source,
        WorkFolder(path.parent / f"{path.name}.work", {}) as work,
    ):
        chunks = Text(tokens, tokens).chunks
        options = ForwardOptions(device="cpu")
        with forward_pass(source, chunks, options, work, lambda share: None) as forward:
            assert [*forward.layers(Silent)] == [*range(source.network.n_layers)]
            return pooled(forward)[0].numpy()


@needs_llama
@pytest.mark.parametrize("name", ENCODERS)
def test_the_forward_pass_makes_the_vectors_of_both(name: str, tmp_path: Path) -> None:
    folder, path = write(name, tmp_path / "model"), tmp_path / "out.gguf"
    convert.convert(folder, path, outtype="f32")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    is_cls = name.endswith("-rank") and not name.startswith("modern-bert")  # as its classifier takes it
    with oracle.Model(path) as llama:
        theirs = llama.pooled(ids, "cls" if is_cls else "mean", len(hidden[0]))
    ours = vectors_of(path, ids)
    for vector, limit in ((hidden[0] if is_cls else hidden.mean(0), 1e-6), (theirs, 5e-4)):
        assert np.linalg.norm(ours - vector / np.linalg.norm(vector)) < limit
    assert np.array_equal(ours, vectors_of(folder, ids))


def test_the_only_type_of_texts_is_added_whole_where_quantize_wrote_it(tmp_path: Path) -> None:
    folder, plain, path = write("roberta", tmp_path / "model"), tmp_path / "plain.gguf", tmp_path / "out.gguf"
    convert.convert(folder, plain, outtype="f32")
    gguf_tools.quantize(plain, path, "F32")
    with open_gguf(path) as file:
        assert file.tensors["token_types.weight"].shape == (64,)  # as llama-quantize writes one row
    assert np.array_equal(vectors_of(path, [0, 7, 8, 9, 2]), vectors_of(plain, [0, 7, 8, 9, 2]))


def llama_s_gelu(x: torch.Tensor, **how: Any) -> torch.Tensor:
    """Return GELU as llama.cpp computes that of encoders: a table of F16, of the approximation by tanh."""
    return torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()


@needs_llama
def test_the_forward_pass_makes_llama_s_vectors_of_an_encoder_with_experts(tmp_path: Path) -> None:
    folder, path = write(WITHOUT_CLASS, tmp_path / "model"), tmp_path / "out.gguf"
    notes = convert.convert(folder, path, outtype="f32").preparation.plan.notes
    assert [note for note in notes if "encoder.layers.1.mlp.experts.bias" in note and "left out" in note]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    with oracle.Model(path) as llama:
        assert llama.tokenize(TEXT, add_special=True) == ids
        theirs = llama.pooled(ids, "mean", 64)
    with patch.object(activations, "gelu", llama_s_gelu):
        ours = vectors_of(path, ids)
        assert np.array_equal(ours, vectors_of(folder, ids))
    assert np.linalg.norm(ours - theirs / np.linalg.norm(theirs)) < 1e-5


def test_the_forward_pass_computes_the_windows_of_embeddinggemma(tmp_path: Path) -> None:
    folder, path = write_published("embeddinggemma", tmp_path / "model"), tmp_path / "out.gguf"
    convert.convert(folder, path, outtype="f32")
    ids = [5 + 7 * number % 500 for number in range(60)]  # more than a window
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    assert np.linalg.norm(vectors_of(path, ids) - expected / np.linalg.norm(expected)) < 1e-5


DENSE = {"sentence_transformers_dense_modules": True}


@needs_llama
def test_dense_modules_of_a_folder_are_in_its_file(tmp_path: Path) -> None:
    folder, path = write_published("embeddinggemma-dense", tmp_path / "model"), tmp_path / "out.gguf"
    convert.convert(folder, path, outtype="f32", family=DENSE)
    plan = convert.convert(folder, tmp_path / "plain.gguf", outtype="f32").preparation.plan
    assert [note for note in plan.notes if "2_Dense" in note or "3_Dense" in note] == [
        f"modules.json: Dense ({place}) is left out: embeddings are those without it;"
        " --sentence-transformers-dense-modules keeps it"
        for place in ("2_Dense", "3_Dense")
    ]
    ids = [5 + 7 * number % 500 for number in range(60)]
    with oracle.Model(path) as llama, oracle.Model(tmp_path / "plain.gguf") as plain:
        theirs, expected = llama.pooled(ids, "mean", 64), plain.pooled(ids, "mean", 64)
    with open_gguf(path) as file:
        for name in ("dense_2.weight", "dense_3.weight"):
            matrix = np.frombuffer(file.raw(name), np.float32).reshape(file.tensors[name].shape)
            expected = matrix @ expected
    assert np.linalg.norm(theirs - expected) < 1e-5 * np.linalg.norm(expected)
    ours = vectors_of(path, ids)
    assert np.linalg.norm(ours - theirs / np.linalg.norm(theirs)) < 2e-3  # GELU is a table of F16 there


def test_dense_modules_are_audited_with_the_folder_s(tmp_path: Path) -> None:
    folder, path = write_published("embeddinggemma-dense", tmp_path / "model"), tmp_path / "out.gguf"
    convert.convert(folder, path, outtype="Q4_0", family=DENSE)
    report = audit(path, folder)
    assert {"dense_2.weight", "dense_3.weight"} <= {each.name for each in report.tensors}
    assert not report.is_wrong


DENSE_REFUSED: dict[str, tuple[tuple[tuple[int, int], ...], dict[str, Any], type[Exception], str]] = {
    "a bias": (((64, 64),), {"bias": True}, UnsupportedCheckpoint, "bias is True, expected False"),
    "an activation": (
        ((64, 64),), {"activation_function": "torch.nn.modules.activation.Tanh"}, UnsupportedCheckpoint,
        "activation.Tanh', expected Identity: llama.cpp has none",
    ),
    "more than two": (((64, 64),) * 3, {}, UnsupportedCheckpoint, "3 modules Dense, and llama.cpp has room"),
    "another width": (((64, 32),), {}, UnsupportedCheckpoint, "64 to 32 columns, expected a chain"),
    "another size": (((64, 64),), {"out_features": 32}, UnsupportedCheckpoint, "64 to 32 columns, expected"),
    "none": ((), {}, BadRequest, "modules.json has no module Dense"),
}  # fmt: skip


@pytest.mark.parametrize(("sizes", "changes", "error", "says"), DENSE_REFUSED.values(), ids=DENSE_REFUSED)
def test_dense_modules_that_llama_cpp_does_not_compute_are_refused(
    sizes: tuple[tuple[int, int], ...],
    changes: dict[str, Any],
    error: type[Exception],
    says: str,
    tmp_path: Path,
) -> None:
    folder = write_published("embeddinggemma", tmp_path / "model")
    if sizes:
        write_dense_modules(folder, sizes, **changes)
    with pytest.raises(error, match=says):
        convert.convert(folder, tmp_path / "out.gguf", family=DENSE)


def test_weights_of_a_dense_module_have_its_sizes(tmp_path: Path) -> None:
    folder = write_published("embeddinggemma-dense", tmp_path / "model")
    write_checkpoint(folder / "2_Dense", read_config(folder / "2_Dense"), {"linear.weight": np.ones((3, 64))})
    with pytest.raises(CheckpointError, match=r"2_Dense: has .*\(3, 64\).*, expected .* of \(192, 64\)"):
        convert.convert(folder, tmp_path / "out.gguf", family=DENSE)


def add_projections(path: Path, output: Path) -> None:
    """Copy an EmbeddingGemma with the matrices of its two Dense modules."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(output, "gemma-embedding")
    for key, field in reader.fields.items():
        if key != "general.architecture" and not key.startswith("GGUF."):
            item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], item)
    random, width = np.random.default_rng(3), 64
    for number, n_in, n_out in ((2, width, 3 * width), (3, 3 * width, width)):
        writer.add_uint32(f"gemma-embedding.dense_{number}_feat_in", n_in)
        writer.add_uint32(f"gemma-embedding.dense_{number}_feat_out", n_out)
        matrix = random.standard_normal((n_out, n_in)).astype(np.float32)
        writer.add_tensor(f"dense_{number}.weight", matrix)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs_llama
def test_vectors_go_through_the_projections_of_a_file(tmp_path: Path) -> None:
    folder, plain, path = (
        write_published("embeddinggemma", tmp_path / "model"),
        tmp_path / "a",
        tmp_path / "b",
    )
    convert.convert(folder, plain, outtype="f32")
    add_projections(plain, path)
    ids = [5 + 7 * number % 500 for number in range(60)]
    with oracle.Model(path) as llama:
        theirs = llama.pooled(ids, "mean", 64)
    ours = vectors_of(path, ids)
    assert np.linalg.norm(ours - theirs / np.linalg.norm(theirs)) < 2e-3  # GELU is a table of F16 there
    assert np.linalg.norm(ours - vectors_of(plain, ids)) > 0.1


@needs_llama
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "roberta", "modern-bert"])
def test_texts_become_the_tokens_of_llama_cpp(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path / "model", *([charsmap(tmp_path)] if name == "xlm-roberta" else []))
    convert.convert(folder, tmp_path / "out.gguf", vocab_only=True)
    with open_gguf(tmp_path / "out.gguf") as file:
        vocab = file.metadata
    encoder = make_encoder(vocab)
    with oracle.Model(tmp_path / "out.gguf", vocab_only=True) as model:
        assert [bos_of(vocab), *encoder.encode(TEXT), end_of(vocab)] == model.tokenize(TEXT, add_special=True)
        for text in HOSTILE:
            if name != "bert" or not _OTHERWISE & set(text):
                assert encoder.encode(text) == model.tokenize(text)


def test_an_importance_matrix_of_an_encoder_counts_every_token(tmp_path: Path) -> None:
    folder = write("bert", tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 50)
    found = imatrix.collect(
        folder, tmp_path / "text.txt", tmp_path / "m.gguf", chunk_size=32, n_chunks=3, any_text=True
    )
    assert found.perplexity is None
    entries = found.importances.entries
    assert {name.removeprefix("blk.0.") for name in entries if name.startswith("blk.0.")} == {
        f"{part}.weight" for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    }
    assert all(entry.counts.tolist() == [96] for entry in entries.values())


def test_importances_of_experts_are_those_of_the_tokens_that_they_see(tmp_path: Path) -> None:
    folder = write(WITHOUT_CLASS, tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 50)
    found = imatrix.collect(
        folder, tmp_path / "text.txt", tmp_path / "m.gguf", chunk_size=32, n_chunks=3, any_text=True
    )
    counts = {name: entry.counts for name, entry in found.importances.entries.items()}
    assert {"blk.0.ffn_up.weight", "blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"} <= {*counts}
    assert sum(counts["blk.1.ffn_up_exps.weight"]) == 2 * 96  # two experts a token


def test_a_text_longer_than_the_positions_is_refused(tmp_path: Path) -> None:
    folder = write("bert", tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 50)
    with pytest.raises(BadRequest, match=r"chunks of 131 tokens, and the model has positions for 130"):
        imatrix.collect(folder, tmp_path / "text.txt", tmp_path / "m.gguf", chunk_size=131, any_text=True)
