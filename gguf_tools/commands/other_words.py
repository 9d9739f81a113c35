"""Names of our options in other tools: a command that meets such a word answers with its own.

The words are those of AutoGPTQ, AutoRound, EXL2, MLX, vLLM, Unsloth, curl and rsync, and what people guess.
"""

from __future__ import annotations

from collections.abc import Collection

_RESUME = (("--restart", "the same command resumes where an interrupted run stopped; --restart starts over"),)
_SIZE = (("--size", "say --size 3.4bpw, or --size 12GiB"), ("--types", "say --types 3.4bpw, or 12GiB"))
_FORCE = (("--force", "--force replaces existing outputs"),)
_OUTPUT = (
    ("--outfile", "say --outfile FILE"),
    ("--output", "say -o FILE"),
    ("--imatrix", "OUTPUT is the second word: quantize INPUT OUTPUT TYPE"),
)
_TYPE = (
    ("--outtype", "say --outtype Q4_K_M"),
    ("--types", "say --types Q4_K_M"),
    ("--imatrix", "TYPE is a word behind the files: quantize INPUT OUTPUT Q4_K_M"),
)
_TEXT = (("--file", "say -f TEXT"), ("--calibrate", "say --calibrate TEXT"))
_THREADS = (("--threads", "say -t N"),)
_CONTEXT = (("--ctx-size", "say -c N"),)
_MATRIX = (("--imatrix", "say --imatrix FILE"),)
_CHUNKS = (("--chunks", "say --chunks N"),)
_DRY = (("--dry-run", "say --dry-run"),)
_REFINE = (("--calibrate", "`gguf-tools refine FILE --base MODEL -f TEXT -o OUT` refines a finished file"),)

_ANSWERS: dict[tuple[str, ...], tuple[tuple[str, str], ...]] = {
    ("--resume", "--continue", "--resume-from", "--checkpoint"): _RESUME,
    ("--bpw", "--target-bpw", "--bits", "--avg-bits", "--target-bits", "--wbits", "--q-bits", "--target-size",
     "--max-size", "--filesize"): _SIZE,
    ("--overwrite", "--overwrite-output", "--replace", "--clobber", "--yes"): _FORCE,
    ("--output", "--outfile", "--output-file", "--out", "--output-dir", "--out-dir", "--save-path",
     "--output-path", "--output-folder", "-o"): _OUTPUT,
    ("--type", "--outtype", "--qtype", "--quant", "--ftype", "--quantization", "--quantization-type",
     "--quant-type", "--scheme"): _TYPE,
    ("--text", "--text-file", "--dataset", "--data", "--calibration-file", "--calibration-data",
     "--calibration-text", "--calib", "--cal-dataset"): _TEXT,
    ("--n-threads", "--num-threads", "--nthreads", "--jobs", "--workers", "--num-workers", "--nproc",
     "-j"): _THREADS,
    ("--ctx", "--context", "--context-length", "--n-ctx", "--seqlen", "--seq-len", "--max-length",
     "--max-seq-len"): _CONTEXT,
    ("--importance-matrix", "--imat", "--importances"): _MATRIX,
    ("--nsamples", "--n-samples", "--num-samples", "--samples", "--n-chunks", "--num-chunks"): _CHUNKS,
    ("--dryrun", "--simulate", "--plan", "--just-print"): _DRY,
    ("--refine", "--finetune", "--tune", "--train-scales"): _REFINE,
}  # fmt: skip
"""Other tools' words -> our options that do the same, and the sentence that says so."""

_BY_WORD = {word: answers for words, answers in _ANSWERS.items() for word in words}


def our_word(word: str, own: Collection[str]) -> str:
    """Answer another tool's option with ours; "" for a word that nobody uses, and for the beginning of ours.

    own  the command's options, which alone are spoken of
    """
    answers = _BY_WORD.get(word.lower().replace("_", "-"), ())
    option, answer = next(((option, f"; {answer}") for option, answer in answers if option in own), ("", ""))
    return "" if option.startswith(word) else answer
