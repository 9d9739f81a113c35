"""What to know before running a converted decoder: where llama.cpp computes something else."""

from __future__ import annotations

from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.rope import RopeConfig


def decoder_notes(config: DecoderConfig) -> tuple[str, ...]:
    """Return a note for each way in which llama.cpp computes something else than the original."""
    return tuple(note for note in (_window_note(config), *_rope_notes(config.rope)) if note)


def _window_note(config: DecoderConfig) -> str | None:
    window = config.sliding_window
    if window is None or not config.sliding_layers or window >= config.max_position_embeddings:
        return None
    return (
        f"{len(config.sliding_layers)} layers of the original see the last {window} positions; the file has"
        " no place for that, and llama.cpp lets them see all"
    )


def _rope_notes(rope: RopeConfig) -> tuple[str | None, ...]:
    if rope.kind == "dynamic":
        return (
            "RoPE of type dynamic: the file says nothing of it, so beyond max_position_embeddings llama.cpp"
            " rotates otherwise",
        )
    if rope.kind == "longrope":
        return ("RoPE of type longrope: the file names it without its factors, and llama.cpp uses none",)
    return ()
