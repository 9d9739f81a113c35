"""Importances of the model for a padded file, and those of a padded file for the model.

Columns of zeros multiply activations that are exactly 0, so the sums of both matrices are the same but for
zeros at the end of every row. Hidden states are as large as before where the hidden size is padded: norms see
to that.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from quantize.importances.entries import ImportanceEntry, Importances
from quantize.importances.resized import ResizedImportance
from quantize.padding.counterparts import without_padding


def fit_importances(entries: Importances, metadata: Metadata, tensors: Sequence[TensorInfo]) -> Importances:
    """Give entries the length of their tensors' rows, where only zeros make the difference.

    Entries that fit are left alone, and so are those that don't fit for another reason.
    """
    known = [info for info in tensors if info.name in entries]
    unfit = {
        info.name: info
        for info in known
        if entries[info.name].n_values not in (info.n_cols, info.n_mats * info.n_cols)
    }
    if not unfit:
        return entries
    real = without_padding(metadata, tensors).resized
    fitted = dict(entries)
    for name, info in unfit.items():
        resize = real.get(name)
        n_real = info.n_cols if resize is None or resize.cols is None else resize.cols.new
        fitted[name] = _fitted(entries[name], info, n_real)
    return fitted


def _fitted(entry: ImportanceEntry, info: TensorInfo, n_real: int) -> ImportanceEntry:
    """Give an entry the length of a tensor's rows if zeros make the difference; otherwise return it as it is.

    n_real  columns of the tensor without padding
    """
    for n_mats in (1, info.n_mats):
        n_cols, rest = divmod(entry.n_values, n_mats)
        if rest:
            continue
        resized = ResizedImportance.of(entry, n_cols, info.n_cols)
        if n_cols == n_real < info.n_cols:
            return resized
        if n_cols > info.n_cols and not entry.read().reshape(n_mats, n_cols)[:, info.n_cols :].any():
            return resized
    return entry
