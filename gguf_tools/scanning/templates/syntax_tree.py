"""Possible actions of a chat template, judged by its syntax tree; nothing of it runs.

Runs in the worker process, because a hostile template can also be aimed at the parser.

`Folder` computes constant expressions, which reveal names put together from pieces. `Triggers` finds
instructions that are added only when a message holds certain words, or on certain days.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

from gguf_tools.findings import Level
from gguf_tools.scanning.strings import deceiving_characters
from gguf_tools.scanning.templates.names import dunder_in, has_format_field, leads_out
from gguf_tools.text import quoted

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
    """Computes constant expressions of one template: of constants, and variables that are set once.

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
            except Exception:  # NotConstant, and what any filter may raise for arguments that make no sense
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
            value, arguments = self.value(node.node), self._arguments(node)
            result = self._env.call_filter(node.name, value, arguments, eval_ctx=nodes.EvalContext(self._env))
            return _limited(list(result) if isinstance(result, Iterator) else result)
        if isinstance(node, nodes.Call):
            return self._call(node)
        raise NotConstant

    def _arguments(self, node: nodes.Filter | nodes.Call) -> list[Any]:
        if node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise NotConstant
        return [self.value(argument) for argument in node.args]

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


_MAX_RANGE = 100_000  # jinja2's sandbox stops there
_MAX_LITERAL_CHARS = 1 << 16
_MAX_NUMBER = 1 << 63

Remark = tuple[Level, str]

Pair = tuple[nodes.Node, nodes.Node | None]
"""A node and its parent."""


def walk(node: nodes.Node) -> Iterator[Pair]:
    """Yield every node below `node` with its parent, in the order of the text, without recursion."""
    todo: list[Pair] = [(node, None)]
    while todo:
        node, parent = todo.pop()
        yield node, parent
        todo += [(child, node) for child in reversed(list(node.iter_child_nodes()))]


def remarks_on(template: nodes.Template, env: SandboxedEnvironment) -> Iterator[Remark]:
    """Yield what is suspicious in a template's tree: how bad, and what, with the line."""
    pairs = list(walk(template))
    folder = Folder(env, _set_once(pairs))
    seen: set[Remark] = set()
    for node, parent in pairs:
        for level, text in _remarks(node, parent, folder):
            remark = (level, f"{text} (line {node.lineno})")
            if remark not in seen:
                seen.add(remark)
                yield remark
    for text, lineno in Triggers(pairs).found():
        yield Level.NOTE, f"{text} (line {lineno})"


def _set_once(pairs: list[Pair]) -> dict[str, nodes.Node]:
    """Return the variables that get a value from a single `set` and nothing else, with their expressions."""
    stored = Counter(node.name for node, _ in pairs if isinstance(node, nodes.Name) and node.ctx != "load")
    return {
        node.target.name: node.node
        for node, _ in pairs
        if isinstance(node, nodes.Assign)
        and isinstance(node.target, nodes.Name)
        and stored[node.target.name] == 1
    }


def _remarks(node: nodes.Node, parent: nodes.Node | None, folder: Folder) -> Iterator[Remark]:
    if isinstance(node, nodes.Import | nodes.FromImport | nodes.Include | nodes.Extends):
        yield Level.BAD, f"loads other templates with {type(node).__name__.lower()!r}"
    elif isinstance(node, nodes.Getattr):
        yield from _attribute(node.attr)
        yield from _bound_format(node, node.attr, parent, folder)
    elif isinstance(node, nodes.Getitem):
        yield from _item(node, parent, folder)
    elif isinstance(node, nodes.Filter):
        yield from _filter(node, folder)
    elif isinstance(node, nodes.Call):
        yield from _call(node, folder)
    elif isinstance(node, nodes.Name) and node.ctx == "load" and node.name in ("self", "lipsum"):
        yield Level.WARNING, f"uses {node.name!r}, which no conversation needs"
    elif isinstance(node, nodes.Const | nodes.TemplateData):
        yield from _constant(node, parent)
    elif isinstance(node, nodes.BinExpr):
        yield from _size(node, folder)
    if isinstance(node, nodes.Concat | nodes.BinExpr | nodes.Filter | nodes.Call | nodes.Getitem):
        yield from _built(node, folder)


def _attribute(name: str) -> Iterator[Remark]:
    if leads_out(name):
        yield Level.BAD, f"reaches for {quoted(name)}, the interpreter's insides"
    elif name.startswith("_"):
        yield Level.WARNING, f"reaches for the private attribute {quoted(name)}"


