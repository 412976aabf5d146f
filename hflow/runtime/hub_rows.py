"""Rows that the `datasets` library reads: of Arrow folders that `save_to_disk` wrote, and of datasets on the
Hugging Face hub. It runs no code of a dataset: version 4 and later have no loading scripts."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from hflow.diagnostics import did_you_mean
from hflow.runtime.data_files import DataRow, check_count, refused, table_rows

DEFAULT_SPLIT = "train"


def load_folder(path: str, split: str | None) -> Any:
    """The `datasets.Dataset` in a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote. Its
    rows stay in the files until they are read.

    Raises:
        HflowError: HF403 when it is none, is damaged, or has no such split.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise refused(f"no folder `{path}`", "a dataset on the hub is written ORG/NAME, without `./`")
    library = _library(path)
    try:
        found = library.load_from_disk(str(folder))
    except Exception as error:  # of Arrow, of JSON, of the library
        raise refused(f"`{path}` is no folder of `save_to_disk`: {_first_line(error)}") from None
    if isinstance(found, library.DatasetDict):
        found = _split(path, found, split)
    elif split is not None:
        raise refused(f"`{path}` holds one dataset and no splits", "leave out `split`")
    return found


def load_hub(name: str, config: str | None, split: str | None, revision: str | None) -> Any:
    """One split (`train`, unless said otherwise) of a dataset on the hub, a `datasets.Dataset`: from the
    library's cache where the machine is offline. Its rows stay in the cache until they are read.

    Raises:
        HflowError: HF403 when it cannot be had.
    """
    if Path(name).exists():
        message = f"`{name}` is a dataset on the hub, but there is a folder of that name, too"
        raise refused(message, f"write `./{name}` for the folder; run elsewhere for the hub's")
    library = _library(name)
    try:
        found = library.load_dataset(name, config, split=split or DEFAULT_SPLIT, revision=revision)
    except Exception as error:  # of the network, the hub, the library, Arrow
        given = [repr(name), *([repr(config)] if config else []), f"split={split or DEFAULT_SPLIT!r}"]
        given += [f"revision={revision!r}"] if revision else []
        said = f"datasets.load_dataset({', '.join(given)})"
        help_ = f"`{said}` where the machine is online puts it into the cache (HF_HOME); it is found there"
        is_offline = isinstance(error, (ConnectionError, TimeoutError)) or "ffline" in str(error)
        problem = "cannot be reached and is not in the cache" if is_offline else "cannot be loaded"
        message = f"dataset `{name}` {problem}: {_first_line(error)}"
        raise refused(message, help_ if is_offline else "") from None
    return found


def _library(path: str) -> ModuleType:
    try:
        import datasets
    except ImportError:
        help_ = "`pip install -e '.[data]'` in hflow's checkout"
        raise refused(f"dataset `{path}` needs the package datasets", help_) from None
    datasets.disable_progress_bars()
    return datasets


def _split(path: str, found: Any, split: str | None) -> Any:
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split in found:
        return found[split]
    names = ", ".join(found)
    if split is None:
        raise refused(f"`{path}` has the splits {names}", "say which by `split`")
    raise refused(
        f"`{path}` has no split `{split}`", did_you_mean(split, found, "splits") or f"splits: {names}"
    )


def all_rows(path: str, loaded: Any) -> list[DataRow]:
    """All rows of a loaded dataset. Raises HflowError HF403 as `rows_between`, and for too many rows."""
    check_count(path, len(loaded))
    return rows_between(path, loaded, 0, len(loaded))


def rows_between(path: str, loaded: Any, first: int, end: int) -> list[DataRow]:
    """The rows of a loaded dataset from number `first` to before `end`.

    Args:
        path: what messages call it.

    Raises:
        HflowError: HF403 when its files are damaged.
    """
    try:
        table = loaded.with_format("arrow")[first:end]  # values as they are stored: nothing is decoded
    except Exception as error:  # a damaged file
        raise refused(f"`{path}` cannot be read: {_first_line(error)}") from None
    return table_rows(path, table, first)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
