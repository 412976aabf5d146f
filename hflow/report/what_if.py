"""The techniques of `--what-if`, as variations of a cluster whose engines would have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.graph.ir import Graph
from hflow.plan.techniques import (
    NO_TECHNIQUES,
    PartialRollouts,
    Speculation,
    Technique,
)
from hflow.report.sensitivity import Variation


def what_ifs(texts: Iterable[str], graph: Graph) -> tuple[Variation, ...]:
    """A variation for each technique, as the last text about it says, and one for all of several together.

    Args:
        texts: like ``speculative=3,2.47``; numbers left out are those of `hflow.plan.techniques`.

    Raises:
        HflowError: HF312 with a diagnostic for each text that names no technique, has numbers that it does
            not take, or would change no plan of `graph`.
    """
    found, bad = dict[str, Technique](), list[Diagnostic]()
    for text in texts:
        name, _, numbers = text.partition("=")
        problem = _problem(name, numbers, graph)
        if problem:
            bad.append(replace(problem, message=f"--what-if {text}: {problem.message}"))
        else:
            found[name] = _read(name, numbers)
    if bad:
        raise HflowError(bad)
    each = [_variation(_text(name, one), {name: one}) for name, one in found.items()]
    together = [_variation("all of these", found)] if len(found) > 1 else []
    return (*each, *together)


def _text(name: str, technique: Technique) -> str:
    return f"{name}={','.join(f'{number:g}' for number in astuple(technique))}"


def _variation(text: str, techniques: Mapping[str, Technique]) -> Variation:
    said = {_OPTIONS[name].field: technique for name, technique in techniques.items()}
    return Variation(text, lambda cluster: replace(cluster, techniques=replace(NO_TECHNIQUES, **said)))


def _problem(name: str, numbers: str, graph: Graph) -> Diagnostic | None:
    if name not in _OPTIONS:
        return Diagnostic("HF312", "no such technique", help=did_you_mean(name, _OPTIONS))
    try:
        _read(name, numbers)
    except (TypeError, ValueError):
        return Diagnostic("HF312", "these numbers cannot be", help=_OPTIONS[name].takes)
    nodes = [node for node in graph.nodes if node.op == "generate"]
    if not nodes:
        return Diagnostic("HF312", f"`{graph.name}` generates nothing", help="leave it out")
    if name == "partial-rollouts" and not any(node.lengths for node in nodes):
        message = "all responses count as equally long, so that they end together"
        help_ = f"state lengths: --set nodes.{nodes[0].name}.lengths.mean=TOKENS, or --from RUN"
        return Diagnostic("HF312", message, help=help_)
    return None


def _read(name: str, numbers: str) -> Technique:
    """Raises TypeError for too many numbers, ValueError for impossible ones."""
    return _OPTIONS[name].read(*map(float, numbers.split(",") if numbers else ()))


def _speculation(drafted: float = Speculation.drafted, made: float = Speculation.made) -> Speculation:
    if not drafted >= 1 or drafted % 1 or not 1 <= made <= drafted + 1:
        raise ValueError
    return Speculation(int(drafted), made)


def _partial_rollouts(begun: float = PartialRollouts.begun) -> PartialRollouts:
    if not 1 < begun < float("inf"):
        raise ValueError
    return PartialRollouts(begun)


@dataclass(frozen=True)
class _Option:
    """`field`: of `Techniques`. `takes`: what its numbers are."""

    field: str
    read: Callable[..., Technique]
    takes: str


_OPTIONS: Mapping[str, _Option] = {
    "speculative": _Option(
        "speculation",
        _speculation,
        "speculative=DRAFTED,MADE: how many tokens are drafted for a row,\n"
        "and how many it has more after that on average, 1 to DRAFTED + 1",
    ),
    "partial-rollouts": _Option(
        "partial_rollouts",
        _partial_rollouts,
        "partial-rollouts=BEGUN: how many times the rows that are needed, above 1",
    ),
}
