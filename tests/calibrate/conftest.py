"""The trained small model and its files, as the tests of `quality` have them."""

from tests.quality.conftest import damaged, made, text, tiny_folder

__all__ = ["damaged", "made", "text", "tiny_folder"]
