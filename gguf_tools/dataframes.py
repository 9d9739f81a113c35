"""Rows of results as a table of pandas, which is not needed for anything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gguf_tools.errors import BadRequest

if TYPE_CHECKING:
    import pandas


def dataframe(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Make a table of rows; raises BadRequest where pandas is missing."""
    if find_spec("pandas") is None:
        raise BadRequest("a DataFrame needs pandas: pip install pandas; rows() needs nothing")
    import pandas

    return pandas.DataFrame(list(rows))
