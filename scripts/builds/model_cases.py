"""Command lines of convert-hf-to-gguf and quantize: every family, every file type, every option."""

from __future__ import annotations

from collections.abc import Iterator

from quantize.plan.recipes import FILE_TYPES
from scripts.builds.chains import Chain, chain
from scripts.builds.material import FAMILIES, FORWARD, PACKED_MODELS, PARTS

_MODEL = "convert-hf-to-gguf model --threads 1"
_QUANTIZE = "quantize in.gguf o.gguf"


def chains() -> Iterator[Chain]:
    for name in FAMILIES:
        yield chain(f"family-{name}", _FAMILY.replace("MODEL", name))
    yield chain("families-verified", [line.replace("MODEL", name) for name in FAMILIES for line in _VERIFIED])
    for name in (*PACKED_MODELS, "older-fp8", "pickled"):
        yield chain(f"convert-{name}", _PACKED.replace("MODEL", name))
    for file_type in FILE_TYPES:
        yield chain(f"type-{file_type}", _TYPE.replace("TYPE", file_type))
    for name, lines in _CHAINS.items():
        yield chain(name, lines)


_FAMILY = f"""
    gguf-tools checkpoint MODEL
    convert-hf-to-gguf MODEL --outfile o.gguf --outtype bf16 --threads 1
    convert-hf-to-gguf MODEL --outfile q-{{ftype}}.gguf --outtype Q4_K_M,Q8_0 --threads 1
    quantize lint --json Q4_K_M o.gguf
    imatrix -m MODEL -f text.txt -o m.gguf --process-output {FORWARD}
"""

_VERIFIED = (
    "convert-hf-to-gguf MODEL --outfile MODEL.gguf --outtype Q8_0 --threads 1",
    "gguf-tools verify MODEL.gguf --against MODEL",
)

_PACKED = """
    gguf-tools checkpoint MODEL --allow-pickle
    convert-hf-to-gguf MODEL --outfile o.gguf --threads 1 --allow-pickle
    convert-hf-to-gguf MODEL --outfile q.gguf --outtype Q4_0 --threads 1 --allow-pickle
"""

_TYPE = """
    quantize --imatrix m.imatrix.gguf in.gguf o.gguf TYPE 1
    gguf-tools diff --values in.gguf o.gguf
    quantize --dry-run --json llama.gguf TYPE
"""

