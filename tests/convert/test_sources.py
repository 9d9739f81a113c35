"""A model that is quantized from a file or from a folder: one way to plan both."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert.pipeline import convert
from convert.sources import SourceOptions, plan_source
from gguf_tools.errors import BadArgument

MODEL = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The model of the folder as an F32 file."""
    return convert(MODEL, tmp_path / "model.gguf", "f32").paths[0]


def test_a_folder_and_a_file_become_the_same(file: Path, tmp_path: Path) -> None:
    written = []
    for source in (MODEL, file):
        with plan_source(source, tmp_path / "out.gguf", "Q8_0", SourceOptions(provenance=False)) as run:
            written.append(run.execute().paths[0].read_bytes())
    assert written[0] == written[1]


def test_options_of_the_other_kind_are_refused(file: Path) -> None:
    with pytest.raises(BadArgument, match="mla needs a folder"):
        plan_source(file, None, "Q8_0", SourceOptions(mla="both"))
    with pytest.raises(BadArgument, match="need a GGUF file"):
        plan_source(MODEL, None, "Q8_0", SourceOptions(keep_split=True))
