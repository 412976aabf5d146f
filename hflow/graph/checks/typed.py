"""The typed nodes of a step, or of a named evaluation: what holds for values between nodes holds for both."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.graph.checks.chat import inherit_chat
from hflow.graph.checks.checks import check_counted, check_groups
from hflow.graph.checks.distributions import check_distributions
from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.infer import infer
from hflow.graph.infer.wiring import order
from hflow.graph.ir import Node
from hflow.graph.source.problems import Problems


def typed_nodes(drafts: Mapping[str, NodeDraft], problems: Problems) -> dict[str, Node]:
    """In topological order, with what later turns inherit; not all of them where problems were found.

    HF212, HF219 and HF229 as `check_distributions`, `check_groups` and `check_counted`, beside the problems
    of types.
    """
    nodes = inherit_chat(infer(drafts, order(drafts, problems), problems))
    check_distributions(nodes, drafts, problems)
    check_groups(nodes, drafts, problems)
    check_counted(nodes, drafts, problems)
    return nodes
