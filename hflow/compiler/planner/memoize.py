"""Results of methods, kept as long as the object that they belong to.

`functools.cache` of a bound method, kept in its object, makes a cycle: everything that a search has found
would wait for Python's search for cyclic garbage, which then has much more to look through.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

UNKNOWN = object()
Method = TypeVar("Method", bound=Callable[..., Any])


def memoize(method: Method) -> Method:
    """For methods that give equal results for equal arguments, which can be keys."""
    name = f"_kept_{method.__name__}"

    @wraps(method)
    def known(self: Any, *args: Any) -> Any:
        found: dict[Any, Any] = self.__dict__.setdefault(name, {})
        value = found.get(args, UNKNOWN)
        if value is UNKNOWN:
            value = found[args] = method(self, *args)
        return value

    return cast(Method, known)
