"""What the options of a data node say about where rows come from, which are kept, and in which order of
difficulty. Nothing is looked up here: a path is told by its form alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

PROCEDURAL = "reasoning-gym/"
FILES = (".jsonl", ".json", ".csv", ".parquet")
KINDS_TEXT = (
    f"FILE.jsonl, FILE.json, FILE.csv, FILE.parquet, {PROCEDURAL}NAME, ./FOLDER of save_to_disk, or ORG/NAME"
    " on the Hugging Face hub"
)
SUCCESS = "success"  # the key of a curriculum that names a value, and the port at which it enters
PathKind = Literal["file", "procedural", "folder", "hub"]
STREAMED_FILES = (".jsonl", ".parquet")  # that are read a part at a time
OTHER_ROWS = ("config", "split", "revision", "options")  # with another of these, a dataset has other rows
# All that is said of one source, beside its path: other rows, more or fewer of them, or with other fields.
OF_A_SOURCE = (*OTHER_ROWS, "size", "filter", "rename_columns")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FOLDER = re.compile(r"(\.{1,2}/|/).+|.+/")
_FUNCTION = re.compile(r"((?:\.{1,2}/|/)[^:]+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")


@dataclass(frozen=True)
class RowSource:
    """One source of a data node, with all that says which rows it has.

    Attributes:
        name: what a mixture calls it, in the field `source` of its rows and in metrics.
        paths: of the same kind each; their rows come one after the other.
        weight: share of a mixture's rows, relative to the others'.
        config, split, revision: of a dataset on the hub; `split` also of a folder that holds several.
        filters: expressions or functions; a row is kept that fulfils all.
        rename_columns: from the field in the source to the one in its rows.
        size, options: of a procedural dataset.
    """

    name: str
    paths: tuple[str, ...]
    weight: float = 1.0
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    filters: tuple[str, ...] = ()
    rename_columns: Mapping[str, str] = field(default_factory=dict[str, str])
    size: int = 4096
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def shown(self) -> str:
        return ", ".join(self.paths)

    def rows_of(self, path: str) -> tuple[Any, ...]:
        """What tells the rows of one of its paths from other rows of it, but for how many there are."""
        fields = [name for name in OF_A_SOURCE if name not in ("filter", "size")]
        said = {name: getattr(self, name) for name in fields} | {"filter": self.filters}
        return path, json.dumps(said, sort_keys=True, default=str)


@dataclass(frozen=True)
class Curriculum:
    """Rows from easy to hard.

    Attributes:
        by: an expression over the fields of a row: how hard it is.
        steps: over which the rows that are drawn grow from the easiest ones to all; None: every pass goes
            from easy to hard.
        start: share of the rows, in (0, 1), from which the first step draws.
    """

    by: str
    steps: int | None = None
    start: float = 0.25


@dataclass(frozen=True)
class SuccessCurriculum:
    """Rows drawn by how often what was made of them was right so far.

    Attributes:
        success: ``node.port``: one value for each row of the data node, or for each response to it.
        threshold: a number counts as right from this value on.
        target: the share of right responses, in (0, 1), at which a row is drawn most often.
        floor: the least weight of a row, in (0, 1]; the greatest is 1.
        decay: by which a row's counts shrink, in (0, 1], before new ones are added.
        lag: how many steps ago the newest counted responses were made, at least 1.
    """

    success: str
    threshold: float = 1.0
    target: float = 0.5
    floor: float = 0.1
    decay: float = 1.0
    lag: int = 1


@dataclass(frozen=True)
class Streaming:
    """Rows are read while a run goes on.

    Attributes:
        block: how many rows are in memory, and shuffled among each other.
    """

    block: int = 4096


def streaming(options: Mapping[str, Any]) -> Streaming | None:
    """How the rows of a data node with checked options are streamed, if they are."""
    written = options.get("streaming")
    if isinstance(written, Mapping):
        return Streaming(**cast("Mapping[str, Any]", written))
    return Streaming() if written else None


def curriculum(options: Mapping[str, Any]) -> Curriculum | None:
    """The curriculum by difficulty of a data node with checked options, if it has one."""
    written = options.get("curriculum")
    return Curriculum(**written) if written and SUCCESS not in written else None


def success_curriculum(options: Mapping[str, Any]) -> SuccessCurriculum | None:
    """The curriculum by success of a data node with checked options, if it has one."""
    written = options.get("curriculum")
    return SuccessCurriculum(**written) if written and SUCCESS in written else None


def is_mixture(options: Mapping[str, Any]) -> bool:
    """Whether `dataset` is a list of sources with weights."""
    dataset = options.get("dataset")
    return isinstance(dataset, Sequence) and any(isinstance(d, Mapping) for d in cast("list[Any]", dataset))


def row_sources(options: Mapping[str, Any]) -> tuple[RowSource, ...]:
    """The sources of a data node with checked options; one, but for a mixture."""
    if is_mixture(options):
        return tuple(_source(entry, options.get("filter")) for entry in options["dataset"])
    return (_source({**options, "path": options["dataset"], "weight": 1.0, "name": ""}, None),)


def dataset_name(options: Mapping[str, Any]) -> str:
    """The dataset of a data node, in messages."""
    return ", ".join(source.shown for source in row_sources(options))


def source_name(path: Any) -> str:
    """What a source without `name` is called: its file without the ending, or the last part of its path."""
    several = cast("list[Any]", path) if isinstance(path, list) else [path]
    first = str(several[0]) if several else ""
    last = first.rstrip("/").rpartition("/")[2]
    ending = next((e for e in FILES if last.endswith(e)), "")
    return last.removesuffix(ending) or first


def path_kind(path: str) -> PathKind | None:
    """What a path names, by its form: `a/b` is a dataset on the hub, `./a/b` and `a/b/` are folders."""
    if path.startswith(PROCEDURAL):
        return "procedural"
    if path.endswith(FILES):
        return "file"
    if _HUB.fullmatch(path):
        return "hub"
    return "folder" if _FOLDER.fullmatch(path) else None


def filter_function(text: str) -> str | None:
    """The function that a filter names, as `fn` of a call node would; None for an expression.

    ``./file.py:keep`` and ``package.module:keep`` are functions: no expression has a colon there.
    """
    match = _FUNCTION.fullmatch(text)
    if match is None:
        return None
    return text if match[1].endswith(".py") else f"{match[1]}.{match[2]}"


def filter_functions(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The functions that the filters of a data node name."""
    filters = (f for source in row_sources(options) for f in source.filters)
    return tuple(dict.fromkeys(f for text in filters if (f := filter_function(text)) is not None))


