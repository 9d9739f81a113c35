"""Every command, as it is attacked: what is typed in a folder with its inputs."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = tuple(f"in-{n:05d}-of-00003.gguf" for n in (1, 2, 3))
FORWARD = "-c 32 --chunks 3"
"""How much text goes through a model."""

BYSTANDERS = {"mine.txt": b"a letter", "o.gguf.bak": b"a copy of mine", "notes/plan.md": b"a plan"}
"""Files in every folder that no command is given."""

_MATERIAL = {
    "model", "pickled", "mtp", "odd.gguf", "in.gguf", "q8.gguf", "q4.gguf", "both.gguf", "r4.gguf",
    "m.imatrix.gguf", "n.imatrix.gguf", "losses.json", "report.json", "recipe.yaml", "text.txt", "other.txt",
    "texts", "suite",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command in a folder of its own.

    name      in tables
    line      what is typed in the folder
    seldom    whether it gets a third of the trials of others, because it takes long
    edits     whether it changes its inputs in place
    finds     whether exit code 1, without an error, says that it found something
    restarts  whether a kill between its small outputs leaves the first, which --force replaces
    typed     the words that are typed, if not those of the line: they may hold blanks
    """

    name: str
    line: str
    seldom: bool = False
    edits: bool = False
    finds: bool = False
    restarts: bool = False
    typed: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        return self.line.split()[0]

    @property
    def words(self) -> list[str]:
        """The arguments."""
        return list(self.typed[1:] or self.line.split()[1:])

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
        " --save-recipe o.json --save-tensor-types o.types --save-custom-q o.q --save-tensor-list o.list",
    ),
    Command(
        "quantize-classes",
        "quantize in.gguf o.gguf Q4_0 --calibrate texts --one-sided --no-sequential --no-embedding -c 32"
        " --chunks 2",
        seldom=True,
    ),
    Command("quantize-pad", "quantize --pad 256 odd.gguf o.gguf Q4_K_M 1"),
    Command("quantize-recipe", "quantize in.gguf o.gguf recipe.yaml 1"),
    Command("convert", "convert-hf-to-gguf model --outfile o.gguf --outtype bf16 --threads 1"),
    Command(
        "convert-one-pass",
        "convert-hf-to-gguf model --outfile o.gguf --outtype Q4_K_M --imatrix m.imatrix.gguf --card"
        " --threads 2",
    ),
    Command(
        "convert-parts",
        "convert-hf-to-gguf model --outfile o.gguf --outtype q8_0 --split-max-tensors 12 --threads 1",
    ),
    Command(
        "convert-pickled",
        "convert-hf-to-gguf pickled --outfile o.gguf --outtype bf16 --allow-pickle --threads 1",
    ),
    Command("convert-mtp", "convert-hf-to-gguf mtp --mtp --outfile o.gguf --outtype q8_0 --threads 1"),
    Command("imatrix", f"imatrix -m model -f text.txt -o o.gguf -t 1 {FORWARD}"),
    Command("imatrix-dat", f"imatrix -m in.gguf -f text.txt -o o.dat -t 1 {FORWARD}"),
    Command("imatrix-classes", f"imatrix -m in.gguf -f texts -o o.gguf -t 1 {FORWARD}"),
    Command("imatrix-model-classes", f"imatrix -m model -f texts -o o.gguf -t 1 {FORWARD}"),
    Command("imatrix-mtp", f"imatrix -m mtp -f text.txt -o o.gguf -t 1 {FORWARD}", seldom=True),
    Command("imatrix-repair", "imatrix repair m.imatrix.gguf -o o.gguf --model in.gguf"),
    Command("attest", "gguf-tools attest q4.gguf --source in.gguf -o o.json"),
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
        "evaluate-pages",
        "evaluate in.gguf q4.gguf -f text.txt --compare-with report.json --losses losses.json --html o.html"
        f" --json o.json --kl-divergence-base o.kld -t 1 {FORWARD}",
        seldom=True,
    ),
    Command(
        "evaluate-suite",
        "evaluate in.gguf q4.gguf --suite suite --against q8.gguf --json o.json --html o.html -t 1",
        seldom=True,
    ),
    Command(
        "audit",
        "gguf-tools audit q4.gguf in.gguf --json o.json --html o.html --threads 1",
        finds=True,
        restarts=True,
    ),
    Command(
        "audit-suite",
        "gguf-tools audit q8.gguf model --suite suite --json o.json --html o.html --threads 1",
        seldom=True,
        finds=True,
        restarts=True,
    ),
    Command(
        "refine",
        "gguf-tools refine q4.gguf --base in.gguf -f text.txt -o o.gguf --steps 2 --codes 1 -c 32 --chunks 6"
        " -t 1",
        seldom=True,
    ),
    Command(
        "sensitivity",
        f"sensitivity model -f text.txt -o o.json --types Q2_K,Q4_K,Q8_0 --rows 16 -t 1 {FORWARD}",
    ),
    Command(
        "cook",
        f"gguf-tools cook model -f text.txt --types Q2_K,5bpw --evaluate other.txt -o cooked -t 1 {FORWARD}",
        seldom=True,
    ),
    Command("text", "gguf-tools text -o written"),
    Command("card", "gguf-tools card q4.gguf q8.gguf --report report.json"),
    Command("card-of-model", "gguf-tools card q4.gguf q8.gguf --source model -o o.md"),
    Command("split", "gguf-tools split q4.gguf o --max-tensors 12"),
    Command("merge", f"gguf-tools merge {PARTS[0]} o.gguf"),
    Command("set", "gguf-tools set q4.gguf general.name=Another", edits=True),
    Command("set-longer", f"gguf-tools set q4.gguf general.name={_LONG}", edits=True),
    Command("set-parts", f"gguf-tools set {PARTS[0]} general.name={_LONG}", edits=True),
    Command("set-copy", "gguf-tools set q4.gguf general.name=Another -o o.gguf"),
    Command("remove-key", "gguf-tools remove-key q4.gguf general.name", edits=True),
    Command("rename-parts", rf"gguf-tools rename {PARTS[0]} --regex blk\.=layer.", edits=True),
    Command("remove-key-copy", "gguf-tools remove-key q4.gguf general.name -o o.gguf"),
    Command("rename-copy", "gguf-tools rename q4.gguf --key general.name=general.title -o o.gguf"),
    Command("repack", "gguf-tools repack q4.gguf o.gguf --threads 1"),
    Command("repack-undo", "gguf-tools repack r4.gguf o.gguf --undo --threads 1"),
    Command("mla-both", "gguf-tools mla-layout q4.gguf o.gguf --to both --threads 1"),
    Command("mla-none", "gguf-tools mla-layout both.gguf o.gguf --to none --threads 1"),
)

