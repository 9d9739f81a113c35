"""Checkpoint: the tensors of a Hugging Face folder, unread, and its JSON files.

A folder holds `config.json` and its weights, in one of these forms (looked for in this order):

    model.safetensors.index.json    {"weight_map": {tensor: file}}: the shards are the files it names
    model*.safetensors              no index: every such file; a name "-00001-of-00004" promises four
    output*.safetensors             the same, as exllamav2 names them
    gptq_model*.safetensors         the same, as AutoGPTQ names them
    consolidated*.safetensors       the same, as Mistral names them beside its params.json

Names are unique over all shards, and index and shards must agree tensor by tensor. A tensor that the index
places elsewhere, or doesn't list, is an error: the download stopped half-way, or the shards are those of two
models. Pickle checkpoints (`.bin`, `.pt`) are refused unless they are asked for, because reading a pickle can
run the code it holds; convert.checkpoint.pickle_file says how they are read.

The order of `names()` is by shard file, then by tensor name. llama.cpp's converter reads in that order,
so its files can be reproduced, and a conversion reads every shard from front to back once.

What config.json says is not always one flat object of Hugging Face's:

    text_config   multimodal models keep what describes their text part in an object inside config.json
    params.json   Mistral's own format: other names of keys, and no `architectures`

Adapters of PEFT are folders too, with weights to be added to those of another model.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

from convert.checkpoint.adapted_folder import CONFIG_NAME, PICKLE_NAME, WEIGHTS_NAME, AdaptedFolder
from convert.checkpoint.adapter import Adapter
from convert.checkpoint.safetensors_file import RawTensor, SafetensorsFile
from convert.checkpoint.streamed import StreamedFolder
from gguf_tools.errors import BadConfig, CheckpointError, MissingModel, MissingTensor, UnsupportedCheckpoint
from gguf_tools.files.documents import MAX_MEMORY, parse_json
from gguf_tools.files.inputs import InputFile
from gguf_tools.files.named_files import read_input
from gguf_tools.system.files import Closing
from gguf_tools.text import shown

MAX_BYTES = 64 << 20


def read_json_object(
    path: Path, error: type[CheckpointError] = BadConfig, *, most_memory: int = MAX_MEMORY
) -> dict[str, Any]:
    """Return the JSON object in `path`.

    most_memory  bytes that the object may take
    raises       `error` when the file can't be read, is not JSON, or holds something else than an object
    """
    data = read_input(path, MAX_BYTES, error)
    try:
        value = parse_json(data.removeprefix(codecs.BOM_UTF8), most_memory=most_memory)
    except ValueError as cause:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error(f"{path}: not JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{path}: holds {type(value).__name__}, expected a JSON object")
    return value


def read_json_object_if_there(
    path: Path, error: type[CheckpointError] = BadConfig, *, most_memory: int = MAX_MEMORY
) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one when there is no such file."""
    return read_json_object(path, error, most_memory=most_memory) if path.exists() else {}


PARAMS_NAME = "params.json"
MISTRAL_LARGE_3 = "MistralLarge3ForCausalLM"
"""Name of Mistral Large 3 in `architectures`, as vLLM gives it; its own files have no such key."""

_STAYS_INSIDE = ("architectures", "quantization_config", "compression_config")
"""Keys of text_config that don't replace those of the top level. Quantization is looked for in both."""


def with_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with the keys of its `text_config` at the top level, where they win.

    Ids of special tokens count from the top level where it has them, and `architectures` always does.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    inner = {
        key: value
        for key, value in text.items()
        if key not in _STAYS_INSIDE and not (key.endswith("_token_id") and config.get(key) is not None)
    }
    return {**config, **inner}


def mistral_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a params.json with the name of the architecture that its keys show, and none if it is no MoE."""
    is_large_3 = "moe" in params and "kv_lora_rank" in params
    return {**params, **({"architectures": [MISTRAL_LARGE_3]} if is_large_3 else {})}


PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
INDEX_NAME = "model.safetensors.index.json"
_NUMBERED = re.compile(r"-(\d{5,})-of-(\d{5,})\.\w+$")
WEIGHT_NAMES = (
    "model*.safetensors", "output*.safetensors", "gptq_model*.safetensors", "consolidated*.safetensors",
)  # fmt: skip
"""Patterns of weight files, in the order in which they are looked for."""

SINGLE_NAME = "model.safetensors"
PICKLE_NAMES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NO_WEIGHTS = (
    "training_args.bin", "optimizer*.*", "scheduler*.*", "scaler*.*", "rng_state*.pth", "adapter_model*.bin",
)  # fmt: skip
"""Patterns of pickles that trainers leave beside the weights, or in their place."""


def is_pickle_of_weights(name: str) -> bool:
    """Return whether a file with this name may be a pickle with the weights of a model."""
    return any(fnmatch(name, pattern) for pattern in PICKLE_NAMES) and not any(
        fnmatch(name, pattern) for pattern in _NO_WEIGHTS
    )


_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Files of which a folder has one if it has a tokenizer of its own."""

