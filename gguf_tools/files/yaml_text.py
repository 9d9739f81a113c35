"""YAML that people write: a key given twice is refused, and every mistake has its line.

YAML forbids a key given twice, and PyYAML lets the last one win.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from os import PathLike
from typing import Any

from gguf_tools.errors import BadRequest, ToolkitError


def parse_yaml(path: str | PathLike[str], text: str, error: type[ToolkitError] = BadRequest) -> Any:
    """Read the value of a text in YAML; `path` is the file's, for messages.

    raises  `error` for what is no YAML, is nested too deeply, or has a key twice
    """
    import yaml

    class OnceLoader(yaml.SafeLoader):
        """A safe loader that refuses a key given twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Hashable] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, Hashable):
                    continue  # the loader itself refuses it, with its place
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise error(f"{path}: line {line}: key {key!r} is given twice, expected once")
                seen.add(key)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    try:
        return yaml.load(text, Loader=OnceLoader)
    except yaml.MarkedYAMLError as cause:
        mark = cause.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise error(f"{path}: {place}{cause.problem or 'not YAML'}") from cause
    except yaml.YAMLError as cause:
        raise error(f"{path}: {' '.join(str(cause).split())}") from cause
    except RecursionError as cause:
        raise error(f"{path}: nested too deeply") from cause


def line_of_key(text: str, path: Sequence[str]) -> int:
    """Find the line of a key in a text that `parse_yaml` has read; `path` leads there from the top."""
    import yaml

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    line = 1
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            break
        found = next(((key, value) for key, value in node.value if key.value == name), None)
        if found is None:
            break
        key, node = found
        line = key.start_mark.line + 1
    return line
