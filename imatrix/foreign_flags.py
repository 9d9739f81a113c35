"""Flags of llama-imatrix that mean nothing here, and those that are refused; see gguf_tools/parser.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gguf_tools.parser import ForeignFlag

Names = tuple[str, ...]


def _idle(why: str, flags: Iterable[Names], values: int | str = 1) -> Iterator[ForeignFlag]:
    return (ForeignFlag(names, why, values, refused=False) for names in flags)


_PLACES: tuple[Names, ...] = (
    ("-ngl", "--gpu-layers", "--n-gpu-layers"),
    ("-dev",),
    ("-sm", "--split-mode"),
    ("-ts", "--tensor-split"),
    ("-mg", "--main-gpu"),
    ("-ot", "--override-tensor"),
    ("-ncmoe", "--n-cpu-moe"),
)
_BATCHES: tuple[Names, ...] = (
    ("-b", "--batch-size"),
    ("-ub", "--ubatch-size"),
    ("-np", "--parallel"),
)
_CACHES: tuple[Names, ...] = (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v"))
_DEVICE = "--device says where to compute"
_DOWNLOAD = "download it first, then name the file with -m"

FOREIGN_FLAGS = (
    *_idle(_DEVICE, _PLACES),
    *_idle(_DEVICE, [("-cmoe", "--cpu-moe")], 0),
    *_idle("the text goes through the model layer by layer", _BATCHES),
    *_idle("-t says how many threads", [("-tb", "--threads-batch"), ("--numa",)]),
    *_idle("attention is exact in any case", [("-fa", "--flash-attn")], "?"),
    *_idle("there is no cache", _CACHES),
    *_idle("nothing is random", [("-s", "--seed")]),
    *_idle("there is one way to say less, -q", [("-lv", "--verbosity", "--log-verbosity")]),
    *_idle("one layer is read at a time", [("--mmap",), ("--no-mmap",), ("--mlock",)], 0),
    *_idle("the file's own weights are computed with", [("--no-repack",)], 0),
    *_idle("nothing is warmed up", [("--warmup",), ("--no-warmup",)], 0),
    ForeignFlag(("-hf", "-hfr", "--hf-repo"), "-m OWNER/NAME, as to hf download", 1),
    ForeignFlag(("-hff", "--hf-file"), _DOWNLOAD, 1),
    ForeignFlag(("-mu", "--model-url"), _DOWNLOAD, 1),
    ForeignFlag(("-p", "--prompt"), "write the text into a file, and name it with -f", 1),
    ForeignFlag(
        ("--save-frequency",), "no matrix is whole before the last layer; see --output-frequency", 1
    ),
    ForeignFlag(("--nextn",), "layers for multi-token prediction are not computed"),
)
