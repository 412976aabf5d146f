"""Plans that can be made but not run: of models without weights, or of families without an engine."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.compiler.plan import Plan
from hflow.compiler.shape import NAMED, Family
from hflow.diagnostics import Diagnostic, HflowError

BUILT: tuple[Family, ...] = ("llama", "qwen2")  # by engines/megatron


def check_runnable(plan: Plan) -> None:
    """Raises HflowError HF406 with every model that no engine can build; asks nothing of the file system."""
    problems = tuple(_problems(plan))
    if problems:
        raise HflowError(problems)


def _problems(plan: Plan) -> Iterator[Diagnostic]:
    for model in plan.graph.models:
        family = plan.shapes[model.name].family
        if model.path.startswith(NAMED):
            message = f"model `{model.name}`: `{model.path}` is a shape without weights: compile only"
            yield Diagnostic(
                "HF406", message, model.span, "to run, `path` is a folder with a Hugging Face model"
            )
        elif family not in BUILT:
            message = f"model `{model.name}` is of family {family}, which no engine builds yet: compile only"
            yield Diagnostic("HF406", message, model.span, f"families that run: {', '.join(BUILT)}")
