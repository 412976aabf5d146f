"""Random damage to graph files: to their bytes, to their text, and to the tree that they hold."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ruamel.yaml import YAML

WORD = re.compile(r"[\w.]+")
REFERENCE = re.compile(r"[a-z]\w*\.[a-z]\w*")
SPLICES = ("null", "{}", "[]", "-1", "0", "1e99", ".nan", '"${ batch }"', "true", "*x", "!!int 3", "é", '"')
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 2**70, 0.5, "", "actor", "rollout.tokens", "${ batch }"),
    *([], ["actor_train"], {}, {"use": "actor", "lag": 1}, {"from": "reward.score", "lag": 1, "init": 0}),
)

KeyPath = tuple[str | int, ...]


def mutated(content: bytes, seed: int) -> bytes:
    """A graph file after one to three random edits of one kind."""
    rng = random.Random(seed)
    edits = rng.randint(1, 3)
    match rng.randrange(8):
        case 0:
            return functools.reduce(lambda c, _: _edit_bytes(c, rng), range(edits), content)
        case 1 | 2 | 3:
            return functools.reduce(lambda t, _: _edit_text(t, rng), range(edits), content.decode()).encode()
        case _:
            tree = copy.deepcopy(_tree(content))
            for _ in range(edits):
                _edit_tree(tree, rng)
            return json.dumps(tree, ensure_ascii=False, indent=1).encode()  # which YAML 1.2 contains


def _edit_bytes(content: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(content)), rng.choice((0, 1, 1, 4, 64))
    return content[:at] + rng.randbytes(rng.randint(1, 4)) + content[at + length :]


def _edit_text(text: str, rng: random.Random) -> str:
    lines, words = text.splitlines(keepends=True), list(WORD.finditer(text))
    if not words:  # all lines were dropped before
        return text
    at, other, word = rng.randrange(len(lines)), rng.randrange(len(lines)), rng.choice(words)
    before, after = text[: word.start()], text[word.end() :]
    match rng.choice(("drop", "duplicate", "splice", "misspell", "rename")):
        case "drop":
            return "".join(lines[:at] + lines[at + 1 :])
        case "duplicate":
            return "".join([*lines[:other], lines[at], *lines[other:]])
        case "splice":
            return before + rng.choice(SPLICES) + after
        case "misspell":
            return before + rng.choice("abcxyz_.") + word.group()[1:] + after
        case _:
            return before + rng.choice(words).group() + after


def _edit_tree(tree: Any, rng: random.Random) -> None:
    paths = list(_paths(tree))
    *above, key = rng.choice(paths)
    parent = _at(tree, above)
    match rng.choice(("drop", "retype", "graft", "rewire", "rewire", "duplicate", "rename", "reorder")):
        case "drop":
            del parent[key]
        case "retype":
            parent[key] = copy.deepcopy(rng.choice(VALUES))
        case "rewire":
            references = [p for p in paths if REFERENCE.fullmatch(str(_at(tree, p)))] or [(*above, key)]
            *node, port = rng.choice(references)
            _at(tree, node)[port] = _at(tree, rng.choice(references))
        case "duplicate" if isinstance(parent, dict):
            parent[f"{key}_2"] = copy.deepcopy(parent[key])
        case "rename" if isinstance(parent, dict):
            parent[str(rng.choice(paths)[-1])] = parent.pop(key)
        case "reorder" if isinstance(parent, dict):
            entries = list(parent.items())
            rng.shuffle(entries)
            parent.clear()
            parent.update(entries)
        case _:
            parent[key] = copy.deepcopy(_at(tree, rng.choice(paths)))


@functools.cache
def _tree(content: bytes) -> Any:
    return YAML(typ="safe").load(content)


def _paths(tree: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Where every value of a tree stands, but the tree itself."""
    if path:
        yield path
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield from _paths(value, (*path, key))


def _at(tree: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
