"""Sizes and importances of a padded file beside those of the model, and of another file of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gguf_tools.errors import BadRequest
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from quantize.importances.entries import ImportanceEntry, Importances, ResizedImportance
from quantize.padding.hidden_size import hidden_padding, hidden_size_without, pads_hidden_size
from quantize.padding.inner_sizes import UNPADDED, inner_sizes
from quantize.padding.padding import NO_PADDING, Padding, is_padded, paddings, value_range


def padded_sizes(metadata: Metadata) -> dict[str, tuple[str, str]]:
    """List the sizes of a file that are padded: key -> (without padding, as it is), for people."""
    keys = [key.removeprefix(UNPADDED) for key in metadata if key.startswith(UNPADDED)]
    return {
        key: (value_range(metadata[UNPADDED + key]), value_range(metadata[key]))
        for key in keys
        if key in metadata
    }


def count_weights(metadata: Metadata, tensors: Iterable[TensorInfo]) -> int:
    """Count the weights of a file without those that are padding."""
    infos = list(tensors)
    return sum(info.n_elems for info in without_padding(metadata, infos).infos(infos))


def without_padding(metadata: Metadata, tensors: Sequence[TensorInfo]) -> Padding:
    """The shapes and sizes that a file would have without padding; no change where that is unknown.

    Of a padded hidden size, they are for comparing shapes: the norms' values need more than another length.
    """
    if not is_padded(metadata):
        return NO_PADDING
    try:
        hidden = hidden_size_without(metadata, tensors, "the file")
        inner = paddings(hidden.metadata(metadata), hidden.infos(tensors), "the file")[0]
    except BadRequest:
        return NO_PADDING
    return hidden.then(inner)


def whole_padding(metadata: Metadata, tensors: Sequence[TensorInfo], *, hidden: bool) -> Padding:
    """Return the padding of all inner sizes of a model that can be padded; of none where unknown.

    hidden  pad the hidden size, too
    raises  BadRequest with `hidden`, for a model whose hidden size can't be padded
    """
    first = hidden_padding(metadata, tensors, "the model") if hidden else NO_PADDING
    try:
        inner = paddings(first.metadata(metadata), first.infos(tensors), "the model")[-1]
    except BadRequest:
        return first
    return first.then(inner)


def padding_like(metadata: Metadata, tensors: Sequence[TensorInfo], other: Metadata) -> Padding:
    """The change that gives a model the sizes of another file of it; none where they are alike.

    other  metadata of that file
    """
    if not is_padded(metadata) and not is_padded(other):
        return NO_PADDING
    hidden = NO_PADDING
    try:
        if pads_hidden_size(other) and not pads_hidden_size(metadata):
            hidden = hidden_padding(metadata, tensors, "the model")
        metadata, tensors = hidden.metadata(metadata), hidden.infos(tensors)
        sizes = inner_sizes(metadata, tensors, "the model")
    except BadRequest:
        return NO_PADDING
    values = (
        other[size.key] if other.get(UNPADDED + size.key, other.get(size.key)) == size.real else size.value
        for size in sizes
    )
    return hidden.then(Padding.of(sizes, values))


# ---- importances


def fit_importances(entries: Importances, metadata: Metadata, tensors: Sequence[TensorInfo]) -> Importances:
    """Give entries the length of their tensors' rows, where only zeros make the difference.

    So the matrix of a model serves a padded file, and the other way round. Columns of zeros multiply
    activations that are exactly 0, so the sums of both are the same but for zeros at the end of every row.
    Hidden states are as large as before where the hidden size is padded: norms see to that.

    Entries that fit are left alone, and so are those that don't fit for another reason.
    """
    known = [(info, entries[info.name]) for info in tensors if info.name in entries]
    unfit = {
        info.name: info
        for info, entry in known
        if entry.n_values not in (entry.counts.size * info.n_cols, info.n_mats * info.n_cols)
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
