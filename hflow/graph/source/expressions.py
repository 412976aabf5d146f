"""``${ ... }``: a whole scalar computed from `params`, by jinja2's sandboxed expressions.

Only arithmetic on numbers, comparisons, conditionals, names and literals. The expression's syntax tree is
checked before anything is compiled, and operands are checked while it runs, so that no expression
reaches attributes, calls or filters, or grows a value beyond reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hflow.diagnostics import Diagnostic, did_you_mean
from hflow.graph.foreign.lookup import answer
from hflow.graph.source.document import Document, Item, KeyPath, Scalar

MAX_LENGTH = 200
MAX_BASE, MAX_EXPONENT = 2**32, 64

_NAME = re.compile(r"[A-Za-z_]\w*")
_WHOLE = re.compile(r"\s*\$\{(.*)\}\s*", re.DOTALL)
_ALLOWED = (
    (nodes.Name, nodes.Const, nodes.CondExpr, nodes.Compare, nodes.Operand)
    + (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow)
    + (nodes.Neg, nodes.Pos, nodes.And, nodes.Or, nodes.Not)
)
_COMPARISONS = ("eq", "ne", "gt", "gteq", "lt", "lteq")


class ExpressionError(Exception):
    def __init__(self, message: str, help: str = ""):
        super().__init__(message)
        self.message = message
        self.help = help


class _Arithmetic(ImmutableSandboxedEnvironment):
    """Operators take numbers only: no repeated strings, no formatting, no huge powers."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
            raise TypeError(f"`{operator}` takes numbers")
        if operator == "**" and (abs(left) > MAX_BASE or abs(right) > MAX_EXPONENT):
            raise OverflowError("the power is too large")
        return super().call_binop(context, operator, left, right)


_ENVIRONMENT = _Arithmetic()


def evaluate(text: str, params: Mapping[str, Scalar]) -> Scalar:
    """The value of an expression, given without its ``${ }``.

    Raises:
        ExpressionError: syntax outside the allowed subset, an unknown name, a failing operation.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters")
    try:
        parser = Parser(_ENVIRONMENT, text, state="variable")
        tree = parser.parse_expression()
        if not parser.stream.eos:
            raise ExpressionError(f"unexpected `{parser.stream.current.value}`")
        _check(tree, params)
        value = _ENVIRONMENT.compile_expression(text, undefined_to_none=False)(dict(params))
    except TemplateError as error:
        raise ExpressionError(str(error.message)) from None
    except RecursionError:
        raise ExpressionError("nested too deeply") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ExpressionError(str(error)) from None
    if not isinstance(value, (bool, int, float, str)):
        raise ExpressionError("the result is no number, string or boolean")
    return value


def _check(tree: nodes.Node, params: Mapping[str, Scalar]) -> None:
    if not isinstance(tree, _ALLOWED):
        what = type(tree).__name__.lower()
        raise ExpressionError(f"`{what}` is not allowed", "use arithmetic, comparisons, `a if b else c`")
    if isinstance(tree, nodes.Name) and tree.name not in params:
        raise ExpressionError(f"unknown param `{tree.name}`", did_you_mean(tree.name, params, "params"))
    if isinstance(tree, nodes.Operand) and tree.op not in _COMPARISONS:
        raise ExpressionError(f"comparison `{tree.op}` is not allowed")
    if isinstance(tree, nodes.CondExpr) and tree.expr2 is None:
        raise ExpressionError("`if` needs an `else`")
    for child in tree.iter_child_nodes():
        _check(child, params)


def names_read(document: Document) -> set[str]:
    """All names in the expressions of a graph file."""
    return set(_names_in(document.root))


def _names_in(item: Item) -> Iterator[str]:
    if isinstance(item.value, Mapping):
        yield from (name for inner in item.value.values() for name in _names_in(inner))
    elif isinstance(item.value, tuple):
        yield from (name for inner in item.value for name in _names_in(inner))
    elif isinstance(item.value, str) and (match := _WHOLE.fullmatch(item.value)):
        yield from _NAME.findall(match[1])


def substitute(
    document: Document, read_before: Collection[str] = ()
) -> tuple[Document, tuple[Diagnostic, ...], tuple[KeyPath, ...]]:
    """Evaluate every expression of a graph file over its plain `params`.

    `read_before`: names that expressions have read which were overridden: who overrides a value knows that
    its param says nothing any more.

    Returns the document with values in place of expressions, which knows the params that each was computed
    from; one HF104 for each that failed (none for one that reads a param of a wrong kind, which its schema
    refuses), and a warning, HF227, for each param that no expression reads; and
    the paths of those that failed.
    """
    params = {k: document.get(("params", k)) for k in document.keys(("params",))}
    scalars = {k: cast(Scalar, i.value) for k, i in params.items() if i and _is_plain_param(i.value)}
    run = _Substitution(scalars, refused=params.keys() - scalars.keys())
    evaluated = replace(document, root=run.item(document.root, ()), computed_from=run.read)
    if run.failed:  # a misspelt name leaves the right one unread
        return evaluated, tuple(run.problems), tuple(run.failed)
    read = {name for names in run.read.values() for name in names}
    return (
        evaluated,
        tuple(_unread(document, name) for name in params if name not in read | {*read_before}),
        (),
    )


def _unread(document: Document, name: str) -> Diagnostic:
    help_ = "\n".join(filter(None, (f"read it somewhere (`${{ {name} }}`), or remove it", answer(name))))
    span = document.span(("params", name), key=True)
    return Diagnostic("HF227", f"nothing reads the param `{name}`", span, help_, "warning")


def _is_plain_param(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


class _Substitution:
    def __init__(self, params: Mapping[str, Scalar], refused: Set[str]):
        self.params = params
        self.refused = refused
        self.problems: list[Diagnostic] = []
        self.failed: list[KeyPath] = []
        self.read: dict[KeyPath, tuple[str, ...]] = {}

    def item(self, item: Item, path: KeyPath) -> Item:
        if isinstance(item.value, Mapping):
            entries = {k: self.item(v, (*path, k)) for k, v in item.value.items()}
            return replace(item, value=entries)
        if isinstance(item.value, tuple):
            return replace(item, value=tuple(self.item(v, (*path, i)) for i, v in enumerate(item.value)))
        if not isinstance(item.value, str) or "${" not in item.value:
            return item
        try:
            return replace(item, value=self._value(item.value, path))
        except ExpressionError as error:
            self.failed.append(path)
            if not self.refused & {*_NAME.findall(item.value)}:
                self.problems.append(Diagnostic("HF104", error.message, item.span, error.help))
            return item

    def _value(self, text: str, path: KeyPath) -> Scalar:
        if path[:1] == ("params",):
            raise ExpressionError("a param is a plain value, not an expression")
        match = _WHOLE.fullmatch(text)
        if not match:
            raise ExpressionError("an expression must be the whole value", "write it as one `${ ... }`")
        text = match[1].strip()
        self.read[path] = tuple(n for n in dict.fromkeys(_NAME.findall(text)) if n in self.params)
        return evaluate(text, self.params)
