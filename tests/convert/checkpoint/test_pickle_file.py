"""Files of torch.save, read without torch: what torch.load gives, to the byte."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from convert.checkpoint.pickle_file import PickleFile
from gguf_tools.errors import CheckpointError
from tests.contract.import_graph import ROOT

torch = pytest.importorskip("torch")

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
]  # fmt: skip
NUMBERS = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def assert_read_as_by_torch(path: Path) -> None:
    """Whether each tensor has the shape, the type and the bytes that it has in torch."""
    value = torch.load(path, weights_only=True)
    expected = next((value[key] for key in ("state_dict", "model", "module") if key in value), value)
    with PickleFile(path) as file:
        assert list(file.tensors) == list(expected)
        for name, tensor in expected.items():
            raw = file.tensors[name]
            rows = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            assert raw.shape == tuple(tensor.shape)
            assert raw.read().dtype.itemsize == tensor.element_size()
            assert raw.read().tobytes() == rows.numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_each_type_are_those_of_torch(dtype: str, tmp_path: Path) -> None:
    torch.save(seen_from_all_sides(dtype), tmp_path / "a.pt")
    assert_read_as_by_torch(tmp_path / "a.pt")


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "float64"])
def test_numbers_of_files_before_torch_1_6_are_those_of_torch(dtype: str, tmp_path: Path) -> None:
    torch.save(seen_from_all_sides(dtype), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert_read_as_by_torch(tmp_path / "a.pt")


def seen_from_all_sides(dtype: str) -> dict[str, Any]:
    tensor = NUMBERS.to(getattr(torch, dtype))
    return {"plain": tensor, "turned": tensor.T, "part": tensor[1:3, 2:5], "scalar": tensor[2, 3]}


def with_attribute(tensor: Any) -> Any:
    tensor.mark = 3
    return tensor


def trained() -> tuple[Any, Any]:
    """A module and its optimizer after a step."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


MODULE, OPTIMIZER = trained()
BESIDE = {
    "epoch": 3, "rate": 1e-3, "big": 2**80, "name": "a", "none": None, "list": [1, (2, 3, 4, 5), ()],
    "bytes": b"a", "array": bytearray(b"a"), "set": {1, 2}, "complex": 1j, "flag": True, ("a", 1): -70000,
    "size": NUMBERS.shape, "device": NUMBERS.device, "dtype": torch.int8, "sparse": NUMBERS.to_sparse(),
    "quantized": torch.quantize_per_channel(NUMBERS, torch.ones(4), torch.zeros(4), 0, torch.qint8),
}  # fmt: skip
STATES = {
    "a module": MODULE.state_dict(),
    "parameters": dict(MODULE.named_parameters()),
    "parameters with attributes": {"a": with_attribute(torch.nn.Parameter(NUMBERS.clone()))},
    "tensors with attributes": {"a": with_attribute(NUMBERS.clone())},
    "tied tensors": {"a": NUMBERS, "b": NUMBERS, "c": NUMBERS[1:]},
    "views": {"a": NUMBERS[0].expand(3, 6), "b": NUMBERS[:, ::2], "c": NUMBERS.as_strided((1, 4), (77, 1))},
    "empty tensors": {"a": torch.zeros(0, 3), "b": NUMBERS[2:2]},
    "another order of axes": {"a": NUMBERS.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)},
    "state_dict": {"state_dict": MODULE.state_dict(), "optimizer": OPTIMIZER.state_dict()},
    "module": {"module": MODULE.state_dict(), **BESIDE},
}


@pytest.mark.parametrize("kind", STATES)
def test_what_people_save_is_what_torch_loads(kind: str, tmp_path: Path) -> None:
    torch.save(STATES[kind], tmp_path / "a.pt")
    assert_read_as_by_torch(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": torch._neg_view(NUMBERS)}, "a: a nested, sparse or negated tensor, expected plain numbers"),
        ({"a": NUMBERS + 1j}, r"a: elements of type torch\.complex64 can't be read"),
        ({"a": torch.quantize_per_tensor(NUMBERS, 1, 0, torch.quint8)}, r"a: elements of type torch\.quint8"),
        ({"a": NUMBERS.to_sparse_csr()}, "'a' is nested, sparse or without data"),
        ({3: NUMBERS}, "3 is Tensor, expected tensors by name"),
        ({"a": NUMBERS.device}, "'a' is device, expected tensors by name"),
        ([NUMBERS], "holds list, expected tensors by name"),
        ({"a": torch.nn.Linear}, r"read as weights only: names torch\.nn\.modules\.linear\.Linear, expected"),
    ],
)
def test_what_is_no_tensor_of_plain_numbers_is_named(state: Any, words: str, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=rf"a\.pt: .*{words}"):
        PickleFile(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("order", "compression", "words"),
    [
        (b"big", zipfile.ZIP_STORED, "was written on a big-endian machine"),
        (
            b"little",
            zipfile.ZIP_DEFLATED,
            r"a/data\.pkl is not in the file as torch stores it, .* or compressed",
        ),
    ],
)
def test_numbers_in_another_form_are_refused(
    order: bytes, compression: int, words: str, tmp_path: Path
) -> None:
    torch.save({"a": NUMBERS}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        records = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "a.pt", "w", compression) as archive:
        for name, data in (records | {"a/byteorder": order}).items():
            archive.writestr(name, data)
    with pytest.raises(CheckpointError, match=rf"a\.pt: {words}"):
        PickleFile(tmp_path / "a.pt")


def test_a_file_that_was_cut_off_says_so(tmp_path: Path) -> None:
    torch.save({"a": NUMBERS}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for n_bytes in (10, len(whole) // 2, len(whole) - 3):
        (tmp_path / "a.pt").write_bytes(whole[:n_bytes])
        with pytest.raises(CheckpointError, match=r"a\.pt: damaged, or no file of torch: File is not a zip"):
            PickleFile(tmp_path / "a.pt")


def test_a_file_since_torch_1_6_needs_no_torch(tmp_path: Path) -> None:
    torch.save({"a": NUMBERS}, tmp_path / "a.pt")
    torch.save({"a": NUMBERS}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    probe = (
        "import sys; sys.modules['torch'] = None;"
        "from pathlib import Path; from convert.checkpoint.pickle_file import PickleFile;"
        "print(PickleFile(Path(sys.argv[1])).tensors['a'].read().sum())"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", probe, tmp_path / name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        for name in ("a.pt", "old.pt")
    ]
    assert found[0].stdout == "276.0\n"
    assert "old.pt: reading a pickle from before torch 1.6 needs torch: pip install" in found[1].stderr
