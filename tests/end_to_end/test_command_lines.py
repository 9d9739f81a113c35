"""Command lines of llama.cpp's tools, and what people mistype, given to ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import convert
import gguf_tools.commands.convert
import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.main
import gguf_tools.commands.quantize
import gguf_tools.commands.sensitivity
import imatrix
import quantize
from gguf_tools import OutputError, open_gguf
from tests.end_to_end.test_commands import MATRIX

Main = Callable[[list[str]], int]


def says(main: Main, words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return exit code and standard error, which must be one line."""
    code = main(words.split())
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return code, err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("a.gguf Q4_KM", "unknown file type 'Q4_KM'; did you mean Q4_K_M?"),
        ("a.gguf b.gguf Q4_KM", "unknown file type 'Q4_KM'; did you mean Q4_K_M?"),
        ("a.gguf b.gguf q5ks 4", "unknown file type 'q5ks'; did you mean Q5_K_S?"),
        ("Q4_K_M a.gguf b.gguf", "TYPE comes after the files: quantize a.gguf b.gguf Q4_K_M"),
        ("a.gguf Q4_K_M b.gguf", "TYPE comes after the files: quantize a.gguf b.gguf Q4_K_M"),
        ("a.gguf", "TYPE is missing"),
        ("a.gguf b.gguf", "TYPE is missing"),
        ("a.gguf b.gguf Q4_0 x", "THREADS: 'x' is not a whole number"),
        ("--imatrx m a.gguf b.gguf Q4_0", "unknown option --imatrx; did you mean --imatrix?"),
    ],
)
def test_mistakes_with_quantize(words: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = says(gguf_tools.commands.quantize.main, words, capsys)
    assert code == 2
    assert part in err


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (gguf_tools.commands.convert.main, "FOLDER --outtype Q4_KM"),
        (gguf_tools.commands.quantize.main, "lint Q4_KM FOLDER/none.gguf"),
    ],
    ids=["convert-hf-to-gguf", "lint"],
)
def test_a_mistyped_type(
    main: Main, words: str, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = says(main, words.replace("FOLDER", str(tiny_folder)), capsys)
    assert code == 2
    assert "unknown file type 'Q4_KM'; did you mean Q4_K_M?" in err


def test_files_in_the_wrong_order(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = says(
        gguf_tools.commands.quantize.main, f"{tmp_path}/new.gguf {tiny_gguf('bf16')} Q4_0", capsys
    )
    assert code == 1
    assert "INPUT comes first" in err


def test_llama_quantize_s_buffer_size(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--max-buffer-size 512 {tiny_gguf('bf16')} {tmp_path}/new.gguf Q8_0"
    code, err = says(gguf_tools.commands.quantize.main, words, capsys)
    assert (code, "--max-buffer-size changes nothing" in err) == (0, True)


REFUSED = [
    (gguf_tools.commands.imatrix.main, "-hf a/b", "hf download"),
    (gguf_tools.commands.imatrix.main, "-m a -p text", "-f"),
    (gguf_tools.commands.imatrix.main, "-m a -f b --save-frequency 3", "--output-frequency"),
    (gguf_tools.commands.convert.main, "--remote a/b", "hf download"),
    (gguf_tools.commands.convert.main, "folder --fp8-as-q8", "--outtype Q8_0"),
    (gguf_tools.commands.convert.main, "folder --fuse-gate-up-exps", "stay apart"),
]


@pytest.mark.parametrize(("main", "words", "part"), REFUSED, ids=[words for _, words, _ in REFUSED])
def test_refused_by_name(main: Main, words: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = says(main, words, capsys)
    assert code == 2
    assert part in err


def test_llama_imatrix_s_flags_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to the model, which isn't there: what they mean is tested with each."""
    (tmp_path / "text.txt").write_text("words")
    words = (
        f"-m {tmp_path}/none.gguf -f {tmp_path}/text.txt --output-file {tmp_path}/m.gguf -ofreq 10 -t 2"
        " -ngl 99 -b 512 -ub 512 -fa on -lv 1 --no-mmap -s 42 -c 512 --chunks 3"
    )
    assert gguf_tools.commands.imatrix.main(words.split()) == 1
    *remarks, error = capsys.readouterr().err.splitlines()
    flags = ["-ngl", "-b", "-ub", "-fa", "-lv", "--no-mmap", "-s"]
    assert [remark.split()[2] for remark in remarks] == flags
    assert "none.gguf" in error


def test_show_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    assert gguf_tools.commands.imatrix.main(["stats", str(MATRIX)]) == 0
    expected = capsys.readouterr().out
    assert (
        gguf_tools.commands.imatrix.main(["--in-file", str(MATRIX), "--show-statistics", "-m", "model.gguf"])
        == 0
    )
    assert capsys.readouterr().out == expected
    assert gguf_tools.commands.imatrix.main(["--show-statistics"]) == 2


def test_the_converter_s_flags(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, same = tmp_path / "plain.gguf", tmp_path / "same.gguf"
    assert gguf_tools.commands.convert.main([str(tiny_folder), "--outfile", str(plain)]) == 0
    flags = ["--no-lazy", "--use-temp-file", "--no-mtp", "--no-nextn"]
    assert gguf_tools.commands.convert.main([str(tiny_folder), "--outfile", str(same), *flags]) == 0
    assert same.read_bytes() == plain.read_bytes()
    assert capsys.readouterr().err.count("changes nothing") == 2


def test_no_tensor_first_split(tiny_folder: Path, tmp_path: Path) -> None:
    words = ["--outfile", str(tmp_path / "m.gguf"), "--split-max-tensors", "30", "--no-tensor-first-split"]
    assert gguf_tools.commands.convert.main([str(tiny_folder), *words]) == 0
    with open_gguf(tmp_path / "m-00001-of-00003.gguf") as opened:
        assert [len(shard.tensors) for shard in opened.shards] == [0, 30, 22]
        assert opened.get("general.architecture") == "deepseek2"


# ---- folders, replaced files, silence


def test_places_that_cannot_be(
    tiny_gguf: Callable[[str], Path], tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_gguf("bf16")
    code, err = says(gguf_tools.commands.quantize.main, f"{source} {tmp_path}/no/out.gguf Q4_0", capsys)
    assert (code, err) == (
        1, f"quantize: error: {tmp_path}/no/out.gguf: there is no folder {tmp_path}/no; create it first\n"
    )  # fmt: skip
    code, err = says(gguf_tools.commands.quantize.main, f"{source} {source}/out.gguf Q4_0", capsys)
    assert (code, f"{source} is a file, expected a folder" in err) == (1, True)
    code, err = says(gguf_tools.commands.convert.main, str(source), capsys)
    assert (code, f"{source}: is a file, expected a folder with config.json" in err) == (1, True)


@pytest.mark.parametrize("words", ["show FOLDER", "verify FOLDER", "diff FOLDER FOLDER"])
def test_a_folder_in_place_of_a_file(
    words: str, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = says(gguf_tools.commands.main.main, words.replace("FOLDER", str(tiny_folder)), capsys)
    assert (code, err) == (1, f"gguf-tools: error: {tiny_folder}: is a folder, expected a file\n")


def test_missing_importances_are_folded(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = says(
        gguf_tools.commands.quantize.main, f"{tiny_gguf('bf16')} {tmp_path}/o.gguf IQ2_XXS", capsys
    )
    assert code == 1
    assert "need an importance matrix" in err
    assert "IQ2_XXS: blk.0-2.attn_" in err
    assert len(err) < 700


def test_what_quantize_replaces(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama-quantize's habit where only its options are used, said aloud; --force with any of ours."""
    source, out = str(tiny_gguf("bf16")), tmp_path / "out.gguf"
    assert gguf_tools.commands.quantize.main([source, str(out), "Q8_0"]) == 0
    assert "which existed before" not in capsys.readouterr().out
    first = out.stat()
    assert gguf_tools.commands.quantize.main([source, str(out), "Q8_0"]) == 0
    said = capsys.readouterr().out
    assert said == f"{out}: exists already, and is what you asked for; --force makes it anew\n"
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert gguf_tools.commands.quantize.main([source, str(out), "Q4_0"]) == 0
    said = capsys.readouterr().out
    assert f"replaced {out}, which existed before\n" in said
    assert "note: replaced the existing file without asking, as llama-quantize does; with any" in said
    ours = ["--fallback", "attn_k_b=Q8_0", source, str(out), "Q4_K_M"]
    assert gguf_tools.commands.quantize.main(ours) == 1
    assert f"{out}: exists already; --force replaces it\n" in capsys.readouterr().err
    assert gguf_tools.commands.quantize.main(["--force", *ours]) == 0
    said = capsys.readouterr().out
    assert f"replaced {out}, which existed before\n" in said
    assert "without asking" not in said


def test_a_finished_output_is_done_as_long_as_its_inputs_are_the_same(
    tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    """Other weights under the same header, an older date and all, are another plan."""
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    data = tiny_gguf("bf16").read_bytes()
    source.write_bytes(data)
    assert not quantize.quantize(source, out, "Q8_0").is_found
    assert quantize.quantize(source, out, "Q8_0").is_found
    assert not quantize.quantize(source, out, "Q8_0", force=True).is_found
    other = tmp_path / "other.gguf"
    other.write_bytes(data[:-64] + bytes(64))
    os.utime(other, (0, 0))
    other.replace(source)
    with pytest.raises(OutputError, match="exists already; force=True replaces it"):
        quantize.quantize(source, out, "Q8_0")
    before = out.read_bytes()
    assert quantize.quantize(source, out, "Q8_0", force=True).replaced == (out,)
    assert out.read_bytes() != before


@pytest.mark.parametrize("what", ["convert", "quantize", "imatrix"])
def test_python_asks_too(
    what: str, tiny_folder: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"the old file")
    make = {
        "convert": lambda **force: convert.convert(tiny_folder, out, outtype="bf16", **force),
        "quantize": lambda **force: quantize.quantize(tiny_gguf("bf16"), out, "Q8_0", **force),
        "imatrix": lambda **force: imatrix.save(out, imatrix.load(MATRIX), **force),
    }[what]
    with pytest.raises(OutputError, match="exists already; force=True replaces it"):
        make()
    assert out.read_bytes() == b"the old file"
    make(force=True)
    assert out.read_bytes() != b"the old file"


WRITING = [
    "convert-hf-to-gguf FOLDER --outfile OUT",
    "convert-hf-to-gguf FOLDER --outfile OUT --outtype Q8_0",
    "convert-hf-to-gguf FOLDER --outfile OUT --vocab-only",
    "gguf-tools set FILE general.name=New -o OUT",
    "gguf-tools remove-key FILE general.name -o OUT",
    "gguf-tools rename FILE output.weight=lm_head.weight -o OUT",
    "gguf-tools merge PARTS OUT",
    "gguf-tools mla-layout FILE OUT --to both",
    "imatrix convert MATRIX OUT",
    "imatrix merge MATRIX MATRIX -o OUT",
    "imatrix repair MATRIX -o OUT",
    "imatrix --in-file MATRIX -o OUT",
]


@pytest.mark.parametrize("words", WRITING)
def test_an_output_that_is_there_is_replaced_only_with_force(
    words: str,
    tiny_gguf: Callable[[str], Path],
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, out = tiny_gguf("bf16"), tmp_path / "out.gguf"
    out.write_bytes(b"the old file")
    places = {"FILE": str(file), "OUT": str(out), "FOLDER": str(tiny_folder), "MATRIX": str(MATRIX)}
    if "PARTS" in words:
        assert gguf_tools.commands.main.main(["split", str(file), str(tmp_path / "part"), "-q"]) == 0
        places["PARTS"] = str(next(tmp_path.glob("part-*")))
    program, *rest = (places.get(word, word) for word in words.split())
    main = {
        "convert-hf-to-gguf": gguf_tools.commands.convert.main, "gguf-tools": gguf_tools.commands.main.main,
        "imatrix": gguf_tools.commands.imatrix.main,
    }[program]  # fmt: skip
    capsys.readouterr()
    assert main(rest) == 1
    assert f"{out}: exists already; --force replaces it\n" in capsys.readouterr().err
    assert out.read_bytes() == b"the old file"
    assert main([*rest, "--force"]) == 0
    assert out.read_bytes() != b"the old file"


def test_what_a_run_has_left_is_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    """The first part is published, the journal of the others is there: the next run goes on."""
    words = [str(tiny_folder), "--outfile", str(tmp_path / "m.gguf"), "--split-max-tensors", "30", "-q"]
    assert gguf_tools.commands.convert.main(words) == 0
    assert gguf_tools.commands.convert.main([*words, "--model-name", "Other"]) == 1
    (tmp_path / "m-00002-of-00002.gguf").rename(tmp_path / "m-00002-of-00002.gguf.partial")
    assert gguf_tools.commands.convert.main(words) == 0


@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_quiet(
    flag: str,
    tiny_gguf: Callable[[str], Path],
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantized = [str(tiny_gguf("bf16")), str(tmp_path / "out.gguf"), "Q4_K_M", "--max-buffer-size", "1"]
    assert gguf_tools.commands.quantize.main([flag, *quantized]) == 0
    assert (
        gguf_tools.commands.convert.main([str(tiny_folder), "--outfile", str(tmp_path / "c.gguf"), flag]) == 0
    )
    edited = ["set", str(tmp_path / "c.gguf"), "general.name=New", flag]
    assert gguf_tools.commands.main.main(edited) == 0
    assert gguf_tools.commands.main.main(["split", str(tmp_path / "c.gguf"), str(tmp_path / "s"), flag]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert gguf_tools.commands.quantize.main([flag, "--dry-run", *quantized]) == 0  # what was asked for
    assert "blk.0.attn_k_b.weight" in capsys.readouterr().out


# ---- sums and JSON


def test_summary_and_json(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_gguf("bf16")), str(tmp_path / "out.gguf"), "Q4_K_M"]
    assert gguf_tools.commands.quantize.main(["--dry-run", *words]) == 0
    whole = capsys.readouterr().out
    assert gguf_tools.commands.quantize.main(["--dry-run", "--summary", *words]) == 0
    summary = capsys.readouterr().out
    assert whole.endswith(summary)
    assert "blk.0.attn_q_a.weight" not in summary
    assert gguf_tools.commands.quantize.main(["--summary", *words]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert gguf_tools.commands.quantize.main(["-q", "--json", *words]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["paths"] == [words[1]]
    assert done["total_bytes"] == (tmp_path / "out.gguf").stat().st_size
    assert (done["replaced"], done["resumed_chunks"], len(done["tensors"])) == ([], 0, 52)


# ---- help


def test_help_fits_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    texts = {parser.prog: parser.format_help() for parser in gguf_tools.commands.main.parsers().values()}
    assert len(texts) > 20
    wide = [(prog, line) for prog, text in texts.items() for line in text.splitlines() if len(line) > 100]
    assert wide == []


def test_every_help_has_examples() -> None:
    texts = {parser.prog: parser.epilog or "" for parser in gguf_tools.commands.main.parsers().values()}
    lacking = [prog for prog, text in texts.items() if f"  {prog}" not in text.partition("examples:")[2]]
    assert lacking == []


def test_help_says_all_that_was_written() -> None:
    for parser in gguf_tools.commands.main.parsers().values():
        words = (parser.description or "").split() + (parser.epilog or "").split()
        shown = parser.format_help().replace("-\n", "-").split()
        assert [word for word in words if word not in shown and "-" not in word] == [], parser.prog
