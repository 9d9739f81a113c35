"""Options go into JSON and come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gguf_tools as gt
from gguf_tools.argument_types import CheckedFields
from gguf_tools.errors import BadArgument, WrongType

COUNTS = st.integers(1, 1 << 30)
NAMES = st.text(min_size=1, max_size=8)
TYPES = st.sampled_from([gt.GGMLType.Q4_K, gt.GGMLType.F16])
CUTS = st.builds(gt.Cut, COUNTS, st.integers(0, 9), st.none() | COUNTS, st.booleans())
FORWARD = st.builds(
    gt.ForwardOptions, st.none() | NAMES, st.sampled_from(["float32", "bfloat16"]),
    n_threads=st.none() | st.integers(1, 99), scheduler=st.none() | st.just("local:2"),
)  # fmt: skip
OVERRIDES = st.sampled_from(["ffn_down=Q6_K", r"blk\.\d+\.attn=q8_0"]).map(
    lambda word: gt.parse_overrides([word])
)
PLANS = st.builds(
    gt.PlanOptions, OVERRIDES, output_type=st.none() | TYPES, prune_layers=st.tuples(COUNTS),
    types=st.dictionaries(NAMES, TYPES, max_size=2),
    grids=st.dictionaries(NAMES, st.builds(gt.KeptGrid, TYPES, NAMES), max_size=2),
)  # fmt: skip
VALUES = st.sampled_from([gt.Value.u32(7), gt.Value.string("x"), gt.Value.i32s([1, -2])])
OPTIONS = st.one_of(
    CUTS,
    FORWARD,
    PLANS,
    st.builds(gt.EvaluateOptions, CUTS, FORWARD, work=st.none() | st.just(Path("work")), force=st.booleans()),
    st.builds(gt.CollectOptions, CUTS, dataset=st.none() | NAMES, forward=FORWARD, earlier=st.just("a.gguf")),
    st.builds(gt.SensitivityOptions, CUTS, st.none() | st.just(("Q4_K", "Q6_K"))),
    st.builds(gt.RefineOptions, CUTS, st.none() | st.floats(0.1, 9), seed=COUNTS),
    st.builds(gt.Calibration, NAMES, CUTS, st.booleans(), forward=FORWARD),
    st.builds(gt.AuditOptions, st.none() | st.booleans(), ignore=st.tuples(NAMES)),
    st.builds(gt.RunOptions, st.none() | st.integers(1, 9), reuse=st.just(("a.gguf", "b.gguf"))),
    st.builds(gt.QuantizeOptions, types=st.none() | PLANS, kv_overrides=st.tuples(st.tuples(NAMES, VALUES))),
    st.builds(gt.ConvertOptions, outtype=st.just("Q4_K_M"), pad=st.none() | st.just("256")),
)


@settings(deadline=None)
@given(OPTIONS)
def test_options_come_back(options: CheckedFields) -> None:
    assert type(options).from_json(json.loads(json.dumps(options.to_json()))) == options


@pytest.mark.parametrize(
    ("class_", "data", "said"),
    [
        (gt.ForwardOptions, {"dtpe": "float32"}, "ForwardOptions has no field 'dtpe'; did you mean dtype?"),
        (gt.Cut, {"x": 1}, "Cut has no field 'x'; expected chunk_size, from_chunk, n_chunks, parse_special"),
        (gt.EvaluateOptions, {"cut": {"chunks": 1}}, "Cut has no field 'chunks'; did you mean n_chunks?"),
        (gt.Cut, {"chunk_size": 0}, "chunk_size: found 0, expected a whole number from 1 to 2147483647"),
        (gt.Cut, [512], "Cut: found a value of type list, expected an object with its fields"),
        (gt.Calibration, {}, "Calibration: text is missing"),
        (gt.PlanOptions, {"output_type": "Q9"}, "unknown tensor type 'Q9'"),
    ],
)
def test_what_is_wrong_is_one_line(class_: Any, data: object, said: str) -> None:
    with pytest.raises(BadArgument) as caught:
        class_.from_json(data)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (gt.RunOptions(progress=print), "progress"),
        (gt.QuantizeOptions(calibration=gt.Calibration("t.txt")), "calibration"),
        (gt.QuantizeOptions(importances={"a": np.ones(4)}), "importances"),
    ],
)
def test_what_json_cannot_hold_is_refused(options: CheckedFields, name: str) -> None:
    with pytest.raises(
        WrongType, match=f"^{name}: found a value of type .*, which options in JSON can't hold"
    ):
        options.to_json()
