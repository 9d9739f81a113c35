"""Claims of a file's header: its file type, its importances, a calibration. What can't be true is found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from convert.rederive.options import RederiveOptions
from gguf_tools.errors import BadArgument, BadRequest, ToolkitError
from gguf_tools.findings import Finding, Level
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from quantize.importances.entries import ImportanceFile
from quantize.options import METHOD_KEY, REFINED_KEY
from quantize.plan.decide import PlanOptions, decide, draft
from quantize.plan.model_facts import ModelFacts
from quantize.plan.plan import in_file_order
from quantize.plan.recipe import Recipe
from quantize.plan.recipes import FILE_TYPES, find_recipe
from quantize.prepare import TYPES_CHOSEN_KEY
from quantize.roles import Role, layer_of, tensor_role

_IMATRIX_KEYS = (
    keys.QUANTIZE_IMATRIX_ENTRIES_COUNT, keys.QUANTIZE_IMATRIX_CHUNKS_COUNT,
    keys.QUANTIZE_IMATRIX_FILE, keys.QUANTIZE_IMATRIX_DATASET,
)  # fmt: skip


def says_importances(metadata: Metadata) -> bool:
    """Whether a file says that it was made with importances."""
    return any(key in metadata for key in _IMATRIX_KEYS)


def refuse_what_lacks(file: GGUFSource, options: RederiveOptions) -> None:
    """Raise BadRequest for a refined file, BadArgument for a text or importances that are missing."""
    if REFINED_KEY in file.metadata:
        raise BadRequest(
            f"{file.path}: was refined ({REFINED_KEY}), and such bytes can't be made again by this version;"
            " gguf-tools audit compares its values"
        )
    if options.calibration is not None or METHOD_KEY in file.metadata:
        if options.sample is not None:
            raise BadArgument(f"{file.path}: was calibrated, so all of it is made again; leave --sample out")
        if options.calibration is None or options.importances is not None:
            raise BadArgument(f"{file.path}: was calibrated; name the text alone, with --calibrate")
    elif options.importances is None and says_importances(file.metadata):
        named = file.metadata.get(keys.QUANTIZE_IMATRIX_FILE)
        which = f" {named.data}" if named is not None else ""
        raise BadArgument(
            f"{file.path}: was made with importances{which}; name the file that they are in with --imatrix"
        )


def importance_findings(metadata: Metadata, matrix: ImportanceFile | None) -> Iterator[Finding]:
    """Yield what a file says of its importances that does not fit those that are given."""
    if matrix is None:
        return
    if not says_importances(metadata):
        yield Finding("importances", "the file does not say that it was made with importances", Level.NOTE)
    found = {
        keys.QUANTIZE_IMATRIX_ENTRIES_COUNT: len(matrix.entries),
        keys.QUANTIZE_IMATRIX_CHUNKS_COUNT: matrix.chunk_count,
    }
    for key, number in found.items():
        said = metadata.get(key)
        if said is not None and number and said.data != number:
            text = f"the file says {said.data}, the importances have {number}: another file of importances"
            yield Finding("importances", text, Level.WARNING, (key,))


Types = Mapping[str, GGMLType]


def file_type_finding(
    file: GGUFSource,
    sources: Sequence[TensorInfo],
    base: Metadata,
    *,
    is_weighed: bool,
    as_if: GGMLType | None,
) -> tuple[str, Finding | None]:
    """Find the words that give a file's types: "Q4_K_M --pure"; and what its file type says that can't be so.

    sources     tensors that it is made of, by the file's names
    base        metadata of what they are in, by which types were decided
    is_weighed  whether importances are given
    as_if       the type that they count as, as `build_plan` takes it
    """
    said = file.metadata.get(keys.FILE_TYPE)
    recipe = None if said is None else _recipe(str(said.data))
    if recipe is None or recipe.default is None or TYPES_CHOSEN_KEY in file.metadata:
        return "", None
    types = {info.name: file.tensor(info.name).type for info in sources}
    is_weighed |= says_importances(file.metadata)
    planner = _Planner((base, file.metadata), sources, types, is_weighed, as_if)
    misfits, words = planner.nearest(recipe)
    if not misfits:
        return words, None
    others = (each for name in FILE_TYPES if (each := find_recipe(name)) != recipe and each.default)
    fitting = next((words for each in others for wrong, words in [planner.nearest(each)] if not wrong), "")
    about = (keys.FILE_TYPE,)
    if fitting:
        text = f"says {recipe.name}, and the types are those of {fitting}"
        return fitting, Finding("file-type", text, Level.BAD, about)
    # The types of embeddings and output can always be those of options, so they say nothing.
    of_layers = {name for name, each in types.items() if each.is_quantized and layer_of(name) is not None}
    n_types, n_wrong = len(of_layers), len(of_layers.intersection(misfits))
    text = f"says {recipe.name}, by which {n_wrong} of {n_types} matrices would have another type"
    if n_wrong == n_types:
        return "", Finding("file-type", text, Level.BAD, about)
    level = Level.WARNING if 2 * n_wrong > n_types else Level.NOTE
    return f"{recipe.name} with types by hand", Finding("file-type", text, level, about)


def _recipe(number: str) -> Recipe | None:
    try:
        return find_recipe(number)
    except BadArgument:
        return None


class _Planner:
    """Plans types for the tensors of a file, in the words that its types leave open."""

    def __init__(
        self,
        models: Sequence[Metadata],
        sources: Sequence[TensorInfo],
        types: Types,
        is_weighed: bool,
        as_if: GGMLType | None,
    ) -> None:
        self._types, self._is_weighed, self._as_if = types, is_weighed, as_if
        self._sources = in_file_order(sources)
        has_layers = any(layer_of(info.name) is not None for info in sources)
        facts = (ModelFacts.from_metadata(each, has_layers=has_layers) for each in models)
        self._facts = tuple(dict.fromkeys(facts))

    def nearest(self, recipe: Recipe) -> tuple[list[str], str]:
        """Find the options under which a recipe gives the file's types, or nearly: misfits, and the words."""
        tried = []
        for by_hand, facts, pure in product((False, True), self._facts, (False, True)):
            options, words = self._options(recipe, pure, output=by_hand, embedding=by_hand)
            tried.append((self._misfits(recipe, options, facts), words, facts, pure))
            if not by_hand and not tried[-1][0]:
                return [], words
        misfits, words, facts, pure = min(tried, key=lambda each: len(each[0]))
        if misfits:
            return misfits, words
        for embedding, output in ((False, True), (True, False)):
            options, fewer = self._options(recipe, pure, output=output, embedding=embedding)
            if not self._misfits(recipe, options, facts):
                return [], fewer
        return [], words

    def _options(
        self, recipe: Recipe, pure: bool, *, output: bool, embedding: bool
    ) -> tuple[PlanOptions, str]:
        of_output = self._types.get("output.weight") or self._types.get("token_embd.weight")
        of_embedding = self._types.get("token_embd.weight")
        words = [recipe.name, *(["--pure"] * pure)]
        options = PlanOptions(pure=pure, allow_requantize=True)
        if output and of_output is not None:
            options = replace(options, output_type=of_output)
            words.append(f"--output-tensor-type {of_output}")
        if embedding and of_embedding is not None:
            options = replace(options, embedding_type=of_embedding)
            words.append(f"--token-embedding-type {of_embedding}")
        return options, " ".join(words)

    def _misfits(self, recipe: Recipe, options: PlanOptions, facts: ModelFacts) -> list[str]:
        """List the tensors to which a recipe gives another type; all where it can't be planned.

        Floats stay what they were in the source, which may not be the one that the file was made of.
        """

        def role_of(info: TensorInfo) -> Role:
            return tensor_role(info.name, info.shape, facts.architecture, recipe.program).role

        drafts = [draft(info, info.name, role_of(info), self._as_if) for info in self._sources]
        try:
            decided = decide(drafts, recipe, facts, self._is_weighed, options)
        except ToolkitError:
            return list(self._types)
        pairs = (
            (each.name, self._types.get(each.name, each.target_type), each.target_type) for each in decided
        )
        return [
            name
            for name, found, planned in pairs
            if found != planned and (found.is_quantized or planned.is_quantized)
        ]
