"""Models from the checkpoints of a run, whether it goes on or has ended. Starts no worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.graph.run_file import FILE, read_run_config
from hflow.plan.digests import INDEX, SINGLE, model_files
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.plan.run_state import trained_models
from hflow.report.named_run import named_run, no_checkpoint, no_run
from hflow.report.run_status import read_summary
from hflow.report.runs import MANIFEST, checkpoint_folders, is_run, size_on_disk
from hflow.runtime.checkpoint.export import export_checkpoint
from hflow.runtime.controller.best_checkpoint import best_of, scores
from hflow.runtime.controller.former_run import evaluations_of, named_evaluations_of, read_lines
from hflow.runtime.model_folder import check_files
from hflow.units import plural, printable

BEST = "best"


@dataclass(frozen=True)
class Exported:
    """A folder with a `model` as it was after `step` steps."""

    model: str
    step: int
    folder: Path
    size_bytes: int


def export_run(
    name: str, runs: Path, model: str | None, to: Path | None, tell: Callable[[str], None]
) -> list[Exported]:
    """Write trained models of a run, by default all of them and from its newest checkpoint that can be used.

    Args:
        name: of a run in `runs`, or its path; with ``@STEP`` or ``@best`` that checkpoint.
        model: this one alone.
        to: its folder; by default ``export/MODEL-step-N`` in the run's.
        tell: hears of checkpoints that are passed over, and of models that are newer than all of them.

    Raises:
        HflowError: HF407 when there is no such run or checkpoint, HF306 when its plan cannot be read, HF202
            for an unknown model, HF406 when a folder is there already, cannot be written, or what the model
            began from has changed, HF412 when no checkpoint can be used.
    """
    run, which = named_run(name, runs, (BEST,))
    if not is_run(run):
        raise HflowError(no_run(run, runs))
    plan = load_plan(run / "plan.json")
    models = _chosen(plan, model, to)
    _check_origins(plan, models)
    steps = _steps(run, plan, models, which)
    folders = dict(checkpoint_folders(run))
    for step, older in zip(steps, (*steps[1:], None)):
        targets = {model: to or run / "export" / f"{model}-step-{step}" for model in models}
        _check_free(targets.values())
        try:
            export_checkpoint(plan, folders[step], targets)
        except HflowError as error:
            if older is None or error.diagnostics[0].code != "HF412":
                raise
            tell(f"passed over: {error}")
            continue
        if not which:
            _tell_of_end(run, models, step, tell)
        return [Exported(model, step, path, size_on_disk(path)) for model, path in targets.items()]
    raise AssertionError(steps)


def _tell_of_end(run: Path, models: Sequence[str], step: int, tell: Callable[[str], None]) -> None:
    """Where what the run has trained at its end is newer than its newest checkpoint."""
    summary = read_summary(run)
    if summary and summary.steps > step:
        ended = f"the run ended after {plural(summary.steps, 'step')}"
        for model, folder in _at_end(run, models).items():
            tell(f"note: {ended}; `{model}` as it was then is in `{printable(str(folder))}`")


def _at_end(run: Path, models: Sequence[str]) -> dict[str, Path]:
    """Folders that a finished run has written its last weights to."""
    summary = read_summary(run)
    if not summary or summary.status != "finished" or read_run_config(run / FILE).export != "last":
        return {}
    folders = {model: run / "export" / model for model in models}
    return {model: folder for model, folder in folders.items() if folder.is_dir()}


def _without_checkpoint(run: Path, models: Sequence[str]) -> Diagnostic:
    at_end = (
        f"`{model}` as it was at the end is in `{printable(str(folder))}`"
        for model, folder in _at_end(run, models).items()
    )
    return replace(no_checkpoint(run), help="; ".join(at_end))


def _chosen(plan: Plan, model: str | None, to: Path | None) -> Sequence[str]:
    trained = trained_models(plan.graph)
    if model is None:
        if to and len(trained) > 1:
            help_ = f"say which: --model {' or --model '.join(trained)}"
            message = f"--to names one folder, and the run trains {len(trained)} models"
            raise HflowError(Diagnostic("HF001", message, help=help_))
        return trained
    if model not in trained:
        frozen = any(m.name == model for m in plan.graph.models)
        problem = "is not trained: its weights never change" if frozen else "is none of the run"
        help_ = did_you_mean(model, trained, "trained models")
        raise HflowError(Diagnostic("HF202", f"model `{printable(model)}` {problem}", help=help_))
    return (model,)


def _check_origins(plan: Plan, models: Sequence[str]) -> None:
    """Configuration and tokenizer come from the folder that a model began from, so these must be as they
    were; its weights need not be."""
    for model in models:
        folder = plan.graph.model(model).path
        check_files(folder)
        files = (f for f in model_files(plan.digests) if f.folder == folder)
        changed = [f.name for f in files if f.name not in (SINGLE, INDEX) and f.state != "same"]
        if changed:
            message = f"`{folder}`, which model `{model}` began from, has changed since: `{changed[0]}`"
            help_ = "an export takes configuration and tokenizer from there"
            raise HflowError(Diagnostic("HF406", message, help=help_))


def _steps(run: Path, plan: Plan, models: Sequence[str], which: str) -> list[int]:
    """The steps whose checkpoints are to be tried, in this order."""
    steps = sorted((s for s, path in checkpoint_folders(run) if (path / MANIFEST).is_file()), reverse=True)
    if which == BEST:
        return [_best(run, plan, steps)]
    if not steps:
        raise HflowError(_without_checkpoint(run, models))
    if which and int(which) not in steps:
        raise HflowError(no_checkpoint(run, f"of step {int(which)}"))
    return [int(which)] if which else steps


def _best(run: Path, plan: Plan, steps: Sequence[int]) -> int:
    policy = read_run_config(run / FILE).checkpoint
    if not policy.best:
        help_ = "name a step in place of `best`: --set run.checkpoint.best=METRIC is for the next run"
        message = f"`run.checkpoint.best` of `{printable(str(run))}` names no metric"
        raise HflowError(Diagnostic("HF407", message, help=help_))
    metrics = list(read_lines(run / "metrics.jsonl"))
    events = list(read_lines(run / "events.jsonl"))
    evaluated = evaluations_of(events), named_evaluations_of(events)
    step = best_of(steps, policy, scores(plan.graph, policy.best, metrics, *evaluated))
    if step is None:
        raise HflowError(no_checkpoint(run, f"whose `{policy.best}` is known"))
    return step


def _check_free(folders: Iterable[Path]) -> None:
    for folder in folders:
        if os.path.lexists(folder):
            message = f"`{printable(str(folder))}` exists"
            help_ = "remove it, or name another folder with --to"
            raise HflowError(Diagnostic("HF406", message, help=help_))