def _item(node: nodes.Getitem, parent: nodes.Node | None, folder: Folder) -> Iterator[Remark]:
    name = folder.text(node.arg)
    if name is not None:
        yield from _attribute(name)
        yield from _bound_format(node, name, parent, folder)


def _bound_format(
    node: nodes.Getattr | nodes.Getitem, name: str, parent: nodes.Node | None, folder: Folder
) -> Iterator[Remark]:
    """Formatting that looks up attributes, and the method on its own, which a filter may call later."""
    if name not in ("format", "format_map"):
        return
    text = folder.text(node.node)
    if text is None:  # a schema may have a field of this name
        return
    if has_format_field(text):
        yield Level.BAD, f"a format string looks up attributes: {quoted(text)}"
    if not (isinstance(parent, nodes.Call) and parent.node is node):
        yield Level.BAD, f"hands on the method {name!r} of a text without calling it"


def _filter(node: nodes.Filter, folder: Folder) -> Iterator[Remark]:
    if node.name == "attr":
        name = folder.text(node.args[0]) if node.args else None
        if name is None:
            yield Level.BAD, "reaches for an attribute by a computed name, with the filter attr"
        elif name in ("format", "format_map"):
            yield Level.BAD, f"reaches for the method {name!r} with the filter attr"
        elif leads_out(name):
            yield from _attribute(name)
        else:
            yield Level.WARNING, f"reaches for {quoted(name)} with the filter attr"
    elif node.name in ("map", "select", "reject") and node.args and folder.text(node.args[0]) == "attr":
        yield Level.BAD, f"reaches for attributes with the filter attr inside of {node.name!r}"


def _call(node: nodes.Call, folder: Folder) -> Iterator[Remark]:
    if isinstance(node.node, nodes.Name) and node.node.name == "range":
        numbers = [number for argument in node.args if (number := folder.number(argument)) is not None]
        if numbers and max(map(abs, numbers)) > _MAX_RANGE:
            yield Level.BAD, f"counts to {_number_text(max(numbers, key=abs))}"


def _constant(node: nodes.Const | nodes.TemplateData, parent: nodes.Node | None) -> Iterator[Remark]:
    value = node.data if isinstance(node, nodes.TemplateData) else node.value
    if isinstance(value, str):
        if len(value) > _MAX_LITERAL_CHARS:
            yield Level.WARNING, f"a constant text of {len(value):,} characters: {quoted(value, 40)}"
        for level, phrase in deceiving_characters(value):
            yield level, f"a constant text holds {phrase}"
        if isinstance(node, nodes.Const) and not _is_reached_for(node, parent):
            remark = dunder_in(value[:_MAX_LITERAL_CHARS])
            if remark:
                yield remark
    elif isinstance(value, int | float) and abs(value) >= _MAX_NUMBER:
        yield Level.WARNING, f"the enormous constant {_number_text(value)}"


def _is_reached_for(node: nodes.Const, parent: nodes.Node | None) -> bool:
    """Whether a constant is the name of an attribute, which has a remark of its own."""
    if isinstance(parent, nodes.Getitem):
        return parent.arg is node
    return isinstance(parent, nodes.Filter) and parent.name == "attr" and node in parent.args


def _size(node: nodes.BinExpr, folder: Folder) -> Iterator[Remark]:
    """Yield remarks on repeating a text, or raising a number, beyond any use."""
    if isinstance(node, nodes.Mul):
        for side in (node.left, node.right):
            count = folder.number(side)
            other = node.right if side is node.left else node.left
            is_number = folder.number(other) is not None
            if count is not None and abs(count) > MAX_CHARS and not is_number:
                yield Level.BAD, f"repeats something {_number_text(count)} times"
    elif isinstance(node, nodes.Pow):
        base, exponent = folder.number(node.left), folder.number(node.right)
        try:
            folder.value(node)
        except NotConstant:
            if None not in (base, exponent) or isinstance(node.right, nodes.Pow):
                yield Level.BAD, "raises a number to an enormous power"


def _built(node: nodes.Expr, folder: Folder) -> Iterator[Remark]:
    """A dangerous name that stands nowhere in the template as a whole."""
    text = folder.text(node)
    if text is None or dunder_in(text) is None:
        return
    pieces = [child.value for child, _ in walk(node) if isinstance(child, nodes.Const)]
    if not any(isinstance(piece, str) and dunder_in(piece) for piece in pieces):
        yield Level.BAD, f"puts the name {quoted(text)} together from pieces"


def _number_text(number: float) -> str:
    if abs(number) < 1e15:
        return f"{number:,}"
    return f"{number:.3g}" if abs(number) < 1e300 else "more than 1e300"


