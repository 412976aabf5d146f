"""What `lengths` of a data or generate node says, checked."""

from __future__ import annotations

from pathlib import Path

from hflow.bounded_read import UnreadableError
from hflow.diagnostics import did_you_mean
from hflow.graph.infer.draft import NodeDraft
from hflow.graph.lengths import ImpossibleLengthsError, Lengths
from hflow.graph.lengths_file import FILE, read_lengths
from hflow.graph.source.document import KeyPath
from hflow.graph.source.problems import Problems
from hflow.graph.source.schema import LengthsSpec

_FORMS = "`{mean: 1019}`, quantiles like `{p50: 800, p95: 3000}`, or `{from: RUN_FOLDER}`"


def stated_lengths(
    spec: LengthsSpec | None, draft: NodeDraft, greatest: int | None, problems: Problems
) -> Lengths | None:
    """The lengths of the node's texts; None where it says none, or where they cannot be, which is HF231.

    Args:
        greatest: length that the node's options admit; None where they are wrong.
    """
    if spec is None or greatest is None:
        return None
    path = (*draft.path, "lengths")
    said = {key: value for key, value in spec.model_dump(exclude_none=True).items() if key != "from_"}
    if spec.from_ is not None:
        return _of_run(spec.from_, draft.name, greatest, tuple(said), path, problems)
    if not said:
        problems.add("HF231", f"`lengths` of `{draft.name}` says nothing", path, key=True, help=_FORMS)
        return None
    mean = said.pop("mean", None)
    try:
        return Lengths.of(greatest, mean, said)
    except ImpossibleLengthsError as error:
        message = f"`{error.key}` {error.message}"
        problems.add("HF231", message, (*path, error.key), help=error.help)
        return None


def _of_run(
    folder: str, node: str, greatest: int, beside: tuple[str, ...], path: KeyPath, problems: Problems
) -> Lengths | None:
    """Those that the node of this name saw in a run, cut off at `greatest`."""
    if beside:
        message = f"`{beside[0]}` stands beside `from`, which says it"
        problems.add("HF231", message, (*path, beside[0]), key=True, help="state one of the two")
        return None
    try:
        nodes = read_lengths(Path(folder))
    except UnreadableError as error:
        message = f"`{Path(folder) / FILE}` cannot be read: {error}"
        help_ = "name the folder of a run, relative to where hflow runs; it has the file after its first step"
        problems.add("HF231", message, (*path, "from"), help=help_)
        return None
    if node not in nodes:
        message = f"the run in `{folder}` saw no lengths of a node `{node}`"
        problems.add("HF231", message, (*path, "from"), help=did_you_mean(node, nodes, "nodes"))
        return None
    return nodes[node].lengths.cut(greatest)
