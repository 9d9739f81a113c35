"""Record the blocks that ggml's codecs make from small samples: a file per type in tests/golden/formats.

    python scripts/record/format_golden.py [TYPE ...]

Without types, everything is recorded again. With types, the samples stay and only those types are recorded.
The rows and importances are stored too, so that the bytes stay valid when numpy's generators change:

    samples.npz   rows              float32 (n_rows, 256), one row of each kind in tests/support/samples.py
                  KIND              float32 (256,), importances of this kind
    TYPE.npz      none, KIND        uint8 (n_rows, bytes of a row), from ggml_quantize_chunk without and with
                                    importances; zeros for a row on which it aborts

Needs the xllamacpp wheel: pip install ".[test]".
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from quantize.formats import available, get_format  # noqa: E402
from quantize.formats.codecs import ignores_importances, requires_importances  # noqa: E402
from tests.support import oracle, samples  # noqa: E402

FOLDER = ROOT / "tests" / "golden" / "formats"
SAMPLES = FOLDER / "samples.npz"
N_COLS = 256
IMPORTANCE_KINDS = ("random", "sparse")


def make_samples() -> None:
    """Write samples.npz."""
    rows = np.concatenate([samples.rows(kind, (1, N_COLS), seed) for seed, kind in enumerate(samples.ROWS)])
    importances = {kind: samples.importances(kind, N_COLS) for kind in IMPORTANCE_KINDS}
    np.savez_compressed(SAMPLES, rows=rows, **importances)


def encode(
    type_id: int, rows: npt.NDArray[np.float32], weights: npt.NDArray[np.float32] | None
) -> npt.NDArray[np.uint8]:
    """Return ggml's blocks of float32 `rows`, uint8 (n_rows, bytes of a row); zeros where ggml aborts."""
    encoded = oracle.quantize(type_id, np.zeros_like(rows), weights)
    encoded[:] = 0
    for row, kind in enumerate(samples.ROWS):
        if kind not in samples.TOO_LARGE or not oracle.aborts(type_id, rows[row : row + 1], weights):
            encoded[row] = oracle.quantize(type_id, rows[row : row + 1], weights)[0]
    return encoded


def record(name: str) -> None:
    codec = get_format(name)
    arrays = {}
    with np.load(SAMPLES) as golden:
        rows = golden["rows"]
        if not requires_importances(codec.type.name):
            arrays["none"] = encode(codec.type.id, rows, None)
        if not ignores_importances(codec.type.name):
            for kind in IMPORTANCE_KINDS:
                arrays[kind] = encode(codec.type.id, rows, golden[kind])
    path = FOLDER / f"{name}.npz"
    np.savez_compressed(path, **arrays)
    print(f"{path}: {', '.join(arrays)}, {path.stat().st_size} bytes")


def main() -> None:
    names = [name.upper() for name in sys.argv[1:]]
    FOLDER.mkdir(exist_ok=True)
    if not names:
        make_samples()
    for name in names or available():
        record(name)


if __name__ == "__main__":
    main()
