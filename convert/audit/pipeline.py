"""Audit a file: is every tensor what its type makes of the base's, and are metadata what they should be?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Unpack

from convert.audit.base import AuditBase, head_sizes, layout_in, open_audit_base
from convert.audit.diagnose import Diagnosis, Patience, diagnose
from convert.audit.expected import Encoder, Expected, encoder_of, expect, rise_of
from convert.audit.judge import Pair, bad_rows
from convert.audit.measure import RowSums, measure, runs_of
from convert.audit.metadata import metadata_findings
from convert.audit.options import MOST_WEIGHTS_READ, AuditChoices, AuditOptions
from convert.audit.pairs import (
    Layers,
    fits,
    keys_that_may_differ,
    match_layers,
    structure_findings,
)
from convert.audit.report import AuditReport, TensorAudit
from gguf_tools.argument_types import checked
from gguf_tools.choices import with_choices
from gguf_tools.errors import QuantError
from gguf_tools.findings import Finding, Level
from gguf_tools.format.ggml_types import I32
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from gguf_tools.progress import Bar, Reporter, Shown
from quantize.fill.scaled import scaled_tensors
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor
from quantize.formats import decodable, encodable, get_decoder, get_format
from quantize.mla_layout.layouts import metadata_in, roles_in


@checked
def audit(
    file: str | os.PathLike[str],
    base: str | os.PathLike[str],
    options: AuditOptions | None = None,
    progress: Shown = None,
    **choices: Unpack[AuditChoices],
) -> AuditReport:
    """Compare a GGUF file with the model that it was made of, and say what is wrong with it.

        audit("lite-Q4_K_M.gguf", "DeepSeek-V2-Lite").is_wrong

    file     any file of a split set
    base     a folder, a GGUF file, or what `convert.sources.source_folder` returns for a model on the Hub
    progress True, a function, a bar of tqdm or rich, or a CancelToken
    choices  fields of AuditOptions as keyword arguments; they replace those of `options`
    raises   ToolkitError for a file or a base that can't be read; what is wrong with either is a finding
    """
    options = with_choices(choices, options or AuditOptions())
    with (
        open_gguf(file) as opened,
        open_audit_base(base, opened, allow_pickle=options.allow_pickle) as of,
        Bar("comparing tensors", show=progress) as bar,
    ):
        return _Audit(opened, of, options, match_layers(opened, of)).run(bar)


@dataclass(frozen=True)
class _Audit:
    file: GGUFSource
    base: AuditBase
    options: AuditOptions
    layers: Layers

    def run(self, progress: Reporter) -> AuditReport:
        path = str(self.file.path)
        may_differ = keys_that_may_differ(self.layers, self.base.architecture)
        findings = [*metadata_findings(self.file.metadata, self._metadata(), path, may_differ)]
        findings += structure_findings(self.file, self.base, self.layers)
        infos = [info for info in self.file.tensors.values() if self._is_comparable(info)]
        progress.start(sum(info.n_bytes for info in infos), 0)
        n_threads = self.options.n_threads or os.cpu_count() or 1
        _load_codecs(infos)
        with ThreadPoolExecutor(n_threads) as pool:
            pairs = list(pool.map(self._pair, infos))
            encoded = [each.expected for each in pairs if isinstance(each, Pair) and not each.is_float]
            encoder = encoder_of(encoded, self.file.metadata)
            patience = Patience()

            def compare(pair: Pair | Finding) -> TensorAudit | Finding:
                compared = pair if isinstance(pair, Finding) else self._compare(pair, encoder, patience)
                progress.advance(pair.info.n_bytes if isinstance(pair, Pair) else 0)
                return compared

            results = list(pool.map(compare, pairs))
        findings += [each for each in results if isinstance(each, Finding)]
        audits = tuple(each for each in results if isinstance(each, TensorAudit))
        findings += _tensor_findings(audits, path, self.layers)
        return AuditReport(
            Path(self.file.path), self.base.path, self.every_row, encoder, audits,
            tuple(sorted(map(self._allowed, findings), key=lambda finding: -finding.level)),
        )  # fmt: skip

    @property
    def every_row(self) -> bool:
        if self.options.every_row is not None:
            return self.options.every_row
        n_weights = sum(info.n_elems for info in self.file.tensors.values())
        return not self.base.is_remote and n_weights <= MOST_WEIGHTS_READ

    def _metadata(self) -> Metadata:
        """Return the base's metadata as a file has them that is in this file's layout of attention."""
        sizes = head_sizes(self.base.metadata, self.base.path)
        found, wanted = layout_in(self.base.tensors), layout_in(self.file.tensors)
        if sizes is None or found is None or wanted is None or found == wanted:
            return self.base.metadata
        return metadata_in(self.base.metadata, found, wanted, sizes)

    @cached_property
    def _stored(self) -> dict[str, SourceTensor]:
        return scaled_tensors(self.file)

    def _is_comparable(self, info: TensorInfo) -> bool:
        source = self.base.find(self.layers.name(info.name))
        return source is not None and fits(info.shape, source.shape)

    def _pair(self, info: TensorInfo) -> Pair | Finding:
        """Pair a tensor with the base's; a finding where it can't be decoded."""
        stored, base = self._stored[info.name], self.base.find(self.layers.name(info.name))
        assert base is not None
        about, path = (info.name,), str(self.file.path)
        if info.type == I32 or (info.type not in FLOAT_DTYPES and info.type.name not in decodable()):
            return Finding("type", f"{info.type.name} was not compared", Level.NOTE, about, path)
        try:
            runs = list(runs_of(info, every_row=self.every_row))
            return Pair(info, stored, base, expect(info, stored, base, runs))
        except QuantError as error:
            return Finding("type", f"not compared: {error}", Level.NOTE, about, path)

    def _compare(self, pair: Pair, encoder: Encoder, patience: Patience) -> TensorAudit:
        pair = replace(pair, rise=rise_of(pair.info.type, encoder))
        runs = list(runs_of(pair.info, every_row=self.every_row))
        ordinary = pair.expected.ordinary(pair.rise)
        measured = measure(pair.stored, pair.base, pair.info, runs, ordinary=ordinary)
        bad = bad_rows(pair, measured)
        diagnoses = tuple(diagnose(pair, measured, bad, self.base, patience)) if len(bad) else ()
        return _audited(pair, measured, len(bad), diagnoses)

    def _allowed(self, finding: Finding) -> Finding:
        """Make a note of a finding that the user wants ignored."""
        ignored = finding.about and all(
            any(fnmatchcase(name, pattern) for pattern in self.options.ignore) for name in finding.about
        )
        return replace(finding, level=Level.NOTE) if ignored else finding


def _load_codecs(infos: Sequence[TensorInfo]) -> None:
    """Import what decodes and encodes before threads do: numba can't be imported by two at once."""
    for type_ in {info.type for info in infos if info.type.name in decodable()}:
        get_decoder(type_)
        if type_.name in encodable():
            get_format(type_)


