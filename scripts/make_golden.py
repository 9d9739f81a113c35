"""Record what ggml's codecs make of small samples: tests/golden/formats.npz.

    python scripts/make_golden.py

The file holds the rows and importances too, so that it stays valid when numpy's generators change:

    rows                 float32 (n_rows, 256), one row of each kind of tests/samples.py
    importance_kinds     "none" and some kinds of importances
    importances KIND     float32 (256,)
    TYPE KIND            uint8 (n_rows, bytes of a row), from ggml_quantize_chunk

Needs the xllamacpp wheel: pip install ".[test]".
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from quantize.formats import available, get_format  # noqa: E402
from quantize.formats.base import ImportanceUse  # noqa: E402
from tests import oracle, samples  # noqa: E402

TARGET = ROOT / "tests" / "golden" / "formats.npz"
N_COLS = 256
IMPORTANCE_KINDS = (None, "random", "sparse")


def main() -> None:
    rows = np.concatenate([samples.rows(kind, (1, N_COLS), seed) for seed, kind in enumerate(samples.ROWS)])
    arrays = {"rows": rows, "importance_kinds": np.array([kind or "none" for kind in IMPORTANCE_KINDS])}
    for kind in IMPORTANCE_KINDS:
        weights = samples.importances(kind, N_COLS)
        if weights is not None:
            arrays[f"importances {kind}"] = weights
        for name in available():
            codec = get_format(name)
            if weights is None and codec.importance is ImportanceUse.REQUIRED:
                continue
            if weights is not None and codec.importance is ImportanceUse.IGNORED:
                continue
            arrays[f"{name} {kind or 'none'}"] = oracle.quantize(codec.type.id, rows, weights)
    np.savez_compressed(TARGET, **arrays)
    print(f"{TARGET}: {len(arrays)} arrays, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
