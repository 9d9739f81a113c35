"""The core of the suite: `pytest -m core` is what to run after every change, in less than half a minute.

A test belongs to it unless it needs llama.cpp, torch or another process, or tries a codec that has a nearer
relative in the core. Nothing needs to be marked: what a test reaches decides. Of a test with many cases, a
few stand for all.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).parent

pytest_plugins = ("tests.imatrix.evaluate.trained_files",)
"""Where fixtures are that several folders use."""

LARGE = (
    "attack",
    "contract",
    "convert/architectures/deepseek2/test_logits.py",
    "convert/architectures/test_deepseek4_logits.py",
    "convert/architectures/test_relatives_logits.py",
    "convert/audit",
    "convert/card",
    "convert/checkpoint/test_hub.py",
    "convert/checkpoint/test_stream.py",
    "convert/weights/test_packed_weights.py",
    "convert/weights/test_recorded_checkpoints.py",
    "end_to_end",
    "fuzz",
    "hostile",
    "gguf_tools/commands/cook",
    "gguf_tools/commands/test_imatrix.py",
    "gguf_tools/cluster",
    "imatrix/calibrate",
    "imatrix/evaluate",
    "imatrix/forward",
    "imatrix/sensitivities",
    "imatrix/test_arch.py",
    "imatrix/test_collect.py",
    "imatrix/test_collect_decoders.py",
    "imatrix/test_collect_deepseek4.py",
    "imatrix/test_device.py",
    "imatrix/test_memory.py",
    "imatrix/test_mtp.py",
    "gguf_tools/edit/test_in_place.py",
    "gguf_tools/hub/test_upload.py",
    "gguf_tools/scanning/test_scan_templates.py",
    "quantize/fill/test_error_ranges.py",
    "quantize/fill/test_precompile.py",
    "quantize/formats/test_grids.py",
    "quantize/formats/test_ik.py",
    "quantize/formats/test_iq1.py",
    "quantize/formats/test_kept_answers.py",
    "quantize/mla_layout",
    "quantize/plan/test_any_architecture.py",
    "quantize/plan/test_layouts.py",
    "quantize/rounding",
    "quantize/simd",
    "quantize/size",
    "quantize/test_whole_files.py",
)
"""Tests that go through whole commands, models or files, or compile kernels of their own; below tests/."""

OUTSIDE = frozenset(
    {
        "oracle",
        "matplotlib",
        "torch",
        "transformers",
        "subprocess",
        "fork",
        "in_child",
        "killed_at",
        "ask_worker",
        "ChatRenderer",
    }
)
"""Names by which a test reaches what is outside of this process, or takes seconds to load."""

GRIDS = "quantize/rounding/test_grid_rounders.py"
SENSITIVITY = "imatrix/sensitivities/test_sensitivity.py"

SAMPLED = {
    f"{GRIDS}::test_a_read_block_has_the_values_that_it_decodes_to": 3,
    f"{GRIDS}::test_the_first_sub_block_gets_the_scale_and_points_of_the_twin": 3,
    f"{GRIDS}::test_the_first_sub_block_is_chosen_anew_as_by_the_twin": 3,
    "quantize/rounding/test_rounders.py::test_odd_rows_are_encoded_too": 3,
    "quantize/rounding/test_refine.py::test_every_sweep_lowers_the_cost": 3,
    f"{GRIDS}::test_costs_are_those_of_what_the_bytes_decode_to": 3,
    "end_to_end/test_complete.py::test_a_mixed_file_completes_a_prompt": 6,
    "end_to_end/test_error_ranges.py::test_trained_rows_stay_well_inside": 10,
    "hostile/test_gguf.py::test_command_ends_in_one_line": 3,
    "hostile/test_paths.py::test_no_output_replaces_an_input": 3,
    "hostile/test_paths.py::test_only_our_own_files_beside_an_output_are_replaced": 6,
    "quantize/fill/test_error_ranges.py::test_generated_rows_use_about_half_of_the_limit": 5,
    "quantize/fill/test_verify.py::test_whatever_the_codecs_make_of_odd_rows_is_good": 5,
    "quantize/formats/test_formats.py::test_a_block_that_is_not_finite_is_named": 9,
    "quantize/mla_layout/test_change_layout.py::test_value_rows_of_any_type_are_regrouped_row_by_row": 3,
    "quantize/plan/test_any_architecture.py::test_plans_equal_the_recorded_ones": 24,
    "quantize/plan/test_layouts.py::test_plans_equal_the_recorded_ones": 3,
    "attack/test_attack.py::test_a_few_trials": 4,
    "end_to_end/test_quantize_tiny.py::test_with_importances": 4,
    "end_to_end/test_quantize_tiny.py::test_with_importances_in_the_older_form": 12,
    "end_to_end/test_quantize_tiny.py::test_without_importances": 4,
    "gguf_tools/test_progress.py::test_functions_that_compute_have_one_bar_that_ends_full": 6,
    "hostile/test_changed_models.py::test_importances": 4,
    "hostile/test_numbers.py::test_feedback_never_makes_what_the_encoder_refuses": 6,
    "hostile/test_numbers.py::test_the_tensor_the_row_and_the_weight_are_named": 6,
    "imatrix/calibrate/refine/test_codes.py::test_without_steps_bytes_are_those_of_the_file": 9,
    "imatrix/calibrate/refine/test_scales.py::test_the_same_scales_are_the_same_bytes": 9,
    "imatrix/evaluate/suite/test_evaluate_suite.py::test_a_class_has_the_numbers_of_its_text_alone": 2,
    "imatrix/test_collect.py::test_a_disk_that_fails_leaves_what_a_rerun_needs": 4,
    "imatrix/test_device.py::test_another_device_gives_the_same": 3,
    "quantize/rounding/test_refine.py::test_a_block_moves_where_that_costs_less": 3,
    "hostile/test_numbers.py::test_no_scale_is_ever_nan_or_infinite": 2,
    "imatrix/calibrate/refine/test_codes.py::test_points_of_grids_go_against_the_derivative": 3,
    "imatrix/calibrate/refine/test_scales.py::test_twice_the_scales_are_twice_the_weights": 9,
    "imatrix/evaluate/suite/test_default_suite.py::test_every_class_has_chunks": 3,
    "imatrix/evaluate/test_evaluate.py::test_measures_are_those_of_transformers": 2,
    f"{SENSITIVITY}::test_damages_of_a_gemma_are_those_of_the_whole_models_gradients": 3,
    "imatrix/test_collect_decoders.py::test_entries_counts_and_values": 2,
    "quantize/formats/test_formats.py::test_halves_are_read_as_the_floats_they_are": 3,
    "quantize/rounding/test_rounders.py::test_correlated_columns_cost_less_than_with_the_stock_encoder": 3,
    "end_to_end/test_header_keys.py::test_a_header_counts_as_in_llama_cpp": 3,
    "end_to_end/test_published_compute.py::test_mixed_files_complete_a_prompt": 2,
    "imatrix/evaluate/test_evaluate.py::test_an_interrupted_run_resumes": 4,
    "imatrix/evaluate/test_evaluate.py::test_a_model_does_not_diverge_from_itself": 2,
    "imatrix/evaluate/test_kept.py::test_a_later_run_gives_the_same_numbers_without_the_base": 2,
    "imatrix/forward/test_differentiate.py::test_gradients_equal_those_of_transformers": 3,
    "imatrix/forward/test_mtp.py::test_drafts_equal_those_of_llama": 2,
    # --- less often than these, because a process compiles a kernel, or a command runs, for each case
    "hostile/test_numbers.py::test_an_interleaved_type_beside_plain_ones": 8,
    "hostile/test_damaged_work.py::test_what_a_crash_has_damaged_is_computed_again": 3,
    "hostile/test_dry_runs.py::test_some_pairs": 3,
    "hostile/test_odd_flags.py::test_outputs_that_no_file_can_have": 4,
    "hostile/test_power_failure.py::test_a_power_failure_costs_a_minute_or_a_layer": 3,
    "hostile/test_same_model.py::test_another_model_is_refused_whichever_side_is_changed": 2,
    "convert/audit/test_faults.py::test_a_fault_is_named": 3,
    "convert/rederive/test_rederive.py::test_own_files_are_the_same": 3,
    "convert/rederive/test_rederive.py::test_llama_cpps_files_are_the_same": 3,
    "convert/architectures/deepseek2/test_logits.py::test_logits_equal_transformers": 3,
    "convert/tokenizer/test_pretokenizers.py::test_other_spellings": 2,
    "end_to_end/test_interrupted.py::test_another_run_is_refused_and_the_interrupted_one_can_go_on": 2,
    "end_to_end/test_interrupted.py::test_a_chunk_that_fails": 2,
    "end_to_end/test_interrupted.py::test_a_write_that_fails": 2,
    "end_to_end/test_other_systems.py::test_the_bytes_are_the_same_elsewhere": 2,
    "end_to_end/test_quantize_files.py::test_output_equals_llama_quantizes": 2,
    "end_to_end/test_quantize_tiny.py::test_llama_cpp_runs_it": 2,
    "gguf_tools/scanning/test_scan_templates.py::test_hostile_templates": 4,
    "imatrix/calibrate/refine/test_codes.py::test_the_nearest_point_is_found": 6,
    "imatrix/calibrate/refine/test_codes.py::test_weights_go_against_their_derivative": 4,
    "imatrix/calibrate/refine/test_scales.py::test_derivatives_are_those_of_the_decoder": 6,
    "imatrix/calibrate/run/test_cluster.py::test_bytes_are_those_of_threads": 2,
    "imatrix/calibrate/run/test_gradients.py::test_covariances_equal_those_of_plain_autograd": 2,
    "imatrix/evaluate/test_charts.py::test_numbers_are_readable": 4,
    "imatrix/forward/test_cuttings.py::test_ids_are_llama_cpps": 3,
    "imatrix/test_dry_run.py::test_it_tells_three_things_and_writes_nothing": 3,
    f"{SENSITIVITY}::test_damages_are_those_of_the_whole_models_gradients": 2,
    "quantize/formats/test_formats.py::test_bytes_equal_the_naive_twin": 3,
    "quantize/plan/test_ik_recipes.py::test_plans_equal_the_recorded_ones": 4,
    "quantize/rounding/test_rounders.py::test_a_row_is_encoded_the_same_whatever_stands_beside_it": 4,
    "quantize/simd/test_tiles.py::test_packed_codes_unpack": 3,
    "quantize/simd/test_tiles.py::test_stored_blocks_end_where_the_array_ends": 3,
}
"""Tests whose cases show nearly the same: about one of so many runs always, at least one; others are slow."""

CODECS = frozenset({"F32", "F16", "Q4_0", "Q4_K", "IQ2_XXS", "MXFP4", "TQ1_0"})
"""Codecs that stand for their families."""

CASES = 3
"""So many cases of one test are in the core."""


def pytest_configure(config: pytest.Config) -> None:
    """Let commands under test keep compiled modules, let idle threads sleep, and let Ctrl-C reach commands.

    Where the environment says that Python writes no bytecode, each of hundreds of processes would compile
    the library anew, which takes half a second. OpenMP's threads spin while they wait, in the way of the
    other workers. A process that starts with SIGINT ignored, as a shell starts a suite in the background,
    hands that on to its children, and Python respects it.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't even import large files when only the core is wanted: that takes most of the time."""
    return (config.getoption("markexpr") == "core" and is_large(collection_path)) or None


