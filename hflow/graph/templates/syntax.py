"""The syntax tree of a template: what it may hold, and how work is made to be counted.

jinja2 compiles templates to Python, in which loops, comparisons, `~` and slices pass no hook. So the tree is
rewritten first: what costs passes through filters of this package (their names begin with `_`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from hflow.bounded_read import is_broken_text
from hflow.graph.templates.budget import BadTemplateError
from hflow.graph.templates.vocabulary import FILTERS, FUNCTIONS, METHODS, STATEMENTS, TESTS

_ALLOWED = (
    (nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.With)
    + (nodes.Assign, nodes.AssignBlock, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List)
    + (nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call)
    + (nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand)
    + (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow)
    + (nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos)
)
_STATEMENTS: dict[type[nodes.Node], str] = {
    nodes.FilterBlock: "filter",
    nodes.CallBlock: "call",
    nodes.FromImport: "from",
    nodes.Scope: "autoescape",
}
_METHOD_NAMES = frozenset[str]().union(*METHODS.values())


def refuse_what_templates_lack(tree: nodes.Node) -> None:
    """Raises BadTemplateError for the first thing that is outside the vocabulary, with what there is."""
    if not isinstance(tree, _ALLOWED):
        raise lacking("statement", _STATEMENTS.get(type(tree), type(tree).__name__.lower()), STATEMENTS)
    match tree:
        case nodes.Filter() if tree.node is None:  # of `{% set x | upper %}`
            raise lacking("statement", f"set ... | {tree.name}", STATEMENTS)
        case nodes.Filter() if tree.name not in FILTERS:
            raise lacking("filter", tree.name, FILTERS)
        case nodes.Test() if tree.name not in TESTS:
            raise lacking("test", tree.name, TESTS)
        case nodes.Call():
            _check_call(tree)
        case nodes.For() if tree.recursive:
            raise BadTemplateError("a template has no recursive loops")
        case nodes.Const() | nodes.TemplateData():
            _check_text(tree)
        case _:
            pass
    if getattr(tree, "dyn_args", None) or getattr(tree, "dyn_kwargs", None):
        raise BadTemplateError("a template has no `*` and `**` in calls", "write the arguments out")
    for child in tree.iter_child_nodes():
        refuse_what_templates_lack(child)


def _check_call(call: nodes.Call) -> None:
    match call.node:
        case nodes.Getattr(attr=name):
            if name not in _METHOD_NAMES:
                raise lacking("method", name, _METHOD_NAMES)
        case nodes.Name(name=name) if name in FUNCTIONS:
            pass
        case nodes.Name(name=name):
            raise lacking("function", name, FUNCTIONS)
        case _:
            raise BadTemplateError("a template calls methods and functions by their names only")


def _check_text(tree: nodes.Const | nodes.TemplateData) -> None:
    text: Any = tree.value if isinstance(tree, nodes.Const) else tree.data
    if isinstance(text, str) and is_broken_text(text):
        raise BadTemplateError(f"the text {text[:40]!a} has a lone surrogate, half a character")


def lacking(kind: str, name: str, known: frozenset[str]) -> BadTemplateError:
    """What to raise where a template asks for a filter, test, ... that there is not."""
    return BadTemplateError(f"a template has no {kind} `{name}`", f"{kind}s: {', '.join(sorted(known))}")


class Counted(NodeTransformer):
    """Rewrites the tree so that all that may cost much is counted, and nothing can be called but filters."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  (jinja2's names)
        steps, characters = _weight([*node.body, node.test])
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_looped", nodes.Const(steps), nodes.Const(characters))
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        called = node.node
        if isinstance(called, nodes.Getattr):
            counted = _filter(called.node, "_method", nodes.Const(called.attr), *node.args)
        else:
            assert isinstance(called, nodes.Name)
            counted = _filter(nodes.Const(None), f"_{called.name}", *node.args)
        counted.kwargs = list[Any](node.kwargs)  # jinja2 itself puts keywords there
        return counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), "_concatenated")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_weighed")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "_weighed")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "_sliced") if isinstance(node.arg, nodes.Slice) else node


def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr", node), name, list(args), [], None, None)


def _weight(body: Sequence[nodes.Node | None]) -> tuple[int, int]:
    """How many nodes one round of a loop may go through, and how many characters it may write as they are."""
    left = [node for node in body if node]
    steps = characters = 0
    while left:
        node = left.pop()
        steps += 1
        characters += len(node.data) if isinstance(node, nodes.TemplateData) else 0
        left += node.iter_child_nodes()
    return steps, characters
