"""Digests that a file names are compared before anything is made: of its source, and of its importances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from convert.rederive.compare import whole
from convert.rederive.ways import Rounded, Way, ways_of
from gguf_tools.findings import Finding
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.encode import RowSources, digest_rows
from quantize.fill.provenance import digest_importance, read_provenance, tensor_provenance
from quantize.options import METHOD_KEY


def digest_findings(file: GGUFSource, sources: RowSources) -> Iterator[Finding]:
    """Yield whether source or importances are others than those that a file's provenance is a digest of.

    The smallest tensor without importances and the smallest with some stand for all; only these are read.
    A calibrated file's numbers are of the whole model, which is not digested here.
    """
    numbers = {} if METHOD_KEY in file.metadata else read_provenance(file) or {}
    known = (info for info in file.tensors.values() if info.name in numbers and info.name in sources.tensors)
    encoded = sorted(
        (each for each in known if sources.is_encoded(each.name, each.type)), key=lambda each: each.n_elems
    )
    what = "the source or the importance matrix"
    for is_weighed in (False, True):
        info = next((each for each in encoded if (each.name in sources.importances) == is_weighed), None)
        if info is None:
            continue
        found = [_number(info, way) for way in _ways(info, sources)]
        if numbers[info.name] in found:
            what = "the importance matrix"
            continue
        what = what if is_weighed else "the source"
        text = f"{what} is another one: digest {found[0]:016x}, expected {numbers[info.name]:016x}"
        yield Finding("digest", f"{text}, or of another version", about=(info.name,))
        return


def _ways(info: TensorInfo, sources: RowSources) -> Iterator[Way]:
    """Yield the ways of a tensor, also from a copy in F32: its weights are equal, and its digest is not."""
    wider = replace(sources, tensors={info.name: Rounded(sources.tensors[info.name], F32)})
    for known in (sources, wider):
        yield from ways_of(info, known, rounded=True)


def _number(info: TensorInfo, way: Way) -> int:
    """Make the number that a tensor would have in the provenance of a file that is made in one way."""
    source, resolved = way.sources.tensors[info.name], way.sources.importances.get(info.name)
    chunks = (
        digest_rows(rows, source) for rows in whole(info, way.sources.rows_per_weights().get(info.name))
    )
    return tensor_provenance(info, source.type, chunks, digest_importance(resolved, info.type.name))
