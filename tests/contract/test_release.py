"""Packages and workflows: what can be known of them before there is a release."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

import gguf_tools
from scripts.release import check_packages
from tests.contract.import_graph import PACKAGES, ROOT, pyproject

YAML = (
    *sorted((ROOT / ".github").rglob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
)
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in YAML if path.parent.name == "workflows"}


def setup_file() -> Any:
    """Import setup.py, which builds when it is the main program alone."""
    spec = spec_from_file_location("setup_file", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_yaml_has_no_mistakes(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == ("gguf-tools", gguf_tools.__version__)


def test_the_changelog_tells_of_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", gguf_tools.__version__]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_call_what_runs_here(name: str) -> None:
    jobs = WORKFLOWS[name]["jobs"]
    assert {job["needs"] for job in jobs.values() if "needs" in job} <= set(jobs)
    lines = [step["run"] for job in jobs.values() for step in job.get("steps", ()) if "run" in step]
    scripts = {script for line in lines for script in re.findall(r"\S+\.(?:py|sh)\b", line)}
    here = (ROOT / ".ci" / "run").read_text()
    assert [script for script in sorted(scripts) if script not in here] == []
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_wheels_are_tried_where_they_are_said_to_run() -> None:
    matrix = WORKFLOWS["ci.yml"]["jobs"]["wheel"]["strategy"]["matrix"]
    classifiers = pyproject()["project"]["classifiers"]
    versions = [each.rpartition(" ")[2] for each in classifiers if re.search(r"Python :: 3\.\d+$", each)]
    assert matrix["python"] == versions
    assert pyproject()["project"]["requires-python"] == f">={versions[0]}"
    systems = [each.rpartition(" ")[2] for each in classifiers if each.startswith("Operating System")]
    names = {"MacOS": "macos-latest", "Windows": "windows-latest", "Linux": "ubuntu-latest"}
    assert sorted(names[each] for each in systems) == sorted(matrix["os"])


def test_links_lead_to_the_repository() -> None:
    text = "![a b](docs/x.svg) [c](docs/d.md#e), [f](https://example.org) `[g]` [h](#i)"
    page = setup_file().page
    assert page(text, "https://example.org/o/n", "v1") == (
        "![a b](https://example.org/o/n/raw/v1/docs/x.svg) [c](https://example.org/o/n/blob/v1/docs/d.md#e), "
        "[f](https://example.org) `[g]` [h](#i)"
    )
    assert page(text, "", "v1") == "*(A picture: a b.)* c, [f](https://example.org) `[g]` [h](#i)"


def test_a_package_shows_no_dead_links() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert check_packages.RELATIVE_LINK.search(readme)
    assert check_packages.RELATIVE_LINK.search(setup_file().metadata()["long_description"]) is None


def make_packages(folder: Path, *, sdist: list[str], wheel: list[str], readme: str = "") -> None:
    info = f"Metadata-Version: 2.4\nName: gguf-tools\nVersion: 0.1.0\n\n{readme}\n".encode()
    with tarfile.open(folder / "n-0.1.0.tar.gz", "w:gz") as archive:
        for name in ("PKG-INFO", *sdist):
            member = tarfile.TarInfo(f"n-0.1.0/{name}")
            member.size = len(info)
            archive.addfile(member, io.BytesIO(info))
    with zipfile.ZipFile(folder / "n-0.1.0-py3-none-any.whl", "w") as archive:
        for name in ("n-0.1.0.dist-info/METADATA", *wheel):
            archive.writestr(name, info)


def test_faults_of_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(check_packages.PACKAGES) == sorted(PACKAGES)
    assert len(list(check_packages.faults(tmp_path, None))) == 1
    monkeypatch.setattr(check_packages, "_tracked", lambda: {"quantize/a.py", "tests/b.py"})
    licence = "n-0.1.0.dist-info/licenses/LICENSE"
    make_packages(
        tmp_path, sdist=["quantize/a.py", "tests/b.py", "setup.cfg"], wheel=["quantize/a.py", licence]
    )
    assert list(check_packages.faults(tmp_path, "v0.1.0")) == []
    make_packages(tmp_path, sdist=["quantize/a.py", "x"], wheel=["tests/b.py"], readme="[a](b.md)")
    found = [fault.partition(": ")[2] for fault in check_packages.faults(tmp_path, "v0.2.0")]
    assert found == [
        "version 0.1.0, and the tag is v0.2.0", "README: ](b.md)", "lacks tests/b.py",
        "has x, which is none of the repository's", "version 0.1.0, and the tag is v0.2.0", "README: ](b.md)",
        "lacks quantize/a.py", "has tests/b.py, which is none of the repository's", "no licence",
    ]  # fmt: skip
