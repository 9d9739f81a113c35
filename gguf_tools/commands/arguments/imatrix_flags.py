"""Flags of llama-imatrix that mean nothing here, and those that are refused; see commands/parser.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gguf_tools.commands.parser import ForeignFlag

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
    ("-ncffn", "--n-cpu-ffn"),
)
_BATCHES: tuple[Names, ...] = (
    ("-b", "--batch-size"),
    ("-ub", "--ubatch-size"),
    ("-np", "--parallel"),
)
_CACHES: tuple[Names, ...] = (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v"))
_OF_GENERATING: tuple[Names, ...] = (
    ("-n", "--predict", "--n-predict"), ("--keep",), ("-l", "--logit-bias"), ("--samplers",),
    ("--sampler-seq", "--sampling-seq"), ("--temp", "--temperature"), ("--top-k",), ("--top-p",),
    ("--min-p",), ("--top-nsigma", "--top-n-sigma"), ("--xtc-probability",), ("--xtc-threshold",),
    ("--typical", "--typical-p"), ("--repeat-last-n",), ("--repeat-penalty",), ("--presence-penalty",),
    ("--frequency-penalty",), ("--dry-multiplier",), ("--dry-base",), ("--dry-allowed-length",),
    ("--dry-penalty-last-n",), ("--dry-sequence-breaker",), ("--adaptive-target",), ("--adaptive-decay",),
    ("--dynatemp-range",), ("--dynatemp-exp",), ("--mirostat",), ("--mirostat-lr",), ("--mirostat-ent",),
    ("--grammar",), ("--grammar-file",), ("-j", "--json-schema"), ("-jf", "--json-schema-file"),
    ("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"),
    ("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"),
)  # fmt: skip
_OF_CORES: tuple[Names, ...] = (
    ("-C", "--cpu-mask"), ("-Cr", "--cpu-range"), ("--cpu-strict",), ("--prio",), ("--poll",),
    ("-Cb", "--cpu-mask-batch"), ("-Crb", "--cpu-range-batch"), ("--cpu-strict-batch",), ("--prio-batch",),
    ("--poll-batch",),
)  # fmt: skip
_OF_IMAGES: tuple[Names, ...] = (
    ("-mm", "--mmproj"), ("-mmu", "--mmproj-url"), ("--image-min-tokens",), ("--image-max-tokens",),
    ("--video-fps",), ("--video-timestamp-interval",), ("--video-ffmpeg-dir",),
    ("--image",), ("--audio",), ("--video",),
)  # fmt: skip
_OF_POSITIONS: tuple[Names, ...] = (
    ("--override-kv",), ("--rope-scaling",), ("--rope-scale",), ("--rope-freq-base",), ("--rope-freq-scale",),
    ("--yarn-orig-ctx",), ("--yarn-ext-factor",), ("--yarn-attn-factor",), ("--yarn-beta-slow",),
    ("--yarn-beta-fast",),
)  # fmt: skip
_ADDED: tuple[Names, ...] = (
    ("--lora-scaled",), ("--control-vector",), ("--control-vector-scaled",),
    ("--control-vector-layer-range",),
)  # fmt: skip
_GENERATED = "nothing is generated"
_LAYER = "one layer is in memory at a time, and --memory bounds the rest"
_DEVICE = "--device says where to compute"
_METADATA = "the model's metadata are used; gguf-tools set MODEL.gguf KEY=VALUE -o OTHER.gguf changes them"
_DOWNLOAD = "download it first, then name the file with -m"

FOREIGN_FLAGS = (
    *_idle(_DEVICE, _PLACES),
    *_idle(_DEVICE, [("-cmoe", "--cpu-moe"), ("--no-host",), ("--op-offload", "--no-op-offload")], 0),
    *_idle("the text goes through the model layer by layer", _BATCHES),
    *_idle("-t says how many threads", [("-tb", "--threads-batch"), ("--numa",)]),
    *_idle("attention is exact in any case", [("-fa", "--flash-attn")], "?"),
    *_idle("there is no cache", [*_CACHES, ("-dt", "--defrag-thold")]),
    *_idle("there is no cache", [("-kvo", "--kv-offload", "-nkvo", "--no-kv-offload"), ("--swa-full",)], 0),
    *_idle("chunks are as long as the context", [("--context-shift",), ("--no-context-shift",)], 0),
    *_idle(_GENERATED, _OF_GENERATING),
    *_idle(_GENERATED, [("--ignore-eos",), ("-bs", "--backend-sampling")], 0),
    *_idle("-t says how many threads", _OF_CORES),
    *_idle("only text is computed", _OF_IMAGES),
    *_idle("only text is computed", [("--mmproj-offload", "--no-mmproj-offload")], 0),
    *_idle(_LAYER, [("-fit", "--fit")], "?"),
    *_idle(_LAYER, [("-fitt", "--fit-target")]),
    *_idle("-c says how long a chunk is", [("-fitc", "--fit-ctx")]),
    *_idle("perplexity is printed unless --no-ppl is given", [("--ppl",)], 0),
    *_idle("escapes in the text are never processed", [("-e", "--escape", "--no-escape")], 0),
    *_idle("times are shown with the progress", [("--perf", "--no-perf")], 0),
    *_idle("there is no log", [("--log-disable",), ("--log-jsonl", "--no-log-jsonl")], 0),
    *_idle("there is no log", [("--log-prefix", "--no-log-prefix")], 0),
    *_idle("there is no log", [("--log-timestamps", "--no-log-timestamps")], 0),
    *_idle("colours are those of the terminal", [("--log-colors",)], "?"),
    *_idle("an MTP layer is computed if the model has one", [("--nextn",)], 0),
    *_idle("nothing is random", [("-s", "--seed")]),
    *_idle("-q is the only way to print less", [("-lv", "--verbosity", "--log-verbosity")]),
    *_idle("one layer is read at a time", [("--mmap",), ("--no-mmap",), ("--mlock",)], 0),
    *_idle("one layer is read at a time", [("-lm", "--load-mode"), ("-lzm", "--lazy-mode")]),
    *_idle("weights are used as the file stores them", [("--repack", "-nr", "--no-repack")], 0),
    *_idle("--verbose shows where an error arose", [("-v", "--log-verbose")], 0),
    *_idle("nothing is warmed up", [("--warmup",), ("--no-warmup",)], 0),
    ForeignFlag(("-hf", "-hfr", "--hf-repo"), "name the model with -m OWNER/NAME, as for hf download", 1),
    ForeignFlag(("-hff", "--hf-file"), _DOWNLOAD, 1),
    ForeignFlag(("-mu", "--model-url"), _DOWNLOAD, 1),
    ForeignFlag(("-p", "--prompt"), "write the text into a file, and name it with -f", 1),
    ForeignFlag(
        ("--save-frequency",), "no matrix is complete before the last layer; see --output-frequency", 1
    ),
    *(ForeignFlag(names, _METADATA, 1) for names in _OF_POSITIONS),
    *(ForeignFlag(names, "put it into the model's weights first", 1) for names in _ADDED),
    ForeignFlag(("-bf", "--binary-file"), "the text is UTF-8; name it with -f", 1),
    ForeignFlag(("--rpc",), "--scheduler lets other machines compute", 1),
    ForeignFlag(("-dr", "--docker-repo"), _DOWNLOAD, 1),
    ForeignFlag(("-hft", "--hf-token"), "log in with hf auth login, or set HF_TOKEN", 1),
    ForeignFlag(("--offline",), "set HF_HUB_OFFLINE=1"),
    ForeignFlag(("--check-tensors",), "use gguf-tools verify MODEL.gguf"),
    ForeignFlag(("--list-devices",), "--device takes torch's names: cpu, cuda, cuda:1, mps"),
    ForeignFlag(("-cl", "--cache-list"), "hf cache ls lists what is in the Hub's cache"),
    ForeignFlag(("--completion-bash",), "gguf-tools completion bash prints it, for all commands"),
    ForeignFlag(("--log-file",), "write standard error to a file with 2> FILE", 1),
    ForeignFlag(("--usage",), "--help explains all options"),
)
