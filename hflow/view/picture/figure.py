"""The numbers at the head of a page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One number, what it is called, and what there is to say about it."""

    name: str
    value: str
    note: str = ""
