"""transformers' environment of chat templates, in which work is counted and nothing differs between runs.

Filters, tests, settings and extensions (``{% generation %}``, ``{% break %}``) are those that transformers
makes, so that a template writes the same text here and there. Beyond that, as in prompts
(`hflow.graph.templates`): loops, calls, concatenations and what filters make of little are counted before the
work is done; there is no `random` and no `lipsum`; and a null is not written as ``None``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MappingView
from itertools import islice
from string import Formatter
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

from jinja2 import Template, Undefined, pass_context
from jinja2.ext import Extension
from jinja2.meta import TrackingCodeGenerator
from jinja2.nodes import Call, Name, Node, Test
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler

from hflow.graph.templates.budget import MAX_OPERATIONS, BadTemplateError, Budget, items, letters
from hflow.graph.templates.costs import FILTER_COSTS, METHOD_COSTS, Cost
from hflow.graph.templates.syntax import Counted
from hflow.graph.templates.vocabulary import METHODS
from hflow.runtime.chat.problem import ChatProblem

MAX_CHARACTERS = 10**8  # of one rendering: a conversation is read and copied some ten times
_PASSED = "jinja_pass_arg"  # how jinja2 marks filters whose first argument is its own
_OURS = (LoopContext, Cycler, Extension)  # of jinja2: their methods make nothing large
_UNBOUND = (MethodDescriptorType, WrapperDescriptorType)
_OF_JINJA = ("_loop_vars", "_block_vars")  # what jinja2 tells a function that asks for its context
_LACKING = ("random", "lipsum")
_HELP = "texts, mappings, lists and loops have methods"
_KINDS: dict[str, type | tuple[type, ...]] = {"text": str, "mapping": dict, "list": (list, tuple)}


@pass_context  # so that jinja2 does not compute constants while it compiles
def _written(context: Context, value: Any) -> Any:
    if value is None:
        raise BadTemplateError("a null would be written as `None`")
    return value


def _tojson(budget: Budget, value: Any, *_: Any, indent: Any = None, **__: Any) -> None:
    FILTER_COSTS["tojson"](budget, value, indent)


def _library() -> Any:
    """The environment in which `apply_chat_template` renders; transformers makes it in no public function."""
    try:
        from transformers.utils.chat_template_utils import (
            _compile_jinja_template,  # pyright: ignore[reportPrivateUsage]
        )
    except ImportError as error:
        help_ = "use one that is as old as hflow"
        raise ChatProblem(f"this version of transformers renders otherwise: {error}", help_) from None
    return _compile_jinja_template("").environment


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """`budget`: of what is being rendered; whoever renders sets a new one."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        library = _library()
        super().__init__(
            trim_blocks=library.trim_blocks,
            lstrip_blocks=library.lstrip_blocks,
            keep_trailing_newline=library.keep_trailing_newline,
            undefined=library.undefined,
            extensions=[type(extension) for extension in library.extensions.values()],
            optimized=False,
            finalize=_written,
        )
        self.budget = Budget(MAX_CHARACTERS)
        self.globals = {name: v for name, v in library.globals.items() if name not in _LACKING}
        costs = {**FILTER_COSTS, "tojson": _tojson}
        filters = {name: f for name, f in library.filters.items() if name not in _LACKING}
        self.filters = {name: self._counted(f, costs.get(name)) for name, f in filters.items()}
        self.tests = {name: self._counted(test) for name, test in library.tests.items()}
        self.filters |= {
            "_looped": self._looped,
            "_concatenated": self._concatenated,
            "_weighed": self._weighed,
            "_sliced": self._made,
        }

    def compiled(self, text: str) -> tuple[Template, frozenset[str]]:
        """The template of a text, and the names that it reads from outside.

        Raises:
            TemplateError, BadTemplateError, RecursionError, ValueError, SyntaxError: it is none.
        """
        self.budget = Budget(MAX_CHARACTERS)
        tree = _ChatCounted().visit(self.parse(text))
        generator = TrackingCodeGenerator(self)
        generator.optimizer = None
        generator.visit(tree)
        code = self.compile(tree)
        template = self.template_class.from_code(self, code, self.make_globals(None))
        return template, frozenset(generator.undeclared_identifiers) | _tested(tree)

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a macro, a function or a method: of those of texts, mappings and lists, what prompts
        have, of loops all, of other values none."""
        self.budget.spend(1 + sum(map(items, args)))
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        kind = next((k for k, type_ in _KINDS.items() if isinstance(owner, type_)), None)
        if kind:
            given = {key: v for key, v in kwargs.items() if key not in _OF_JINJA}
            self._check_method(kind, owner, name, args, given)
        elif isinstance(__obj, _UNBOUND) or not isinstance(owner, (type(None), *_OURS)):
            raise BadTemplateError(f"the method `{name}` of {_kind_of(__obj, owner)} cannot be called", _HELP)
        made = super().call(__context, __obj, *args, **kwargs)
        return self._made(made) if kind else made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operation, whose result is no larger than the budget allows."""
        if operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            FILTER_COSTS["format"](self.budget, left, *values)
        self.budget.spend_operation(operator, left, right)
        return self.budget.number(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        """`format` of a text, which jinja2 makes a function of its own: counted before it is called."""
        made = super().wrap_str_format(value)
        if made is None:
            return None
        pattern = value.__self__

        @functools.wraps(made)
        def run(*args: Any, **kwargs: Any) -> Any:
            size, _ = self.budget.weigh([list(args), kwargs])
            self.budget.spend(characters=_fields(pattern) * size)
            return self._made(made(*args, **kwargs))

        return run

    def _check_method(self, kind: str, owner: Any, name: str, args: Any, kwargs: Any) -> None:
        if name not in METHODS[kind]:
            help_ = f"its methods: {', '.join(sorted(METHODS[kind]))}"
            raise BadTemplateError(f"a {kind} has no method `{name}`", help_)
        for value in (owner, *args, *kwargs.values()):
            self.budget.spend(items(value), letters(value))
        cost = METHOD_COSTS.get(name) if kind == "text" else None
        if cost:
            cost(self.budget, owner, *args, **kwargs)

    def _counted(self, function: Callable[..., Any], cost: Cost | None = None) -> Callable[..., Any]:
        """The function after its arguments, and what it may make of them, are counted. Lists and mappings
        count by their entries alone: templates ask for the length of a conversation again and again."""
        own = int(hasattr(function, _PASSED))

        @functools.wraps(function)  # keeps jinja2's mark
        def run(*args: Any, **kwargs: Any) -> Any:
            given = args[own:]
            for value in (*given, *kwargs.values()):
                self.budget.spend(1 + items(value), letters(value))
            if cost and not isinstance(given[0], Undefined):
                cost(self.budget, *given, **kwargs)
            return self._made(function(*args, **kwargs))

        return run

    def _made(self, value: Any) -> Any:
        """A result: counted, and a list where jinja2 or Python would go through it later, or only once."""
        if isinstance(value, Iterator | MappingView):
            value = self._listed(value)
        self.budget.spend(1 + items(value), letters(value))
        return self.budget.number(value)

    def _listed(self, value: Any) -> list[Any]:
        items = list(islice(value, MAX_OPERATIONS + 1))
        self.budget.spend(len(items))
        return items

    def _looped(self, value: Any, steps: int, characters: int) -> Any:
        """What a loop goes through: each round has `steps`, and writes `characters` as they are."""
        if isinstance(value, Undefined):
            return value
        items = self._listed(value)
        self.budget.spend(len(items) * (1 + steps), len(items) * characters)
        return items

    def _concatenated(self, parts: list[Any]) -> str:
        texts = [self.budget.text(part) for part in parts]
        self.budget.spend(characters=sum(map(len, texts)))
        return "".join(texts)

    def _weighed(self, value: Any) -> Any:
        self.budget.spend(1 + items(value), letters(value))
        return value


class _ChatCounted(Counted):
    """As for prompts, but that calls stay what they are: `ChatEnvironment.call` counts them."""

    def visit_Call(self, node: Call) -> Any:  # noqa: N802  (jinja2's names)
        return self.generic_visit(node)


def _fields(pattern: str) -> int:
    """How many values a text of `str.format` writes. Raises BadTemplateError where it says how wide: a width
    may be a field itself, as in ``{:{}}``."""
    found = [(name, spec) for _, name, spec, _ in Formatter().parse(pattern) if name is not None]
    if any(spec for _, spec in found):
        raise BadTemplateError("`format` takes no widths")
    return len(found)


def _kind_of(called: Any, owner: Any) -> str:
    return f"type `{getattr(called, '__objclass__', type(owner)).__name__}`"


def _tested(tree: Node) -> frozenset[str]:
    """What a template sets itself unless it is given is read, too: ``{% if not x is defined %}``."""
    tests = (test for test in tree.find_all(Test) if test.name in ("defined", "undefined"))
    return frozenset(test.node.name for test in tests if isinstance(test.node, Name))
