"""Texts, looked at before hours of work that would end with one that does not do."""

from __future__ import annotations

from pathlib import Path

from calibrate.choices import Choices
from calibrate.coverage import Coverage
from forward.text.tokens import Cut
from gguf_tools.errors import BadArgument
from quality.options import SHORTEST_CHUNK
from quantize.prepare import Preparation


def refuse_text(path: Path, cut: Cut, preparation: Preparation, *, measured: bool = False) -> None:
    """Read a text as a model will that is about to be made.

    measured  whether predictions of it will be measured
    raises    BadRequest for a file that is no text or too short, BadArgument for chunks that are too short,
              UnsupportedCheckpoint for a model that can't be computed
    """
    if measured and cut.chunk_size < SHORTEST_CHUNK:
        raise BadArgument(f"a context of {cut.chunk_size} tokens, expected {SHORTEST_CHUNK} or more")
    output = preparation.outputs[0]
    coverage = Coverage.of(output.path, output.layout.metadata, preparation.plan.infos)
    Choices(path, cut).read(output.layout.metadata, coverage)
