"""Two files compared, and one checked, as functions: what `gguf-tools diff` and `gguf-tools verify` print.

They decode tensors, and read the folder that a file was made of, so they need more than the floor of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.argument_types import checked
from gguf_tools.files.named_files import AnyPath
from gguf_tools.findings import Finding, Level
from gguf_tools.format.shards import GGUFSet, open_gguf
from gguf_tools.look.compare import Difference, as_lines, compare
from gguf_tools.look.verify import KIND, Verification
from gguf_tools.look.verify import verify as find_faults
from gguf_tools.progress import Bar, Shown

if TYPE_CHECKING:
    from quantize.value_errors import FileErrors


@dataclass(frozen=True)
class FileDifferences:
    """Differences between two files.

    found   each thing that differs, in the order of A; empty: the same
    data    whether the tensors' data were compared, too, and not the headers alone
    errors  errors of the values of B against those of A; None: not asked for
    """

    found: tuple[Difference, ...]
    data: bool
    errors: FileErrors | None

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        errors = {} if self.errors is None else self.errors.to_json()
        return {"differences": [each.as_json() for each in self.found], **errors}

    def lines(self) -> Iterator[str]:
        """Yield what differs as text, and a table of the errors."""
        yield from as_lines(self.found)
        if not self.found:
            yield "metadata and tensors are the same" if self.data else "headers are the same"
        yield from () if self.errors is None else self.errors.lines()


@checked
def diff(
    a: AnyPath, b: AnyPath, *, data: bool = True, values: bool = False, progress: Shown = None
) -> FileDifferences:
    """Compare two GGUF files or split sets.

        diff("old.gguf", "new.gguf").found == ()

    data      compare the tensors' data, too; False: headers alone
    values    also decode tensors of the same shape, of whatever types, and measure the errors of B's values
    progress  True, a function, a bar of tqdm or rich, or a CancelToken
    raises    GGUFError for a file that can't be opened, QuantError for a type that can't be decoded
    """
    with open_gguf(a) as of_a, open_gguf(b) as of_b:
        with Bar("comparing", show=progress if data else None) as bar:
            found = tuple(compare(of_a, of_b, data=data, progress=bar))
        return FileDifferences(found, data, _value_errors(of_a, of_b, progress) if values else None)


def _value_errors(a: GGUFSet, b: GGUFSet, progress: Shown) -> FileErrors:
    from quantize.value_errors import compare_values

    with Bar("comparing values", show=progress) as bar:
        return compare_values(a, b, bar)


@checked
def verify(
    file: AnyPath, *, against: AnyPath | None = None, allow_pickle: bool = False, progress: Shown = None
) -> Verification:
    """Check a GGUF file: offsets and sizes, and floats and scales for NaN and infinity. All data are read.

        verify("lite-Q4_K_M.gguf", against="lite-bf16.gguf").bad

    file          any part opens a split set; that parts are missing is a finding
    against       what the file was made of, a file or folder: errors of values must be those of the types
    allow_pickle  read a folder of .bin and .pt files, as weights only
    progress      True, a function, a bar of tqdm or rich, or a CancelToken
    raises        GGUFError for a file that can't be opened, CheckpointError for such a folder
    """
    with open_gguf(file, may_lack_parts=True) as source:
        with Bar("checking", show=progress) as bar:
            findings = find_faults(source, bar)
        if source.missing:
            findings.append(Finding(KIND, source.missing, Level.BAD, file=str(source.path)))
        if against is not None:
            findings += _compare_with_source(source, Path(against), allow_pickle, progress)
        return Verification(source.path, len(source.tensors), tuple(findings))


def _compare_with_source(file: GGUFSet, against: Path, allow_pickle: bool, progress: Shown) -> list[Finding]:
    from quantize.fill.sources import GGUFTensor
    from quantize.value_errors import compare_with_source

    with ExitStack() as opened:
        if against.is_dir():
            from convert.architectures.vision import holds_tower
            from convert.pipeline import open_tensors

            sources = opened.enter_context(
                open_tensors(against, allow_pickle=allow_pickle, mmproj=holds_tower(file.metadata))
            )
        else:
            source = opened.enter_context(open_gguf(against))
            sources = {name: GGUFTensor(source, name) for name in source.tensors}
        bar = opened.enter_context(Bar("comparing values", show=progress))
        return compare_with_source(file, sources, str(against), bar)
