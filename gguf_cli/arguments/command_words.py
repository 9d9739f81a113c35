"""The words of `quantize` that are no options: files, types, threads; and the list of types in its help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from gguf_cli.command import threads
from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import output_path
from gguf_tools.format.ggml_types import by_name
from gguf_tools.system.locks import MAX_THREADS
from gguf_tools.text import did_you_mean, quoted
from quantize.formats import encodable
from quantize.plan.ik_recipes import IK_RECIPES
from quantize.plan.recipe import Recipe
from quantize.plan.recipe_files import is_recipe_file
from quantize.plan.recipes import ALIASES, FILE_TYPES, RECIPES, find_recipe


def command_words(
    words: Sequence[str], parser: argparse.ArgumentParser, *, needs_type: bool = True
) -> tuple[str, Path | None, str | None, int | None]:
    """Return (input, output or None, type or None, threads or None) of `INPUT [OUTPUT] TYPE [THREADS]`.

    As in llama-quantize, a second word that is a type is the type. With a size, there may be no type.
    """
    source, *rest = words
    output = None
    if rest and not _is_type(rest[0]):
        output, *rest = rest
    type_ = None
    if needs_type or (rest and not rest[0].isdecimal()):
        if not rest or not _is_type(rest[0]):
            parser.error(_no_type_text(words))
        type_, *rest = rest
    if len(rest) > 1:
        parser.error(f"unexpected argument {rest[1]!r}")
    n_threads = None
    if rest:
        if output is None and not rest[0].isdecimal():
            parser.error(_no_type_text(words))
        try:
            n_threads = threads(rest[0])
        except (ValueError, argparse.ArgumentTypeError):
            parser.error(f"THREADS is {quoted(rest[0])}, expected a whole number from 1 to {MAX_THREADS}")
    return source, None if output is None else output_path(output), type_, n_threads


def _no_type_text(words: Sequence[str]) -> str:
    """Describe the mistake in words that have no type in its place."""
    types = [word for word in words if not word.isdecimal() and _is_type(word)]
    if types:
        others = [word for word in words if word not in types]
        return f"TYPE comes after the files: quantize {' '.join([*others, *types])}"
    last = words[-2] if len(words) > 3 and words[-1].isdecimal() else words[-1]
    looks_like_a_file = len(words) < 3 and (Path(last).suffix == ".gguf" or Path(last).exists())
    if looks_like_a_file:
        return "no TYPE is given, for instance Q4_K_M"
    return f"unknown file type {last!r}{did_you_mean(last, FILE_TYPES)}"


def _is_type(word: str) -> bool:
    """Whether a word names a type, a recipe file, or several with commas between them."""
    first, comma, rest = word.partition(",")
    try:
        find_recipe(first)
    except BadRequest:
        if not is_recipe_file(first):
            return False
    return _is_type(rest) if comma else True


def recipe_lines() -> Iterator[str]:
    """Yield the lines of a list of all file types, for --help."""
    yield from map(_recipe_line, RECIPES.values())
    yield "  " + ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    interleaved = [r for r in IK_RECIPES.values() if r.default and by_name(r.default).rows_interleaved > 1]
    yield "\ntypes of ik_llama.cpp, which only it can read:"
    yield from (_recipe_line(recipe) for recipe in IK_RECIPES.values() if recipe not in interleaved)
    yield "\nthe same with rows interleaved, for CPUs (see gguf-tools repack):"
    yield from (_recipe_line(recipe) for recipe in interleaved)


def _recipe_line(recipe: Recipe) -> str:
    number = "" if recipe.file_type is None else str(recipe.file_type)
    if recipe.default is None:
        what = "every tensor as it is"
    else:
        what = f"mostly {recipe.default}, {by_name(recipe.default).bits_per_weight:.2f} bits"
        what += ", needs --imatrix" * (recipe.default in recipe.need_importances)
    types = {recipe.default, *(rule.type for rule in recipe.rules)} - {None}
    limit = "" if types <= {*encodable()} else " (plan only)"
    return f"  {recipe.name:10} {number:>3}  {what}{limit}"
