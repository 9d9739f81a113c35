"""Pickles made to run code, to fill memory or to break what reads them: each is refused in one line."""

from __future__ import annotations

import os
import pickle
import random
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest

from convert.checkpoint.pickle_file import PickleFile
from gguf_tools.errors import CheckpointError

NUMBERS = bytes(96)
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x18tQ"
GOOD = (
    b"\x80\x02}q\x00(X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n("
    + STORAGE
    + b"K\x00K\x04K\x06\x86K\x06K\x01\x86\x89ccollections\nOrderedDict\n)RtRu."
)
"""A dictionary with one tensor, (4, 6)."""


def write(path: Path, program: bytes, numbers: bytes = NUMBERS) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", program), ("byteorder", b"little"), ("data/0", numbers)):
            archive.writestr(f"a/{name}", data)
    return path


def refusal(path: Path, program: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        PickleFile(write(path, program))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    assert len(message) < 600
    return message


def test_the_program_without_harm_is_read(tmp_path: Path) -> None:
    with PickleFile(write(tmp_path / "a.bin", GOOD)) as file:
        assert file.tensors["a"].shape == (4, 6)


@pytest.mark.parametrize(
    "name",
    [
        "os.system", "posix.system", "nt.system", "builtins.eval", "__builtin__.eval", "builtins.getattr",
        "builtins.__import__", "functools.partial", "torch.hub.load", "torch.load",
        "torch._utils._import_dotted_name",
        "torch.nn.Linear", "copyreg._reconstructor", "operator.attrgetter", "subprocess.Popen",
        "pickle.loads",
        "collections.OrderedDict.__init__", "torch.float32.__class__", "torch.FloatStorage.from_file",
        "convert.checkpoint.torch_program._call", "\x1b[1mred", "a" * 1000,
    ],
)  # fmt: skip
def test_a_name_beyond_those_of_tensors_is_refused(name: str, tmp_path: Path) -> None:
    module, _, word = name.rpartition(".")
    called = f"c{module}\n{word}\n(X\x04\x00\x00\x00truetR.".encode()
    assert ": can't be read as weights only: names " in refusal(tmp_path / "a.bin", b"\x80\x02" + called)


def global_(name: str) -> bytes:
    module, _, word = name.rpartition(".")
    return f"c{module}\n{word}\n".encode()


SET, TENSOR, DTYPE = map(global_, ("builtins.set", "torch._utils._rebuild_tensor_v2", "torch.float32"))
FROM_TYPE = global_("torch._tensor._rebuild_from_type_v2")
HARM = {
    "calls a type of numbers": DTYPE + b")R.",
    "calls a text": b"X\x01\x00\x00\x00a)R.",
    "calls what a call gave": SET + b")R)R.",
    "calls a tensor without arguments": TENSOR + b")R.",
    "calls with a list": TENSOR + b"]R.",
    "makes a tensor of no storage": TENSOR + b"(K\x00K\x00)))K\x00tR.",
    "makes a tensor of negative size": TENSOR
    + b"("
    + STORAGE
    + b"K\x00J\xff\xff\xff\xff\x85K\x01\x85\x89NtR.",
    "makes a tensor of a size that is no number": TENSOR + b"(" + STORAGE + b"K\x00N\x85K\x01\x85\x89NtR.",
    "has an axis without a stride": TENSOR + b"(" + STORAGE + b"K\x00K\x01\x85)\x89NtR.",
    "calls by another call": FROM_TYPE + b"(X\x06\x00\x00\x00systemN)NtR.",
    "calls itself": b"(" + FROM_TYPE + b"q\x00tq\x01" + (b"h\x00(h\x00Nh\x01Ntq\x01" * 3000)[:-2] + b"R.",
    "makes an object of a type": global_("torch.Tensor") + b")\x81.",
    "sets attributes of a function": TENSOR + b"}b.",
    "sets attributes of a storage": STORAGE + b"}b.",
    "sets attributes of a text": b"X\x01\x00\x00\x00aN}\x86b.",
    "appends to a text": b"X\x01\x00\x00\x00aK\x00a.",
    "sets an item of a list": b"]K\x00K\x00s.",
    "sets items without a value": b"}(K\x00u.",
    "has a list as a key": b"}]K\x00s.",
    "has nested tuples as a key": b"})" + b"\x85" * 200_000 + b"K\x00s.",
    "has doubled tuples as a key": b"})" + b"q\x00h\x00\x86" * 100 + b"K\x00s.",
    "has a number of 2000 bits as a key": b"}\x8a\xfa" + b"\x7f" * 250 + b"K\x00s.",
    "takes from an empty stack": b"R.",
    "ends with an empty stack": b".",
    "takes a mark that is not there": b"t.",
    "takes from a memo that is empty": b"h\x00.",
    "has no end": b"}",
    "is empty": b"",
    "names a record by number": STORAGE.replace(b"X\x01\x00\x00\x000", b"K\x00") + b".",
    "has an id that is no tuple": b"K\x00Q.",
    "has an id of a module": STORAGE.replace(b"storage", b"modules") + b".",
    "has an id in text": b"Pstorage\n.",
    "uses a registered extension": b"\x82\x01.",
    "uses a name from the stack": b"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93)R.",
    "makes an instance": b"(ios\nsystem\n.",
    "makes an object": b"(" + SET + b"o.",
    "makes an object with names": SET + b")}\x92.",
    "takes a buffer": b"\x97.",
    "says it has a long text": b"X\xff\xff\xff\xffa.",
    "says it has a longer text": b"\x8d" + b"\xff" * 7 + b"\x7fa.",
    "says it has a large frame": b"\x95" + b"\xff" * 7 + b"\x7f.",
    "has a number of many digits": b"I" + b"9" * 100_000 + b"\n.",
    "has an unknown escape": b"S'\\o'\n.",
    "has no UTF-8": b"X\x01\x00\x00\x00\xff.",
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("harm", HARM)
def test_a_program_that_does_harm_is_refused(harm: str, tmp_path: Path) -> None:
    refusal(tmp_path / "a.bin", b"\x80\x02" + HARM[harm] if HARM[harm] else b"")


def test_memory_does_not_grow_by_what_a_program_says(tmp_path: Path) -> None:
    """A memo's number, a storage's size, and results of calls on one large value."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with PickleFile(write(tmp_path / "a.bin", GOOD.replace(b"q\x00", b"r\xff\xff\xff\xff"))) as file:
        assert list(file.tensors) == ["a"]
    text = b"X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"q\x01"
    encode = b"c_codecs\nencode\nq\x02]q\x03(" + b"h\x02h\x01h\x01\x86R" * 10_000 + b"e."
    assert "holds list" in refusal(tmp_path / "a.bin", b"\x80\x02" + text + encode)
    huge = STORAGE.replace(b"K\x18", b"\x8a\x07" + b"\x7f" * 7)
    expanded = GOOD.replace(STORAGE, huge).replace(
        b"K\x04K\x06\x86K\x06K\x01\x86", b"J\0\0\0\x70\x85K\x00\x85"
    )
    assert "a: its 4 bytes are not in the file as torch stores them" in refusal(tmp_path / "a.bin", expanded)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_changed_bytes_are_read_or_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was run")

    for module, name in ((os, "system"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, run)
    chance = random.Random(3)
    n_read, refusals = 0, []
    for _ in range(1000):
        path = write(tmp_path / "a.bin", changed(GOOD, chance))
        try:
            with PickleFile(path) as file:
                assert sum(raw.read().nbytes for raw in file.tensors.values()) <= len(NUMBERS)
                n_read += 1
        except CheckpointError as error:
            refusals.append(str(error))
    assert all(message.startswith(f"{path}: ") and message.isprintable() for message in refusals)
    assert min(n_read, len(refusals)) > 50


def changed(program: bytes, chance: random.Random) -> bytes:
    """Return a program with one to three bytes that are others, new or gone."""
    data = bytearray(program)
    for _ in range(chance.randint(1, 3)):
        place, byte = chance.randrange(len(data)), chance.choice((chance.randrange(256), chance.choice(GOOD)))
        data[place : place + chance.randint(0, 1)] = bytes([byte])[: chance.randint(0, 1)]
    return bytes(data)
