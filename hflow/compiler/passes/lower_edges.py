"""Build the programs of the step and of its evaluation, and lower all edges: who sends what to whom."""

from __future__ import annotations

from dataclasses import replace

from hflow.compiler.program_builder.builder import ProgramBuilder
from hflow.compiler.state import Draft
from hflow.graph.ir import Graph
from hflow.plan.program import Program


def lower_edges(draft: Draft) -> Draft:
    """The program builder makes the whole program of the chosen plan, not its edges alone, as it did for the
    plan's price: instructions, what they wait for, and which trainer donates its weights' memory. What is
    added to that are the copies of each edge.

    Raises:
        HflowError: HF307 when a model would have to be read after it has been trained in the same step.
    """
    evaluation = draft.evaluation_graph
    return replace(
        draft,
        step=_program(draft, draft.graph),
        evaluation=_program(draft, evaluation) if evaluation else None,
    )


def _program(draft: Draft, graph: Graph) -> Program:
    instructions, edges = ProgramBuilder(draft, graph).build(draft.nodes)
    return Program(graph, tuple(edge.lowered(draft.cluster) for edge in edges), tuple(instructions))
