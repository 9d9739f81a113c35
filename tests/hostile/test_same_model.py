"""Whatever compares two models asks one function whether they are the same; what may differ passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import convert
import gguf_tools
import quantize
from convert.audit.metadata import metadata_findings
from gguf_tools.errors import BadRequest
from gguf_tools.findings import Finding
from gguf_tools.format import keys
from gguf_tools.format.shards import FileLayout, open_gguf
from gguf_tools.format.values import Metadata, Value

torch = pytest.importorskip("torch")

from gguf_tools.commands.main import main  # noqa: E402
from imatrix.evaluate.bases.same_model import KnownModel  # noqa: E402
from imatrix.forward.open import open_model  # noqa: E402
from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
Change = Callable[[Metadata], Mapping[str, Value | None]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    convert.convert(EXAMPLES / "small-llama", path, outtype="f16")
    return path


@pytest.fixture(scope="module")
def quant(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quant") / "quant.gguf"
    quantize.quantize(base, path, "Q4_0")
    return path


def changed(path: Path, output: Path, change: Change) -> Path:
    """Write a file with other metadata; None takes a key out."""
    with open_gguf(path) as file:
        metadata = {k: v for k, v in {**file.metadata, **change(file.metadata)}.items() if v is not None}
        layout = FileLayout.of(metadata, list(file.tensors.values()))
        data = bytearray(layout.total_bytes)
        data[: len(layout.header)] = layout.header
        for info in file.tensors.values():
            start = layout.offset_of(info.name)
            data[start : start + info.n_bytes] = file.read_bytes(info.name, 0, info.n_bytes).tobytes()
    output.write_bytes(data)
    return output


def tokens(put: Callable[[list[str]], list[str]]) -> Change:
    return lambda m: {keys.TOKENIZER_TOKENS: Value.strings(put(list(m[keys.TOKENIZER_TOKENS].data)))}


def kinds(put: Callable[[list[int]], list[int]]) -> Change:
    return lambda m: {keys.TOKENIZER_TOKEN_TYPE: Value.i32s(put(list(m[keys.TOKENIZER_TOKEN_TYPE].data)))}


def key(name: str, value: Value | None) -> Change:
    return lambda m: {name: value}


def merges(m: Metadata) -> dict[str, Value]:
    return {keys.TOKENIZER_MERGES: Value.strings(m[keys.TOKENIZER_MERGES].data[::-1])}


def fillers(name: str, kind: int) -> Change:
    """Take the last tokens for ones that only fill the vocabulary up."""

    def change(m: Metadata) -> dict[str, Value]:
        texts, own = list(m[keys.TOKENIZER_TOKENS].data), list(m[keys.TOKENIZER_TOKEN_TYPE].data)
        texts[-9:], own[-9:] = [name.format(i) for i in range(9)], [kind] * 9
        return {keys.TOKENIZER_TOKENS: Value.strings(texts), keys.TOKENIZER_TOKEN_TYPE: Value.i32s(own)}

    return change


def last_unused(m: Metadata) -> dict[str, Value]:
    return {keys.TOKENIZER_TOKEN_TYPE: Value.i32s([*m[keys.TOKENIZER_TOKEN_TYPE].data[:-5], *[5] * 5])}


ANOTHER: Mapping[str, tuple[str, Change]] = {
    "reordered": (keys.TOKENIZER_TOKENS, tokens(lambda all_: all_[:300] + all_[300:][::-1])),
    "two swapped": (keys.TOKENIZER_TOKENS, tokens(lambda all_: [*all_[:-2], all_[-1], all_[-2]])),
    "one renamed": (keys.TOKENIZER_TOKENS, tokens(lambda all_: [*all_[:-1], "another"])),
    "words control": (keys.TOKENIZER_TOKEN_TYPE, kinds(lambda all_: [3] * len(all_))),
    "kinds turned": (keys.TOKENIZER_TOKEN_TYPE, kinds(lambda all_: all_[::-1])),
    "bytes": (keys.TOKENIZER_TOKEN_TYPE, kinds(lambda all_: [*all_[:256], *[6] * 256, *all_[512:]])),
    "merges": (keys.TOKENIZER_MERGES, merges),
    "bos": (keys.TOKENIZER_BOS_ID, key(keys.TOKENIZER_BOS_ID, Value.u32(7))),
    "eos": (keys.TOKENIZER_EOS_ID, key(keys.TOKENIZER_EOS_ID, Value.u32(7))),
    "pre-tokenizer": (keys.TOKENIZER_PRE, key(keys.TOKENIZER_PRE, Value.string("llama-bpe"))),
}


@pytest.mark.parametrize("which", ANOTHER)
def test_another_model_is_refused_whichever_side_is_changed(
    which: str, base: Path, quant: Path, tmp_path: Path
) -> None:
    wanted, change = ANOTHER[which]
    other_base, other_file = changed(base, tmp_path / "b", change), changed(quant, tmp_path / "q", change)
    for original, file in ((other_base, quant), (base, other_file)):
        with open_model(original) as of, open_model(file) as made:
            with pytest.raises(BadRequest) as caught:
                KnownModel.of(of).admit([made], lambda finding: None)
            assert str(caught.value).startswith(f"{file}: {wanted}: ")
            assert str(caught.value).endswith(
                f"; it is of another model than {original}: name the base that it was made of"
            )
            found = [each for each in metadata_findings(made.metadata, of.metadata, "") if each.is_bad]
            assert wanted in {about for each in found for about in each.about}, "the audit says so, too"


SAME: Mapping[str, tuple[Change, Change, tuple[str, ...]]] = {
    "added tokens of another kind": (
        kinds(lambda all_: [1, 1, 1, *all_[3:]]), lambda m: {}, (keys.TOKENIZER_TOKEN_TYPE,),
    ),
    "fillers with other names": (
        fillers("[PAD{}]", 5), fillers("<dummy{:05}>", 4), (keys.TOKENIZER_TOKENS, keys.TOKENIZER_TOKEN_TYPE),
    ),
    "unused tokens": (fillers("x{}", 5), fillers("y{}", 5), (keys.TOKENIZER_TOKENS,)),
    "fillers left out": (
        lambda m: {
            keys.TOKENIZER_TOKENS: Value.strings(m[keys.TOKENIZER_TOKENS].data[:-5]),
            keys.TOKENIZER_TOKEN_TYPE: Value.i32s(m[keys.TOKENIZER_TOKEN_TYPE].data[:-5]),
        },
        last_unused, (keys.TOKENIZER_TOKENS, keys.TOKENIZER_TOKEN_TYPE),
    ),
    "no kinds": (key(keys.TOKENIZER_TOKEN_TYPE, None), lambda m: {}, ()),
    "no pre-tokenizer": (
        key(keys.TOKENIZER_PRE, Value.string("default")), lambda m: {}, (keys.TOKENIZER_PRE,),
    ),
    "no special tokens": (
        lambda m: {keys.TOKENIZER_EOS_ID: None, keys.TOKENIZER_PAD_ID: None}, lambda m: {}, (),
    ),
    "a chat template": (key(keys.TOKENIZER_CHAT_TEMPLATE, Value.string("{{ 1 }}")), lambda m: {}, ()),
    "heads by layer": (
        lambda m: {"llama.attention.head_count": Value.u32s([m["llama.attention.head_count"].data] * 8)},
        lambda m: {}, (),
    ),
    "another name and context": (
        lambda m: {keys.NAME: Value.string("x"), "llama.context_length": Value.u32(99)}, lambda m: {}, (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", SAME)
def test_what_other_converters_write_is_the_same_model(
    which: str, base: Path, quant: Path, tmp_path: Path
) -> None:
    in_file, in_base, noted = SAME[which]
    original = changed(base, tmp_path / "b.gguf", in_base)
    file = changed(quant, tmp_path / "q.gguf", in_file)
    told: list[Finding] = []
    with open_model(original) as of, open_model(file) as made:
        KnownModel.of(of).admit([made], told.append)
    assert [each.about for each in told] == ([noted] if noted else [])


def test_a_quantized_base_of_fewer_bits_is_told_once(base: Path, quant: Path) -> None:
    for original, files, n_told in (
        (quant, [base, base], 1), (base, [quant, base], 0), (EXAMPLES / "small-llama", [base, quant], 0),
        (quant, [quant], 0),
    ):  # fmt: skip
        told: list[Finding] = []
        with open_model(original) as of, open_model(files[0]) as a, open_model(files[-1]) as b:
            KnownModel.of(of).admit([a, b], told.append)
        assert [each.kind for each in told] == ["swapped"] * n_told
        assert all("are they swapped?" in each.text for each in told)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "t.txt"
    path.write_bytes((EXAMPLES / "tiny-deepseek-v3" / "calibration.txt").read_bytes()[:4000])
    return path


def test_commands_refuse_before_they_compute(
    base: Path, quant: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, change = ANOTHER["reordered"]
    other, output = changed(base, tmp_path / "other.gguf", change), tmp_path / "out.gguf"
    cut = ["-f", str(text), "-c", "64", "--chunks", "4"]
    assert main(["refine", str(quant), "--base", str(other), *cut, "--steps", "1", "-o", str(output)]) == 1
    assert "is of another model than" in capsys.readouterr().err
    assert main(["evaluate", str(other), *cut, str(quant)]) == 1
    assert "is of another model than" in capsys.readouterr().err
    assert not output.exists()
    assert list(tmp_path.glob("*.work")) == []


def test_a_base_that_is_gone_is_known_by_what_was_kept(
    base: Path, quant: Path, text: Path, tmp_path: Path
) -> None:
    gone, keep = tmp_path / "gone.gguf", tmp_path / "kept"
    gone.write_bytes(base.read_bytes())
    options = gguf_tools.EvaluateOptions(
        cut=Cut(64, n_chunks=1), forward=ForwardOptions(n_threads=1), keep=keep, work=tmp_path / "work"
    )
    first = gguf_tools.evaluate(gone, text, [quant], options)
    gone.unlink()
    again = gguf_tools.evaluate(gone, text, [quant], options)
    assert again.models[0].divergence == first.models[0].divergence
    for which in ("reordered", "merges", "bos"):
        wanted, change = ANOTHER[which]
        with pytest.raises(BadRequest, match=f"{wanted}: is not the base's; it is of another model"):
            gguf_tools.evaluate(gone, text, [changed(quant, tmp_path / "q.gguf", change)], options)


def test_an_audit_of_another_model_keeps_what_it_has_found(
    base: Path, quant: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, change = ANOTHER["reordered"]
    file = changed(quant, tmp_path / "q.gguf", change)
    assert main(["audit", str(file), str(base), "-f", str(text), "-c", "64", "-q"]) == 1
    said = capsys.readouterr().out
    assert "tokens are in another order" in said
    assert "not measured: " in said
    assert "57 tensors compared" in said
