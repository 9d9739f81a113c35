"""Files made by ik_llama.cpp as inputs: quantized further, refused in one line where they can't be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import quantize
from gguf_tools import open_gguf
from gguf_tools.errors import BadRequest, ExecutionError, QuantError
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize import PlanOptions
from quantize.fill.sources import GGUFTensor
from quantize.formats import get_decoder
from tests.quantize.codecs import encode

NAME = "blk.0.ffn_up.weight"
GOLDEN = Path(__file__).parents[1] / "golden" / "ik" / "vectors.npz"
AGAIN = PlanOptions(allow_requantize=True)


def recorded(type_name: str) -> npt.NDArray[np.uint8]:
    """Return sixteen rows of 512, uint8 (16, row bytes)."""
    with np.load(GOLDEN) as file:
        data: npt.NDArray[np.uint8] = file[f"bytes_{type_name}"].reshape(16, -1)
    return data


def write_model(
    path: Path, type_name: str, data: npt.NDArray[np.generic], shape: tuple[int, ...] = (16, 512)
) -> Path:
    """Write a model of nothing but one tensor."""
    metadata = {
        "general.architecture": Value.string("deepseek2"),
        "deepseek2.block_count": Value.u32(1),
    }
    layout = FileLayout.of(metadata, [TensorInfo(NAME, shape, by_name(type_name))])
    with GGUFWriter(path, layout) as writer:
        writer.write(layout.offset_of(NAME), data.reshape(-1).view(np.uint8))
        writer.publish()
    return path


@pytest.mark.parametrize("type_name", ["IQ4_KS", "IQ3_K", "IQ2_KT", "IQ4_K_R4", "Q8_KV_R8"])
def test_a_file_of_theirs_is_quantized_further(tmp_path: Path, type_name: str) -> None:
    data = recorded(type_name)
    path, out = write_model(tmp_path / "in.gguf", type_name, data), tmp_path / "out.gguf"
    with pytest.raises(BadRequest, match=f"quantized already: {NAME} \\({type_name} -> Q8_0\\)"):
        quantize.quantize(path, out, "Q8_0")
    quantize.quantize(path, out, "Q8_0", options=AGAIN, verify=True)
    expected = encode("Q8_0", get_decoder(type_name)(data, 512), None)
    with open_gguf(out) as file:
        assert bytes(file.raw(NAME)) == expected.tobytes()


def test_their_tensors_are_copied_as_they_are(tmp_path: Path) -> None:
    data = recorded("IQ5_KS")
    quantize.quantize(
        write_model(tmp_path / "in.gguf", "IQ5_KS", data), tmp_path / "out.gguf", "COPY", verify=True
    )
    with open_gguf(tmp_path / "out.gguf") as file:
        assert bytes(file.raw(NAME)) == data.tobytes()


def test_a_target_that_can_only_be_decoded_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write_model(tmp_path / "in.gguf", "F32", np.ones((16, 512), np.float32))
    options = PlanOptions(overrides=quantize.parse_overrides(["ffn_up=Q8_K_R8"]))
    with pytest.raises(QuantError, match=f"{NAME}: Q8_K_R8 can't be encoded yet") as e:
        quantize.quantize(path, tmp_path / "out.gguf", "Q8_0", options=options)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out.gguf").exists()


def test_a_row_scale_that_is_not_finite_is_refused_in_one_line(tmp_path: Path) -> None:
    data = recorded("IQ4_KS").copy()
    data[3, :4] = np.array([np.nan], "<f4").view(np.uint8)
    path = write_model(tmp_path / "in.gguf", "IQ4_KS", data)
    with pytest.raises(ExecutionError, match=f"{NAME}: weight at row 3, column 0 is nan") as e:
        quantize.quantize(path, tmp_path / "out.gguf", "Q8_0", options=AGAIN)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out.gguf").exists()


def test_rows_that_fill_no_group_are_refused_in_one_line(tmp_path: Path) -> None:
    """The group of the last two rows of six is not whole."""
    data = recorded("Q5_0_R4")[:6]
    path = write_model(tmp_path / "in.gguf", "Q5_0_R4", data, (6, 512))
    text = f"{NAME}: Q5_0_R4 keeps 4 rows together, and 6 rows are no multiple of that"
    with pytest.raises(QuantError, match=text) as e:
        quantize.quantize(path, tmp_path / "out.gguf", "Q8_0", options=AGAIN)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out.gguf").exists()


def test_any_rows_of_a_group_can_be_read(tmp_path: Path) -> None:
    """Row ranges of a run need not know what the input keeps together."""
    data = recorded("IQ5_KS_R4")
    rows = get_decoder("IQ5_KS_R4")(data, 512)
    with open_gguf(write_model(tmp_path / "in.gguf", "IQ5_KS_R4", data)) as file:
        tensor = GGUFTensor(file, NAME)
        for start, stop in ((0, 16), (3, 4), (3, 10), (8, 12), (15, 16), (5, 5)):
            np.testing.assert_array_equal(tensor.read_rows(start, stop), rows[start:stop])
        assert bytes(tensor.raw_rows(4, 12)) == data[4:12].tobytes()


@pytest.mark.parametrize(
    ("type_name", "instead"),
    [("IQ4_KS", "IQ4_NL"), ("IQ3_K", "IQ4_NL"), ("IQ5_K", "Q6_0"), ("IQ4_KSS", "IQ4_NL")],
)
def test_their_types_are_written_whatever_the_number_of_threads(
    tmp_path: Path, type_name: str, instead: str
) -> None:
    rows = np.random.default_rng(5).standard_normal((40, 512), np.float32)
    path = write_model(tmp_path / "in.gguf", "F32", rows, (40, 512))
    options = PlanOptions(overrides=quantize.parse_overrides([f"ffn_up={type_name.lower()}"]))
    for n_threads in (1, 3):
        out = tmp_path / f"{n_threads}.gguf"
        quantize.quantize(path, out, "Q8_0", options=options, verify=True, n_threads=n_threads)
        with open_gguf(out) as file:
            assert file.tensors[NAME].type.name == type_name
            assert bytes(file.raw(NAME)) == encode(type_name, rows, None).tobytes()
    short = write_model(tmp_path / "short.gguf", "F32", rows, (40 * 16, 32))
    quantize.quantize(short, tmp_path / "out.gguf", "Q8_0", options=options, verify=True)
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.tensors[NAME].type.name == instead
