"""Whether a file is being imported for a function of the user's.

A script that defines a reward and runs a graph with it is imported for the reward, in this process or in a
worker's. It must not start the run again there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError

_files: list[Path] = []


@contextmanager
def importing(file: Path) -> Iterator[None]:
    """Within, `file` is being imported."""
    _files.append(file)
    try:
        yield
    finally:
        _files.pop()


def refuse_in_import() -> None:
    """Raises HflowError HF205 while some file is being imported."""
    if not _files:
        return
    message = f"`{_files[-1].name}` is imported for a function in it, and would run the graph again"
    help_ = 'put what is to run under `if __name__ == "__main__":`, or functions into a file of their own'
    raise HflowError(Diagnostic("HF205", message, help=help_))
