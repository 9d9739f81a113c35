"""Values of a template's expressions before it runs: they reveal names put together from pieces.

Only constants are computed, and variables that are set once, to constants; nothing of the template runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

MAX_CHARS = 100_000
_FILTERS = frozenset((
    "join", "replace", "reverse", "lower", "upper", "format", "first", "last", "list", "string", "trim",
    "title", "capitalize", "sort", "safe", "int", "abs", "length",
))  # fmt: skip
_METHODS = frozenset((
    "join", "replace", "lower", "upper", "strip", "lstrip", "rstrip", "format", "removeprefix",
    "removesuffix", "title", "capitalize", "swapcase",
))  # fmt: skip


class NotConstant(Exception):
    """An expression whose value depends on the conversation."""


class Folder:
    """Computes constant expressions of one template.

    env    environment whose filters are used
    names  variables that are set once, with the expressions they are set to
    """

    def __init__(self, env: SandboxedEnvironment, names: dict[str, nodes.Node]) -> None:
        self._env = env
        self._names = names
        self._known: dict[int, Any] = {}
        self._open: set[int] = set()

    def value(self, node: nodes.Node) -> Any:
        """Return the value of a constant expression.

        raises  NotConstant, also for one that would be larger than MAX_CHARS
        """
        number = id(node)
        if number not in self._known:
            if number in self._open:
                raise NotConstant
            self._open.add(number)
            try:
                self._known[number] = self._compute(node)
            except NotConstant:
                self._known[number] = NotConstant
            except Exception:  # what any filter may raise for arguments that make no sense
                self._known[number] = NotConstant
            finally:
                self._open.discard(number)
        result = self._known[number]
        if result is NotConstant:
            raise NotConstant
        return result

    def text(self, node: nodes.Node) -> str | None:
        """Return the value of a constant expression if it is a text, else None."""
        try:
            result = self.value(node)
        except NotConstant:
            return None
        return result if isinstance(result, str) else None

    def number(self, node: nodes.Node) -> int | None:
        """Return the value of a constant expression if it is a whole number, else None."""
        try:
            result = self.value(node)
        except NotConstant:
            return None
        return result if isinstance(result, int) and not isinstance(result, bool) else None

    def _compute(self, node: nodes.Node) -> Any:
        if isinstance(node, nodes.Const):
            return node.value
        if isinstance(node, nodes.Name) and node.name in self._names:
            return self.value(self._names[node.name])
        if isinstance(node, nodes.List | nodes.Tuple):
            return [self.value(item) for item in node.items]
        if isinstance(node, nodes.Concat):
            return _limited("".join(str(self.value(item)) for item in node.nodes))
        if isinstance(node, nodes.BinExpr):
            return self._operation(node)
        if isinstance(node, nodes.Neg):
            return -self.value(node.node)
        if isinstance(node, nodes.Getitem):
            return self._item(node)
        if isinstance(node, nodes.Filter) and node.node is not None and node.name in _FILTERS:
            return self._filtered(node.name, self.value(node.node), self._arguments(node))
        if isinstance(node, nodes.Call):
            return self._call(node)
        raise NotConstant

    def _arguments(self, node: nodes.Filter | nodes.Call) -> list[Any]:
        if node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise NotConstant
        return [self.value(argument) for argument in node.args]

    def _filtered(self, name: str, value: Any, arguments: list[Any]) -> Any:
        result = self._env.call_filter(name, value, arguments, eval_ctx=nodes.EvalContext(self._env))
        return _limited(list(result) if isinstance(result, Iterator) else result)

    def _operation(self, node: nodes.BinExpr) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node, nodes.Add):
            return _limited(left + right)
        if isinstance(node, nodes.Sub):
            return left - right
        if isinstance(node, nodes.Mul):
            if isinstance(left, int) and isinstance(right, int):
                return _limited(left * right)
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            if len(sequence) * count > MAX_CHARS:
                raise NotConstant
            return sequence * count
        if isinstance(node, nodes.Pow):
            if abs(left) > 1 and right * abs(left).bit_length() > 4096:
                raise NotConstant
            return left**right
        if isinstance(node, nodes.Mod) and isinstance(left, str):
            return _limited(left % (tuple(right) if isinstance(right, list) else right))
        raise NotConstant

    def _item(self, node: nodes.Getitem) -> Any:
        sequence = self.value(node.node)
        if isinstance(node.arg, nodes.Slice):
            parts = (node.arg.start, node.arg.stop, node.arg.step)
            return sequence[slice(*(None if part is None else self.value(part) for part in parts))]
        return sequence[self.value(node.arg)]

    def _call(self, node: nodes.Call) -> Any:
        called = node.node
        if isinstance(called, nodes.Name) and called.name == "dict" and not node.args:
            return {pair.key: None for pair in node.kwargs}
        if isinstance(called, nodes.Getattr) and called.attr in _METHODS:
            target = self.text(called.node)
            if target is not None:
                method = self._env.getattr(target, called.attr)
                return _limited(method(*self._arguments(node)))
        raise NotConstant


def _limited(value: Any) -> Any:
    """Return `value`; raises NotConstant if it is large."""
    if isinstance(value, int) and value.bit_length() > 4096:
        raise NotConstant
    if isinstance(value, str | list) and len(value) > MAX_CHARS:
        raise NotConstant
    return value
