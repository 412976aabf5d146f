"""What chat templates ask of a plan, looked at before its first step."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.checks.chat import begun_by
from hflow.graph.ir import Node
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
    problems = [
        _diagnostic(plan, node, problem)
        for node in plan.graph.nodes
        if node.op == "generate"
        for problem in _problems(plan, node, tokenizers)
    ]
    if problems:
        raise HflowError(problems)


def _problems(plan: Plan, node: Node, tokenizers: Mapping[str, Tokenizer]) -> list[ChatProblem]:
    written = observations(node.options, tokenizers[node.model_use.model])
    data = begun_by(node, {other.name: other for other in plan.graph.nodes}) if node.input("prompt") else None
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


def _diagnostic(plan: Plan, node: Node, problem: ChatProblem) -> Diagnostic:
    folder = plan.graph.model_of(node).path
    return Diagnostic("HF406", f"`{node.name}`, model `{folder}`: {problem.message}", node.span, problem.help)
