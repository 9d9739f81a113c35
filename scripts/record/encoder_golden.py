"""Record what llama.cpp's own converter makes of small encoders: tests/golden/arch/encoders.json.

    python scripts/record/encoder_golden.py LLAMA_CPP_SOURCE

For each model of PRE what `published_golden.py` records, which says what the source is. Needs torch,
transformers and, for the SentencePiece model, protobuf.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRE = {
    "bert": "default",
    "roberta": "roberta-bpe",
    "roberta-rank": "roberta-bpe",
    "xlm-roberta-model": "",
    "modern-bert": "modern-bert",
    "nomic-bert": "default",
    "nomic-bert-moe": "",
}
"""Model -> the name of its pre-tokenizer; "" where its kind of tokenizer has no names."""

OUT = ROOT / "tests" / "golden" / "arch" / "encoders.json"


def move_mask(folder: Path) -> None:
    """Have the converter put <mask> where a small vocabulary has it; it knows only the published one's id."""
    from conversion import bert

    from scripts.record.published_golden import renumber

    pieces = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    renumber(bert.BertModel, "_xlmroberta_set_vocab", 250001, len(pieces) - 1)


def main() -> None:
    source = Path(sys.argv[1]).resolve()
    # The source has a package "tests" too, so ours is imported before the source is on the path.
    sys.path.insert(0, str(ROOT))
    from scripts.record.published_golden import convert, facts
    from tests.support.encoder_models import write

    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    recorded = {}
    for name, pre in PRE.items():
        with tempfile.TemporaryDirectory() as temporary:
            outfile = Path(temporary) / "out.gguf"
            folder = write(name, Path(temporary) / "model")
            if name == "nomic-bert-moe":
                move_mask(folder)
            convert(folder, outfile, pre)
            recorded[name] = facts(outfile, [])
    entries = (
        f"{json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in recorded.items()
    )
    OUT.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