_CHAINS = {
    "convert-types": "".join(
        f"{_MODEL} --outfile o-{name}.gguf --outtype {name}\n"
        for name in ("f32", "f16", "bf16", "q8_0", "auto", "COPY", "tq1_0", "IQ4_KS", "mine.yaml", "ik.yaml")
    ),
    "convert-layouts": f"""
        {_MODEL} --outfile o.gguf --mla split
        {_MODEL} --outfile b.gguf --mla both
        {_MODEL} --outfile n.gguf --mla none
        {_MODEL} --outfile ik.gguf --outtype IQ4_KS --mla none
        {_MODEL} --outfile big.gguf --bigendian
        gguf-tools show big.gguf
        gguf-tools verify big.gguf
    """,
    "convert-mtp": """
        convert-hf-to-gguf mtp --outfile with.gguf --mtp --threads 1
        convert-hf-to-gguf mtp --outfile without.gguf --no-mtp --threads 1
        convert-hf-to-gguf mtp --outfile o.gguf --no-nextn --outtype Q5_0 --threads 1
        convert-hf-to-gguf glm-4.6 --outfile glm.gguf --threads 1
        convert-hf-to-gguf glm-4.6 --outfile glm-less.gguf --no-mtp --threads 1
        gguf-tools diff --no-data glm.gguf glm-less.gguf
    """,
    "convert-parts": f"""
        {_MODEL} --outfile o.gguf --split-max-tensors 12
        {_MODEL} --outfile p.gguf --split-max-size 2M
        {_MODEL} --outfile q.gguf --outtype Q8_0 --split-max-size 1M
        {_MODEL} --outfile n.gguf --split-max-tensors 12 --no-tensor-first-split
        convert-hf-to-gguf shards --outfile s.gguf --threads 1
    """,
    "convert-names": f"""
        {_MODEL}
        {_MODEL} --outfile 'm-{{ftype}}.gguf' --outtype f16
        {_MODEL} --outfile v.gguf --vocab-only
        {_MODEL} --outfile n.gguf --model-name 'Another Name'
        {_MODEL} --outfile meta.gguf --metadata meta.json
        {_MODEL} --outfile pre.gguf --pre-tokenizer deepseek-v3
        {_MODEL} --outfile card.gguf --outtype Q8_0 --card --base-model me/base --quantized-by me
        {_MODEL} --outfile card.gguf --outtype Q8_0 --force
        {_MODEL} --outfile card.gguf --outtype Q8_0
        {_MODEL} --outfile q.gguf --quiet
        {_MODEL} --outfile verified.gguf --outtype Q4_0 --verify
        convert-hf-to-gguf tiny-deepseek-v3 --outfile t.gguf --outtype Q4_K_M --threads 1
        convert-hf-to-gguf --print-supported-models
    """,
    "convert-plans": f"""
        {_MODEL} --dry-run
        {_MODEL} --dry-run --json
        {_MODEL} --dry-run --summary --outtype Q4_K_M
        {_MODEL} --dry-run --json --outtype IQ4_KS --mla both
        {_MODEL} --dry-run --outtype Q4_K_M,Q2_K --outfile 'o-{{ftype}}.gguf'
        {_MODEL} --json --outfile o.gguf --outtype Q6_K
        {_MODEL} --dry-run --outtype Q4_K_M --tensor-type ffn_down_exps=Q8_0 --pure
        {_MODEL} --no-lazy --use-temp-file --outfile lazy.gguf
        {_MODEL} --outfile mix.gguf --outtype Q4_K_M --imatrix m.imatrix.gguf --exclude-weights exps
        {_MODEL} --outfile again.gguf --outtype Q4_K_M --imatrix m.imatrix.gguf --reuse mix.gguf
        {_MODEL} --outfile plain.gguf --outtype Q4_K_M --no-provenance
    """,
    "without-importances": "".join(
        f"quantize in.gguf {name}.gguf {name} 1\n"
        for name in ("Q2_K", "Q2_K_S", "Q3_K_L", "Q4_0", "Q5_1", "IQ2_XXS", "IQ1_M", "IQ3_XXS", "IQ4_XS")
    ),
    "matrices": f"""
        {_QUANTIZE} Q4_K_M 1 --imatrix m.dat
        quantize in.gguf p.gguf Q2_K 1 --imatrix m.imatrix.gguf --include-weights ffn_down
        quantize in.gguf q.gguf Q3_K_L 1 --imatrix m.imatrix.gguf --exclude-weights exps
        quantize in.gguf r.gguf Q3_K_S 1 --imatrix llama.imatrix.gguf
        quantize llama.gguf s.gguf Q4_K_S 1 --imatrix llama.imatrix.gguf
        quantize none.gguf t.gguf IQ3_S 1 --imatrix m.imatrix.gguf
        quantize both.gguf u.gguf IQ4_K 1 --imatrix m.imatrix.gguf
    """,
    "options-of-types": f"""
        {_QUANTIZE} Q4_K_M 1 --pure
        {_QUANTIZE} Q5_K_S 1 --leave-output-tensor
        {_QUANTIZE} Q4_K_S 1 --output-tensor-type q5_1 --token-embedding-type Q8_0
        {_QUANTIZE} Q4_K_M 1 --tensor-type ffn_down_exps=q6_k --tensor-type 'blk\\.[01]\\.attn_=Q5_1'
        {_QUANTIZE} Q2_K 1 --tensor-type attn=q8_0 --tensor-type attn_q=q4_0
        {_QUANTIZE} Q4_K_M 1 --tensor-type-file types.txt
        {_QUANTIZE} IQ4_KS 1 --custom-q 'ffn_down_exps=iq3_k,ffn_.*_exps=iq2_ks'
        {_QUANTIZE} Q4_K_M 1 --fallback attn_k_b=Q8_0
        {_QUANTIZE} Q4_K_M 1 --fallback attn_k_b=Q6_K
        {_QUANTIZE} mine.yaml 1
        quantize in.gguf mine.json
        {_QUANTIZE} ik.yaml 1
        {_QUANTIZE} mine.yaml 1 --tensor-type attn_output=Q5_0
        {_QUANTIZE} 15
        {_QUANTIZE} q4_k_m
        quantize in.gguf Q8_0
    """,
    "options-of-files": rf"""
        {_QUANTIZE} Q4_K_M 1 --prune-layers 1
        {_QUANTIZE} Q4_1 1 --prune-layers 0 --imatrix m.imatrix.gguf
        {_QUANTIZE} Q5_0 1 --override-kv general.name=str:Other --override-kv a.b=int:7
        {_QUANTIZE} Q5_0 1 --override-kv a.c=float:0.5 --override-kv a.d=bool:true
        quantize --keep-split {PARTS[0]} parts.gguf Q4_K_M 1
        quantize {PARTS[1]} joined.gguf Q6_K 1
        quantize model m.gguf Q4_K_M 1 --mla none
        quantize model b.gguf IQ4_KS 1
        quantize model c.gguf Q4_K_M 1 --mla both --card
        quantize q8.gguf d.gguf Q4_0 1
        quantize q8.gguf d.gguf Q4_0 1 --allow-requantize
        quantize q4.gguf e.gguf COPY 1
        {_QUANTIZE} Q6_K 2 --verify
        {_QUANTIZE} Q6_K 1 --no-provenance -q
        {_QUANTIZE} Q6_K 1 --json
        {_QUANTIZE} Q8_0 1 --max-buffer-size 512
        quantize tiny.gguf tiny-Q4_K_M.gguf Q4_K_M 2
    """,
    "several-types": """
        quantize --imatrix m.imatrix.gguf in.gguf o-{FTYPE}.gguf Q2_K,IQ4_XS,Q5_0 1
        quantize in.gguf p-{ftype}.gguf Q4_K_M,mine.yaml 1 --card --quantized-by me --report report.json
        quantize in.gguf o.gguf Q4_K_M,Q5_K_M 1
        quantize in.gguf r-{FTYPE}.gguf Q4_K_M,Q4_K_M 1
        quantize --dry-run --json in.gguf s-{FTYPE}.gguf Q4_K_M,IQ4_KS
        quantize in.gguf t-{FTYPE}.gguf Q4_0,Q4_0_R8,IQ4_KS 1
        quantize --keep-split in-00001-of-00003.gguf u-{FTYPE}.gguf Q8_0,Q4_1 1
    """,
    "reused": """
        quantize --imatrix m.imatrix.gguf in.gguf old.gguf Q4_K_M 1
        quantize --imatrix m.imatrix.gguf in.gguf new.gguf Q4_K_S 1 --reuse old.gguf
        quantize --imatrix n.imatrix.gguf in.gguf other.gguf Q4_K_M 1 --reuse old.gguf --reuse new.gguf
        quantize --dry-run in.gguf Q4_K_M --reuse old.gguf
        quantize --imatrix m.imatrix.gguf in.gguf old.gguf Q5_K_M 1 --reuse old.gguf
        quantize in.gguf f.gguf Q4_K_M 1 --reuse llama.gguf
    """,
    "repacked": """
        quantize --repack q4.gguf o.gguf
        quantize --repack q4.gguf p.gguf --repack-pattern ffn_down,attn_output
        quantize --repack both.gguf q.gguf
        gguf-tools repack o.gguf back.gguf --undo --threads 1
        gguf-tools diff q4.gguf back.gguf
        quantize q4.gguf r.gguf Q4_K_R4 1 --allow-requantize
    """,
    "linted": """
        quantize lint Q4_K_M in.gguf
        quantize lint --json Q4_K_M in.gguf
        quantize lint IQ2_XXS in.gguf
        quantize lint IQ2_XXS model --imatrix m.imatrix.gguf
        quantize lint --imatrix llama.imatrix.gguf Q3_K_M in.gguf
        quantize lint mine.yaml in.gguf
        quantize lint mine.yaml llama.gguf
        quantize lint ik.yaml model
        quantize lint Q4_K_M in.gguf --tensor-type none=Q8_0 --tensor-type attn=Q4_0 --tensor-type attn=Q5_0
        quantize lint --fallback attn_k_b=Q8_0 IQ4_XS in.gguf
        quantize lint --pure Q6_K llama.gguf --output-tensor-type Q8_0
        quantize lint Q4_K_M q8.gguf
        quantize lint Q4_K_M q8.gguf --allow-requantize
        quantize lint Q8_0 both.gguf
        quantize lint IQ3_KT none.gguf --custom-q 'attn_kv_b=q8_0,ffn=iq2_kt'
    """,
    "quantize-plans": """
        quantize --dry-run in.gguf Q4_K_M
        quantize --dry-run --summary in.gguf Q4_K_M
        quantize --dry-run --json model IQ2_M --imatrix m.imatrix.gguf
        quantize --dry-run in.gguf o.gguf IQ1_S
        quantize --dry-run --json both.gguf Q3_K_M
        quantize --dry-run none.gguf IQ4_KSS
        quantize --dry-run --json in.gguf Q4_K_M --prune-layers 1
        quantize --dry-run llama.gguf Q2_K --tensor-type ffn_down=Q6_K --pure
        quantize --dry-run q8.gguf Q4_K_M
        quantize --dry-run r4.gguf Q4_K_M
        quantize --dry-run nothing.gguf Q4_K_M
    """,
}
