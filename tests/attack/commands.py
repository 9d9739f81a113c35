"""Every command that writes something, as it is attacked: what is typed in a folder with its inputs."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = tuple(f"in-{n:05d}-of-00003.gguf" for n in (1, 2, 3))
FORWARD = "-c 32 --chunks 3"
"""How much text goes through a model."""

BYSTANDERS = {"mine.txt": b"a letter", "o.gguf.bak": b"a copy of mine", "notes/plan.md": b"a plan"}
"""Files in every folder that no command is given."""

_MATERIAL = {
    "model", "pickled", "in.gguf", "q8.gguf", "q4.gguf", "both.gguf", "r4.gguf", "m.imatrix.gguf",
    "n.imatrix.gguf", "losses.json", "report.json", "text.txt", "other.txt",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command in a folder of its own.

    name    in tables
    line    what is typed in the folder
    seldom  whether it gets a third of the trials of others, because it takes long
    edits   whether it changes its inputs in place
    """

    name: str
    line: str
    seldom: bool = False
    edits: bool = False

    @property
    def program(self) -> str:
        return self.line.split()[0]

    @property
    def words(self) -> list[str]:
        """The arguments."""
        return self.line.split()[1:]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Files and folders of the material that it is given."""
        names = [word for word in self.words if word in _MATERIAL]
        return (*names, *PARTS) if PARTS[0] in self.words else tuple(names)


_LONG = "Long" * 20

COMMANDS = (
    Command("quantize", "quantize --imatrix m.imatrix.gguf in.gguf o.gguf Q4_K_M 2"),
    Command(
        "quantize-types", "quantize --imatrix m.imatrix.gguf --card in.gguf o-{FTYPE}.gguf Q2_K,IQ4_XS,Q5_0 1"
    ),
    Command("quantize-parts", f"quantize --keep-split {PARTS[0]} o.gguf Q8_0 1"),
    Command("quantize-folder", "quantize model o.gguf Q6_K 1"),
    Command("quantize-calibrate", f"quantize model o.gguf Q2_K --calibrate text.txt {FORWARD}", seldom=True),
    Command(
        "quantize-size",
        "quantize in.gguf o.gguf --imatrix m.imatrix.gguf --size 5bpw --save-recipe o.json"
        f" --sensitivity-text text.txt {FORWARD}",
        seldom=True,
    ),
    Command(
        "quantize-losses",
        "quantize in.gguf o.gguf 1 --imatrix m.imatrix.gguf --size 5bpw --losses losses.json"
        " --save-recipe o.json",
    ),
    Command("convert", "convert-hf-to-gguf model --outfile o.gguf --outtype bf16 --threads 1"),
    Command(
        "convert-one-pass",
        "convert-hf-to-gguf model --outfile o.gguf --outtype Q4_K_M --imatrix m.imatrix.gguf --threads 2",
    ),
    Command(
        "convert-parts",
        "convert-hf-to-gguf model --outfile o.gguf --outtype q8_0 --split-max-tensors 12 --threads 1",
    ),
    Command(
        "convert-pickled",
        "convert-hf-to-gguf pickled --outfile o.gguf --outtype bf16 --allow-pickle --threads 1",
    ),
    Command("imatrix", f"imatrix -m model -f text.txt -o o.gguf -t 1 {FORWARD}"),
    Command("imatrix-dat", f"imatrix -m in.gguf -f text.txt -o o.dat -t 1 {FORWARD}"),
    Command("imatrix-merge", "imatrix merge m.imatrix.gguf n.imatrix.gguf -o o.gguf"),
    Command("imatrix-convert", "imatrix convert m.imatrix.gguf o.dat"),
    Command(
        "evaluate",
        "evaluate in.gguf q4.gguf q8.gguf -f text.txt --json o.json --html o.html --keep kept --work work"
        f" -t 1 {FORWARD}",
        seldom=True,
    ),
    Command("evaluate-json", f"evaluate model q4.gguf -f text.txt --json o.json -t 1 {FORWARD}"),
    Command(
        "sensitivity",
        f"sensitivity model -f text.txt -o o.json --types Q2_K,Q4_K,Q8_0 --rows 16 -t 1 {FORWARD}",
    ),
    Command(
        "cook",
        f"gguf-tools cook model -f text.txt --types Q2_K,5bpw --evaluate other.txt -o cooked -t 1 {FORWARD}",
        seldom=True,
    ),
    Command("card", "gguf-tools card q4.gguf q8.gguf --report report.json"),
    Command("split", "gguf-tools split q4.gguf o --max-tensors 12"),
    Command("merge", f"gguf-tools merge {PARTS[0]} o.gguf"),
    Command("set", "gguf-tools set q4.gguf general.name=Another", edits=True),
    Command("set-longer", f"gguf-tools set q4.gguf general.name={_LONG}", edits=True),
    Command("set-parts", f"gguf-tools set {PARTS[0]} general.name={_LONG}", edits=True),
    Command("set-copy", "gguf-tools set q4.gguf general.name=Another -o o.gguf"),
    Command("remove-key", "gguf-tools remove-key q4.gguf general.name", edits=True),
    Command("rename-parts", rf"gguf-tools rename {PARTS[0]} --regex blk\.=layer.", edits=True),
    Command("repack", "gguf-tools repack q4.gguf o.gguf --threads 1"),
    Command("repack-undo", "gguf-tools repack r4.gguf o.gguf --undo --threads 1"),
    Command("mla-both", "gguf-tools mla-layout q4.gguf o.gguf --to both --threads 1"),
    Command("mla-none", "gguf-tools mla-layout both.gguf o.gguf --to none --threads 1"),
)
