"""Help for keys that are another library's: what to write here.

The answer to an unknown key is this where the key is known elsewhere, and the nearest of our own keys
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hflow.diagnostics import did_you_mean
from hflow.graph.foreign.elsewhere import ELSEWHERE
from hflow.graph.foreign.foreign_name import ForeignName
from hflow.graph.foreign.trl import TRL
from hflow.graph.foreign.verl import VERL

TABLES: Mapping[str, Mapping[str, tuple[ForeignName, ...]]] = {"TRL": TRL, "verl": VERL}
# Last parts of dotted names that say too little by themselves.
_VAGUE = frozenset({"enable", "name", "path", "type", "mode"})


def help_for_unknown(name: str, known: Iterable[str], what: str, whole: str = "") -> str:
    """Help text for a key that is none of `known`, which are called `what`: ``keys``, ``options``.

    `whole`: the key with what stands behind it, where it is the first part of a dotted name.
    """
    names = tuple(known)
    if (ours := _normalised(name)) in names:  # `top-p`
        return f"did you mean `{ours}`?"
    return answer(whole or name) or did_you_mean(name, names, what)


def answer(name: str) -> str:
    """What to write here for another library's `name`; empty where the name is not known.

    Upper case, hyphens and a leading `+` or `--` do not matter.
    """
    return "\n".join(_told(each) for each in foreign_names(name))


def foreign_names(name: str) -> tuple[ForeignName, ...]:
    """The lines of the tables about `name`; several where it means several things.

    Of a dotted name, the end is enough (`rollout.n`). One that is in no table stands for the longest
    beginning that is: `trainer.what` is in the section `trainer`.
    """
    parts = _normalised(name).split(".")
    heads = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((_INDEX[head] for head in heads if head in _INDEX), ())


def _told(line: ForeignName) -> str:
    if not line.ours:
        return f"hflow has no counterpart: {line.remark}"
    return f"in hflow: {line.told}" + (f"; {line.remark}" if line.remark else "")


def own_keys(name: str) -> frozenset[str]:
    """Names of the options and keys that are meant by another library's `name`, without their places."""
    owns = (own.partition(" of ")[0] for each in foreign_names(name) for own in each.ours)
    return frozenset(own.rpartition(".")[2] for own in owns)


def is_option(name: str, op: str) -> bool:
    """Whether `name` is an option of nodes of the kind `op` that the tables tell of."""
    return any(f"{name} of {op}" in each.ours for each in foreign_names(name))


def _normalised(name: str) -> str:
    return name.strip().lstrip("+-").lower().replace("-", "_")


def _lines() -> Iterator[ForeignName]:
    yield from ELSEWHERE
    for table in TABLES.values():
        for lines in table.values():
            yield from lines


def _index() -> dict[str, tuple[ForeignName, ...]]:
    """Lines by each of their names, and by what these end with, as `n` of `rollout.n`. A name that a table
    spells out in full stands for itself alone."""
    whole: dict[str, list[ForeignName]] = {}
    tails: dict[str, list[ForeignName]] = {}
    for line in _lines():
        for name in line.names:
            parts = name.lower().split(".")
            whole.setdefault(name.lower(), []).append(line)
            for start in range(1, len(parts)):
                tails.setdefault(".".join(parts[start:]), []).append(line)
    kept = {name: lines for name, lines in tails.items() if name not in _VAGUE}
    return {name: _distinct(lines) for name, lines in (kept | whole).items()}


def _distinct(lines: Iterable[ForeignName]) -> tuple[ForeignName, ...]:
    """Those that say something which none before them says."""
    kept: list[ForeignName] = []
    for line in lines:
        if not any(set(line.ours) <= set(earlier.ours) for earlier in kept):
            kept.append(line)
    return tuple(kept)


_INDEX = _index()
