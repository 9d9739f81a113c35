"""What a chat template could do, judged by its syntax tree; nothing of it runs.

Runs in the worker process, because a hostile template can also be aimed at the parser.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

from gguf_tools.findings import Level
from gguf_tools.scan.characters import deceiving_characters
from gguf_tools.scan.templates.constants import MAX_CHARS, Folder, NotConstant
from gguf_tools.scan.templates.names import dunder_in, has_format_field, leads_out
from gguf_tools.scan.templates.triggers import Triggers
from gguf_tools.text import quoted

_MAX_RANGE = 100_000  # jinja2's sandbox stops there
_MAX_LITERAL_CHARS = 1 << 16
_MAX_NUMBER = 1 << 63

Remark = tuple[Level, str]


def walk(node: nodes.Node) -> Iterator[tuple[nodes.Node, nodes.Node | None]]:
    """Yield every node below `node` with its parent, in the order of the text, without recursion."""
    todo: list[tuple[nodes.Node, nodes.Node | None]] = [(node, None)]
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


def _set_once(pairs: list[tuple[nodes.Node, nodes.Node | None]]) -> dict[str, nodes.Node]:
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
