"""TowerConfig: what config.json and the image processor's settings say of a vision tower, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.config_reader import MAX_LAYERS, ConfigReader
from convert.checkpoint.checkpoint import read_json_object_if_there
from gguf_tools.errors import UnsupportedCheckpoint


@dataclass(frozen=True)
class TowerConfig:
    """Configuration of a vision tower; names as in `vision_config`, or as most models have them.

    projection_dim  columns of the text model's hidden states, which the tower's last matrix makes
    image_size      pixels of a side of the images that positions were learned for
    patch_size      pixels of a side of a patch
    layer_norm_eps  of the norms of the tower
    image_mean      what is subtracted from the channels of an image, between 0 and 1
    image_std       what they are divided by then
    """

    projection_dim: int
    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Colors of a pixel."""
        return 3

    @property
    def qkv_rows(self) -> int:
        """Rows of queries, keys and values stored as one matrix."""
        return 3 * self.hidden_size

    @property
    def n_patches(self) -> int:
        """Patches of an image of `image_size`."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class AudioConfig:
    """Configuration of an audio tower; names as in `audio_config`, or as most models have them.

    projection_dim  columns of the text model's hidden states
    n_mels          bands of a spectrum
    """

    projection_dim: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_mels: int
    layer_norm_eps: float


def part_of(raw: Mapping[str, Any], key: str, path: str | Path, defaults: Mapping[str, Any]) -> ConfigReader:
    """Return a reader of an object in config.json, in which `defaults` stand for the keys that it lacks.

    raises  UnsupportedCheckpoint where config.json has no such object
    """
    part = raw.get(key)
    if not isinstance(part, dict) or not part:
        raise UnsupportedCheckpoint(f"{path}: no {key}, so there is nothing to make an mmproj file of")
    return ConfigReader({**defaults, **part}, path, prefix=f"{key}.")


def tower_fields(raw: Mapping[str, Any], vision: ConfigReader, *, least: int = 1) -> dict[str, Any]:
    """Return the fields of TowerConfig that every tower reads in the same way; all but image_size.

    raw     config.json, with the keys of its text_config
    vision  its vision_config, in which the number of layers is `num_hidden_layers`
    least   fewest layers, and width of their blocks
    """
    mean, std = _image_statistics(vision.path)
    return {
        "projection_dim": ConfigReader(raw, vision.path).size("hidden_size"),
        "patch_size": vision.size("patch_size"),
        "hidden_size": vision.size("hidden_size"),
        "intermediate_size": vision.size("intermediate_size", least=least),
        **_layer_fields(vision, least),
        "layer_norm_eps": vision.number("layer_norm_eps", 1e-6),
        "image_mean": mean,
        "image_std": std,
    }


def audio_fields(audio: ConfigReader, projection_dim: int, *, least: int = 1) -> dict[str, Any]:
    """Return the fields of AudioConfig that every tower reads in the same way; all but intermediate_size."""
    return {
        "projection_dim": projection_dim,
        "hidden_size": audio.size("hidden_size", most=2**20),
        **_layer_fields(audio, least),
        "n_mels": audio.size("input_feat_size", 128),
        "layer_norm_eps": audio.number("layer_norm_eps", 1e-6),
    }


def _layer_fields(read: ConfigReader, least: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": read.size("num_hidden_layers", least=least, most=MAX_LAYERS),
        "num_attention_heads": read.size("num_attention_heads", least=least),
    }


def read_preprocessor(config_path: str | Path) -> ConfigReader:
    """Read the settings of the image processor, which stand in one or two files beside config.json.

    What processor_config.json says wins over preprocessor_config.json, as in llama.cpp's converter.
    """
    settings: dict[str, Any] = {}
    path = Path(config_path)
    for name, inner in (("preprocessor_config.json", "media_proc_cfg"),
                        ("processor_config.json", "image_processor")):  # fmt: skip
        beside = path.with_name(name)
        stated = read_json_object_if_there(beside)
        nested = stated.get(inner)
        settings |= stated | (nested if isinstance(nested, dict) else {})
        path = beside if stated else path
    return ConfigReader(settings, path)


def _image_statistics(config_path: str | Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of the channels of images."""
    read = read_preprocessor(config_path)

    def channels(key: str) -> tuple[float, ...]:
        stated = read.raw.get(key)
        if not isinstance(stated, list) or len(stated) != 3:
            raise read.bad(key, "three numbers (preprocessor_config.json or processor_config.json has them)")
        if not all(type(number) in (int, float) and abs(number) < 1e30 for number in stated):
            raise read.bad(key, "three numbers")
        return tuple(float(number) for number in stated)

    return channels("image_mean"), channels("image_std")
