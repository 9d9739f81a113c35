"""Command lines of gguf-tools, and every --help and --version."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.builds.chains import PROGRAMS, Chain, chain
from scripts.builds.material import HOSTILE, PARTS

_SUBCOMMANDS = {
    "quantize": ("lint",),
    "imatrix": ("show", "convert", "merge", "stats", "check", "repair"),
    "gguf-tools": (
        "show", "diff", "verify", "hash", "scan", "set", "remove-key", "rename", "split", "merge",
        "mla-layout", "repack", "card", "cook", "upload", "checkpoint", "completion",
    ),
}  # fmt: skip


def chains() -> Iterator[Chain]:
    for program in PROGRAMS:
        lines = [f"{program} --help", f"{program} --version", f"{program}"]
        yield chain(
            f"help-{program}",
            [*lines, *(f"{program} {name} --help" for name in _SUBCOMMANDS.get(program, ()))],
        )
    for name, lines in _CHAINS.items():
        yield chain(name, lines)
    yield chain("hostile-shown", [f"gguf-tools show {name}" for name in HOSTILE])
    yield chain("hostile-scanned", [f"gguf-tools scan {name}" for name in list(HOSTILE)[::4]])


_LONG = "Long" * 20

_CHAINS = {
    "show": f"""
        gguf-tools show in.gguf
        gguf-tools show --full in.gguf
        gguf-tools show --json q4.gguf
        gguf-tools show {PARTS[0]}
        gguf-tools show {PARTS[2]} --json
        gguf-tools show both.gguf
        gguf-tools show none.gguf
        gguf-tools show r4.gguf
        gguf-tools show m.imatrix.gguf
        gguf-tools show llama.gguf
        gguf-tools show tiny.gguf
    """,
    "diff": f"""
        gguf-tools diff in.gguf in.gguf
        gguf-tools diff in.gguf {PARTS[0]}
        gguf-tools diff in.gguf q4.gguf
        gguf-tools diff in.gguf q4.gguf --json
        gguf-tools diff in.gguf q4.gguf --no-data
        gguf-tools diff in.gguf q8.gguf --values
        gguf-tools diff in.gguf q4.gguf --values --json
        gguf-tools diff in.gguf llama.gguf --quiet
        gguf-tools diff in.gguf both.gguf
        gguf-tools diff q4.gguf r4.gguf --values
        gguf-tools diff f32.gguf nan.gguf --values
    """,
    "verify": f"""
        gguf-tools verify in.gguf
        gguf-tools verify q4.gguf --json
        gguf-tools verify {PARTS[1]}
        gguf-tools verify q4.gguf --against in.gguf
        gguf-tools verify q4.gguf --against model
        gguf-tools verify q4.gguf --against pickled
        gguf-tools verify q4.gguf --against pickled --allow-pickle --json
        gguf-tools verify q4.gguf --against llama.gguf
        gguf-tools verify in.gguf --against q4.gguf -q
        gguf-tools verify r4.gguf --against in.gguf
        gguf-tools verify nan.gguf
        gguf-tools verify nan.gguf --json
        gguf-tools verify longer.gguf
        gguf-tools verify cut.gguf
        gguf-tools verify cut-byte.gguf
        gguf-tools verify cut-header.gguf
    """,
    "hash": f"""
        gguf-tools hash in.gguf
        gguf-tools hash --json {PARTS[0]}
        gguf-tools hash q4.gguf
        gguf-tools hash m.imatrix.gguf --json
    """,
    "scan": f"""
        gguf-tools scan in.gguf
        gguf-tools scan in.gguf --strict --data
        gguf-tools scan {PARTS[0]} --json
        gguf-tools scan r4.gguf
        gguf-tools scan longer.gguf
        gguf-tools scan nan.gguf --data
        gguf-tools scan cut.gguf --json
        gguf-tools scan cut-header.gguf
        gguf-tools set in.gguf tokenizer.chat_template=str@chat.jinja -o chat.gguf
        gguf-tools scan chat.gguf
        gguf-tools set in.gguf tokenizer.chat_template=str@evil.jinja -o evil.gguf
        gguf-tools scan evil.gguf
        gguf-tools scan evil.gguf --json
        PYTHONPATH=no-jinja2 gguf-tools scan evil.gguf
        gguf-tools scan tiny.gguf --strict
    """,
    "set": rf"""
        gguf-tools set q4.gguf general.name=Another
        gguf-tools set q4.gguf general.name={_LONG} --json
        gguf-tools set q4.gguf general.name=Third -o o.gguf
        gguf-tools set q4.gguf general.name=Third -o o.gguf
        gguf-tools set q4.gguf general.name=Fourth -o o.gguf --force -q
        gguf-tools set q4.gguf deepseek2.context_length=u32:65536 general.license=mit --dry-run
        gguf-tools set q4.gguf deepseek2.context_length=u32:65536 general.license=mit
        gguf-tools set q4.gguf deepseek2.context_length=str:many
        gguf-tools set q4.gguf deepseek2.context_length=str:many --force
        gguf-tools set q4.gguf my.numbers=[i32]:1,2,3 'my.words=[str]:["a, b", "c"]' my.flag=bool:true
        gguf-tools set q4.gguf my.byte=u8:255 my.small=i8:-128 my.float=f32:0.1 my.double=f64:1e300
        gguf-tools set q4.gguf my.byte=u8:256
        gguf-tools set q4.gguf my.flag=bool:perhaps
        gguf-tools set q4.gguf general.architecture=llama
        gguf-tools set q4.gguf general.alignment=u32:64
        gguf-tools set q4.gguf tokenizer.chat_template=str@chat.jinja
        gguf-tools show q4.gguf
        gguf-tools remove-key q4.gguf my.byte my.small
        gguf-tools remove-key q4.gguf my.byte
        gguf-tools remove-key q4.gguf general.architecture
        gguf-tools remove-key q4.gguf general.name -o p.gguf --json
        gguf-tools remove-key q4.gguf general.name --dry-run
        gguf-tools verify q4.gguf
    """,
    "set-in-parts": rf"""
        gguf-tools set {PARTS[0]} general.name={_LONG}
        gguf-tools rename {PARTS[0]} --regex blk\.=layer. --dry-run
        gguf-tools rename {PARTS[0]} --regex blk\.=layer.
        gguf-tools show {PARTS[1]}
        gguf-tools remove-key {PARTS[1]} general.name
        gguf-tools set {PARTS[0]} split.count=u16:4
    """,
    "rename": r"""
        gguf-tools rename in.gguf token_embd.weight=embedding.weight
        gguf-tools rename in.gguf embedding.weight=token_embd.weight -o o.gguf
        gguf-tools rename in.gguf --regex 'blk\.(\d+)\.=model.layers.\1.' --json
        gguf-tools rename in.gguf nothing=something
        gguf-tools rename in.gguf embedding.weight=output_norm.weight
        gguf-tools rename in.gguf --regex '(=x'
        gguf-tools rename in.gguf --key general.name=general.author
        gguf-tools rename in.gguf --key general.type=general.alignment
        gguf-tools rename in.gguf --key --regex '^general\.=my.' --dry-run
    """,
    "split": f"""
        gguf-tools split q4.gguf o --max-tensors 12
        gguf-tools split q4.gguf p --max-size 1M --dry-run
        gguf-tools split q4.gguf p --max-size 1M --json
        gguf-tools split q4.gguf q
        gguf-tools split q4.gguf r --max-tensors 12 --no-tensor-first-split -q
        gguf-tools split q4.gguf o --max-tensors 12
        gguf-tools split q4.gguf o --max-tensors 9 --force
        gguf-tools split {PARTS[0]} s --max-tensors 20
        gguf-tools merge o-00001-of-00003.gguf m.gguf
        gguf-tools merge {PARTS[2]} n.gguf --json
        gguf-tools merge {PARTS[0]} n.gguf
        gguf-tools merge {PARTS[0]} n.gguf --force --dry-run
        gguf-tools merge q4.gguf t.gguf
        gguf-tools diff q4.gguf n.gguf
    """,
    "mla-layout": """
        gguf-tools mla-layout in.gguf both.gguf --to both --threads 1 --force
        gguf-tools mla-layout in.gguf none.gguf --to none --threads 1 --force
        gguf-tools mla-layout both.gguf s.gguf --to split --threads 1
        gguf-tools mla-layout none.gguf t.gguf --to split --threads 1
        gguf-tools mla-layout none.gguf u.gguf --to both --threads 1
        gguf-tools mla-layout in.gguf v.gguf --to split --threads 1
        gguf-tools diff in.gguf s.gguf
    """,
    "mla-layout-quantized": """
        gguf-tools mla-layout q4.gguf a.gguf --to both --threads 1
        gguf-tools mla-layout q4.gguf b.gguf --to none --threads 1 --json
        gguf-tools mla-layout q4both.gguf c.gguf --to split --threads 1
        gguf-tools mla-layout q4both.gguf d.gguf --to none --threads 1
        gguf-tools mla-layout b.gguf e.gguf --to split --tensor-type attn_k_b=Q5_0 --imatrix m.imatrix.gguf
        gguf-tools mla-layout q4.gguf f.gguf --to both --tensor-type attn_kv_b=Q4_K --threads 1 -q
        gguf-tools mla-layout q4.gguf --to both --dry-run
        gguf-tools mla-layout llama.gguf g.gguf --to both
        gguf-tools mla-layout in-00001-of-00003.gguf h.gguf --to both --keep-split --threads 1
        gguf-tools mla-layout q4.gguf a.gguf --to both --threads 1
    """,
    "repack": """
        gguf-tools repack q4.gguf o.gguf --threads 1
        gguf-tools repack q4.gguf p.gguf --only _exps --to Q4_K_R4,Q6_K_R4 --threads 1
        gguf-tools repack q4.gguf --dry-run
        gguf-tools repack q4.gguf --dry-run --json
        gguf-tools repack in.gguf q.gguf --to BF16_R16 --threads 1 --verify
        gguf-tools repack in.gguf r.gguf --threads 1
        gguf-tools repack o.gguf s.gguf --undo --threads 1
        gguf-tools repack r4.gguf t.gguf --threads 1
        gguf-tools repack q4.gguf u.gguf --undo --threads 1
        gguf-tools repack q4.gguf o.gguf --threads 1
        gguf-tools repack q4.gguf v.gguf --to Q4_K_R9
        gguf-tools repack q4.gguf v.gguf --to Q4_K
    """,
    "card": """
        gguf-tools card q4.gguf q8.gguf --report report.json
        gguf-tools card q4.gguf q8.gguf -o other.md --source model --base-model me/base --quantized-by me
        gguf-tools card q4.gguf -o other.md
        gguf-tools card q4.gguf -o mine
        gguf-tools card q4.gguf -o mine --force -q
        gguf-tools card in-00001-of-00003.gguf -o parts.md --source tiny-deepseek-v3
        gguf-tools card m.imatrix.gguf -o m.md
        gguf-tools card q4.gguf --report losses.json -o x.md
    """,
    "upload": """
        gguf-tools upload q4.gguf me/model --dry-run
        gguf-tools upload q4.gguf text.txt me/model --dry-run --private --revision main
        gguf-tools upload model me/model --dry-run --include '*.txt'
        gguf-tools upload q4.gguf me/model
        gguf-tools upload q4.gguf model
        gguf-tools upload nothing.gguf me/model --dry-run
    """,
    "completion": """
        gguf-tools completion bash
        gguf-tools completion zsh
        gguf-tools completion fish
        gguf-tools completion powershell
    """,
    "checkpoint": """
        gguf-tools checkpoint model
        gguf-tools checkpoint model --json
        gguf-tools checkpoint shards
        gguf-tools checkpoint packed-gptq --json
        gguf-tools checkpoint pickled
        gguf-tools checkpoint tiny-deepseek-v3
    """,
}
