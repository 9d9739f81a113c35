"""Metadata that pyproject.toml can't say: addresses, and the README with links that work anywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def page(text: str, repository: str, tag: str) -> str:
    """Return a page of the repository as others may show it: its relative links lead to the tag's files.

    repository  an address as GitHub lays out the files below it; "" leaves the words of a link alone
    """

    def absolute(link: re.Match[str]) -> str:
        mark, words, path = link.groups()
        if repository:
            return f"{mark}[{words}]({repository}/{'raw' if mark else 'blob'}/{tag}/{path})"
        return f"*(A picture: {words}.)*" if mark else words

    return re.sub(r"(!?)\[([^\]]*)\]\((?![\w+.-]+:|#)([^)\s]+)\)", absolute, text)


def metadata() -> dict[str, object]:
    """Return the arguments of `setuptools.setup`."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["gguf-tools"][
        "repository"
    ]
    init = (ROOT / "gguf_tools" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'__version__ = "(.+)"', init)[1]
    paths = {"Source": "", "Issues": "/issues", "Changelog": f"/blob/v{version}/CHANGELOG.md"}
    return {
        "long_description": page((ROOT / "README.md").read_text(encoding="utf-8"), repository, f"v{version}"),
        "long_description_content_type": "text/markdown",
        "project_urls": {name: repository + path for name, path in paths.items() if repository},
    }


if __name__ == "__main__":
    setup(**metadata())
