"""What padding does to models whose sizes are no multiple of 256: the tables of docs/notes/odd-sizes.md.

    python scripts/measure/odd_sizes.py sizes                real shapes: bytes with padding and without
    python scripts/measure/odd_sizes.py errors               errors of types, for quantize/formats/codecs.py
    python scripts/measure/odd_sizes.py cut F32.gguf OUT.gguf KEY=N ...     inner channels left out
    python scripts/measure/odd_sizes.py quality MODEL.gguf MATRIX LOSSES TEXT ...    at equal bytes

The models of `sizes` are headers with a hole where the data would be: those of tests/golden, and Qwen2.5-72B
by the names of its smaller sister. `cut` keeps the channels that matter most, by the product of the norms of
their gate, up and down. `quality` makes files of the size of Q2_K, IQ3_XXS and Q4_K_M with --pad off, with
--pad 256 and as `quantize --size` chooses, and prints the divergences on each text.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from math import exp, log
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from gguf_tools import open_gguf  # noqa: E402
from gguf_tools.files.partial_file import GGUFWriter  # noqa: E402
from gguf_tools.format.ggml_types import F32, by_name  # noqa: E402
from gguf_tools.format.shards import FileLayout  # noqa: E402
from gguf_tools.format.tensors import TensorInfo  # noqa: E402
from gguf_tools.format.values import Metadata, Value  # noqa: E402
from imatrix.evaluate.comparison import Interval  # noqa: E402
from quantize.formats import encodable, get_decoder, get_format  # noqa: E402
from quantize.importances.entries import Importance, ImportanceFile  # noqa: E402
from quantize.importances.weighting import ColumnWeights  # noqa: E402
from quantize.options import QuantizeOptions  # noqa: E402
from quantize.padding.inner_sizes import inner_sizes  # noqa: E402
from quantize.pipeline import plan_run  # noqa: E402
from quantize.prepare import Preparation  # noqa: E402
from tests.quantize.plan.odd_models import odd_model  # noqa: E402

TYPES = ("Q2_K", "IQ2_XS", "IQ3_XXS", "Q3_K_M", "Q4_K_M")
Model = tuple[Metadata, Sequence[TensorInfo]]


def real_models() -> Iterator[tuple[str, Model]]:
    """Yield names, metadata and tensors of published models, as F32."""
    names = {"v2-lite": "DeepSeek-V2-Lite", "glm-4.5-air": "GLM-4.5-Air", "qwen2.5-72b": "Qwen2.5-72B",
             "gpt-oss-20b": "gpt-oss-20b"}  # fmt: skip
    for name, shown in names.items():
        yield shown, odd_model(name)


def write_hollow(model: Model, path: Path) -> Path:
    """Write a file with a hole where the data would be."""
    metadata, tensors = model
    layout = FileLayout.of(metadata, [TensorInfo(each.name, each.shape, F32) for each in tensors])
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.total_bytes)
    return path


def all_ones(tensors: Sequence[TensorInfo]) -> ImportanceFile:
    """Return importances of every tensor, all ones, which take no memory."""
    one = np.float32(1)
    return ImportanceFile({
        each.name: Importance(
            np.broadcast_to(one, (each.n_mats, each.n_cols)), np.broadcast_to(one, each.n_mats)
        )
        for each in tensors
    })  # fmt: skip


def print_sizes() -> None:
    """Print a table of real shapes: bytes and weights that fall back, with padding and without."""
    print("| model | type | fall back | bytes | padded | | `--pad auto` pads |")
    print("|---|---|--:|--:|--:|--:|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, model in real_models():
            path = write_hollow(model, Path(folder) / "model.gguf")
            entries = all_ones(model[1])
            for type_ in TYPES:
                plain = _prepared(path, type_, QuantizeOptions(entries))
                ways = {name: QuantizeOptions(entries, pad="256")}
                if name.startswith("gpt-oss"):
                    ways[f"{name}, `--pad-hidden`"] = QuantizeOptions(entries, pad="256", pad_hidden=True)
                auto = _prepared(path, type_, QuantizeOptions(entries, pad="auto"))
                for shown, options in ways.items():
                    print(_row(shown, type_, plain, _prepared(path, type_, options), auto))


def _prepared(path: Path, type_: str, options: QuantizeOptions) -> Preparation:
    with plan_run(path, path.with_name("out.gguf"), type_, options) as run:
        return run.preparation


def _row(name: str, type_: str, plain: Preparation, padded: Preparation, auto: Preparation) -> str:
    kept = [each for each in auto.padding.changes if each.pads]
    sizes = ", ".join(f"{each.real_text} to {each.after_text}" for each in kept) or "nothing"
    change = f"{100 * (padded.total_bytes / plain.total_bytes - 1):+.1f} %"
    share = f"{_fallen(plain):.1f} % → {_fallen(padded):.1f} %"
    n_bytes = f"{plain.total_bytes:,} | {padded.total_bytes:,}"
    return f"| {name} | {type_} | {share} | {n_bytes} | {change} | {sizes} |"


def _fallen(preparation: Preparation) -> float:
    """Return how many per cent of the weights have another type than the one asked for."""
    tensors = preparation.plan.tensors
    fallen = sum(each.info.n_elems for each in tensors if each.fell_from is not None)
    return 100 * fallen / sum(each.info.n_elems for each in tensors)


def print_errors() -> None:
    """Print the squared error of each type on normally distributed weights, over their squares."""
    weights = np.random.default_rng(0).standard_normal((48, 2048)).astype(np.float32)
    alike = ColumnWeights(np.ones(weights.shape[1], np.float32))
    for name in encodable():
        type_ = by_name(name)
        if type_.rows_interleaved > 1:
            continue
        data = get_format(type_).encode(weights, alike).reshape(len(weights), -1)
        error = get_decoder(type_)(data, weights.shape[1]).astype(np.float64) - weights
        print(f'    "{name}": {np.square(error).sum() / np.square(weights).sum():.3g},')


def cut(source: Path, output: Path, sizes: Mapping[str, int]) -> None:
    """Write an F32 file with fewer inner channels.

    sizes  the last word of a metadata key -> its new number
    """
    with open_gguf(source) as file:
        metadata, infos = dict(file.metadata), list(file.tensors.values())
        values = {
            info.name: file.read_rows(info.name, 0, info.n_rows).view(np.float32).reshape(info.shape)
            for info in infos
        }
    for size in inner_sizes(metadata, infos, str(source)):
        number = sizes.get(size.key.rpartition(".")[2])
        if number is None:
            continue
        metadata[size.key] = Value(size.value.kind, number)
        blocks: dict[tuple[int, str], dict[str, str]] = {}
        for tensor in size.tensors:
            blocks.setdefault((tensor.place.layer, tensor.place.part), {})[tensor.place.matrix] = tensor.name
        times = {(tensor.place.layer, tensor.place.part): tensor.times for tensor in size.tensors}
        for place, names in blocks.items():
            values |= _cut_block(
                {part: values[name] for part, name in names.items()}, names, number * times[place]
            )
    shorter = [TensorInfo(info.name, values[info.name].shape, info.type) for info in infos]
    layout = FileLayout.of(metadata, shorter)
    with GGUFWriter(output, layout) as writer:
        for info in shorter:
            writer.write(layout.offset_of(info.name), np.ascontiguousarray(values[info.name]))
        writer.publish()


def _cut_block(block: Mapping[str, np.ndarray], names: Mapping[str, str], kept: int) -> dict[str, np.ndarray]:
    """Return the matrices of a block, by name, with the channels that matter most, in their order."""
    gate, up, down = (np.atleast_3d(block[part].T).T for part in ("gate", "up", "down"))
    weight = np.linalg.norm(gate, axis=2) * np.linalg.norm(up, axis=2) * np.linalg.norm(down, axis=1)
    chosen = np.sort(np.argsort(-weight, axis=1)[:, :kept], axis=1)
    shorter = {
        "gate": np.take_along_axis(gate, chosen[:, :, None], axis=1),
        "up": np.take_along_axis(up, chosen[:, :, None], axis=1),
        "down": np.take_along_axis(down, chosen[:, None, :], axis=2),
    }
    return {names[part]: each if block[part].ndim == 3 else each[0] for part, each in shorter.items()}


def print_quality(model: Path, matrix: Path, losses: Path, texts: Sequence[Path]) -> None:
    """Print divergences at equal bytes, without padding and as --size chooses; ratios with 95 % intervals."""
    import gguf_tools
    from gguf_tools.commands.quantize import main as quantize_command

    ratios: list[float] = []
    print("| size of | text | bytes | without | `--pad 256` | ratio | as chosen | ratio |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for type_ in ("Q2_K", "IQ3_XXS", "Q4_K_M"):
        files = []
        for pad in ("off", "256", "auto"):
            files.append(model.with_name(f"{model.stem}-{type_}-{pad}.gguf"))
            size = files[0].stat().st_size if files[1:] else type_
            words = ["--size", size, "--losses", losses, "--imatrix", matrix, "--pad", pad, "--quiet"]
            with redirect_stdout(StringIO()):
                if quantize_command(list(map(str, [*words, "--force", model, files[-1]]))):
                    raise SystemExit(1)
        for text in texts:
            found = gguf_tools.evaluate(model, text, files, chunk_size=256, n_chunks=64, against=files[0])
            plain, padded, chosen = (f"{each.divergence.kld.mean.value:.5f}" for each in found.models)
            of_padded, of_chosen = (each.found.overall.kld_ratio for each in found.comparisons)
            ratios.append(of_chosen.value)
            print(
                f"| {type_} | {text.name} | {files[0].stat().st_size:,} | {plain} | {padded}"
                f" | {_shown(of_padded)} | {chosen} | {_shown(of_chosen)} |",
                flush=True,
            )
    mean = exp(sum(map(log, ratios)) / len(ratios))
    print(f"geometric mean of the chosen ones {mean:.3f}, largest {max(ratios):.3f}")


def _shown(ratio: Interval) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def main(words: Sequence[str]) -> None:
    what, *rest = words
    if what == "sizes":
        print_sizes()
    elif what == "errors":
        print_errors()
    elif what == "cut":
        source, output, *sizes = rest
        cut(Path(source), Path(output), {key: int(n) for key, n in (size.split("=") for size in sizes)})
    elif what == "quality":
        model, matrix, losses, *texts = map(Path, rest)
        print_quality(model, matrix, losses, texts)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
