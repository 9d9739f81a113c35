"""Look-ups as kernels see them; wide_tables.py is how numba sees them."""

import numpy as np
import numpy.typing as npt

from quantize.simd.lanes import Floats, Ints

def look_up_in(array: npt.NDArray[np.float32], size: int, index: Ints) -> Floats: ...