def filter_places(options: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Where a filter is written in the options, and its text."""
    written: list[tuple[tuple[str | int, ...], Any]] = [(("filter",), options.get("filter"))]
    if is_mixture(options):
        entries = enumerate(cast("list[Any]", options["dataset"]))
        written += [
            (("dataset", i, "filter"), cast("Mapping[str, Any]", e).get("filter"))
            for i, e in entries
            if isinstance(e, Mapping)
        ]
    yield from ((place, text) for place, text in written if isinstance(text, str))


def with_filters(options: Mapping[str, Any], filters: Mapping[tuple[str | int, ...], str]) -> dict[str, Any]:
    """The options with other texts at some `filter_places`."""
    out = dict(options)
    for (first, *rest), text in filters.items():
        if not rest:
            out["filter"] = text
            continue
        entries = cast("list[dict[str, Any]]", out[str(first)])
        out[str(first)] = [{**e, "filter": text} if i == rest[0] else e for i, e in enumerate(entries)]
    return out


def overlap(options: Mapping[str, Any], others: Mapping[str, Any]) -> Literal["none", "within", "beyond"]:
    """Whether rows of the data node with `options` may be rows of the one with `others`: none; some, and all
    of its rows are among the others'; or some, and it may have rows that the others lack."""
    own, theirs = row_sources(options), row_sources(others)
    paths = [path for source in theirs for path in source.paths]
    if not any(_may_share(path, paths) for source in own for path in source.paths):
        return "none"
    known: dict[tuple[Any, ...], int] = {}
    for rows, size in ((source.rows_of(path), source.size) for source in theirs for path in source.paths):
        known[rows] = max(size, known.get(rows, 0))
    within = all(known.get(source.rows_of(path), 0) >= source.size for source in own for path in source.paths)
    return "within" if within else "beyond"


def _may_share(path: str, others: Sequence[str]) -> bool:
    """Whether a path is among others, by name or by a pattern of either."""
    return any(path == o or fnmatchcase(path, o) or fnmatchcase(o, path) for o in others)


def _source(entry: Mapping[str, Any], common: str | None) -> RowSource:
    """`common`: the filter of all sources of a mixture."""
    path = entry["path"]
    given = {k: entry[k] for k in ("config", "split", "revision", "size") if entry.get(k) is not None}
    return RowSource(
        entry.get("name") or source_name(path),
        (path,) if isinstance(path, str) else tuple(path),
        float(entry.get("weight", 1.0)),
        filters=tuple(f for f in (entry.get("filter"), common) if f is not None),
        rename_columns=entry.get("rename_columns") or {},
        options=entry.get("options") or {},
        **given,
    )
