"""Every value that differs from a given one in a single field, found by walking dataclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Place = tuple[str, str]  # the class that has the field, and the field
Way = tuple[Place, ...]  # from the outermost value to the field that was changed


def field_mutants(value: Any) -> Iterator[tuple[Way, Any]]:
    """Of a dataclass: itself with one field changed, or one field of what its fields hold. Fields that do not
    count for equality are left out."""
    hints = get_type_hints(type(value))
    for field in fields(value):
        if not field.compare:
            continue
        here: Place = type(value).__name__, field.name
        for way, mutant in _mutants(getattr(value, field.name), hints[field.name]):
            yield (here, *way), replace(value, **{field.name: mutant})


def compared_fields(*classes: type) -> set[Place]:
    return {(c.__name__, f.name) for c in classes for f in fields(c) if f.compare}


def _mutants(value: Any, hint: Any) -> Iterator[tuple[Way, Any]]:
    """Other values of a field, and the way to the change within it."""
    if value is None:
        yield (), _sample(hint)
    elif is_dataclass(value):
        yield from field_mutants(value)
        if NoneType in get_args(hint):
            yield (), None
    elif isinstance(value, Mapping):
        yield from (((), {**value, key: _other(value[key])}) for key in value)
        yield from (((), {k: v for k, v in value.items() if k != key}) for key in value)
        yield (), {**value, "added": 1}
    elif isinstance(value, tuple):
        yield from _mutants_of_tuple(value, hint)
    else:
        yield (), _other(value)


def _mutants_of_tuple(value: tuple[Any, ...], hint: Any) -> Iterator[tuple[Way, Any]]:
    for i, inner in enumerate(value):
        changed = field_mutants(inner) if is_dataclass(inner) else [((), _other(inner))]
        yield from ((way, (*value[:i], mutant, *value[i + 1 :])) for way, mutant in changed)
        yield (), (*value[:i], *value[i + 1 :])
    yield (), (*value, _sample(get_args(hint)[0]))


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case list():
            return [*value, 1]
        case None:
            return 1
        case _:
            return {**value, "added": 1}


def _sample(hint: Any) -> Any:
    """Some value of a type."""
    if get_origin(hint) in (Union, UnionType):
        return _sample(next(h for h in get_args(hint) if h is not NoneType))
    if get_origin(hint) is Literal:
        return get_args(hint)[0]
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        needed = [f for f in fields(hint) if f.default is MISSING and f.default_factory is MISSING]
        return hint(**{f.name: _sample(hints[f.name]) for f in needed})  # type: ignore[operator]
    return {str: "sample", int: 3, float: 3.5, bool: True, tuple: ()}.get(get_origin(hint) or hint, 3)
