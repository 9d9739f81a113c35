"""Instructions that a chat template adds only when a message holds certain words, or on certain days.

A model that is harmless in every test can be told by its template to misbehave when a keyword appears. The
same means serve honest ends: `/no_think` in a message, or cutting off a reasoning part. So the search is
for a condition on a message's content that contains a word of a natural language and adds a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from jinja2 import nodes

from gguf_tools.text import quoted

_SEARCHES = frozenset(("startswith", "endswith", "find", "rfind", "index", "count"))
_TESTS = frozenset(("in", "eq", "equalto", "==", "ne", "!=", "search", "match"))
_WORD = re.compile(r"[^\W\d_]{3,}")
_MARKUP = re.compile(r"<[^<>]{0,80}>|\[[^][]{0,80}\]|(?<!\w)/\w{1,40}")
_SENTENCE_WORDS = 3

Pair = tuple[nodes.Node, nodes.Node | None]


class Triggers:
    """Finds conditions on what messages say, in the nodes of a template with their parents."""

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
