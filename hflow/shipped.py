"""Files that hflow ships, by name: algorithms and clusters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean


def find(name: str | Path, folder: str, what: str) -> Path:
    """A path as given; a bare name is looked up in `folder` here, then in that of hflow itself.

    Args:
        folder: ``algorithms`` or ``clusters``.
        what: what the files are, for messages.

    Raises:
        HflowError: HF001, with the names that there are.
    """
    path = Path(name)
    if is_file(path) or not is_bare(path):
        return path
    found = _first(str(name), _folders(folder))
    if found is None:
        raise _missing(str(name), folder, what, known(folder))
    return found


def find_graph(name: str | Path) -> Path:
    """The graph file that `name` means: the file as given; for a bare name ``NAME.yaml`` here, then the
    algorithm of that name.

    Raises:
        HflowError: HF001 for a bare name that is none of them, with the nearest that is, and for a file that
            is not there and is called like an algorithm.
    """
    path = Path(name)
    if not is_bare(path) and not os.path.lexists(path) and is_shipped(path.stem):
        message = f"cannot read `{path}`: no such file"
        raise HflowError(Diagnostic("HF001", message, help=f"`{path.stem}` alone means hflow's own"))
    found = path if is_file(path) or not is_bare(path) else algorithm(str(name), Path())
    if found:
        return found
    if os.path.lexists(path):  # a folder: reading it says so
        return path
    here = sorted(file.stem for file in Path().glob("*.yaml"))
    raise _missing(str(name), "algorithms", "graph file or algorithm", [*known("algorithms"), *here])


def algorithm(name: str, folder: Path, besides: str = "") -> Path | None:
    """The graph file that the bare `name` means in a `folder`: ``NAME.yaml`` there, else the algorithm of
    that name; not the file `besides` itself. None if there is neither."""
    return _first(name, (folder, *_folders("algorithms")), os.path.realpath(besides) if besides else "")


def is_bare(path: Path) -> bool:
    """Whether a path may be the name of something that is shipped: it has neither a folder nor a suffix."""
    return path.parent == Path() and not path.suffix


def is_file(path: Path) -> bool:
    """Whether there is such a file; no name is too long to ask."""
    try:
        return path.is_file()
    except OSError:
        return False


def known(folder: str) -> list[str]:
    """The names that there are in `folder` here and in that of hflow itself."""
    return sorted({file.stem for f in _folders(folder) for file in f.glob("*.yaml")})


def is_shipped(name: str) -> bool:
    """Whether hflow itself has an algorithm of that name."""
    return _first(name, _folders("algorithms")[1:]) is not None


def _folders(folder: str) -> tuple[Path, ...]:
    """Here; in the installed package; in the repository."""
    package = Path(__file__).resolve().parent
    return Path(folder), package / folder, package.parent / folder


def _first(name: str, folders: Iterable[Path], besides: str = "") -> Path | None:
    files = (folder / f"{name}.yaml" for folder in folders)
    return next((f for f in files if is_file(f) and os.path.realpath(f) != besides), None)


def _missing(name: str, folder: str, what: str, names: Iterable[str]) -> HflowError:
    near = did_you_mean(name, names)
    help_ = f"{near} {folder}: {', '.join(known(folder))}" if near.endswith("?") else near
    return HflowError(Diagnostic("HF001", f"no {what} `{name}`", help=help_))
