"""Command lines that can't work: what people mistype, flags that exclude each other, broken inputs.

No line names a device as an output: run as root, a build that failed would replace it.
"""

from __future__ import annotations

from collections.abc import Iterator

from scripts.builds.chains import Chain, chain
from scripts.builds.material import FORWARD as F

HUGE = "9" * 23


def chains() -> Iterator[Chain]:
    for name, lines in _CHAINS.items():
        yield chain(f"bad-{name}", lines, apart=True)


_CHECKPOINTS = (
    "no-config", "no-tokenizer", "no-weights", "half-weights", "bad-config", "bad-tokenizer", "odd-model",
    "odd-sizes", "odd-heads", "odd-quant", "less-tensors", "more-tensors", "odd-shape", "nan-model",
    "pickled", "old-pickle",
)  # fmt: skip

_CHAINS = {
    "quantize-words": f"""
        quantize in.gguf
        quantize in.gguf o.gguf
        quantize in.gguf o.gguf Q4_KM
        quantize in.gguf o.gguf q5ks 4
        quantize Q4_K_M in.gguf o.gguf
        quantize in.gguf Q4_K_M o.gguf
        quantize in.gguf o.gguf Q4_0 x
        quantize in.gguf o.gguf Q4_0 0
        quantize in.gguf o.gguf Q4_0 {HUGE}
        quantize in.gguf o.gguf Q4_0 1 2
        quantize in.gguf o.gguf 77
        quantize in.gguf o.gguf -1
        quantize in.gguf o.gguf Q4_K_M,
        quantize in.gguf o.gguf ''
        quantize '' o.gguf Q4_0
        quantize o.gguf in.gguf Q4_0
        quantize nothing.gguf o.gguf Q4_0
        quantize in.gguf in.gguf Q4_0
        quantize in.gguf no/o.gguf Q4_0
        quantize in.gguf in.gguf/o.gguf Q4_0
        quantize in.gguf model Q4_0
        quantize in.gguf . Q4_0
        quantize in.gguf pipe Q4_0
        quantize in.gguf loop Q4_0
        quantize pipe o.gguf Q4_0
        quantize loop o.gguf Q4_0
        quantize text.txt o.gguf Q4_0
        quantize in.gguf o.gguf Q8_K_R8
        quantize in.gguf o-{{ftyp}}.gguf Q4_0,Q8_0
        quantize lint
        quantize lint Q4_K_M
        quantize lint Q4_KM in.gguf
        quantize lint in.gguf Q4_K_M
        quantize lint Q4_K_M nothing.gguf
        quantize lint Q4_K_M in.gguf --sumary
    """,
    "quantize-flags": """
        quantize --imatrx m.imatrix.gguf in.gguf o.gguf Q4_0
        quantize --imatrix nothing.gguf in.gguf o.gguf Q4_0
        quantize --imatrix in.gguf in.gguf o.gguf Q4_0
        quantize --imatrix text.txt in.gguf o.gguf Q4_0
        quantize --imatrix in.gguf
        quantize --include-weights a --exclude-weights b --imatrix m.imatrix.gguf in.gguf o.gguf Q4_0
        quantize --include-weights a in.gguf o.gguf Q4_0
        quantize --output-tensor-type Q9 in.gguf o.gguf Q4_0
        quantize --token-embedding-type Q4_K_M in.gguf o.gguf Q4_0
        quantize --tensor-type ffn_down in.gguf o.gguf Q4_0
        quantize --tensor-type '(=Q8_0' in.gguf o.gguf Q4_0
        quantize --tensor-type ffn_down=Q8 in.gguf o.gguf Q4_0
        quantize --tensor-type attn_k_b=Q4_K in.gguf o.gguf Q4_0
        quantize --tensor-type-file odd-types.txt in.gguf o.gguf Q4_0
        quantize --tensor-type-file nothing.txt in.gguf o.gguf Q4_0
        quantize --tensor-type-file pipe in.gguf o.gguf Q4_0
        quantize --custom-q ffn=iq9_k in.gguf o.gguf IQ4_KS
        quantize --custom-q ffn in.gguf o.gguf IQ4_KS
        quantize --fallback attn_k_b in.gguf o.gguf Q4_K_M
        quantize --fallback attn_k_b=IQ9 in.gguf o.gguf Q4_K_M
        quantize --prune-layers 9 in.gguf o.gguf Q4_0
        quantize --prune-layers x in.gguf o.gguf Q4_0
        quantize --prune-layers 0,1 in.gguf o.gguf Q4_0
        quantize --override-kv a.b in.gguf o.gguf Q4_0
        quantize --override-kv a.b=int:x in.gguf o.gguf Q4_0
        quantize --override-kv a.b=thing:1 in.gguf o.gguf Q4_0
        quantize --override-kv general.architecture=str:llama in.gguf o.gguf Q4_0
        quantize --mla none in.gguf o.gguf Q4_0
        quantize --mla fancy model o.gguf Q4_0
        quantize --stream in.gguf o.gguf Q4_0
        quantize --timeout -3 in.gguf o.gguf Q4_0
        quantize --repack in.gguf o.gguf Q4_0 --imatrix m.imatrix.gguf
        quantize --repack-pattern ffn in.gguf o.gguf Q4_0
        quantize --summary in.gguf o.gguf Q4_0
        quantize --reuse nothing.gguf in.gguf o.gguf Q4_0
        quantize --reuse text.txt in.gguf o.gguf Q4_0
        quantize --reuse old.gguf --no-provenance in.gguf o.gguf Q4_0
        quantize --report text.txt in.gguf o.gguf Q4_0
        quantize --base-model me/base in.gguf o.gguf Q4_0
        quantize --base-model nonsense --card in.gguf o.gguf Q4_0
        quantize --allow-requantise q8.gguf o.gguf Q4_0
        quantize --pure --pure=1 in.gguf o.gguf Q4_0
        quantize --scheduler somewhere in.gguf o.gguf Q4_0
        PYTHONPATH=no-distributed quantize --scheduler local:2 in.gguf o.gguf Q4_0
        quantize --keep-split in.gguf o.gguf Q4_0 --dry-run --json --summary
        quantize me/no-such-model o.gguf Q4_0
    """,
    "quantize-size": """
        quantize in.gguf o.gguf --size 5bpw
        quantize in.gguf o.gguf --size 5 --losses losses.json
        quantize in.gguf o.gguf --size 5pounds --losses losses.json
        quantize in.gguf o.gguf --size -5bpw --losses losses.json
        quantize in.gguf o.gguf --size 5bpw --losses nothing.json
        quantize in.gguf o.gguf --size 5bpw --losses text.txt
        quantize in.gguf o.gguf --size 5bpw --losses cut.json
        quantize in.gguf o.gguf --size 5bpw --losses report.json
        quantize in.gguf o.gguf Q4_K_M --size 5bpw --losses losses.json
        quantize in.gguf o.gguf Q4_K_M --losses losses.json
        quantize in.gguf o.gguf --vram 1MiB --losses losses.json
        quantize in.gguf o.gguf --size 1MiB --vram 1MiB --ram 1MiB --losses losses.json
        quantize in.gguf o.gguf --size 5bpw --losses losses.json --at-least attn=Q9
        quantize in.gguf o.gguf --size 5bpw --losses losses.json --at-least attn=Q8_0 --at-most attn=Q4_K
        quantize in.gguf o.gguf --size 5bpw --losses losses.json --fast-on toaster
        quantize in.gguf o.gguf --size 5bpw --losses losses.json --for mistral.rs
        quantize in.gguf o.gguf --size 5bpw --losses losses.json --pure
        quantize in.gguf o.gguf Q4_K_M --save-recipe o.yaml
        quantize in.gguf o.gguf Q4_K_M --equal-experts
        quantize in.gguf o.gguf --size 5bpw --sensitivity-text text.txt --losses losses.json
    """,
    "recipes": """
        quantize in.gguf o.gguf typo.yaml
        quantize in.gguf o.gguf odd-key.yaml
        quantize in.gguf o.gguf odd-value.yaml
        quantize in.gguf o.gguf broken.yaml
        quantize in.gguf o.gguf list.json
        quantize in.gguf o.gguf nothing.yaml
        quantize lint typo.yaml in.gguf
        convert-hf-to-gguf model --outfile o.gguf --outtype odd-key.yaml
    """,
    "calibrate": """
        quantize in.gguf o.gguf Q4_0 --calibrate nothing.txt
        quantize in.gguf o.gguf Q4_0 --calibrate empty.txt
        quantize in.gguf o.gguf Q4_0 --calibrate short.txt
        quantize in.gguf o.gguf Q4_0 --calibrate latin.txt
        quantize in.gguf o.gguf Q4_0 --calibrate text.txt -c 0
        quantize in.gguf o.gguf Q4_0 --calibrate text.txt -c x
        quantize in.gguf o.gguf Q4_0 --calibrate text.txt --chunks 0
        quantize in.gguf o.gguf Q4_0 --calibrate text.txt --device meta
        quantize in.gguf o.gguf Q4_0 --calibrate text.txt --device cuda
        quantize in.gguf o.gguf Q4_0 --calibrate text.txt --dtype float64
        quantize in.gguf o.gguf Q4_0 --one-sided
        quantize in.gguf o.gguf Q4_0 --evaluate other.txt
        quantize in.gguf o.gguf Q4_0 -c 32
        quantize q4.gguf o.gguf Q4_0 --calibrate text.txt -c 32 --chunks 2
        quantize in.gguf o.gguf Q4_0 --calibrate text.txt --repack
        quantize in-00001-of-00003.gguf o.gguf Q4_0 --calibrate text.txt --keep-split -c 32 --chunks 2
        PYTHONPATH=no-torch quantize in.gguf o.gguf Q4_0 --calibrate text.txt
    """,
    "files": """
        quantize cut.gguf o.gguf Q4_0
        quantize cut-header.gguf o.gguf Q4_0
        quantize nan.gguf o.gguf Q4_0 1
        quantize nan.gguf o.gguf Q4_K_M 1 --pure
        quantize longer.gguf o.gguf COPY 1
        quantize m.imatrix.gguf o.gguf Q4_0
        quantize --imatrix cut.imatrix.gguf in.gguf o.gguf Q4_0
        quantize --imatrix cut.dat in.gguf o.gguf Q4_0
        quantize in-00002-of-00003.gguf o.gguf Q4_0 --prune-layers 1
        gguf-tools show cut.gguf
        gguf-tools show cut-header.gguf
        gguf-tools show cut-byte.gguf
        gguf-tools hash cut.gguf
        gguf-tools diff in.gguf cut.gguf
        gguf-tools set cut-header.gguf general.name=x
        gguf-tools repack cut-byte.gguf o.gguf
        gguf-tools mla-layout cut.gguf o.gguf --to both
        imatrix show cut.imatrix.gguf
        imatrix show cut.dat
        imatrix show in.gguf
        imatrix show text.txt
        imatrix stats cut.dat
        imatrix check cut.imatrix.gguf
        imatrix convert cut.dat o.gguf
        imatrix -m cut.gguf -f text.txt -o o.gguf
        evaluate cut.gguf in.gguf -f text.txt
        evaluate nan.gguf in.gguf -f text.txt -c 32 --chunks 2 -t 1
    """,
    "parts": """
        gguf-tools set in-00001-of-00003.gguf general.name=Longer -q
        gguf-tools rename in-00002-of-00003.gguf --regex 'blk\\.1\\.=blk.7.' --dry-run
        gguf-tools merge in.gguf/x o.gguf
        gguf-tools merge lone-00002-of-00003.gguf o.gguf
        gguf-tools show lone-00002-of-00003.gguf
        quantize lone-00002-of-00003.gguf o.gguf Q4_0
        gguf-tools merge nothing-00001-of-00003.gguf o.gguf
        gguf-tools split in.gguf o --max-tensors 0
        gguf-tools split in.gguf o --max-size 3X
        gguf-tools split in.gguf o --max-size 1M --max-tensors 3
        gguf-tools split in.gguf .
        gguf-tools split in.gguf ''
        gguf-tools split in.gguf no/o
    """,
    "checkpoints": "".join(
        f"convert-hf-to-gguf {name} --outfile o.gguf --outtype {outtype} --threads 1\n"
        for name in _CHECKPOINTS
        for outtype in ("bf16", "Q4_0")
    )
    + "".join(f"gguf-tools checkpoint {name}\n" for name in _CHECKPOINTS),
    "convert": f"""
        convert-hf-to-gguf nothing
        convert-hf-to-gguf in.gguf
        convert-hf-to-gguf ''
        convert-hf-to-gguf me/no-such-model
        convert-hf-to-gguf --remote a/b
        convert-hf-to-gguf model --fp8-as-q8
        convert-hf-to-gguf model --fuse-gate-up-exps
        convert-hf-to-gguf model --outype f16
        convert-hf-to-gguf model --outtype Q4_KM
        convert-hf-to-gguf model --outtype f16,bf16 --outfile o.gguf
        convert-hf-to-gguf model --outfile no/o.gguf
        convert-hf-to-gguf model --outfile in.gguf
        convert-hf-to-gguf model --outfile pipe
        convert-hf-to-gguf model --mla fancy
        convert-hf-to-gguf llama-r1-distill --mla both --outfile o.gguf
        convert-hf-to-gguf llama-r1-distill --mtp --outfile o.gguf
        convert-hf-to-gguf model --mtp --outfile o.gguf
        convert-hf-to-gguf model --mtp --no-mtp --outfile o.gguf
        convert-hf-to-gguf model --vocab-only --outtype Q4_K_M --outfile o.gguf
        convert-hf-to-gguf model --vocab-only --split-max-tensors 3 --outfile o.gguf
        convert-hf-to-gguf model --bigendian --outtype Q4_K_M --outfile o.gguf
        convert-hf-to-gguf model --split-max-size 3X --outfile o.gguf
        convert-hf-to-gguf model --split-max-tensors 0 --outfile o.gguf
        convert-hf-to-gguf model --split-max-size 1G --split-max-tensors 3 --outfile o.gguf
        convert-hf-to-gguf model --metadata nothing.json --outfile o.gguf
        convert-hf-to-gguf model --metadata list.json --outfile o.gguf
        convert-hf-to-gguf model --metadata text.txt --outfile o.gguf
        convert-hf-to-gguf model --pre-tokenizer fancy --outfile o.gguf
        convert-hf-to-gguf model --threads 0 --outfile o.gguf
        convert-hf-to-gguf model --threads {HUGE} --outfile o.gguf
        convert-hf-to-gguf model --imatrix m.imatrix.gguf --outtype f16 --outfile o.gguf
        convert-hf-to-gguf model --outtype IQ2_XXS --outfile o.gguf
        convert-hf-to-gguf model --pure --outtype f16 --outfile o.gguf
        convert-hf-to-gguf model --stream --outfile o.gguf
        convert-hf-to-gguf model --summary --outfile o.gguf
        PYTHONPATH=no-torch convert-hf-to-gguf old-pickle --allow-pickle --outfile o.gguf
    """,
    "imatrix": f"""
        imatrix
        imatrix -m model
        imatrix -f text.txt
        imatrix -hf a/b -f text.txt
        imatrix -m model -p text
        imatrix -m model -f text.txt --save-frequency 3
        imatrix -m nothing -f text.txt -o o.gguf
        imatrix -m model -f nothing.txt -o o.gguf
        imatrix -m model -f empty.txt -o o.gguf
        imatrix -m model -f short.txt -o o.gguf
        imatrix -m model -f latin.txt -o o.gguf
        imatrix -m model -f same.txt -o o.gguf {F}
        imatrix -m model -f same.txt -o o.gguf --force {F}
        imatrix -m model -f text.txt -o o.gguf -c 7777 --chunks 2
        imatrix -m model -f text.txt -o o.gguf -c 0
        imatrix -m model -f text.txt -o o.gguf --chunks 0
        imatrix -m model -f text.txt -o o.gguf --from-chunk 999 {F}
        imatrix -m model -f text.txt -o o.gguf --device meta
        imatrix -m model -f text.txt -o o.gguf -t {HUGE}
        imatrix -m model -f text.txt -o o.gguf --memory -1
        imatrix -m model -f text.txt -o model
        imatrix -m model -f text.txt -o pipe
        imatrix -m model -f text.txt -o no/o.gguf
        imatrix -m model -f text.txt -o text.txt
        imatrix -m model -f text.txt -o o.gguf --output-format txt
        imatrix -m llama-r1-distill -f text.txt -o o.dat --mla both {F}
        imatrix -m no-tokenizer -f text.txt -o o.gguf {F}
        imatrix -m nan-model -f text.txt -o o.gguf {F}
        imatrix -m model -f text.txt -o o.gguf --in-file llama.imatrix.gguf {F}
        imatrix --show-statistics
        imatrix --in-file nothing.gguf -o o.gguf
        imatrix sho m.imatrix.gguf
        imatrix show
        imatrix show nothing.gguf
        imatrix check m.imatrix.gguf --recipe Q4_K_M
        imatrix check m.imatrix.gguf --model model --recipe Q4_KM
        imatrix repair m.imatrix.gguf
        imatrix merge m.imatrix.gguf
        imatrix merge m.imatrix.gguf n.imatrix.gguf -o m.imatrix.gguf
        imatrix convert m.imatrix.gguf
        imatrix convert m.imatrix.gguf m.imatrix.gguf
        imatrix convert --mla none m.imatrix.gguf o.dat
        PYTHONPATH=no-torch imatrix -m model -f text.txt -o o.gguf {F}
        PYTHONPATH=no-distributed imatrix -m model -f text.txt -o o.gguf --scheduler local:2 {F}
    """,
    "evaluate": f"""
        evaluate
        evaluate in.gguf
        evaluate in.gguf q4.gguf
        evaluate in.gguf nothing.gguf -f text.txt
        evaluate nothing q4.gguf -f text.txt
        evaluate in.gguf q4.gguf -f nothing.txt
        evaluate in.gguf q4.gguf -f empty.txt
        evaluate in.gguf q4.gguf -f short.txt
        evaluate in.gguf llama.gguf -f text.txt {F}
        evaluate in.gguf text.txt -f text.txt {F}
        evaluate in.gguf q4.gguf q4.gguf -f text.txt {F}
        evaluate in.gguf q4.gguf -f text.txt -c 1
        evaluate in.gguf q4.gguf -f text.txt --like vllm
        evaluate in.gguf q4.gguf -f text.txt --jsn o.json
        evaluate in.gguf q4.gguf -f text.txt --json text.txt {F}
        evaluate in.gguf q4.gguf -f text.txt --json no/o.json {F}
        evaluate in.gguf q4.gguf -f text.txt --compare-with report.json {F}
        evaluate in.gguf q4.gguf -f text.txt --html o.html --compare-with losses.json {F}
        evaluate in.gguf q4.gguf -f text.txt --html o.html --losses report.json {F}
        evaluate in.gguf q4.gguf -f text.txt --keep text.txt {F}
        evaluate in.gguf q4.gguf --kl-divergence
        evaluate --kl-divergence-base nothing.kld --kl-divergence q4.gguf
        evaluate --kl-divergence-base text.txt --kl-divergence q4.gguf
        evaluate --kl-divergence-base cut.kld --kl-divergence q4.gguf -t 1
        evaluate --kl-divergence-base base.kld --kl-divergence q4.gguf -f text.txt -t 1
        PYTHONPATH=no-torch evaluate in.gguf q4.gguf -f text.txt {F}
    """,
    "sensitivity": f"""
        sensitivity
        sensitivity model -f text.txt
        sensitivity model -o o.json
        sensitivity nothing -f text.txt -o o.json
        sensitivity model -f text.txt -o o.json --types Q4_K_M {F}
        sensitivity model -f text.txt -o o.json --types Q9 {F}
        sensitivity model -f text.txt -o o.json --types '' {F}
        sensitivity model -f text.txt -o o.json --rows 0 {F}
        sensitivity model -f text.txt -o o.json --seed {HUGE} {F}
        sensitivity model -f text.txt -o no/o.json {F}
        sensitivity model -f same.txt -o o.json {F}
        sensitivity q4.gguf -f text.txt -o o.json --types Q2_K --rows 8 {F}
        PYTHONPATH=no-torch sensitivity model -f text.txt -o o.json {F}
    """,
    "gguf-tools": f"""
        gguf-tools shw in.gguf
        gguf-tools show
        gguf-tools show nothing.gguf
        gguf-tools show model
        gguf-tools show text.txt
        gguf-tools show empty.txt
        gguf-tools show pipe
        gguf-tools show loop
        gguf-tools show in.gguf --jsn
        gguf-tools verify model
        gguf-tools verify in.gguf --against nothing
        gguf-tools diff in.gguf
        gguf-tools diff in.gguf model
        gguf-tools diff in.gguf nothing.gguf
        gguf-tools hash nothing.gguf
        gguf-tools scan nothing.gguf
        gguf-tools set in.gguf
        gguf-tools set in.gguf general.name
        gguf-tools set in.gguf general.name=u99:x
        gguf-tools set in.gguf general.name=str@nothing.txt
        gguf-tools set in.gguf general.name=str@pipe
        gguf-tools set in.gguf general.file_type=many
        gguf-tools set in.gguf my.numbers=[i32]:1,x
        gguf-tools set in.gguf my.key=1
        gguf-tools set in.gguf general.name=x -o model
        gguf-tools set nothing.gguf general.name=x
        gguf-tools remove-key in.gguf nothing
        gguf-tools rename in.gguf a
        gguf-tools rename in.gguf =b
        gguf-tools mla-layout in.gguf o.gguf
        gguf-tools mla-layout in.gguf --to both
        gguf-tools mla-layout in.gguf o.gguf --to bth
        gguf-tools mla-layout in.gguf in.gguf --to both
        gguf-tools mla-layout in.gguf o.gguf --to both --threads 0
        gguf-tools mla-layout in.gguf o.gguf --to both --tensor-type attn_kv_b=Q9
        gguf-tools repack in.gguf
        gguf-tools repack q4.gguf q4.gguf
        gguf-tools repack q4.gguf o.gguf --only '('
        gguf-tools repack q4.gguf o.gguf --undo --to Q4_K_R4
        gguf-tools repack q4.gguf o.gguf --threads {HUGE}
        gguf-tools card
        gguf-tools card nothing.gguf
        gguf-tools card q4.gguf --report text.txt
        gguf-tools card q4.gguf --base-model nonsense
        gguf-tools checkpoint nothing
        gguf-tools checkpoint in.gguf
        gguf-tools cook model
        gguf-tools cook model -f text.txt -o o --types Q4_KM {F}
        gguf-tools cook nothing -f text.txt -o o --types Q4_0 {F}
        gguf-tools cook model -f nothing.txt -o o --types Q4_0 {F}
        gguf-tools cook model -f text.txt -o text.txt --types Q4_0 {F}
        gguf-tools cook model -f text.txt -o o --types 1bpw {F}
        gguf-tools cook model -f text.txt -o o --types Q4_0 --evaluate text.txt --dry-run {F}
        PYTHONPATH=no-torch gguf-tools cook model -f text.txt -o o --types Q4_0 {F}
        gguf-tools upload q4.gguf
        gguf-tools upload q4.gguf nonsense --dry-run
    """,
}
