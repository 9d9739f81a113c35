"""Run one harness under atheris, which is guided by coverage; needs `pip install atheris`.

    python -m tests.fuzz.run gguf --runs 100000
    python -m tests.fuzz.run gguf -- -max_total_time=600 folder-with-inputs

Arguments after -- go to libFuzzer. An input that fails is written to crash-* in the working folder.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys

N_SEEDS = 200


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="harness, see tests/fuzz/targets.py")
    parser.add_argument("--runs", type=int, default=-1, help="number of inputs; by default until interrupted")
    parser.add_argument("libfuzzer", nargs="*", help="arguments for libFuzzer, after --")
    args = parser.parse_args()

    import atheris

    with atheris.instrument_imports(include=["gguf_tools", "convert", "imatrix", "quantize"]):
        from gguf_tools.errors import ToolkitError
        from tests.fuzz import scratch
        from tests.fuzz.targets import TARGETS

    target = TARGETS[args.target]
    target.warm_up()
    seeds = scratch.folder(f"{args.target}-seeds")
    for number in range(N_SEEDS):
        (seeds / str(number)).write_bytes(target.make(random.Random(number)))

    def one_input(data: bytes) -> None:
        with contextlib.suppress(ToolkitError):
            target.one_input(data)

    atheris.Setup([sys.argv[0], f"-runs={args.runs}", *args.libfuzzer, str(seeds)], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
