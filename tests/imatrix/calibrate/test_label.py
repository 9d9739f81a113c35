"""The label of a calibration: the key by which a file says how it was calibrated, and how to do so again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gguf_tools.format import keys
from gguf_tools.format.values import Value
from imatrix.calibrate.calibration import Calibration
from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Cut
from quantize.options import METHOD_KEY
from quantize.rounding.methods import METHODS

CUTS = st.builds(Cut, st.integers(1, 4096), st.integers(0, 9), st.just(4), st.booleans())


@given(
    cut=st.one_of(CUTS, st.just(Cut(n_chunks=4))),
    sequential=st.booleans(),
    method=st.sampled_from(sorted(METHODS)),
    embedding=st.booleans(),
    seed=st.integers(0, 99),
    forward=st.sampled_from(["float32", "bfloat16"]).map(lambda dtype: ForwardOptions(dtype=dtype)),
)
def test_all_that_the_bytes_depend_on_is_read_back(**settings: Any) -> None:
    calibration = Calibration("text", **settings)
    metadata = {
        METHOD_KEY: Value.string(calibration.label),
        keys.QUANTIZE_IMATRIX_CHUNKS_COUNT: SimpleNamespace(data=4),
    }
    file: Any = SimpleNamespace(metadata=metadata, path="a.gguf")
    assert Calibration.like(file, "text") == calibration
