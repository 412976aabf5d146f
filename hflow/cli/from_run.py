"""What `hflow compile --from RUN` plans: a run's graph with the lengths that it saw, beside its old plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.cli.arguments import load_graph, width
from hflow.cli.resume import former_plan, own_graph
from hflow.diagnostics import Diagnostic, HflowError


@dataclass(frozen=True)
class SeenRun:
    """A run folder, the plan that it had last, and the lengths that its nodes saw."""

    folder: Path
    plan: Any
    seen: Any

    @classmethod
    def read(cls, folder: Path) -> SeenRun:
        """Raises HflowError HF407 when there is no run, or it has seen no lengths yet; HF306 when its plan
        cannot be read."""
        from hflow.graph.lengths_file import FILE, seen_in

        plan, seen = former_plan(folder), seen_in(folder)
        if not seen:
            message = f"the run in `{folder}` has seen no lengths"
            help_ = f"it has a `{FILE}` after its first step"
            raise HflowError(Diagnostic("HF407", message, help=help_))
        return cls(folder, plan, seen)

    def graph(self, given: Path | None, files: Sequence[Path] | None, overrides: Sequence[str] | None) -> Any:
        """The run's graph, as it was or changed, or a `given` one, with the lengths that the run saw.

        Raises:
            HflowError: HF407 when the run has no node of the graph; as `load_graph`.
        """
        from hflow.graph.lengths_of_run import with_lengths

        loaded = load_graph(given, files, overrides) if given else self._own_graph(files, overrides)
        if not {node.name for node in loaded.nodes} & self.seen.keys():
            message = f"the run in `{self.folder}` saw no lengths of nodes of `{loaded.name}`"
            raise HflowError(Diagnostic("HF407", message, help=f"it saw those of {', '.join(self.seen)}"))
        return with_lengths(loaded, self.seen)

    def _own_graph(self, files: Sequence[Path] | None, overrides: Sequence[str] | None) -> Any:
        own = self.plan.graph
        return own_graph(self.folder, own, files or (), overrides or ()) if files or overrides else own

    def as_planned(self, graph: Any, cluster: Any) -> Any:
        """The run's old plan of `graph`, priced with the lengths that the run saw; None where the graph, or
        the cluster, has no such plan any more."""
        from hflow.compiler.replan import repriced

        return repriced(self.plan, graph, cluster)

    def lengths_text(self) -> str:
        """What the run saw, beside what it was planned for."""
        from hflow.view.terminal.length_text import seen_lengths

        return seen_lengths(self.plan.graph, self.seen, width())