@cache
def is_large(path: Path) -> bool:
    return not {ROOT / large for large in LARGE}.isdisjoint((path, *path.parents))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Find the tests without Python's collector of cycles, and let it leave them alone afterwards.

    They are a million objects that live until the end. To look at all of them again and again, in vain, was
    a third of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions = [item for item in items if isinstance(item, pytest.Function)]
    for _, cases in groupby(functions, key=_test_of):
        for item in spares(list(cases)):
            item.add_marker("slow")
    if "core" in config.getoption("markexpr"):
        for _, cases in groupby(filter(is_core, functions), key=_test_of):
            for item in spread(list(cases)):
                item.add_marker("core")


def _test_of(item: pytest.Function) -> str:
    """Return the id of the test that an item is a case of."""
    return item.nodeid.partition("[")[0]


def spread(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return at most CASES of the cases of one test, evenly spaced."""
    return cases[:: -(-len(cases) // CASES)]


def spares(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return the cases of one test that are not of the sample that runs always, which names choose."""
    of = SAMPLED.get(f"{_name_of(cases[0].path)}::{cases[0].originalname}", 1)
    numbers = [crc32(item.name.encode()) for item in cases]
    kept = {number for number in numbers if number % of == 0} or {min(numbers)}
    return [item for item, number in zip(cases, numbers, strict=True) if number not in kept]


@cache
def _name_of(path: Path) -> str:
    """Return the name of a file below tests/."""
    return path.relative_to(ROOT).as_posix()


def is_core(item: pytest.Function) -> bool:
    if is_large(item.path) or item.get_closest_marker("slow"):
        return False
    if not all(_is_a_usual_case(value) for value in _parameters(item)):
        return False
    fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
    return OUTSIDE.isdisjoint(_names_reached(item.function, *fixtures))


def _parameters(item: pytest.Function) -> Iterator[Any]:
    if hasattr(item, "callspec"):
        yield from item.callspec.params.values()


def _is_a_usual_case(value: object) -> bool:
    """Whether a parameter is neither a codec with a nearer relative in the core, nor a dtype of halves."""
    from quantize.formats import available

    if isinstance(value, type):
        return value not in (np.float16, ml_dtypes.bfloat16)
    name = value if isinstance(value, str) else getattr(value, "name", None)
    return not isinstance(name, str) or name not in available() or name in CODECS


@cache
def _names_reached(*tested: Any) -> set[str]:
    """Return the names that tests and fixtures use, and those that helpers in the tests use for them."""
    names: set[str] = set()
    seen: set[int] = set()
    functions = list(tested)
    while functions:
        function = functions.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        used = set(_names_in(function.__code__))
        names |= used
        for name in used & function.__globals__.keys():
            value = function.__globals__[name]
            if getattr(value, "__module__", "").startswith("tests."):
                functions += vars(value).values() if isinstance(value, type) else [value]
    return names


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, and its strings: `importorskip("torch")`."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant
