"""The file types as a list for people."""

from __future__ import annotations

from collections.abc import Iterator

from gguf_tools.format.ggml_types import by_name
from quantize.formats import encodable
from quantize.plan.ik_recipes import IK_RECIPES
from quantize.plan.recipe import Recipe
from quantize.plan.recipes import ALIASES, RECIPES


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
