"""A calibrated file is made again as a whole, in a folder that is removed afterwards, and compared.

Its bytes depend on sums over a text. They are the same on the same processor with the same version of torch.
Elsewhere sums differ in their last digits, and some weights are rounded to the other side. Such a file is
consistent with its source, which is no proof: what was changed on purpose, and costs as little, looks alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from convert.audit.base import AuditBase
from convert.audit.pairs import Layers
from convert.rederive.compare import Compared, compare, whole
from convert.rederive.faults import RAISED, relative_errors
from convert.rederive.options import RederiveOptions
from convert.rederive.report import TensorVerdict
from convert.rederive.ways import Way
from convert.sources import SourceOptions, plan_source
from gguf_tools.errors import BadArgument
from gguf_tools.files.named_files import AnyPath
from gguf_tools.format import keys
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.progress import Shown
from quantize.fill.encode import RowSources
from quantize.fill.sources import GGUFTensor
from quantize.importances.entries import ImportanceFile
from quantize.importances.text_sketch import SHA256_KEY
from quantize.options import METHOD_KEY, BegunCalibrating
from quantize.padding.hidden_size import pads_hidden_size
from quantize.padding.inner_sizes import UNPADDED, inner_sizes
from quantize.padding.padding import is_padded
from quantize.plan.decide import PlanOptions
from quantize.run_options import RunOptions

_DRIFTING = 0.25
"""Share of the tensors that must differ for their sums to be the reason: a change of a few is no drift."""

_SPREAD = 0.05
"""Relative difference of errors that is left to sums; a changed code raises the error of its row by more."""


def recalibrated(
    file: GGUFSource,
    source: AnyPath,
    base: AuditBase,
    layers: Layers,
    options: RederiveOptions,
    progress: Shown,
) -> Iterator[TensorVerdict]:
    """Calibrate a model again as a file says that it was, and yield what is to be said of each tensor.

    raises  BadArgument, before anything is made, for another text or other settings than the file names
    """
    assert options.calibration is not None
    calibration = options.calibration.begin()
    infos = [TensorInfo(name, tensor.shape, tensor.type) for name, tensor in base.tensors.items()]
    _refuse_others(file, calibration, calibration.promise(base.metadata, infos))
    made_so = SourceOptions(
        types=PlanOptions(
            types={info.name: info.type for info in file.tensors.values()},
            prune_layers=tuple(layers.left_out(base.tensors)),
            allow_requantize=True,
        ),
        calibration=calibration,
        provenance=False,
        pad=_padded_keys(file, base, infos),
        pad_hidden=pads_hidden_size(file.metadata),
        mla=base.mla,
    )
    run = RunOptions(n_threads=options.n_threads, progress=progress, label="calibrating again")
    with TemporaryDirectory(prefix="gguf-tools-") as folder:
        output = Path(folder, "again.gguf")
        with plan_source(source, output, "Q8_0", made_so) as planned:
            planned.execute(run)
        with open_gguf(output) as again, ThreadPoolExecutor(options.n_threads) as pool:
            infos = [info for info in file.tensors.values() if again.tensors.get(info.name) == info]
            found = {info.name: _compared(info, file, again, pool) for info in infos}
            n_odd = sum(not compared.is_same for compared in found.values())
            drifts = n_odd >= _DRIFTING * sum(info.type.is_quantized for info in infos)
            for info in file.tensors.values():
                if info.name not in found:
                    text = "the source makes no tensor of this name, shape and type"
                    yield TensorVerdict(info.name, info.type.name, "not made", kind="no-source", text=text)
                    continue
                wanted, compared = base.find(layers.name(info.name)), found[info.name]
                if compared.is_same:
                    counts = compared.n_rows, compared.n_blocks, 0
                    yield TensorVerdict(info.name, info.type.name, "same", "", *counts)
                    continue
                assert wanted is not None
                made, stored = GGUFTensor(again, info.name), GGUFTensor(file, info.name)
                errors = relative_errors(info, compared.rows, wanted, made, stored)
                yield judged(info, compared, *errors, drifts=drifts)


def _padded_keys(file: GGUFSource, base: AuditBase, infos: Sequence[TensorInfo]) -> tuple[str, ...] | None:
    """List the keys of inner sizes that are padded in a file; None for none."""
    if not is_padded(file.metadata):
        return None
    sizes = inner_sizes(base.metadata, infos, str(file.path))
    return tuple(size.key for size in sizes if UNPADDED + size.key in file.metadata) or None


def _refuse_others(file: GGUFSource, calibration: BegunCalibrating, promised: ImportanceFile) -> None:
    """Refuse a text or settings that can't have made a file."""
    sketch = promised.sketch
    pairs = (
        (METHOD_KEY, "calibrated otherwise", calibration.label),
        (SHA256_KEY, "the text is another one: digest", sketch.sha256 if sketch is not None else ""),
        (keys.QUANTIZE_IMATRIX_CHUNKS_COUNT, "other chunks of the text:", promised.chunk_count),
    )
    for key, what, given in pairs:
        said = file.metadata.get(key)
        if said is None or said.data == given or str(given).startswith(f"{said.data}, "):
            continue  # older versions left out the end of the method's words
        raise BadArgument(f"{file.path}: {what} {given}, expected {said.data}")


def _compared(info: TensorInfo, file: GGUFSource, again: GGUFSource, pool: Executor) -> Compared:
    way = Way("", True, RowSources({info.name: GGUFTensor(again, info.name)}, {}))
    ranges = whole(info, None)
    return compare(info, GGUFTensor(file, info.name), way, ranges, pool, is_whole=False, give_up=False)


def judged(info: TensorInfo, compared: Compared, made: float, found: float, *, drifts: bool) -> TensorVerdict:
    """Say what a tensor is that has other bytes.

    made, found  relative errors in rows that differ: as they were made, and as they are in the file
    drifts       whether so many tensors differ that sums may be the reason
    """
    counts = compared.n_rows, compared.n_blocks, compared.n_differ
    share = 100 * (1 - compared.n_rows_differ * info.type.rows_interleaved / compared.n_rows)
    text = f"{share:.3g} % of its rows are the same; those that differ err by {100 * found:.3g} %,"
    text += f" {100 * made:.3g} % as they are made here"
    if drifts and abs(found - made) <= _SPREAD * made:
        return TensorVerdict(info.name, info.type.name, "consistent", "", *counts, "sums", text)
    kind = "other-weights" if found > RAISED * made else "changed"
    return TensorVerdict(info.name, info.type.name, "differs", "", *counts, kind, text)
