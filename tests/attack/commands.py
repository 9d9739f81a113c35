"""Every command that writes something, as it is attacked: its words and its inputs."""

from __future__ import annotations

from dataclasses import dataclass

from tests.attack.material import TEXT_OPTIONS

BYSTANDERS = {"mine.txt": b"a letter", "o.gguf.bak": b"a copy of mine", "notes/plan.md": b"a plan"}
"""Files in every folder that no command is given."""


@dataclass(frozen=True)
class Command:
    """A command in a folder of its own.

    name    in tables
    line    what is typed in the folder
    inputs  files and folders of the material that are copied there
    edits   those among them that it changes in place
    seldom  whether it gets a third of the trials of others, because it takes long
    """

    name: str
    line: str
    inputs: tuple[str, ...]
    edits: tuple[str, ...] = ()
    seldom: bool = False

    @property
    def program(self) -> str:
        return self.line.split()[0]

    @property
    def words(self) -> list[str]:
        """The arguments."""
        return self.line.split()[1:]


_SPLIT = tuple(f"in-{n:05d}-of-00003.gguf" for n in (1, 2, 3))

COMMANDS = (
    Command("quantize", "quantize --imatrix m.imatrix.gguf in.gguf o.gguf Q4_K_M 2", ("in.gguf", "m.imatrix.gguf")),
    Command(
        "quantize-types",
        "quantize --imatrix m.imatrix.gguf --card in.gguf o-{FTYPE}.gguf Q2_K,IQ4_XS,Q5_0 1",
        ("in.gguf", "m.imatrix.gguf"),
    ),
    Command("quantize-parts", "quantize --keep-split in-00001-of-00003.gguf o.gguf Q8_0 1", _SPLIT),
    Command("quantize-folder", "quantize model o.gguf Q6_K 1", ("model",)),
    Command(
        "quantize-calibrate",
        f"quantize model o.gguf Q2_K --calibrate text.txt {TEXT_OPTIONS.removesuffix(' -t 1')}",
        ("model", "text.txt"),
        seldom=True,
    ),
    Command(
        "quantize-size",
        "quantize in.gguf o.gguf --imatrix m.imatrix.gguf --size 5bpw --save-recipe o.json --sensitivity-text"
        f" text.txt {TEXT_OPTIONS.removesuffix(' -t 1')}",
        ("in.gguf", "m.imatrix.gguf", "text.txt"),
        seldom=True,
    ),
    Command(
        "quantize-losses",
        "quantize in.gguf o.gguf 1 --imatrix m.imatrix.gguf --size 5bpw --losses losses.json --save-recipe o.json",
        ("in.gguf", "m.imatrix.gguf", "losses.json"),
    ),
    Command("convert", "convert-hf-to-gguf model --outfile o.gguf --outtype bf16 --threads 1", ("model",)),
    Command(
        "convert-one-pass",
        "convert-hf-to-gguf model --outfile o.gguf --outtype Q4_K_M --imatrix m.imatrix.gguf --threads 2",
        ("model", "m.imatrix.gguf"),
    ),
    Command(
        "convert-parts",
        "convert-hf-to-gguf model --outfile o.gguf --outtype q8_0 --split-max-tensors 12 --threads 1",
        ("model",),
    ),
    Command(
        "convert-pickled",
        "convert-hf-to-gguf pickled --outfile o.gguf --outtype bf16 --allow-pickle --threads 1",
        ("pickled",),
    ),
    Command("imatrix", f"imatrix -m model -f text.txt -o o.gguf {TEXT_OPTIONS}", ("model", "text.txt")),
    Command("imatrix-dat", f"imatrix -m in.gguf -f text.txt -o o.dat {TEXT_OPTIONS}", ("in.gguf", "text.txt")),
    Command(
        "imatrix-merge", "imatrix merge m.imatrix.gguf n.imatrix.gguf -o o.gguf", ("m.imatrix.gguf", "n.imatrix.gguf")
    ),
    Command("imatrix-convert", "imatrix convert m.imatrix.gguf o.dat", ("m.imatrix.gguf",)),
    Command(
        "evaluate",
        f"evaluate in.gguf q4.gguf q8.gguf -f text.txt --json o.json --html o.html --keep kept --work work {TEXT_OPTIONS}",
        ("in.gguf", "q4.gguf", "q8.gguf", "text.txt"),
        seldom=True,
    ),
    Command(
        "evaluate-json",
        f"evaluate model q4.gguf -f text.txt --json o.json {TEXT_OPTIONS}",
        ("model", "q4.gguf", "text.txt"),
    ),
    Command(
        "sensitivity",
        f"sensitivity model -f text.txt -o o.json --types Q2_K,Q4_K,Q8_0 --rows 16 {TEXT_OPTIONS}",
        ("model", "text.txt"),
    ),
    Command(
        "cook",
        f"gguf-tools cook model -f text.txt --types Q2_K,5bpw --evaluate other.txt -o cooked {TEXT_OPTIONS}",
        ("model", "text.txt", "other.txt"),
        seldom=True,
    ),
    Command("card", "gguf-tools card q4.gguf q8.gguf --report report.json -q", ("q4.gguf", "q8.gguf", "report.json")),
    Command("split", "gguf-tools split q4.gguf o --max-tensors 12", ("q4.gguf",)),
    Command("merge", "gguf-tools merge in-00001-of-00003.gguf o.gguf", _SPLIT),
    Command("set", "gguf-tools set q4.gguf general.name=Another", ("q4.gguf",), ("q4.gguf",)),
    Command("set-longer", f"gguf-tools set q4.gguf general.name={'Long' * 20}", ("q4.gguf",), ("q4.gguf",)),
    Command("set-parts", f"gguf-tools set {_SPLIT[0]} general.name={'Long' * 20}", _SPLIT, _SPLIT),
    Command("set-copy", "gguf-tools set q4.gguf general.name=Another -o o.gguf", ("q4.gguf",)),
    Command("remove-key", "gguf-tools remove-key q4.gguf general.name", ("q4.gguf",), ("q4.gguf",)),
    Command(
        "rename-parts", rf"gguf-tools rename {_SPLIT[0]} --regex blk\.=layer.", _SPLIT, _SPLIT
    ),
    Command("repack", "gguf-tools repack q4.gguf o.gguf --threads 1", ("q4.gguf",)),
    Command("repack-undo", "gguf-tools repack r4.gguf o.gguf --undo --threads 1", ("r4.gguf",)),
    Command("mla-both", "gguf-tools mla-layout q4.gguf o.gguf --to both --threads 1", ("q4.gguf",)),
    Command("mla-none", "gguf-tools mla-layout both.gguf o.gguf --to none --threads 1", ("both.gguf",)),
)  # fmt: skip
