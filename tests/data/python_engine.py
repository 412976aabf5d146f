"""What tests of the Python engine share: a tokenizer, dims, and calls of a node by one worker."""

from __future__ import annotations

from hflow.graph.ir import Node
from hflow.graph.types import Dim, Factor
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.tokenizer import Tokenizer
from hflow.runtime.tools.new_model import ALPHABET, character_tokenizer

TOKENIZER = Tokenizer(character_tokenizer(ALPHABET), eos_id=1, pad_id=0)
BATCH, GROUP = Factor("batch", 6, "prompts"), Factor("group", 3, "rollout")
RESP = Dim((Factor("resp", 8, "rollout"),), ragged=True)
PROMPT, SEQ = (Dim((Factor(name, 32, "prompts"),), ragged=True) for name in ("prompt", "seq"))
ANSWERS = Dim((Factor("resp", 8, "prompts"),), ragged=True)


def call(node: Node, rows: tuple[int, int], step: int = 0, evaluation: bool = False) -> EngineCall:
    plan = NodePlan(node.name, node.op, None, "python", Mesh.of((0,)), 1, 0.0, 0.0, 0)
    return EngineCall(node, plan, rows[0], rows[1] - rows[0], seed=7, step=step, evaluation=evaluation)


# data ------------------------------------------------------------------------------------------
