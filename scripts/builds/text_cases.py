"""Command lines that send a text through a model: imatrix, evaluate, sensitivity, quantize, cook."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.builds.chains import Chain, chain
from scripts.builds.material import FORWARD as F

C = "-c 32 --chunks 3"
Q = "quantize in.gguf q.gguf"
L = "--losses losses.json"


def chains() -> Iterator[Chain]:
    for name, lines in _CHAINS.items():
        yield chain(name, lines)


_CHAINS = {
    "imatrix-collected": f"""
        imatrix -m model -f text.txt -o o.gguf {F}
        imatrix -m in.gguf -f text.txt -o o.dat {F}
        imatrix -m q4.gguf -f text.txt -o q4.imatrix.gguf --process-output {F}
        imatrix -m both.gguf -f text.txt -o b.gguf {F}
        imatrix -m model -f text.txt -o ik.dat --mla both {F}
        imatrix -m none.gguf -f text.txt -o none.imatrix.gguf {F}
        imatrix -m model -f text.txt -o o.gguf {F}
        imatrix -m model -f text.txt -o o.gguf --force -q {F}
    """,
    "imatrix-options": f"""
        imatrix -m model -f text.txt -o a.gguf --from-chunk 2 --no-ppl {F}
        imatrix -m model -f text.txt -o b.gguf --parse-special --all-experts {F}
        imatrix -m model -f text.txt -o c.gguf --output-format dat {F}
        imatrix -m model -f text.txt -o d.gguf --output-frequency 1 {F}
        imatrix -m model -f text.txt -o e.gguf --dataset-name mine --dtype bfloat16 {F}
        imatrix -m model -f text.txt -o f.gguf --in-file m.imatrix.gguf {F}
        imatrix -m model -f text.txt -o g.gguf --memory 0.0001 {F}
        imatrix -m in-00001-of-00003.gguf -f text.txt -o h.gguf {F}
        imatrix -m model -f text.txt -o i.gguf -ngl 99 -b 512 -ub 512 -fa on --no-mmap -s 42 {F}
        imatrix -m model -f other.txt -c 64 --chunks -1 -t 2
    """,
    "imatrix-files": """
        imatrix show m.imatrix.gguf
        imatrix show --json m.imatrix.gguf
        imatrix show m.dat
        imatrix show --json m.dat
        imatrix stats m.imatrix.gguf
        imatrix stats --json m.imatrix.gguf
        imatrix stats m.dat
        imatrix --in-file m.imatrix.gguf --show-statistics
        imatrix check m.imatrix.gguf
        imatrix check m.imatrix.gguf --model model --recipe IQ2_XS
        imatrix check m.dat --model in.gguf
        imatrix check m.imatrix.gguf --model llama.gguf --recipe Q4_K_M
        imatrix check llama.imatrix.gguf --model model --recipe mine.yaml
        imatrix repair m.imatrix.gguf -o whole.gguf
        imatrix repair m.imatrix.gguf -o whole-model.gguf --model model
        imatrix repair m.dat -o whole.dat --model in.gguf
        imatrix merge m.imatrix.gguf n.imatrix.gguf -o sum.gguf
        imatrix merge m.imatrix.gguf n.imatrix.gguf m.dat -o sum.dat
        imatrix merge m.imatrix.gguf llama.imatrix.gguf -o odd.gguf
        imatrix --in-file m.imatrix.gguf --in-file n.imatrix.gguf -o sum2.gguf
        imatrix convert m.imatrix.gguf c.dat
        imatrix convert c.dat d.gguf
        imatrix convert m.imatrix.gguf d.gguf
        imatrix convert m.imatrix.gguf d.gguf --force
        imatrix convert --mla both --model model m.imatrix.gguf ik.dat
        imatrix convert --mla both m.imatrix.gguf ik2.gguf
        imatrix convert --mla split --model model ik.dat back.gguf
        PYTHONPATH=no-matplotlib imatrix stats --plot o.png m.imatrix.gguf
    """,
    "evaluated": f"""
        evaluate in.gguf q4.gguf -f text.txt {F}
        evaluate model q4.gguf q8.gguf -f text.txt --json o.json {F}
        evaluate in.gguf q4.gguf -f text.txt --json o.json {F}
        evaluate in.gguf q4.gguf -f text.txt --json o.json --force -q {F}
        evaluate in.gguf q4.gguf in.gguf -f text.txt --like llama.cpp --json like.json {F}
        evaluate in.gguf q4.gguf -f text.txt --dtype bfloat16 --work work --json work.json {F}
        evaluate in.gguf both.gguf none.gguf r4.gguf -f other.txt -c 64 --chunks 2 -t 1
        evaluate in.gguf q8.gguf -f text.txt --memory 0.0001 {F}
        evaluate llama.gguf llama-r1-distill -f text.txt {F}
    """,
    "evaluated-pages": f"""
        evaluate in.gguf q4.gguf q8.gguf -f text.txt --html o.html --json o.json {F}
        evaluate in.gguf r4.gguf -f text.txt --html p.html --compare-with report.json --losses losses.json {F}
        PYTHONPATH=no-matplotlib evaluate in.gguf q4.gguf -f text.txt --html q.html {F}
    """,
    "evaluated-without-base": f"""
        evaluate in.gguf q8.gguf -f text.txt --kl-divergence-base o.kld {F}
        evaluate --kl-divergence-base o.kld --kl-divergence q4.gguf q8.gguf --json kld.json -t 1
        evaluate --kl-divergence-base base.kld --kl-divergence in.gguf -t 1
        evaluate --kl-divergence-base base.kld --kl-divergence llama.gguf -t 1
        evaluate in.gguf q4.gguf -f text.txt --keep kept {F}
        evaluate in.gguf q8.gguf -f text.txt --keep kept --json kept.json {F}
        evaluate in.gguf q8.gguf -f other.txt --keep kept {F}
    """,
    "sensitivity": f"""
        sensitivity model -f text.txt -o a.json --types Q2_K,Q4_K,Q8_0 --rows 16 {F}
        sensitivity in.gguf -f text.txt -o b.json --types Q2_K,IQ4_XS --rows 8 --seed 7 {F}
        sensitivity model -f text.txt -o a.json --types Q2_K {F}
        sensitivity model -f text.txt -o a.json --types Q2_K --rows 8 --force -q {F}
        sensitivity llama-r1-distill -f text.txt -o c.json --types Q4_0,Q8_0 --rows 16 {F}
        sensitivity model -f text.txt -o d.json --rows 4 {F}
        sensitivity model -f text.txt -o e.json --types Q4_K --rows 16 --dtype bfloat16 --memory 0.0001 {F}
    """,
    "sized": f"""
        quantize in.gguf o.gguf 1 --imatrix m.imatrix.gguf --size 5bpw {L} --save-recipe o.yaml
        quantize in.gguf p.gguf o.yaml 1 --imatrix m.imatrix.gguf
        quantize in.gguf q.gguf 1 --size 5bpw {L} --save-recipe o.json
        {Q} --size 1500KiB {L} --dry-run --json
        {Q} --size Q4_K_M {L} --dry-run
        {Q} --size 4bpw {L} --dry-run --for ik_llama.cpp --fast-on cpu
        {Q} --size 4bpw {L} --dry-run --for llama.cpp --fast-on gpu
        {Q} --size 4bpw {L} --dry-run --equal-experts
        {Q} --size 4bpw --dry-run {L} --at-least attn=Q6_K --at-most exps=Q4_K
        {Q} --size 5bpw {L} --dry-run --tensor-type attn_output=Q8_0
        {Q} --vram 1.5MiB --ram 1MiB {L} --dry-run
        quantize in.gguf r.gguf 1 --size 6bpw {L} --save-recipe r.yaml --save-tensor-types r.txt
        quantize in.gguf s.gguf 1 --size 6bpw {L} --save-custom-q s.txt --save-tensor-list t.txt
        {Q} --size 1bpw {L} --dry-run
        {Q} --size 40bpw {L} --dry-run
        quantize llama.gguf q.gguf --size 4bpw {L} --dry-run
        PYTHONPATH=no-matplotlib {Q} --size 4bpw {L} --curve o.svg --dry-run
    """,
    "sized-by-a-text": f"""
        quantize in.gguf o.gguf --imatrix m.imatrix.gguf --size 5bpw --sensitivity-text text.txt {C}
        quantize model p.gguf --size 5bpw --calibrate text.txt --evaluate other.txt {C}
    """,
    "calibrated": f"""
        quantize model o.gguf Q2_K 1 --calibrate text.txt {C}
        quantize in.gguf p.gguf Q4_K_M 1 --calibrate text.txt {C} --imatrix m.imatrix.gguf
        quantize in.gguf q.gguf Q3_K_S 1 --calibrate text.txt {C} --one-sided --no-embedding
        quantize in.gguf r.gguf IQ3_XXS 1 --calibrate text.txt {C} --no-sequential
        quantize in.gguf s.gguf Q4_0 1 --calibrate text.txt {C} --evaluate other.txt
        quantize in.gguf t.gguf IQ4_KS 1 --calibrate text.txt {C} -q
        quantize in.gguf u-{{FTYPE}}.gguf Q2_K,Q5_0 1 --calibrate text.txt {C}
        quantize in.gguf v.gguf Q4_K_M --calibrate text.txt {C} --dry-run
        quantize in.gguf v.gguf Q4_K_M 1 --calibrate same.txt {C}
        quantize in.gguf v.gguf Q4_1 1 --calibrate same.txt {C} --force
        quantize in.gguf w.gguf mine.yaml 1 --calibrate text.txt -c 32 --chunks 2 --dtype bfloat16
        quantize llama.gguf x.gguf Q4_0 1 --calibrate text.txt -c 32 --chunks 2
    """,
    "calibrated-families": "".join(
        f"quantize {name} {name}.gguf Q4_0 1 --calibrate text.txt -c 32 --chunks 2\n"
        for name in ("gpt-oss", "qwen3moe", "glm4moe-air", "deepseek-v3.2", "deepseek-v4", "minimax-m2")
    ),
    "cooked": f"""
        gguf-tools cook model -f text.txt --types Q2_K,5bpw --evaluate other.txt -o cooked --dry-run {F}
        gguf-tools cook model -f text.txt --types Q2_K,5bpw --evaluate other.txt -o cooked {F}
        gguf-tools cook model -f text.txt --types Q2_K,5bpw --evaluate other.txt -o cooked {F}
        gguf-tools cook model -f text.txt --types Q2_K,5bpw,Q8_0 --evaluate other.txt -o cooked {F}
        gguf-tools cook model -f other.txt --types Q2_K -o cooked {F}
    """,
    "cooked-otherwise": f"""
        gguf-tools cook in.gguf -f text.txt --types Q4_0 -o a --name mine --base-model me/base {F}
        gguf-tools cook model -f text.txt --types Q3_K_S -o b --calibrate -q {F}
        gguf-tools cook model -f text.txt --types Q4_K_M,ik.yaml -o c --dry-run {F}
        gguf-tools cook model -f same.txt --types Q4_0 -o d {F}
    """,
}
