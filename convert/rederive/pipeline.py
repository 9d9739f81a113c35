"""Make every tensor of a file again and compare it, without writing a model.

What decides the bytes of a tensor is its type, the rows of its source and its importances, so these are taken
from the file, from the source and from the importance matrix, whatever else the file says of itself. What it
says of its types is checked apart; see claims.py.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Unpack

from convert.audit.base import AuditBase, open_audit_base
from convert.audit.pairs import Layers, match_layers
from convert.rederive.claims import (
    file_type_finding,
    importance_findings,
    refuse_what_lacks,
)
from convert.rederive.compare import Compared, chance_to_slip, compare, sampled, whole
from convert.rederive.digests import digest_findings
from convert.rederive.faults import Case, name_fault
from convert.rederive.options import RederiveChoices, RederiveOptions
from convert.rederive.recalibrate import recalibrated
from convert.rederive.report import Rederivation, TensorVerdict
from convert.rederive.ways import Way, ways_of
from gguf_tools.argument_types import checked
from gguf_tools.choices import with_choices
from gguf_tools.errors import BadArgument, QuantError
from gguf_tools.files.named_files import AnyPath
from gguf_tools.findings import Finding, Level, Tell, tell_all, teller
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.progress import BYTES, Bar, Shown
from gguf_tools.text import number_ranges
from quantize.fill.encode import RowSources
from quantize.fill.precompile import Encoding, compile_all
from quantize.fill.provenance import read_provenance
from quantize.fill.sources import GGUFTensor, SourceTensor
from quantize.formats.codecs import ignores_importances
from quantize.importances.entries import ImportanceFile, ResolvedImportance, resolve
from quantize.importances.files import importance_file
from quantize.padding.counterparts import fit_importances
from quantize.plan.model_facts import ModelFacts
from quantize.roles import layer_of, n_dims

CHANGED_ROWS = (1, 100, 10_000)
"""Numbers of changed rows for which a sample tells the chance that they slip through."""


@checked
def rederive(
    file: AnyPath,
    source: AnyPath | None = None,
    options: RederiveOptions | None = None,
    progress: Shown = None,
    **choices: Unpack[RederiveChoices],
) -> Rederivation:
    """Make every tensor of a GGUF file again, and compare it byte for byte with what the file has.

        rederive("lite-Q4_K_M.gguf", "lite-bf16.gguf", importances="lite.imatrix.gguf").is_same

    file      any file of a split set
    source    the GGUF file or the folder that it was made of
    progress  True, a function, a bar of tqdm or rich, or a CancelToken
    choices   fields of RederiveOptions as keyword arguments; they replace those of `options`
    raises    BadArgument for importances or a calibration text that are missing or others than the file's,
              and ToolkitError for what can't be read. What differs is in the result
    """
    options = with_choices(choices, options or RederiveOptions())
    if options.seed is not None and options.sample is None:
        raise BadArgument("a seed chooses the rows of a sample: --sample is missing")
    with open_gguf(file) as opened:
        if source is None:
            raise BadArgument(f"{opened.path}: name what it was made of with --source{_hint(opened)}")
        matrix = None if options.importances is None else importance_file(options.importances)
        refuse_what_lacks(opened, options)
        with open_audit_base(source, opened, allow_pickle=options.allow_pickle) as base:
            layers, is_folder = match_layers(opened, base), Path(source).is_dir()
            job = _Job(opened, base, layers, options, matrix, is_folder, teller(quiet=not progress))
            if options.calibration is not None:
                return job.result(recalibrated(opened, source, base, layers, options, progress))
            with Bar("making again", BYTES, show=progress) as bar:
                return job.result(job.verdicts(bar))


def _hint(file: GGUFSource) -> str:
    """Say in parentheses which model the file names as its base, if it does."""
    named = file.metadata.get("general.base_model.0.repo_url")
    return "" if named is None else f" (its header names {named.data})"


@dataclass
class _Job:
    """A file to be made again.

    layers   which layer of the base each of the file's is
    matrix   the importances that are given, None for none
    rounded  whether a file of another float type may lie between the source and the file
    tell     told what can be said before anything is made
    """

    file: GGUFSource
    base: AuditBase
    layers: Layers
    options: RederiveOptions
    matrix: ImportanceFile | None
    rounded: bool
    tell: Tell
    _likely: tuple[str, bool] = field(default=("", True), init=False)

    @cached_property
    def seed(self) -> int:
        """Number that decides which rows are sampled."""
        return secrets.randbits(32) if self.options.seed is None else self.options.seed

    def result(self, verdicts: Iterable[TensorVerdict]) -> Rederivation:
        """Put together what is said of the header and, as it is made, of each tensor."""
        digests = list(digest_findings(self.file, self.row_sources))
        tell_all(digests, self.tell)  # long before the verdict
        findings = [*digests, *importance_findings(self.file.metadata, self.matrix), *self._left_out()]
        file_type, finding = self._file_type()
        findings += [finding] if finding is not None else []
        found = []
        for verdict in verdicts:
            found.append(verdict)
            if self.options.stop and verdict.verdict != "same":
                break
        infos, sample = self.file.tensors.values(), self.options.sample
        chances = {} if sample is None else {n: chance_to_slip(iter(infos), sample, n) for n in CHANGED_ROWS}
        return Rederivation(
            Path(self.file.path), self.base.path, file_type, tuple(found), tuple(findings), sample,
            None if sample is None else self.seed, chances, len(infos) - len(found),
        )  # fmt: skip

    @cached_property
    def row_sources(self) -> RowSources:
        """Sources of the tensors, with the importances that are given."""
        return RowSources(self._sources, self._importances())

    def verdicts(self, bar: Bar) -> Iterator[TensorVerdict]:
        """Make each tensor again, and yield what is to be said of it."""
        sources = self.row_sources
        n_threads = self.options.n_threads or os.cpu_count() or 1
        infos = self.file.tensors.values()
        known = (info for info in infos if info.name in sources.tensors)
        encoded = [info for info in known if sources.is_encoded(info.name, info.type)]
        compile_all((Encoding.of(sources, info.name, info.type) for info in encoded), n_threads)
        bar.start(sum(info.n_bytes for info in infos), 0)
        with ThreadPoolExecutor(n_threads) as pool:
            for info in infos:
                yield self._verdict(info, sources, pool)
                bar.advance(info.n_bytes)

    def _source(self, info: TensorInfo) -> SourceTensor | None:
        return self.base.find(self.layers.name(info.name))

    def _file_type(self) -> tuple[str, Finding | None]:
        described = [TensorInfo(name, each.shape, each.type) for name, each in self._sources.items()]
        as_if = F32 if self.rounded else None
        return file_type_finding(
            self.file, described, self.base.metadata, is_weighed=self.matrix is not None, as_if=as_if
        )

    def _left_out(self) -> Iterator[Finding]:
        """Yield findings about layers and tensors that the source has and the file has not."""
        pruned = self.layers.left_out(self.base.tensors)
        if pruned:
            yield Finding("pruned", f"without {number_ranges(pruned)} of the source's layers", Level.NOTE)
        own = set(map(self.layers.name, self.file.tensors))
        missing = tuple(
            name for name in self.base.tensors if name not in own and layer_of(name) not in pruned
        )
        if missing:
            yield Finding("left-out", "only the source has it", Level.WARNING, missing)

    @cached_property
    def _sources(self) -> dict[str, SourceTensor]:
        """Sources of the tensors, without those that the source has not in this shape."""
        found = ((info, self._source(info)) for info in self.file.tensors.values())
        return {
            info.name: source
            for info, source in found
            if source is not None and _shape(source.shape) == _shape(info.shape)
        }

    def _importances(self) -> Mapping[str, ResolvedImportance]:
        if self.matrix is None:
            return {}
        known = [self.file.tensor(name) for name in self._sources]
        old = {info.name: replace(info, name=self.layers.name(info.name)) for info in known}
        entries = fit_importances(self.matrix.entries, self.file.metadata, list(old.values()))
        n_heads = ModelFacts.from_metadata(self.file.metadata, has_layers=False).n_heads
        weighed = (info for info in known if not ignores_importances(info.type.name))
        found = ((info.name, resolve(old[info.name], entries, n_heads)) for info in weighed)
        return {name: resolved for name, resolved in found if resolved is not None}

    def _verdict(self, info: TensorInfo, sources: RowSources, pool: Executor) -> TensorVerdict:
        if info.name not in sources.tensors:
            found = self._source(info)
            text = "the source has no such tensor" if found is None else f"the source's is {found.shape}"
            return TensorVerdict(info.name, info.type.name, "not made", kind="no-source", text=text)
        stored = GGUFTensor(self.file, info.name)
        span, sample = sources.rows_per_weights().get(info.name), self.options.sample
        is_whole = sample is None
        ranges = whole(info, span) if sample is None else sampled(info, span, sample, self.seed)
        ways = sorted(
            ways_of(info, sources, rounded=self.rounded),
            key=lambda way: (way.through, way.is_weighed) != self._likely,
        )
        first: Compared | None = None
        try:
            for way in ways:
                give_up = first is not None
                compared = compare(info, stored, way, ranges, pool, is_whole=is_whole, give_up=give_up)
                if compared.is_same:
                    return self._fitting(info, way, compared)
                first = first or compared
        except QuantError as error:
            if first is None:
                return TensorVerdict(info.name, info.type.name, "not made", kind="not-made", text=str(error))
        assert first is not None
        numbers = read_provenance(self.file) or {}
        case = Case(info, stored, ways[0], first, numbers.get(info.name), self.matrix is not None)
        kind, text = name_fault(case)
        return TensorVerdict(
            info.name, info.type.name, "differs", ways[0].through, first.n_rows, first.n_blocks,
            first.n_differ, kind, text,
        )  # fmt: skip

    def _fitting(self, info: TensorInfo, way: Way, compared: Compared) -> TensorVerdict:
        """Tell of a tensor that one way gives; a file with importances must have used them."""
        self._likely = way.through, way.is_weighed
        counts = compared.n_rows, compared.n_blocks, compared.n_differ
        if way.is_weighed:
            return TensorVerdict(info.name, info.type.name, "same", way.through, *counts)
        text = "it was made without the importances that are given for it"
        kind = "without-importances"
        return TensorVerdict(info.name, info.type.name, "differs", way.through, *counts, kind, text)


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out leading dimensions of 1, which no file tells from none."""
    return shape[-n_dims(shape) :]
