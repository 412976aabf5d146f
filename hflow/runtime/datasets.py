"""Rows from files or procedural generators, and the order in which a run draws them.

Nothing here depends on how many workers read: held-out rows are chosen by the content of their
prompts, and the batch of a step is a function of (seed, step, stream) alone. Each data node of a graph
has a stream of its own: without, two nodes over equally many rows would draw them in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hflow.diagnostics import did_you_mean
from hflow.graph.row_sources import PROCEDURAL
from hflow.runtime.data_files import read_file, refused
from hflow.runtime.permutation import permutation
from hflow.runtime.row_order import RowOrder

T = TypeVar("T")


@dataclass(frozen=True)
class Dataset(Generic[T]):
    """Rows to train on, in file order, and rows held out, in a fixed order of their own.

    Of the rows in the source, `filtered` were left out by a filter, `duplicates` were the same as one before,
    `too_long` were left out, and `set_aside` have the prompt of a held-out row and something else that
    differs. `order`: of a mixture or a curriculum.
    """

    name: str
    train: tuple[T, ...]
    held_out: tuple[T, ...]
    duplicates: int = 0
    too_long: int = 0
    set_aside: int = 0
    filtered: int = 0
    order: RowOrder | None = None

    def batch(self, seed: int, step: int, size: int, shuffle: bool = True, stream: int = 0) -> tuple[T, ...]:
        """The `size` rows of `step`: passes over all rows without replacement, each newly shuffled.

        A pass ends with its last whole batch, so that the rows of a batch are distinct.
        Without `shuffle` they come in file order, whatever seed and stream. With an `order`, as that says.

        Raises:
            HflowError: HF403 when there are fewer than `size` rows.
        """
        self.require(size)
        if self.order:
            return tuple(self.train[i] for i in self.order.batch(seed, step, size, shuffle, stream))
        per_epoch = len(self.train) // size
        epoch, at = divmod(step, per_epoch)
        order = permutation(len(self.train), seed, epoch, stream) if shuffle else range(len(self.train))
        return tuple(self.train[int(i)] for i in order[at * size : (at + 1) * size])

    def require(self, size: int, evaluation: str = "") -> None:
        """Raises HflowError HF403 when there are fewer than `size` rows to train on, or for the named
        `evaluation`."""
        if size > len(self.train) and evaluation:
            have = f"{len(self.train)} rows ({self._origin()})"
            raise refused(f"`{self.name}` has {have}, evaluation `{evaluation}` needs {size}")
        if size > len(self.train):
            have = f"{len(self.train)} rows to train on ({self._origin()})"
            raise refused(f"`{self.name}` has {have}, a batch needs {size}")
        for group, least in zip(self.order.groups, self.order.least_rows(size)) if self.order else ():
            if len(group.rows) < least:
                have = f"{len(group.rows)} rows to train on"
                help_ = "give it a smaller `weight`, or more rows"
                raise refused(f"source `{group.name}` has {have}, a batch takes {least} of it", help_)

    def evaluation(self, size: int) -> tuple[T, ...]:
        """The first `size` held-out rows.

        Raises:
            HflowError: HF403 when fewer are held out.
        """
        if size > len(self.held_out):
            message = f"`{self.name}` holds out {len(self.held_out)} rows, the evaluation needs {size}"
            raise refused(message, "raise `holdout` of the data node")
        return self.held_out[:size]

    def _origin(self) -> str:
        """Where the rows of the source went, in words."""
        dropped = self.duplicates + self.too_long + self.set_aside + self.filtered
        total = len(self.train) + len(self.held_out) + dropped
        beside = f", of a held-out prompt: {self.set_aside}" if self.set_aside else ""
        source = _source(total, self.duplicates, self.too_long, self.filtered)
        return f"{source}, held out: {len(self.held_out)}{beside}"


def _source(total: int, duplicates: int, too_long: int, filtered: int) -> str:
    by_filter = f", filtered: {filtered}" if filtered else ""
    return f"of {total} in the source; duplicates: {duplicates}, too long: {too_long}{by_filter}"


def hold_out(
    name: str,
    rows: Sequence[T],
    prompt: Callable[[T], str],
    same: Callable[[T], Hashable],
    count: int,
    too_long: int = 0,
    filtered: int = 0,
) -> Dataset[T]:
    """Drop rows that are the `same` as one before, then set the rows of `count` prompts aside.

    The prompts held out are those with the smallest SHA-256: a choice that depends on neither seed nor
    file order, so two graphs over the same prompts hold out the same ones, and no held-out prompt is
    ever trained on. Of each, the first row is held out. `too_long` and `filtered` say how many
    rows were left out before.

    Raises:
        HflowError: HF403 when nothing would be left to train on.
    """
    distinct = _firsts(rows, same)
    duplicates = len(rows) - len(distinct)
    first = {prompt(row): row for row in _firsts(distinct, prompt)}
    if count >= len(first):
        origin = _source(len(rows) + too_long + filtered, duplicates, too_long, filtered)
        have = f"{len(first)} distinct prompts ({origin})"
        raise refused(f"`{name}` has {have}; holding out {count} leaves none to train on")
    ranked = sorted(first, key=lambda text: hashlib.sha256(text.encode()).digest())[:count]
    aside = frozenset(ranked)
    train = tuple(row for row in distinct if prompt(row) not in aside)
    set_aside = len(distinct) - len(train) - count
    return Dataset(
        name, train, tuple(first[text] for text in ranked), duplicates, too_long, set_aside, filtered
    )


def _firsts(rows: Sequence[T], key: Callable[[T], Hashable]) -> list[T]:
    """The rows whose key did not come before."""
    found: dict[Hashable, T] = {}
    for row in rows:
        found.setdefault(key(row), row)
    return list(found.values())


def read_rows(source: str, size: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All rows of a dataset, each a mapping from field to value.

    Args:
        source: a ``.jsonl`` or ``.parquet`` file, or ``reasoning-gym/NAME``.
        size: rows to generate; only for procedural datasets.
        options: settings of the procedural dataset (its `seed` is 0 unless given here).

    Raises:
        HflowError: HF403 when the source cannot be read or has no rows.
    """
    if source.startswith(PROCEDURAL):
        rows = _procedural(source.removeprefix(PROCEDURAL), size, options)
    elif options:
        raise refused(f"`{source}` is a file and takes no options ({', '.join(options)})")
    else:
        rows = read_file(Path(source))
    if not rows:
        raise refused(f"`{source}` has no rows")
    return rows


def _procedural(name: str, size: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        message = f"dataset `{PROCEDURAL}{name}` needs the package reasoning-gym"
        raise refused(message, "in hflow's checkout: pip install -e '.[tasks]'") from None
    if name not in DATASETS:
        raise refused(f"reasoning-gym has no dataset `{name}`", did_you_mean(name, DATASETS, "datasets"))
    try:
        return list(reasoning_gym.create_dataset(name, **{"seed": 0, **options, "size": size}))
    except (TypeError, ValueError, AssertionError) as error:
        raise refused(f"`{PROCEDURAL}{name}` refuses its options: {error}") from None
