"""`imatrix.collect` takes the words of the command line as keywords."""

from __future__ import annotations

import pytest

import imatrix
from gguf_tools.choices import with_choices


def test_choices_are_all_fields() -> None:
    options = (imatrix.CollectOptions(), imatrix.Cut(), imatrix.ForwardOptions())
    fields = [(name, getattr(each, name)) for each in options for name in each.__dataclass_fields__]
    assert len(dict(fields)) == len(fields)
    assert with_choices(dict(fields), imatrix.CollectOptions()) == imatrix.CollectOptions()


def test_unknown_keywords_are_refused_with_what_is_known() -> None:
    with pytest.raises(TypeError, match=r"'chunks'; did you mean n_chunks\?; .*chunk_size, .*n_chunks"):
        imatrix.collect("model", "text.txt", chunks=4)
