"""Attestations: what files were made of, written and followed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import convert
import gguf_tools
from convert.sources import model_path
from gguf_tools.commands.attestation import Attestation
from gguf_tools.commands.main import main
from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from tests.support.hub_server import HubServer

MODEL = Path(__file__).parents[3] / "examples" / "small-llama"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert.convert(MODEL, tmp_path_factory.mktemp("source") / "f16.gguf", "f16").paths[0]


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_tools.quantize(source, tmp_path_factory.mktemp("made") / "q.gguf", "Q8_0").paths[0]


def test_an_attestation_names_all_by_digest(source: Path, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    assert main(["attest", str(made), "--source", str(source), "-o", str(out)]) == 0
    said = json.loads(out.read_text())
    assert said["predicateType"] == "https://slsa.dev/provenance/v1"
    build = said["predicate"]["buildDefinition"]
    for path, found in ((made, said["subject"]), (source, build["resolvedDependencies"])):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert found == [{"name": path.name, "digest": {"sha256": digest}}]
    assert build["externalParameters"]["files"] == {made.name: {keys.FILE_TYPE: 7}}
    assert main(["attest", str(made), "-o", str(out)]) == 1


def test_files_of_one_name_have_no_statement_together(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "a.json", Path(shutil.copy(made, tmp_path / made.name))
    assert main(["attest", str(made), str(other), "-o", str(out)]) == 1
    assert f"{other}: another file has this name" in capsys.readouterr().err
    assert not out.exists()


def test_the_chain_begins_at_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is fetched at the commit that the statement names, where it is not here."""
    made, out, other = (str(tmp_path / name) for name in ("q.gguf", "a.json", "b.json"))
    with HubServer({"me/tiny": MODEL}) as hub:
        with hub.client(tmp_path / "cache"):
            source = model_path("me/tiny", quiet=True)
            gguf_tools.quantize(source, made, "Q8_0")
            assert main(["attest", made, "--source", str(source), "-o", out]) == 0
        assert Attestation.read(Path(out)).model == f"hf://me/tiny@{hub.commit('me/tiny')}"
        with hub.client(tmp_path / "another"):
            assert main(["rederive", made, "--attestation", out, "-q"]) == 0
            assert "same: every byte" in capsys.readouterr().out
            Path(other).write_text(Path(out).read_text().replace("pkg:huggingface/me", "pkg:huggingface/.."))
            assert main(["rederive", made, "--attestation", other, "-q"]) == 1
            assert "names no model" in capsys.readouterr().err


def test_an_attestation_is_followed(
    source: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Digests are compared before anything is made; other files are told even if the tensors are the same."""
    out, other = tmp_path / "a.json", tmp_path / "other.gguf"
    assert main(["attest", str(made), "--source", str(source), "-o", str(out)]) == 0
    words = ["--attestation", str(out), "-q", "--json"]
    assert main(["rederive", str(made), "--source", str(source), *words]) == 0
    gguf_tools.quantize(source, other, "Q8_0", provenance=False)
    capsys.readouterr()
    assert main(["rederive", str(other), "--source", str(source), *words]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["same"], result["as_claimed"]) == (True, False)
    assert [each["kind"] for each in result["findings"]] == ["attested-file"]
    assert f"{other}: is another one than the attestation names: digest" in printed.err
    assert main(["rederive", str(other), "--source", str(source), *words, "--stop"]) == 1
    assert not capsys.readouterr().out  # nothing was made
    found = Attestation.read(out).findings(made, [made])
    assert [(each.kind, each.is_bad) for each in found] == [
        ("attested-material", True),
        ("not-compared", False),
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"subject": 1}', "[" * 100_000, "\xff"])
def test_what_is_no_statement_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadRequest, match="is no in-toto statement"):
        Attestation.read(path)
