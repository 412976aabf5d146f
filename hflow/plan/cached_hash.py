"""Frozen values that are keys of many caches, and so keep their hash."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any


class CachedHash:
    """For frozen dataclasses. Pickles hold the fields alone: the hash of a string is another one in another
    process, where a hash that came along would find nothing."""

    @cached_property
    def _hash(self) -> int:
        raise NotImplementedError

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
