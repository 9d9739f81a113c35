"""Wrong arguments of Python functions: one line names the argument, what was found and what is expected.

All public functions are found by their names, so that a new one is tested, too.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, is_typeddict

import numpy as np
import pytest

import gguf_tools as gt
import imatrix
from gguf_tools import edit
from gguf_tools.errors import BadArgument, BadImportance, BadRequest, OutputError, ToolkitError, WrongType
from quantize.importances.entries import Importance
from quantize.importances.files import importance_file

FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (gt, imatrix, edit)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
}
"""All public functions."""

OF_A_HEADER = {"set_values", "remove_keys", "rename_keys", "rename_tensors", "parse_assignment", "recover"}
"""Functions for `edit_model`, whose errors name a key."""

SHORT = {
    "card", "convert_adapter", "decode", "encode", "lint", "load", "open_checkpoint", "open_gguf",
    "parse_overrides", "read_suite", "read_values", "save", "show", "write_texts", *OF_A_HEADER,
}  # fmt: skip
"""Functions that take no long time."""

WRITING_NOTHING = {
    "audit", "decode", "diff", "encode", "lint", "load", "open_checkpoint", "open_gguf", "parse_overrides",
    "read_suite", "read_values", "rederive", "scan", "show", "verify", *OF_A_HEADER,
}  # fmt: skip


def keywords(function: Callable[..., Any]) -> set[str]:
    """Return what a function takes by name, fields of its options included."""
    names = set()
    for each in inspect.signature(function).parameters.values():
        if each.kind is inspect.Parameter.VAR_KEYWORD:
            module = inspect.getmodule(inspect.unwrap(function))
            choices = vars(module)[str(each.annotation).removeprefix("Unpack[").removesuffix("]")]
            assert is_typeddict(choices)
            names |= {*get_names(choices)}
        else:
            names.add(each.name)
    return names


def get_names(choices: Any) -> list[str]:
    return list(choices.__annotations__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_takes_long_has_progress_and_what_writes_has_force(name: str) -> None:
    last = name.rpartition(".")[2]
    function, taken = FUNCTIONS[name], keywords(FUNCTIONS[name])
    assert last in SHORT or "progress" in taken
    assert last in WRITING_NOTHING or "force" in taken
    assert last in OF_A_HEADER or hasattr(function, "__wrapped__"), f"{name} is not @checked"


def wrong_calls() -> list[tuple[str, str]]:
    """Return each parameter of each public function that has to be a path, a list, a word or options."""
    return [
        (name, each.name)
        for name, function in FUNCTIONS.items()
        if name.rpartition(".")[2] not in OF_A_HEADER
        for each in inspect.signature(function).parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
        and each.name not in ("array", "importances", "quants")
        and (name, each.name) != ("gguf_tools.read_values", "name")
        and "Shown" not in str(each.annotation)
    ]


@pytest.mark.parametrize(("name", "argument"), wrong_calls())
def test_an_argument_of_another_type_is_named(name: str, argument: str, tmp_path: Path) -> None:
    function = FUNCTIONS[name]
    needed = {
        each.name: _good(each.name, tmp_path)
        for each in inspect.signature(function).parameters.values()
        if each.default is inspect.Parameter.empty and each.kind is not inspect.Parameter.VAR_KEYWORD
    }
    for wrong in (3 + 4j, types.SimpleNamespace(), *([np.zeros(3)] if argument != "data" else [])):
        if isinstance(wrong, np.ndarray) and _takes_many(function, argument):
            continue
        with pytest.raises(WrongType) as caught:
            function(**{**needed, argument: wrong})
        assert str(caught.value).startswith(f"{argument}: found ")
        assert ", expected " in str(caught.value)
        assert isinstance(caught.value, TypeError | ToolkitError)
    assert list(tmp_path.iterdir()) == []


def _takes_many(function: Callable[..., Any], argument: str) -> bool:
    annotation = str(inspect.signature(function).parameters[argument].annotation)
    return any(word in annotation for word in ("Paths", "Iterable", "Sequence"))


def _good(name: str, folder: Path) -> Any:
    return {
        "options": None, "quants": [], "edit": lambda metadata, names: metadata, "to": "split",
        "data": np.zeros(4, np.uint8), "contents": imatrix.ImportanceFile({}), "words": [], "types": ["Q8_0"],
        "file_types": ["Q8_0"], "array": np.zeros(32), "type_": "Q8_0", "file_type": "Q8_0",
    }.get(name, str(folder / "missing" / name))  # fmt: skip


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: gt.evaluate("b", "t", np.zeros(2)), "quants: found np.float64(0.0) among"),
        (lambda: gt.card(["a", 5]), "files: found 5 among them, expected str or PathLike"),
        (lambda: gt.RunOptions(reuse=[b"x"]), "reuse: found b'x' among them"),
        (lambda: gt.ForwardOptions(dtype="f16"), "dtype: found 'f16', expected 'float32' or 'bfloat16'"),  # type: ignore[arg-type]
        (lambda: gt.ForwardOptions(device=0), "device: found 0, expected str or None"),  # type: ignore[arg-type]
        (lambda: gt.RunOptions(scheduler="nowhere"), "scheduler: found 'nowhere', expected an address"),
        (lambda: gt.QuantizeOptions(types="Q4_K"), "types: found 'Q4_K', expected PlanOptions or None"),  # type: ignore[arg-type]
        (lambda: gt.split("a", "b", max_tensors=0), "max_tensors: found 0, expected a whole number from 1"),
        (lambda: gt.evaluate("b", "t", "q", chunk_size=0), "chunk_size: found 0, expected a whole number"),
    ],
)  # fmt: skip
def test_messages(call: Callable[[], object], said: str) -> None:
    with pytest.raises(BadArgument) as caught:
        call()
    assert str(caught.value).startswith(said)


def test_a_path_is_as_good_as_a_list_of_one() -> None:
    """The file is looked for, and its name not taken for a list of letters."""
    with pytest.raises(ToolkitError, match=r"^text\.txt: can't be read"):
        gt.evaluate("base.gguf", "text.txt", Path("x.gguf"))
    assert gt.RunOptions(reuse="old.gguf").old_files == (Path("old.gguf"),)
    assert gt.RunOptions(reuse=(each for each in ["a", Path("b")])).old_files == (Path("a"), Path("b"))
    with pytest.raises(ToolkitError, match=r"^nothing\.imatrix: can't be read"):
        _ = gt.CollectOptions(earlier="nothing.imatrix").earlier_files
    assert gt.EvaluateOptions(work="a").work == Path("a")  # type: ignore[arg-type]


def test_evaluate_replaces_logits_with_force_alone(tmp_path: Path) -> None:
    logits, text = tmp_path / "base.kld", tmp_path / "t.txt"
    logits.write_text("mine")
    text.write_text("words")
    with pytest.raises(OutputError, match="exists already"):
        gt.evaluate("base.gguf", text, "x.gguf", logits=logits)
    with pytest.raises(ToolkitError, match="such file or folder"):
        gt.evaluate("base.gguf", text, "x.gguf", logits=logits, force=True)
    assert logits.read_text() == "mine"


def test_importances_are_arrays_too() -> None:
    ready = Importance(np.ones((1, 4), np.float32), np.ones(1, np.float32))
    file = importance_file({"a": np.arange(4), "b": np.ones((3, 4)), "c": ready, "d": [0.5, 2.0]})
    assert {name: each.shape for name, each in file.entries.items()} == {
        "a": (1, 4), "b": (3, 4), "c": (1, 4), "d": (1, 2),
    }  # fmt: skip
    np.testing.assert_array_equal(file.entries["a"].weights(), [[0, 1, 2, 3]])
    np.testing.assert_array_equal(file.entries["d"].weights(), [[0.5, 2.0]])


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((2, 3, 4)), r"blk: importances \(2, 3, 4\), expected \(n_cols,\) or \(n_mats, n_cols\)"),
        (np.zeros(0), r"blk: importances \(0,\), expected"),
        (np.array([1, np.nan]), "blk: the importance of column 1 is nan, expected a finite number"),
        (np.array([1, -1]), "blk: the importance of column 1 is -1.0"),
        ("abc", "blk: found a str as importances, expected an array of numbers"),
        (object(), "blk: found a object as importances, expected an array of numbers"),
    ],
)
def test_arrays_that_are_no_importances(array: Any, said: str) -> None:
    with pytest.raises(BadImportance, match=f"^{said}"):
        importance_file({"blk": array})


@pytest.mark.parametrize("function", [gt.card, lambda files: gt.upload(files, "a/b")])
def test_no_file_at_all_is_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises(BadRequest, match="files: found none"):
        function([])


ODD_IMPORTANCES = {
    "complex": np.ones(4, np.complex64),
    "texts": np.array(["1", "2"]),
    "dates": np.zeros(4, "datetime64[s]"),
}


@pytest.mark.parametrize("values", ODD_IMPORTANCES.values(), ids=ODD_IMPORTANCES.keys())
def test_importances_are_real_numbers(values: np.ndarray) -> None:
    with pytest.raises(BadImportance, match="expected an array of numbers"):
        importance_file({"output.weight": values})


def test_importances_have_names() -> None:
    with pytest.raises(WrongType, match="importances: found 3 as a tensor's name"):
        importance_file({3: np.ones(4)})  # type: ignore[dict-item]


NO_NAME = "a" * 5000
NAMING: list[Callable[[], object]] = [
    lambda: gt.evaluate(NO_NAME, __file__, __file__),
    lambda: gt.evaluate_suite(__file__, NO_NAME, __file__),
    lambda: gt.quantize(NO_NAME, None, "Q8_0"),
    lambda: gt.convert(NO_NAME, None),
    lambda: gt.upload(NO_NAME, "a/b"),
    lambda: gt.audit(NO_NAME, __file__),
    lambda: gt.open_gguf(NO_NAME),
]


@pytest.mark.parametrize("call", NAMING)
def test_no_file_has_so_long_a_name(call: Callable[[], object]) -> None:
    with pytest.raises(ToolkitError, match="File name too long"):
        call()


def test_types_of_cook_are_texts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(WrongType, match="types: found 3 among them"):
        gt.cook(tmp_path, __file__, [3], tmp_path / "out")  # type: ignore[list-item]