def _audited(pair: Pair, measured: RowSums, n_bad: int, diagnoses: tuple[Diagnosis, ...]) -> TensorAudit:
    total = measured.sums.over()
    expected: Expected = pair.expected
    return TensorAudit(
        name=pair.info.name,
        type=pair.info.type.name,
        n_rows=pair.info.n_rows,
        n_rows_read=len(measured.rows),
        relative=float(total.relative),
        expected=expected.relative,
        cosine=float(total.cosine),
        scale=float(total.scale),
        is_plain=expected.is_plain,
        n_bad_rows=n_bad,
        n_nonfinite=int(measured.nonfinite.sum()),
        diagnoses=diagnoses,
    )


def _tensor_findings(audits: Sequence[TensorAudit], file: str, layers: Layers) -> Iterator[Finding]:
    """Tell what is wrong with tensors; two that hold each other's weights are swapped."""
    holds = {each.name: diagnosis.holds for each in audits for diagnosis in each.diagnoses if diagnosis.holds}
    own = {layers.name(name): name for name in holds}
    told: set[str] = set()
    for each in audits:
        if each.n_nonfinite:
            text = f"{each.n_nonfinite:,} weights are NaN or infinite"
            yield Finding("nonfinite", text, Level.BAD, (each.name,), file)
        for diagnosis in each.diagnoses:
            other = own.get(diagnosis.holds, "")
            if other and own.get(holds[other]) == each.name:
                if each.name not in told:
                    text = _with_part(f"swapped with {other}: each holds the other's weights", diagnosis)
                    yield Finding("swapped-tensor", text, Level.BAD, (each.name, other), file)
                told |= {each.name, other}
                continue
            text = _with_part(f"{diagnosis.text} {_errors(diagnosis)}".rstrip(), diagnosis)
            if diagnosis.kind in _ENCODED_TWICE and _may_be_relaid(each.name):
                text = f"{text}; or made of attention's encoded tensors in another layout"
                yield Finding(diagnosis.kind, text, Level.WARNING, (each.name,), file)
            elif diagnosis.kind == "rounded":  # converters write BF16 or F16 of any folder
                yield Finding(diagnosis.kind, text, Level.WARNING, (each.name,), file)
            elif diagnosis.otherwise:
                text = f"{text}; or {diagnosis.otherwise}"
                yield Finding(diagnosis.kind, text, Level.WARNING, (each.name,), file)
            else:
                yield Finding(diagnosis.kind, text, Level.BAD, (each.name,), file)


_ENCODED_TWICE = frozenset({"revision", "requantized"})


def _may_be_relaid(name: str) -> bool:
    """Whether a tensor may have been made of others that were encoded, by a change of attention's layout."""
    return name.endswith(tuple(f".{role.value}.weight" for role in roles_in("both")))


def _with_part(text: str, diagnosis: Diagnosis) -> str:
    return f"{diagnosis.where}: {text}" if diagnosis.where else text


def _errors(diagnosis: Diagnosis) -> str:
    if diagnosis.left is None:
        return ""
    return f"(relative error {100 * diagnosis.relative:.3g}%, {100 * diagnosis.left:.3g}% if so)"