_OWN_TOKENIZER = "the tokenizer, with its chat template, is the adapter's"


class Checkpoint(Closing):
    """An open Hugging Face folder. Close it, or use it in a with-block.

    folder        where it is
    source        what it was opened by: the folder, a StreamedFolder whose shards stay on the Hub, or an
                  AdaptedFolder
    adapter       that is to be merged into the weights, None for none
    config        config.json as a dictionary, see `read_config`; with an adapter, that of the merged model
    files         the open shards, in reading order
    notes         what the folder holds that isn't used
    allow_pickle  read pickles where there are no safetensors files
    raises   CheckpointError (BadConfig, UnsupportedCheckpoint) when the folder is not a whole checkpoint
    """

    def __init__(self, folder: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        self.source = folder
        adapted = folder if isinstance(folder, AdaptedFolder) else None
        if adapted is not None:
            folder = adapted.folder
        self._streamed = folder if isinstance(folder, StreamedFolder) else None
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self.notes: tuple[str, ...] = ()
        if adapter_of(self.folder) is not None:
            self.notes = (NOT_USED,)
        with ExitStack() as opened:
            index = self.folder / INDEX_NAME
            if self._streamed is not None:
                places = read_index(index)
                _check_numbering([self.folder / shard.name for shard in self._streamed.shards])
                self.files: tuple[SafetensorsFile, ...] = self._streamed.open_shards(opened)
            else:
                index = _index_path(self.folder, allow_pickle=allow_pickle)
                places = read_index(index)
                if places is not None and _is_stale(index, places):
                    places = None
                    self.notes = (*self.notes, _STALE.format(index=index.name, file=SINGLE_NAME))
                self.files = tuple(
                    opened.enter_context(_open_file(path))
                    for path in _shard_paths(index, places, allow_pickle=allow_pickle)
                )
            self._tensors = _route(self.files)
            if places is not None:
                _check_index(index, places, self._tensors)
            self.adapter: Adapter | None = None
            if adapted is not None:
                weights = opened.enter_context(_open_file(adapted.weights_path(allow_pickle=allow_pickle)))
                stated = read_json_object(adapted.adapter / CONFIG_NAME)
                self.adapter = Adapter(adapted.adapter, stated, weights, adapted.scale)
                self.config = self.adapter.changed(self.config, self._tensors)
                self.notes += (_OWN_TOKENIZER,) if self.tokenizer_folder != self.folder else ()
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    @property
    def config_path(self) -> Path:
        return config_path(self.folder)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer: the adapter's where it has one, because tokens may have been added."""
        has_own = self.adapter is not None and any(
            (self.adapter.folder / name).exists() for name in _TOKENIZERS
        )
        return self.adapter.folder if self.adapter is not None and has_own else self.folder

    @property
    def is_of_mlx(self) -> bool:
        """Whether MLX has written the files, which it says in their headers."""
        return any(file.metadata.get("format") == "mlx" for file in self.files)

    def open_module(self, place: str) -> Mapping[str, RawTensor]:
        """Return the tensors of a module in a folder inside by name; its file is closed with the others."""
        file = self._opened.enter_context(_open_file(self.folder / place / SINGLE_NAME))
        self.files = (*self.files, file)
        return file.tensors

    def names(self) -> tuple[str, ...]:
        """Return the names of all stored tensors, by shard and then by name."""
        return tuple(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def raw(self, name: str) -> RawTensor:
        """Return the stored tensor `name`; MissingTensor if there is none."""
        try:
            return self._tensors[name]
        except KeyError:
            raise MissingTensor(f"{self.folder}: no tensor {name}") from None

    def remote(self) -> dict[str, str]:
        """Return an identity of each shard that stays on the Hub; empty for a folder of files."""
        return {} if self._streamed is None else self._streamed.recognised_by()

    def inputs(self) -> tuple[InputFile, ...]:
        """Return the shards and the adapter, as far as they are files here, and where tensors lie in them."""
        files = [file for file in self.files if file.tensors and self._streamed is None]
        shards = [InputFile(file.path, file.places(), file.fileno()) for file in files]
        return (*shards, *([] if self.adapter is None else [self.adapter.input]))

    def read_json(self, file_name: str) -> dict[str, Any] | None:
        """Return another JSON file of the folder as a dictionary, None if it isn't there."""
        path = self.folder / file_name
        return read_json_object(path) if path.exists() else None


def config_path(folder: Path) -> Path:
    """Return the file that describes the model: config.json, or params.json where there is only that."""
    path = folder / "config.json"
    params = folder / PARAMS_NAME
    return params if params.exists() and not path.exists() else path


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the config.json of `folder`, for callers that need no weights.

    What stands in `text_config` is brought to the top level, see `with_text_config`; a params.json in
    Mistral's own format gets `architectures`, see `mistral_config`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        if folder.exists():
            raise CheckpointError(f"{folder}: is a file, expected a folder with config.json")
        raise MissingModel(f"{folder}: no such folder")
    path = config_path(folder)
    if not path.exists():
        refuse_adapter(folder)
        raise BadConfig(f"{folder}: no config.json; expected the folder of a Hugging Face model")
    config = read_json_object(path)
    return mistral_config(config) if path.name == PARAMS_NAME else with_text_config(config)


def _index_path(folder: Path, *, allow_pickle: bool) -> Path:
    """Return where an index of the weights would be: that of pickles where there are only pickles to read."""
    pickles = folder / PICKLE_INDEX_NAME
    if not allow_pickle or any(any(folder.glob(pattern)) for pattern in WEIGHT_NAMES):
        return folder / INDEX_NAME
    return pickles if pickles.exists() else folder / INDEX_NAME


def read_index(path: Path) -> dict[str, str] | None:
    """Return tensor -> file name from an index of safetensors or of pickles, None if there is no index."""
    if not path.exists():
        return None
    ending = ".bin" if path.name == PICKLE_INDEX_NAME else ".safetensors"
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadConfig(f"{path}: no weight_map; expected a mapping of tensor names to files")
    for tensor, name in weight_map.items():
        # A bare name: an index from a stranger must not reach outside its folder.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(ending):
            raise BadConfig(
                f"{path}: {shown(tensor)}: found file {shown(repr(name))}, expected the name of"
                f" a {ending} file beside it"
            )
    return weight_map


def _open_file(path: Path) -> SafetensorsFile:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    from convert.checkpoint.pickle_file import PickleFile

    return PickleFile(path)


def _shard_paths(index: Path, places: Mapping[str, str] | None, *, allow_pickle: bool) -> list[Path]:
    """Return the shards in reading order after checking that all of them are there."""
    folder = index.parent
    if places is not None:
        counts: dict[str, int] = {}
        for name in places.values():
            counts[name] = counts.get(name, 0) + 1
        paths = [folder / name for name in sorted(counts)]
        # os.path, because Path.exists raises for a name that is too long.
        missing = [path for path in paths if not os.path.exists(path)]
        if (folder / SINGLE_NAME).exists() and SINGLE_NAME not in counts:
            raise CheckpointError(
                f"{folder}: holds {SINGLE_NAME} and {len(paths) - len(missing)} of the {len(paths)} shards of"
                f" {INDEX_NAME}; remove one of them, or the index and its shards"
            )
        if missing:
            raise CheckpointError(
                f"{folder / shown(missing[0].name)}: missing shard;"
                f" {index.name} places {counts[missing[0].name]} tensors in it"
                f" ({len(missing)} of {len(paths)} shards are missing{_others(folder, counts)})"
            )
        return paths
    for pattern in WEIGHT_NAMES:
        paths = sorted(folder.glob(pattern))
        if paths:
            _check_numbering(paths)
            return paths
    pickles = [
        path
        for pattern in PICKLE_NAMES
        for path in sorted(folder.glob(pattern))
        if is_pickle_of_weights(path.name)
    ]
    if pickles and allow_pickle:
        _check_numbering(pickles)
        return pickles
    if pickles:
        raise UnsupportedCheckpoint(
            f"{pickles[0]}: a pickle checkpoint, and reading one can run any code; expected .safetensors"
            " (save the model again with safe_serialization=True, or read it with --allow-pickle)"
        )
    refuse_adapter(folder)
    raise CheckpointError(f"{folder}: no weights; expected {SINGLE_NAME} or {INDEX_NAME}")


_STALE = "{index} names none of the files that are here; {file} is read without it, as transformers does"


def _is_stale(index: Path, places: Mapping[str, str]) -> bool:
    """Return whether a folder has a single file of weights, and none of the shards that its index names."""
    names = set(places.values())
    folder = index.parent
    return (
        index.name == INDEX_NAME
        and SINGLE_NAME not in names
        and (folder / SINGLE_NAME).exists()
        and not any(os.path.exists(folder / name) for name in names)
    )


def _others(folder: Path, named: Container[str]) -> str:
    """Return words for weights in a folder that its index doesn't name."""
    others = sorted(
        path.name for pattern in WEIGHT_NAMES for path in folder.glob(pattern) if path.name not in named
    )
    return f", and {others[0]} is here, which it doesn't name" if others else ""


def _check_numbering(paths: Iterable[Path]) -> None:
    """Raise CheckpointError when a numbered shard that another one promises is not among `paths`."""
    present = {path.name for path in paths}
    for path in paths:
        match = _NUMBERED.search(path.name)
        if match is None:
            continue
        stem, digits, count = path.name[: match.start()], len(match[1]), match[2]
        for number in range(1, min(int(count), 100_000) + 1):
            name = f"{stem}-{number:0{digits}d}-of-{count}{path.suffix}"
            if name not in present:
                raise CheckpointError(
                    f"{path.parent / name}: missing shard; {path.name} is one of {int(count)}"
                )
        return


def _route(files: Iterable[SafetensorsFile]) -> Mapping[str, RawTensor]:
    """Return name -> tensor over all shards, in reading order; CheckpointError for a name in two of them."""
    tensors: dict[str, RawTensor] = {}
    for file in files:
        for name in sorted(file.tensors):
            if name in tensors:
                other = tensors[name].path.name
                raise CheckpointError(f"{file.path}: {shown(name)}: is also in {other}")
            tensors[name] = file.tensors[name]
    return MappingProxyType(tensors)


def _check_index(index: Path, places: Mapping[str, str], tensors: Mapping[str, RawTensor]) -> None:
    """Raise CheckpointError for the first tensor that is not where the index says."""
    absent = [name for name in places if name not in tensors]
    for name, file_name in places.items():
        if name not in tensors:
            raise MissingTensor(
                f"{index.parent / file_name}: {shown(name)}: not in this shard, where {index.name} places it;"
                f" {len(absent)} of the index's {len(places)} tensors are in no shard, so shards or index are"
                " those of another save"
            )
        if tensors[name].path.name != file_name:
            raise CheckpointError(
                f"{index}: {shown(name)}: found in {tensors[name].path.name}, expected in {file_name}"
            )
    for name, tensor in tensors.items():
        if name not in places:
            raise CheckpointError(
                f"{tensor.path}: {shown(name)}: not in {index.name}, which belongs to another save;"
                " remove it if the shards are complete"
            )


_FILES = (CONFIG_NAME, WEIGHTS_NAME, PICKLE_NAME)

NOT_USED = (
    f"{CONFIG_NAME} is here, but the adapter is not used: the file holds the model without it (--lora merges"
    " an adapter)"
)

ADAPTER_TENSORS = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_magnitude_vector", ".modules_to_save.")
"""Parts of the names of weights that an adapter adds to a model, and merging takes away."""


def adapter_of(folder: Path) -> str | None:
    """Return words for the adapter in a folder, None if there is none; BadConfig for no JSON object."""
    path = folder / CONFIG_NAME
    if not path.exists():
        return None
    content = read_json_object(path)
    kind, base = content.get("peft_type"), content.get("base_model_name_or_path")
    name = "a LoRA adapter" if kind in (None, "LORA") else f"an adapter ({shown(str(kind))})"
    return f"{name} of {shown(str(base)) if base else 'a model that it does not name'}"


def refuse_adapter(folder: Path) -> None:
    """Raise UnsupportedCheckpoint for a folder that has an adapter, itself or one folder below: no model."""
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        file = next((name for name in _FILES if (place / name).exists()), None)
        if file is not None:
            adapter = adapter_of(place) or "an adapter (LoRA or another) of a model that nothing names"
            raise UnsupportedCheckpoint(
                f"{place}: {adapter} ({file}), and no model: convert the folder of that model, with --lora"
                f" {place}"
            )
