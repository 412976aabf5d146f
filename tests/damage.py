"""Random damage to trees, above all to their numbers (`tests.graph.mutants` is after names), and to bytes."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 10**6, 2**31, 2**53 + 1, 2**63, 2**70, 10**400),
    *(0.0, -0.5, 0.5, 1e-300, 1e300, -1e300, float("inf"), float("nan")),
)
OTHERS: tuple[Any, ...] = (None, True, False, "", "x", "é", "\u202e", "a.b", "../x", [], {}, [0], {"a": 1})
KeyPath = tuple[str | int, ...]


def damaged(tree: Any, seed: int) -> Any:
    """A copy of a tree after one to three random edits."""
    rng = random.Random(seed)
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        _edit(tree, rng)
    return tree


def with_bad_bytes(content: bytes, seed: int) -> bytes:
    """Bytes of which a few are replaced, or the rest is missing."""
    rng = random.Random(seed)
    at = rng.randrange(len(content))
    if rng.random() < 0.2:
        return content[:at]
    return content[:at] + rng.randbytes(rng.randint(1, 4)) + content[at + rng.choice((0, 1, 4, 64)) :]


def _edit(tree: Any, rng: random.Random) -> None:
    paths = list(paths_of(tree))
    numbers = [p for p in paths if isinstance(at(tree, p), int | float)]
    *above, last = rng.choice(numbers if numbers and rng.random() < 0.5 else paths)
    parent, key = at(tree, above), cast(Any, last)
    match rng.choice(("drop", "number", "number", "scale", "other", "graft", "double", "rename")):
        case "drop":
            del parent[key]
        case "number":
            parent[key] = rng.choice(NUMBERS)
        case "scale" if isinstance(parent[key], int | float):
            parent[key] = parent[key] * 10 ** rng.randint(-3, 12)
        case "graft":
            parent[key] = copy.deepcopy(at(tree, rng.choice(paths)))
        case "double" if isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
        case "rename" if isinstance(parent, dict):
            parent[str(rng.choice(paths)[-1])] = parent.pop(key)
        case _:
            parent[key] = copy.deepcopy(rng.choice(OTHERS))


def paths_of(tree: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Where every value of a tree stands, but the tree itself."""
    if path:
        yield path
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield from paths_of(value, (*path, key))


def at(tree: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
