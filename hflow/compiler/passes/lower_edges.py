"""Build the programs of the step and of its evaluations, and lower all edges: who sends what to whom."""

from __future__ import annotations

from dataclasses import replace

from hflow.compiler.evaluation_nodes import evaluation_nodes
from hflow.compiler.program_builder.builder import ProgramBuilder
from hflow.compiler.state import Draft
from hflow.graph.evaluation import named_graph
from hflow.graph.ir import Graph, NamedEvaluation
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import EvaluationPlan
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
        evaluations=tuple(_planned(draft, named) for named in draft.graph.evaluations),
        step=_program(draft, draft.graph),
        evaluation=_program(draft, evaluation) if evaluation else None,
    )


def _planned(draft: Draft, evaluation: NamedEvaluation) -> EvaluationPlan:
    graph = named_graph(draft.graph, evaluation)
    nodes = evaluation_nodes(draft, graph)
    return EvaluationPlan(evaluation.name, _program(draft, graph, nodes), nodes)


def _program(draft: Draft, graph: Graph, more: tuple[NodePlan, ...] = ()) -> Program:
    """`more`: plans of nodes that the step does not have."""
    instructions, edges = ProgramBuilder(draft, graph).build((*draft.nodes, *more))
    return Program(graph, tuple(edge.lowered(draft.cluster) for edge in edges), tuple(instructions))