_SEARCHES = frozenset(("startswith", "endswith", "find", "rfind", "index", "count"))
_TESTS = frozenset(("in", "eq", "equalto", "==", "ne", "!=", "search", "match"))
_WORD = re.compile(r"[^\W\d_]{3,}")
_MARKUP = re.compile(r"<[^<>]{0,80}>|\[[^][]{0,80}\]|(?<!\w)/\w{1,40}")
_SENTENCE_WORDS = 3


class Triggers:
    """Finds conditions on what messages say, in the nodes of a template with their parents.

    A model that is harmless in every test can be told by its template to misbehave when a keyword appears.
    The same means serve honest ends: `/no_think` in a message, or cutting off a reasoning part. So the search
    is for a condition on a message's content that contains a word of a natural language and adds a sentence.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self._tainted: set[str] = set()
        while self._spread():
            pass

    def found(self) -> Iterator[tuple[str, int]]:
        """Yield a phrase and the line for every condition that adds a sentence."""
        for node, _ in self._pairs:
            if not isinstance(node, nodes.If | nodes.CondExpr):
                continue
            branches: list[nodes.Node] = [node.expr1] if isinstance(node, nodes.CondExpr) else node.body
            said = _sentence_in(branches)
            if said is None:
                continue
            if word := self._word_in(node.test):
                yield f"if a message holds {quoted(word)}, the prompt says {quoted(said)}", node.lineno
            elif _asks_for_the_date(node.test):
                yield f"on certain days, the prompt says {quoted(said)}", node.lineno

    def _spread(self) -> bool:
        """Add variables that are set from a message's content; returns whether any was new."""
        before = len(self._tainted)
        for node, _ in self._pairs:
            if isinstance(node, nodes.For | nodes.Assign) and isinstance(node.target, nodes.Name):
                source: nodes.Node = node.iter if isinstance(node, nodes.For) else node.node
                if self._is_content(source):
                    self._tainted.add(node.target.name)
        return len(self._tainted) > before

    def _is_content(self, node: nodes.Node) -> bool:
        """Whether an expression is a message's content, or derived from it."""
        todo = [node]
        while todo:
            node = todo.pop()
            if isinstance(node, nodes.Getattr) and node.attr == "content":
                return True
            if isinstance(node, nodes.Getitem) and _constant_text(node.arg) == "content":
                return True
            if isinstance(node, nodes.Name) and node.name in self._tainted:
                return True
            if not isinstance(node, nodes.Test):  # `content is string` says nothing about what it says
                todo += node.iter_child_nodes()
        return False

    def _word_in(self, test: nodes.Node) -> str | None:
        """Return the word that a condition looks for in a message's content, None without one."""
        todo = [test]
        while todo:
            node = todo.pop()
            sides: list[nodes.Node] = []
            if isinstance(node, nodes.Compare):
                sides = [node.expr, *(operand.expr for operand in node.ops)]
            elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
                if node.node.attr in _SEARCHES:
                    sides = [node.node.node, *node.args]
            elif isinstance(node, nodes.Test) and node.name in _TESTS:
                sides = [node.node, *node.args]
            if any(map(self._is_content, sides)):
                for side in sides:
                    word = _constant_text(side)
                    if word is not None and _WORD.search(_MARKUP.sub(" ", word)):
                        return word
            todo += node.iter_child_nodes()
        return None


def _constant_text(node: nodes.Node) -> str | None:
    items = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    for item in items:
        if isinstance(item, nodes.Const) and isinstance(item.value, str):
            return item.value
    return None


def _sentence_in(branches: Sequence[nodes.Node]) -> str | None:
    """Return the first literal text of several words that the branches put out or keep, None without one."""
    todo = list(reversed(branches))
    while todo:
        node = todo.pop()
        text = None
        if isinstance(node, nodes.TemplateData):
            text = node.data
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            text = node.value
        if text is not None and len(_WORD.findall(_MARKUP.sub(" ", text))) >= _SENTENCE_WORDS:
            return " ".join(text.split())
        if not _is_exception(node):
            todo += reversed(list(node.iter_child_nodes()))
    return None


def _is_exception(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Call)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "raise_exception"
    )


def _asks_for_the_date(test: nodes.Node) -> bool:
    """Whether a condition compares the date with something."""
    todo: list[tuple[nodes.Node, bool]] = [(test, False)]
    while todo:
        node, compared = todo.pop()
        compared = compared or isinstance(node, nodes.Compare)
        if compared and isinstance(node, nodes.Name) and node.name == "strftime_now":
            return True
        todo += [(child, compared) for child in node.iter_child_nodes()]
    return False
