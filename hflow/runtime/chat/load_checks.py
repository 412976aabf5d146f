"""What chat templates ask of a plan, looked at before its first step."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.checks.chat import begun_by
from hflow.graph.evaluation import named_graph
from hflow.graph.ir import Graph, Node, step_node
from hflow.plan.plan import Plan
from hflow.runtime.chat.observations import observations, turn_end
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.rows import chat_template
from hflow.runtime.tokenizer import Tokenizer


def check_chats(plan: Plan, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Raises HflowError HF406 for every generate node that cannot end the turns of its chat template, or
    cannot go on after them.

    Args:
        tokenizers: by the names of models.
    """
    graphs = (plan.graph, *(named_graph(plan.graph, evaluation) for evaluation in plan.graph.evaluations))
    problems: dict[tuple[str, str], Diagnostic] = {}  # what is wrong in the step, is told there alone
    for graph in graphs:
        for node in (n for n in graph.nodes if n.op == "generate"):
            for problem in _problems(graph, node, tokenizers):
                key = step_node(node.name), problem.message
                problems.setdefault(key, _diagnostic(graph, node, problem))
    if problems:
        raise HflowError(problems.values())


def _problems(graph: Graph, node: Node, tokenizers: Mapping[str, Tokenizer]) -> list[ChatProblem]:
    written = observations(node.options, tokenizers[node.model_use.model])
    data = begun_by(node, {other.name: other for other in graph.nodes}) if node.input("prompt") else None
    try:
        if written:
            written.check()
            _check_end(turn_end(written.template), node, tokenizers[node.model_use.model])
        if data:
            tokenizer = tokenizers[data.options["tokenizer"]]
            template = chat_template({"date": "2026-01-01", **data.options}, tokenizer)
            _check_end(turn_end(template), node, tokenizer)
    except ChatProblem as problem:
        return [problem]
    return []


def _check_end(end: int, node: Node, tokenizer: Tokenizer) -> None:
    """A response ends with the tokenizer's end token, or with what the node's options say."""
    if end == tokenizer.eos_id or end in (node.options.get("stop_token_ids") or ()):
        return
    mine, theirs = (tokenizer.fast.convert_ids_to_tokens(i) for i in (tokenizer.eos_id, end))
    message = f"the chat template ends a turn with `{theirs}`, but rollouts end with the tokenizer's `{mine}`"
    raise ChatProblem(message, f"write `eos_token: {theirs}` in the model's tokenizer_config.json")


def _diagnostic(graph: Graph, node: Node, problem: ChatProblem) -> Diagnostic:
    folder = graph.model_of(node).path
    return Diagnostic("HF406", f"`{node.name}`, model `{folder}`: {problem.message}", node.span, problem.help)
