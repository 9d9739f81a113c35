"""Check the packages that `python -m build` has made, before anybody gets them.

    python scripts/release/check_packages.py DIST [--tag TAG]

DIST holds one sdist and one wheel, of the version that TAG names, for instance v0.1.0. The sdist has the
files of the repository, so it passes the repository's tests, and the wheel has those of its packages. Their
README has no relative link. Exits with a line for each fault.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("gguf_tools", "quantize", "convert", "imatrix")
MADE = re.compile(r"PKG-INFO|setup\.cfg|gguf_tools\.egg-info/.*")
"""What a build adds to an sdist."""

RELATIVE_LINK = re.compile(r"\]\((?![\w+.-]+:|#)[^)\s]+\)")


def faults(dist: Path, tag: str | None) -> Iterator[str]:
    """Yield what is wrong with the packages in a folder."""
    sdists, wheels = sorted(dist.glob("*.tar.gz")), sorted(dist.glob("*.whl"))
    if len(sdists) != 1 or len(wheels) != 1:
        yield f"{dist}: {len(sdists)} sdists and {len(wheels)} wheels, expected one each"
        return
    tracked = _tracked()
    with tarfile.open(sdists[0]) as archive:
        names = {member.name.partition("/")[2]: member for member in archive if member.isfile()}
        info = archive.extractfile(names["PKG-INFO"])
        assert info is not None
        yield from _faults_of_info(sdists[0], message_from_bytes(info.read()), tag)
    yield from _differences(sdists[0], tracked, {name for name in names if not MADE.fullmatch(name)})
    with zipfile.ZipFile(wheels[0]) as archive:
        files = set(archive.namelist())
        [info_name] = (name for name in files if name.endswith(".dist-info/METADATA"))
        yield from _faults_of_info(wheels[0], message_from_bytes(archive.read(info_name)), tag)
    folder = info_name.removesuffix("METADATA")
    yield from _differences(
        wheels[0],
        {name for name in tracked if name.startswith(tuple(f"{package}/" for package in PACKAGES))},
        {name for name in files if not name.startswith(folder)},
    )
    if f"{folder}licenses/LICENSE" not in files:
        yield f"{wheels[0]}: no licence"


def _faults_of_info(path: Path, info: Message, tag: str | None) -> Iterator[str]:
    if tag is not None and tag != f"v{info['Version']}":
        yield f"{path}: version {info['Version']}, and the tag is {tag}"
    yield from (f"{path}: README: {link}" for link in RELATIVE_LINK.findall(str(info.get_payload())))


def _differences(path: Path, expected: Iterable[str], found: Iterable[str]) -> Iterator[str]:
    yield from (f"{path}: lacks {name}" for name in sorted(set(expected) - set(found)))
    yield from (
        f"{path}: has {name}, which is none of the repository's"
        for name in sorted(set(found) - set(expected))
    )


def _tracked() -> set[str]:
    """Return the files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    return set(listed.stdout.split("\0")) - {""}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dist", type=Path, metavar="DIST")
    parser.add_argument("--tag")
    args = parser.parse_args()
    found = list(faults(args.dist, args.tag))
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
