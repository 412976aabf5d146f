"""The graph file and the plan that a picture, a page, an exported model or a run was made from."""

from __future__ import annotations

from pathlib import Path

from hflow.bounded_read import UnreadableError, read_text
from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.origin import GRAPH_FILE, PLAN_FILE, Origin
from hflow.plan.plan_file import MAX_PLAN_BYTES
from hflow.view.picture.carried_origin import carried_origin

_PAIRS = ((GRAPH_FILE, PLAN_FILE), ("graph.yaml", "plan.json"))  # of an exported model, of a run
_HELP = "pictures of `hflow show --svg`, pages of plans and runs, and exported models carry theirs"


def read_origin(path: Path) -> Origin:
    """What `path`, a file or a folder, was made from.

    Raises:
        HflowError: HF001 when it cannot be read, or does not tell.
    """
    try:
        found = _of_folder(path) if path.is_dir() else carried_origin(read_text(path, MAX_PLAN_BYTES))
    except UnreadableError as error:
        missing = error.reason == "missing"
        message = f"`{path}` does not exist" if missing else f"`{path}` cannot be read: {error}"
        raise HflowError(Diagnostic("HF001", message)) from None
    except OSError as error:
        raise HflowError(Diagnostic("HF001", f"`{path}` cannot be read: {error.strerror}")) from None
    if not found:
        raise HflowError(Diagnostic("HF001", f"`{path}` carries no graph file", help=_HELP))
    return found


def _of_folder(folder: Path) -> Origin | None:
    for graph, plan in _PAIRS:
        if (folder / graph).is_file():
            is_planned = (folder / plan).is_file()
            text = read_text(folder / plan, MAX_PLAN_BYTES) if is_planned else ""
            return Origin(read_text(folder / graph, MAX_PLAN_BYTES), text)
    return None
