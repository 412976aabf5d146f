"""A jinja2 environment whose templates do a bounded amount of work and know nothing but their row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence
from typing import Any, cast

from jinja2 import StrictUndefined, Undefined, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from hflow.graph.templates.budget import MAX_OPERATIONS, BadTemplateError, Budget, items, letters
from hflow.graph.templates.costs import FILTER_COSTS, METHOD_COSTS, Cost
from hflow.graph.templates.null_field import dumps, is_null
from hflow.graph.templates.syntax import lacking
from hflow.graph.templates.vocabulary import FILTERS, LOOP_ATTRIBUTES, METHODS, TESTS

_PASSED = "jinja_pass_arg"  # how jinja2 marks filters whose first argument is its own


@pass_context  # so that jinja2 does not compute constants while it compiles
def _written(context: Context, value: Any) -> str:
    return cast("BoundedEnvironment", context.environment).budget.text(value)


class BoundedEnvironment(SandboxedEnvironment):
    """`budget`: of the row that is being rendered; whoever renders sets a new one."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            undefined=StrictUndefined, keep_trailing_newline=True, optimized=False, finalize=_written
        )
        self.budget = Budget()
        self.globals: dict[str, Any] = {}
        self.filters = {name: self._counted(self.filters[name], FILTER_COSTS.get(name)) for name in FILTERS}
        self.tests["none"] = is_null
        self.tests = {name: self._counted(self.tests[name]) for name in TESTS}
        self.policies["json.dumps_function"] = dumps
        self.filters |= {
            "_looped": self._looped,
            "_method": self._method,
            "_range": self._range,
            "_namespace": self._namespace,
            "_concatenated": self._concatenated,
            "_weighed": self._weighed,
            "_sliced": self._sliced,
        }

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing is called but filters and tests."""
        raise SecurityError("a template calls methods and functions by their names only")

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A filter that `map` was given by its name."""
        if name not in FILTERS:
            raise lacking("filter", name, FILTERS)
        return super().call_filter(name, *args, **kwargs)

    def call_test(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A test that `select` or its like was given by its name."""
        if name not in TESTS:
            raise lacking("test", name, TESTS)
        return super().call_test(name, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`: an entry of a mapping; there are no attributes but of loops and namespaces."""
        return self.getitem(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`, and `obj.argument` for a text."""
        self.budget.spend(1)
        if isinstance(obj, Undefined):
            return obj[argument]  # raises; its message names what is missing
        if isinstance(argument, str) and argument in _names(obj):
            return getattr(obj, argument)
        if isinstance(obj, dict | list | tuple | str):
            try:
                return cast(Any, obj)[argument]
            except (TypeError, LookupError):
                pass
        return self.undefined(obj=obj, name=argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operation, whose result is no larger than the budget allows."""
        if operator == "%" and isinstance(left, str):
            raise BadTemplateError("`%` takes numbers", "format texts by `'...' | format(x)` or `~`")
        self.budget.spend_operation(operator, left, right)
        return self.budget.number(super().call_binop(context, operator, left, right))

    def _counted(self, function: Callable[..., Any], cost: Cost | None = None) -> Callable[..., Any]:
        """The function after its arguments, and what it may make of them, are counted."""
        own = int(hasattr(function, _PASSED))

        @functools.wraps(function)  # keeps jinja2's mark
        def run(*args: Any, **kwargs: Any) -> Any:
            given = args[own:]
            for value in (*given, *kwargs.values()):
                self.budget.weigh(value)
            if cost and not isinstance(given[0], Undefined):
                cost(self.budget, *given, **kwargs)
            return self._made(function(*args, **kwargs))

        return run

    def _made(self, value: Any) -> Any:
        """A result: counted, and a list where jinja2 or Python would go through it later, or only once."""
        value = _as_list(value)
        self.budget.spend(1 + items(value), letters(value))
        if isinstance(value, str):
            return str(value)  # without the mark of HTML that is safe
        return self.budget.number(value)

    def _weighed(self, value: Any) -> Any:
        self.budget.weigh(value)
        return value

    def _sliced(self, value: Any) -> Any:
        return self._made(value)

    def _looped(self, value: Any, steps: int, characters: int) -> Any:
        """What a loop goes through: each round has `steps`, and writes `characters` as they are."""
        if isinstance(value, Undefined):
            return value  # raises when it is gone through
        if not isinstance(value, list | tuple | dict | str):
            raise BadTemplateError(f"`for` goes through lists, mappings and texts, not `{_kind(value)}`")
        items = list(cast("Sequence[Any]", value))
        self.budget.spend(len(items) * (1 + steps), len(items) * characters)
        return items

    def _range(self, _: None, *bounds: Any) -> list[int]:
        numbers = range(*bounds)
        self.budget.spend(MAX_OPERATIONS + 1 if numbers[MAX_OPERATIONS:] else len(numbers))
        return list(numbers)

    def _namespace(self, _: None, **values: Any) -> Namespace:
        return Namespace(**values)

    def _concatenated(self, parts: Sequence[Any]) -> str:
        texts = [self.budget.text(part) for part in parts]
        self.budget.spend(characters=sum(map(len, texts)))
        return "".join(texts)

    def _method(self, owner: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(owner, Undefined):
            return str(owner)  # raises; its message names what is missing
        kind = _kind(owner)
        if name not in METHODS.get(kind, ()):
            known = ", ".join(sorted(METHODS.get(kind, ())))
            raise BadTemplateError(
                f"a {kind} has no method `{name}`", f"its methods: {known}" if known else ""
            )
        cost = METHOD_COSTS.get(name) if kind == "text" else None
        for value in (*args, *kwargs.values(), *([] if kind == "loop" else [owner])):
            self.budget.weigh(value)
        if cost:
            cost(self.budget, owner, *args, **kwargs)
        return self._made(getattr(owner, name)(*args, **kwargs))


def _kind(value: Any) -> str:
    kinds: dict[str, type | tuple[type, ...]] = {
        "text": str,
        "mapping": dict,
        "list": (list, tuple),
        "loop": LoopContext,
    }
    return next((name for name, type_ in kinds.items() if isinstance(value, type_)), type(value).__name__)


def _names(value: Any) -> Sequence[str] | frozenset[str] | Mapping[str, Any]:
    """The attributes that a template may ask for: of loops, namespaces and the groups of `groupby`."""
    if isinstance(value, LoopContext):
        return LOOP_ATTRIBUTES
    if isinstance(value, Namespace):
        return cast("dict[str, Any]", object.__getattribute__(value, "_Namespace__attrs"))
    return getattr(cast(Any, value), "_fields", ()) if isinstance(value, tuple) else ()


def _as_list(value: Any) -> Any:
    """A generator or a view of a mapping as a list, anything else as it is."""
    return list(cast("Iterator[Any]", value)) if isinstance(value, Iterator | MappingView) else value
