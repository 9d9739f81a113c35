"""The owner of devices, and the list of docs/add-a-device.md on a device that pretends not to be the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from imatrix.forward.device import CPU, choose_device, is_cpu, threads_on, to_bytes, to_numpy, to_torch  # noqa: E402
from tests.imatrix.forward.pretended_device import pretended  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "add-a-device.md"


def test_the_page_lists_what_a_device_must_answer() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    page: dict[str, Any] = {}
    exec(code, page)
    expected = page["answers"](CPU)
    with pretended() as device:
        found = page["answers"](device)
    assert len(expected) == 10
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_a_device_but_the_cpu_is_fed_by_one_thread() -> None:
    assert is_cpu("cpu")
    assert is_cpu(torch.device("cpu", 0))
    assert choose_device("cpu") == CPU
    assert not is_cpu("cuda:1")
    assert (threads_on("cpu", 8), threads_on("cuda", 8)) == (8, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, ml_dtypes.bfloat16])
def test_arrays_come_over_with_their_dtype(dtype: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    array.flags.writeable = False
    tensor = to_torch(array)
    assert str(tensor.dtype).removeprefix("torch.") == np.dtype(dtype).name
    assert bytes(to_bytes(tensor)) == array.tobytes()
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_bytes_of_rows_are_in_row_order_and_nothing_has_none() -> None:
    rows = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert bytes(to_bytes(rows.T)) == to_numpy(rows).T.tobytes()
    assert bytes(to_bytes(torch.empty(0, 3))) == b""
    to_bytes(rows)[:4] = b"\0\0\x80\x3f"
    assert rows[0, 0] == 1


def test_writeable_arrays_share_their_memory() -> None:
    array = np.zeros(3, np.float32)
    to_torch(array)[0] = 1
    assert array.tolist() == [1, 0, 0]
