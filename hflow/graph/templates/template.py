"""Templates of prompts and responses: a text from the fields of a row.

jinja2's language without what a graph file may not have: no work or text without bound (see `budget`), and
nothing that differs between workers or runs of one seed (see `vocabulary`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Template as CompiledTemplate
from jinja2 import TemplateError, UndefinedError
from jinja2.meta import TrackingCodeGenerator
from jinja2.nodes import Node

from hflow.bounded_read import is_broken_text
from hflow.graph.templates.budget import BadTemplateError, Budget
from hflow.graph.templates.environment import BoundedEnvironment
from hflow.graph.templates.syntax import Counted, refuse_what_templates_lack

MAX_WRITTEN = 2**30  # characters, of all rows


class Template:
    """`fields`: the names that the template reads from a row.

    Raises:
        BadTemplateError: the text is no template, or asks for what templates do not have.
    """

    def __init__(self, text: str):
        self._environment = BoundedEnvironment()
        self._written = 0
        try:
            tree = self._environment.parse(text)
            refuse_what_templates_lack(tree)
            tree = Counted().visit(tree)
            self.fields = self._fields(tree)
            code = self._environment.compile(tree)
        except TemplateError as error:
            raise BadTemplateError(str(error.message)) from None
        except RecursionError:
            raise BadTemplateError("nested too deeply") from None
        except (ValueError, SyntaxError) as error:  # of numbers, and of Python, which jinja2 compiles to
            raise BadTemplateError(str(error)) from None
        self._compiled = CompiledTemplate.from_code(self._environment, code, {})

    def _fields(self, tree: Node) -> frozenset[str]:
        """As `jinja2.meta.find_undeclared_variables`, which would compute constants, at check time."""
        generator = TrackingCodeGenerator(self._environment)
        generator.optimizer = None
        generator.visit(tree)
        return frozenset(generator.undeclared_identifiers)

    def render(self, row: Mapping[str, Any]) -> str:
        """The text of one row.

        Raises:
            BadTemplateError: a field or an entry is missing, a filter does not take its arguments, the work
                is more than the budget of a row, or the texts of all rows together more than `MAX_WRITTEN`.
        """
        self._environment.budget = Budget()
        try:
            text = self._compiled.render(dict(row))
        except BadTemplateError:
            raise
        except UndefinedError as error:
            raise BadTemplateError(str(error)) from None
        except Exception as error:  # of Python's and jinja2's functions, which the template calls as it likes
            raise BadTemplateError(f"{type(error).__name__}: {error}") from None
        if is_broken_text(text):
            raise BadTemplateError("the text has a lone surrogate, half a character")
        self._written += len(text)
        if self._written > MAX_WRITTEN:
            raise BadTemplateError(f"all rows together have more than {MAX_WRITTEN} characters")
        return text
