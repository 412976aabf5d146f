"""What a user is told of workers that hang: a line while it may still end well, then a failure and stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Graph
from hflow.runtime.controller.deadlines import Usual
from hflow.runtime.controller.run_folder import RunFolder
from hflow.runtime.controller.worker_failure import WorkerFailure
from hflow.units import duration
from hflow.whole_file import write_whole

HUNG = "HF413"


@dataclass(frozen=True)
class Stall:
    """Workers `ranks` have done `what` for `seconds`, which is longer than usual. `node`: of the graph, if it
    is one's. `silent`: they do not answer, and did that when they last have; `stopped`: since their process
    is. `passed`: others that take part in it, but went on. `waiting`: others that cannot go on before."""

    ranks: tuple[int, ...]
    what: str
    node: str
    seconds: float
    limit_s: float
    usual: Usual
    silent: bool = False
    stopped: bool = False
    passed: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True)
class SeenWorker:
    """A worker when something hangs: `doing` so for `seconds`; `stacks` of its threads, if it answers; else
    the `state` of its process."""

    name: str
    doing: str
    seconds: float
    stacks: str | None
    state: str


class HangReport:
    """Of one run, into its folder and onto the terminal."""

    def __init__(self, graph: Graph, folder: RunFolder, say: Callable[[str], None]):
        self._graph, self._folder, self._say = graph, folder, say

    def notice(self, stall: Stall, names: Sequence[str]) -> None:
        """Tell of workers that take long."""
        limit = duration(stall.limit_s)
        self._say(f"{_text(stall, names)}; the run counts as hung after {limit} (run.hang)")
        self._event("slow", stall, names)

    def failure(self, stall: Stall, workers: Sequence[SeenWorker]) -> WorkerFailure:
        """Write the stacks of all; the failure says where they are."""
        names = [worker.name for worker in workers]
        file, problem = self._write_stacks(workers)
        self._event("hung", stall, names, stacks=file.name if file else None)
        where = f"the stacks of all workers are in {file}" if file else f"no stacks were written: {problem}"
        help_ = f"{where}; `run.hang` says when a run counts as hung"
        span = next((node.span for node in self._graph.nodes if node.name == stall.node), None)
        return WorkerFailure(Diagnostic(HUNG, f"the run hangs: {_text(stall, names)}", span, help_))

    def _event(self, kind: str, stall: Stall, names: Sequence[str], **more: str | None) -> None:
        nodes = [names[rank] for rank in stall.ranks]
        self._folder.event(
            kind, workers=list(stall.ranks), nodes=nodes, doing=stall.what, seconds=stall.seconds,
            limit_s=stall.limit_s, silent=stall.silent, stopped=stall.stopped, **more,
        )  # fmt: skip

    def _write_stacks(self, workers: Sequence[SeenWorker]) -> tuple[Path | None, HflowError | None]:
        """The file, or why there is none."""
        texts = [
            f"worker {rank} ({worker.name}): {worker.doing} for {duration(worker.seconds)}\n\n"
            + (worker.stacks or f"It does not answer; state of its process: {worker.state}.\n")
            for rank, worker in enumerate(workers)
        ]
        files = (self._folder.path / f"stacks-{number}.txt" for number in count(1))
        file = next(file for file in files if not file.exists())
        try:
            write_whole(file, "\n\n".join(texts), "HF407")
        except HflowError as error:
            return None, error
        return file, None


def _text(stall: Stall, names: Sequence[str]) -> str:
    """``worker 1 (10.0.0.2, pid 77) has been in `reward` for 104 s; it took 3 s before``"""
    them = _workers(stall.ranks, names)
    seconds, has = duration(stall.seconds), "has" if len(stall.ranks) == 1 else "have"
    if stall.silent:
        why = "is stopped (SIGSTOP)" if stall.stopped else "runs, but a function may let no other thread run"
        text = f"{them} {has} not answered for {seconds}: the process {why}; it was {stall.what} before"
    else:
        text = f"{them} {has} been {stall.what} for {seconds}{_usual(stall.usual)}"
    if stall.passed:
        also = "which takes part" if len(stall.passed) == 1 else "which take part"
        text += f"; {_workers(stall.passed, names)}, {also} in it, went on without"
    if stall.waiting:
        text += f"; {_workers(stall.waiting, names)} wait{'s' if len(stall.waiting) == 1 else ''} for it"
    return text


def _usual(usual: Usual) -> str:
    if usual.longest_s is not None:
        return f"; it took at most {duration(usual.longest_s)} before" if usual.longest_s else ""
    return f"; it was predicted to take {duration(usual.predicted_s)}" if usual.predicted_s else ""


def _workers(ranks: Sequence[int], names: Sequence[str]) -> str:
    named = [f"{rank} ({names[rank]})" for rank in ranks]
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(named)}"
