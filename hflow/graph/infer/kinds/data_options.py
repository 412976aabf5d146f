"""What may be wrong with a data node's sources, filters and curriculum, as far as the file alone tells."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from hflow.graph.infer.functions import FunctionSource
from hflow.graph.options import Option, OptionProblem, problems
from hflow.graph.row_sources import (
    KINDS_TEXT,
    OF_A_SOURCE,
    STREAMED_FILES,
    SUCCESS,
    filter_function,
    is_mixture,
    path_kind,
    source_name,
)
from hflow.graph.templates.budget import BadTemplateError
from hflow.graph.templates.expression import Expression

SOURCE_OPTIONS = (
    Option("path", "texts"),
    Option("name", "str", optional=True),
    Option("weight", "float", 1.0, above=0),
    Option("config", "str", optional=True),
    Option("split", "str", optional=True),
    Option("revision", "str", optional=True),
    Option("filter", "str", optional=True),
    Option("rename_columns", "mapping", optional=True),
    Option("size", "int", 4096, above=0),
    Option("options", "mapping", {}),
)
CURRICULUM_OPTIONS = (
    Option("by", "str"),
    Option("steps", "int", optional=True, above=0),
    Option("start", "float", 0.25, above=0, below=1),
)
SUCCESS_OPTIONS = (
    Option("success", "str"),
    Option("threshold", "float", 1.0),
    Option("target", "float", 0.5, above=0, below=1),
    Option("floor", "float", 0.1, above=0, most=1),
    Option("decay", "float", 1.0, above=0, most=1),
    Option("lag", "int", 1, above=0),
)
_VALUE = re.compile(r"[a-z_][a-z0-9_]*\.[a-z_][a-z0-9_]*")
STREAMING_OPTIONS = (Option("block", "int", 4096, above=0),)
_NEED_ALL_ROWS = {
    "holdout": "name other rows in the `data` of an evaluation",
    "curriculum": "sort the file itself, and write `shuffle: false`",
}
# Without effect beside a mixture; its `filter` is of all sources, `size` and `options` are told elsewhere.
_OF_ONE_SOURCE = tuple(name for name in OF_A_SOURCE if name not in ("filter", "size", "options"))
_NEEDS = {"config": ("hub",), "revision": ("hub",), "split": ("hub", "folder")}
_KIND_NAMES = {"hub": "a dataset on the hub", "folder": "a folder"}
ROW_DTYPES = ("str", "i64", "f32", "bool")  # of a field that a filter's function may ask for

OptionPlace = tuple[str | int, ...]


def row_problems(written: Mapping[str, Any]) -> Iterator[OptionProblem]:
    """HF101, HF211 and HF212 of `dataset`, `filter`, `curriculum` and the keys that belong to them."""
    dataset = written.get("dataset")
    if is_mixture(written) and isinstance(dataset, list):
        yield from _of_mixture(cast("list[Any]", dataset), written)
    elif isinstance(dataset, (str, list)):
        yield from _of_source({**written, "path": dataset}, (), "dataset")
    yield from _of_filter(written.get("filter"), ())
    if isinstance(curriculum := written.get("curriculum"), Mapping):
        yield from _of_curriculum(cast("Mapping[str, Any]", curriculum), written.get("shuffle"))
    if (streamed := written.get("streaming")) not in (None, False):
        yield from _of_streaming(streamed, written)


def function_problem(source: FunctionSource) -> str | None:
    """Why a filter cannot be this function, or None."""
    inputs, outputs = source.signature.inputs, source.signature.outputs
    dense = all(len(p.type.dims) == 1 and not p.type.ragged for p in inputs)
    if not dense or any(p.type.dtype not in ROW_DTYPES or p.tag for p in inputs):
        return (
            "a filter reads fields of rows: inputs are `str[rows]`, `i64[rows]`, `f32[rows]` or `bool[rows]`"
        )
    if any(len(p.type.dims[0].factors) != 1 for p in inputs):
        return "a filter reads fields of rows, which are not in groups: write `rows`, no product"
    if len({str(p.type.dims[0]) for p in (*inputs, *outputs) if p.type.dims}) != 1:
        return (
            "a filter reads fields of the same rows: all of its inputs have one dim, and its output the same"
        )
    if len(outputs) != 1 or outputs[0].type.dtype != "bool" or len(outputs[0].type.dims) != 1:
        return "a filter says which rows are kept: its one output is `bool[rows]`"
    if source.whole_batch or source.options:
        return "a filter's function has no options, and is not of a whole batch"
    return None


def _of_mixture(entries: Sequence[Any], written: Mapping[str, Any]) -> Iterator[OptionProblem]:
    for name in _OF_ONE_SOURCE:
        if name in written:
            help_ = f"write `{name}` in the entries of `dataset`"
            yield OptionProblem("HF212", f"`{name}` has no effect: `dataset` is a mixture", name, help_)
    names: list[str] = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            continue
        place: OptionPlace = ("dataset", number)
        source = cast("Mapping[str, Any]", entry)
        found = [replace(p, within=place) for p in problems(SOURCE_OPTIONS, source)]
        yield from found
        if any(p.option in ("path", None) for p in found):
            continue
        yield from _of_source(source, place, "path")
        yield from _of_filter(source.get("filter"), place)
        yield from _procedural_keys(source, place)
        name = str(source.get("name") or source_name(source["path"]))
        if name in names:
            message, help_ = f"two sources are called `{name}`", "give each its `name`"
            yield OptionProblem("HF212", message, "name" if "name" in source else "path", help_, place)
        names.append(name)


def _procedural_keys(source: Mapping[str, Any], place: OptionPlace) -> Iterator[OptionProblem]:
    if _kinds(source["path"]) == {"procedural"}:
        return
    for name in ("size", "options"):
        if name in source:
            message = f"`{name}` has no effect: the dataset is not `reasoning-gym/NAME`"
            yield OptionProblem("HF212", message, name, within=place)


def _of_source(source: Mapping[str, Any], place: OptionPlace, key: str) -> Iterator[OptionProblem]:
    """`key`: under which its path stands."""
    path = source["path"]
    paths = [path] if isinstance(path, str) else cast("list[Any]", path)
    for part in (p for p in paths if isinstance(p, str)):
        if path_kind(part) is None:
            help_ = f"datasets: {KINDS_TEXT}"
            yield OptionProblem("HF212", f"dataset `{part}` is of no known kind", key, help_, place)
    kinds = _kinds(path)
    if len(paths) > 1 and not kinds <= {"file", None}:
        yield OptionProblem("HF212", f"only files are read as a list, `{key}` names others", key, "", place)
    for name, of in _NEEDS.items():
        if name in source and not kinds & {*of, None}:
            what = " or ".join(_KIND_NAMES[kind] for kind in of)
            message = f"`{name}` has no effect: `{key}` is not {what}"
            yield OptionProblem("HF212", message, name, within=place)
    renamed = source.get("rename_columns")
    if isinstance(renamed, Mapping):
        for old, new in cast("Mapping[Any, Any]", renamed).items():
            if not isinstance(new, str):
                message = f"`rename_columns` must name a field for `{old}`, got {new!r}"
                yield OptionProblem("HF212", message, "rename_columns", within=place)


def _kinds(path: Any) -> set[str | None]:
    paths = [path] if isinstance(path, str) else cast("list[Any]", path)
    return {path_kind(p) for p in paths if isinstance(p, str)}


def _of_filter(text: Any, place: OptionPlace) -> Iterator[OptionProblem]:
    if not isinstance(text, str) or filter_function(text):
        return
    try:
        expression = Expression(text)
    except BadTemplateError as error:
        yield OptionProblem(
            "HF212", f"`filter` is no expression: {error.message}", "filter", error.help, place
        )
        return
    if expression.is_never_bool:
        message = "`filter` gives no truth value"
        help_ = "compare, as in `level < 3`; functions are written `./file.py:function`"
        yield OptionProblem("HF212", message, "filter", help_, place)


def _of_streaming(streamed: Any, written: Mapping[str, Any]) -> Iterator[OptionProblem]:
    if isinstance(streamed, Mapping):
        found = problems(STREAMING_OPTIONS, cast("Mapping[str, Any]", streamed))
        yield from (replace(p, within=("streaming",)) for p in found)
    for name, help_ in _NEED_ALL_ROWS.items():
        if written.get(name):
            message = f"`{name}` needs all rows, and they are streamed"
            yield OptionProblem("HF212", message, name, help_)
    if is_mixture(written):
        help_ = "a mixture takes rows of all its sources by their weights: leave out `streaming`"
        yield OptionProblem("HF212", "a mixture is not streamed", "streaming", help_)
        return
    dataset = written.get("dataset")
    paths = cast("list[Any]", dataset) if isinstance(dataset, list) else [dataset]
    for path in (p for p in paths if isinstance(p, str)):
        is_whole = path_kind(path) == "file" and not path.endswith(STREAMED_FILES)
        if is_whole or path_kind(path) == "procedural":
            help_ = f"{', '.join(STREAMED_FILES)}, folders and datasets on the hub are"
            yield OptionProblem("HF212", f"`{path}` is not streamed", "streaming", help_)


def _of_curriculum(curriculum: Mapping[str, Any], shuffle: Any) -> Iterator[OptionProblem]:
    place: OptionPlace = ("curriculum",)
    if SUCCESS in curriculum:
        yield from _of_success(curriculum, shuffle)
        return
    yield from (replace(p, within=place) for p in problems(CURRICULUM_OPTIONS, curriculum))
    if "start" in curriculum and "steps" not in curriculum:
        message, help_ = "`start` has no effect without `steps`", "add `steps`, until all rows are drawn"
        yield OptionProblem("HF212", message, "start", help_, place)
    if "steps" in curriculum and shuffle is False:
        help_ = "without `steps` rows come from easy to hard; with it they are drawn at random"
        yield OptionProblem("HF212", "`shuffle: false` has no effect beside `steps`", "steps", help_, place)
    by = curriculum.get("by")
    if not isinstance(by, str):
        return
    try:
        expression = Expression(by)
    except BadTemplateError as error:
        yield OptionProblem("HF212", f"`by` is no expression: {error.message}", "by", error.help, place)
        return
    if expression.is_always_bool:
        help_ = "rows are sorted by numbers, the smallest first"
        yield OptionProblem("HF212", "`by` gives truth values, not numbers", "by", help_, place)


def _of_success(curriculum: Mapping[str, Any], shuffle: Any) -> Iterator[OptionProblem]:
    place: OptionPlace = ("curriculum",)
    if "by" in curriculum:
        help_ = "leave out one of them"
        message = f"a curriculum goes by `by` or by `{SUCCESS}`, not by both"
        yield OptionProblem("HF212", message, "by", help_, place)
    said = {name: value for name, value in curriculum.items() if name != "by"}
    yield from (replace(p, within=place) for p in problems(SUCCESS_OPTIONS, said))
    if isinstance(value := said[SUCCESS], str) and not _VALUE.fullmatch(value):
        help_ = "it is `node.port`, like `reward.score`: one value for each response"
        yield OptionProblem("HF212", f"`{SUCCESS}` names no value: `{value}`", SUCCESS, help_, place)
    if shuffle is False:
        message, help_ = f"`shuffle: false` has no effect beside `{SUCCESS}`", "rows are drawn at random"
        yield OptionProblem("HF212", message, SUCCESS, help_, place)
