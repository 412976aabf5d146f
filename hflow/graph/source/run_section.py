"""The section `run` of a graph file: its short forms, what it comes to, and the file without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hflow.diagnostics import HflowError
from hflow.graph.run_config import CheckpointPolicy, HangPolicy, ReplanPolicy, RunConfig, SamplePolicy
from hflow.graph.source.document import Document, Item, KeyPath, dump, parse
from hflow.graph.source.run_schema import CHECKPOINT, HANG, REPLAN, SAMPLES, RunSpec

RUN = "run"


def config_of(spec: RunSpec | None) -> RunConfig:
    """What the section says, with defaults for what it does not."""
    said = spec or RunSpec()
    checkpoint = CheckpointPolicy(**said.checkpoint.model_dump())
    hang = HangPolicy(said.hang.factor, said.hang.least, said.hang.first)
    return RunConfig(
        checkpoint, said.export, said.restarts, said.grace, tuple(said.retry), said.elastic, said.wait, hang,
        SamplePolicy(**said.samples.model_dump()), tuple(dict.fromkeys(said.trackers)),
        ReplanPolicy(**said.replan.model_dump()), tuple(dict.fromkeys(said.show)),
    )  # fmt: skip


def unfolded(item: Item, path: KeyPath) -> Item:
    """``checkpoint: 10`` as the ``{every: 10}`` that it is short for, so that other layers can be merged with
    it; everything else as it is."""
    if (
        path not in (CHECKPOINT, SAMPLES, REPLAN)
        or item.value is None
        or isinstance(item.value, (Mapping, tuple, bool))
    ):
        return item
    return replace(item, value={"every": Item(item.value, item.span, item.key_span)})


def opened(item: Item, path: KeyPath) -> Item:
    """As `unfolded`, of what something is merged over: ``false`` leaves nothing of itself, nor does
    ``replan: true``, which is ``{}``."""
    is_plain = path in (CHECKPOINT, HANG, SAMPLES, REPLAN) and item.value is False
    if is_plain or (path == REPLAN and item.value is True):
        return replace(item, value={})
    return unfolded(item, path)


def is_of_run(override: str) -> bool:
    """Whether a ``key.path=value`` changes how a run is kept, and nothing else."""
    return override.partition("=")[0].split(".")[0].strip() == RUN


def is_only_run(partial: Document) -> bool:
    """Whether a partial graph file says how a run is kept, and nothing else."""
    return partial.keys(()) == (RUN,)


def without_run(document: Document) -> Document:
    """The document without the section; its text keeps comments where the section has lines of its own."""
    if RUN not in document.keys(()):
        return document
    assert isinstance(document.root.value, Mapping)
    entries = {key: item for key, item in document.root.value.items() if key != RUN}
    bare = replace(document, root=replace(document.root, value=entries))
    lines = [document.span((key,), key=True).line - 1 for key in document.keys(())]
    text = _cut(document.text, lines, document.span((RUN,), key=True).line - 1)
    return replace(bare, text=text if _says(text, bare) else dump(bare))


def _cut(text: str, starts: Sequence[int], first: int) -> str:
    """The text without the section that starts in the line `first`, and without the comment right above it.
    `starts`: the lines where all sections do."""
    lines = text.split("\n")
    after = min((line for line in starts if line > first), default=len(lines))
    above, section, below = lines[:first], lines[first:after], lines[after:]
    while section[1:] and (section[-1].startswith("#") or not section[-1].strip()):  # of what follows
        below.insert(0, section.pop())
    while min(starts) < first and above[-1].startswith("#"):
        above.pop()
    while above and below and not above[-1].strip() and not below[0].strip():
        below.pop(0)
    return "\n".join([*above, *below])


def _says(text: str, document: Document) -> bool:
    """Whether a text says what the document's tree does."""
    try:
        return repr(parse(text, document.file).plain()) == repr(document.plain())
    except HflowError:
        return False
