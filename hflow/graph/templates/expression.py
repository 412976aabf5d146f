"""Expressions over the fields of a row: ``level < 3 and answer is not none``. The language is that of
templates, with the same bounds (`budget`) and the same vocabulary; an expression gives a value where a
template writes a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Template as CompiledTemplate
from jinja2 import TemplateError, Undefined, UndefinedError, nodes
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser

from hflow.graph.templates.budget import BadTemplateError, Budget
from hflow.graph.templates.environment import BoundedEnvironment
from hflow.graph.templates.syntax import Counted, refuse_what_templates_lack

_RESULT = "_hflow_result"
_NO_BOOL = (nodes.BinExpr, nodes.Concat, nodes.List, nodes.Dict, nodes.Tuple, nodes.Neg, nodes.Pos)
_TRUTHS = (nodes.Compare, nodes.Not, nodes.Test)


class Expression:
    """`fields`: the names that the expression reads from a row.

    Raises:
        BadTemplateError: the text is no expression, or asks for what templates do not have.
    """

    def __init__(self, text: str):
        self._environment = BoundedEnvironment()
        try:
            tree = self._parsed(text)
            refuse_what_templates_lack(tree)
            self._root = tree
            body: list[nodes.Node] = [nodes.Assign(nodes.Name(_RESULT, "store"), tree, lineno=1)]
            whole = Counted().visit(nodes.Template(body, lineno=1))
            whole.set_environment(self._environment)
            self.fields = self._fields(whole)
            code = self._environment.compile(whole)
        except TemplateError as error:
            message = str(error.message).replace("end of template", "end")
            raise BadTemplateError(message, _help(text)) from None
        except RecursionError:
            raise BadTemplateError("nested too deeply") from None
        except (ValueError, SyntaxError) as error:  # of numbers, and of Python, which jinja2 compiles to
            raise BadTemplateError(str(error)) from None
        self._compiled = CompiledTemplate.from_code(self._environment, code, {})

    @property
    def is_never_bool(self) -> bool:
        """Whether its form alone says that it gives no truth value: arithmetic, a text, a list."""
        return _never_bool(self._root)

    @property
    def is_always_bool(self) -> bool:
        """Whether its form alone says that it gives a truth value: a comparison, a test."""
        return isinstance(self._root, _TRUTHS)

    def value(self, row: Mapping[str, Any]) -> Any:
        """The value for one row.

        Raises:
            BadTemplateError: a field or an entry is missing, a filter does not take its arguments, or the
                work is more than the budget of a row.
        """
        self._environment.budget = Budget()
        context = self._compiled.new_context(dict(row))
        try:
            for _ in self._compiled.root_render_func(context):
                pass
            found = context.vars[_RESULT]
            if isinstance(found, Undefined):
                str(found)  # raises; its message names what is missing
            return found
        except BadTemplateError:
            raise
        except UndefinedError as error:
            raise BadTemplateError(str(error)) from None
        except (
            Exception
        ) as error:  # of Python's and jinja2's functions, which the expression calls as it likes
            raise BadTemplateError(f"{type(error).__name__}: {error}") from None

    def _parsed(self, text: str) -> nodes.Expr:
        parser = Parser(self._environment, text, state="variable")
        tree = parser.parse_expression()
        if not parser.stream.eos:
            raise BadTemplateError(f"`{parser.stream.current}` does not belong there", _help(text))
        return tree

    def _fields(self, tree: nodes.Node) -> frozenset[str]:
        generator = TrackingCodeGenerator(self._environment)  # as `Template`
        generator.optimizer = None
        generator.visit(tree)
        return frozenset(generator.undeclared_identifiers)


def _never_bool(tree: nodes.Expr) -> bool:
    if isinstance(tree, nodes.Const):
        return not isinstance(tree.value, bool)
    if isinstance(tree, (nodes.And, nodes.Or)):  # they are BinExpr, and give one of their sides
        return _never_bool(tree.left) and _never_bool(tree.right)
    return isinstance(tree, _NO_BOOL)


def _help(text: str) -> str:
    return "write the expression alone, without `{{ }}`" if "{{" in text or "{%" in text else ""