READERS = (
    Command("quantize-dry", "quantize --dry-run --imatrix m.imatrix.gguf in.gguf o.gguf Q2_K"),
    Command("lint", "quantize lint --imatrix m.imatrix.gguf in.gguf Q4_K_M", finds=True),
    Command("imatrix-show", "imatrix show m.imatrix.gguf"),
    Command("imatrix-stats", "imatrix stats m.imatrix.gguf"),
    Command("imatrix-check", "imatrix check m.imatrix.gguf --model in.gguf", finds=True),
    Command("show", "gguf-tools show q4.gguf"),
    Command("show-json", "gguf-tools show --json q4.gguf"),
    Command("diff", "gguf-tools diff q4.gguf q4.gguf", finds=True),
    Command("diff-values", "gguf-tools diff --values q4.gguf q4.gguf", finds=True),
    Command("verify", "gguf-tools verify q4.gguf --against in.gguf", finds=True),
    Command("rederive", "gguf-tools rederive q4.gguf --source in.gguf -t 1", finds=True),
    Command("hash", "gguf-tools hash q4.gguf"),
    Command("scan", "gguf-tools scan q4.gguf", finds=True),
    Command("audit-text", f"gguf-tools audit q8.gguf in.gguf -f text.txt --threads 1 {FORWARD}", finds=True),
    Command("clean", "gguf-tools clean ."),
    Command("upload-dry", "gguf-tools upload --dry-run q4.gguf q8.gguf me/lite"),
    Command("checkpoint", "gguf-tools checkpoint model"),
    Command("completion", "gguf-tools completion bash"),
)
"""Commands that print alone, or change nothing as they are called here."""

ELSEWHERE = {"gguf-tools clean": "cleaned", "gguf-tools upload": "secrets"}
"""Commands that change something and have a kind of disturbance of their own."""


def find(name: str) -> Command:
    """Return a command of COMMANDS or READERS by its name."""
    return next(command for command in (*COMMANDS, *READERS) if command.name == name)
