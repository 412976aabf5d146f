"""Sampling options that are said once, at the generate node, and hold for whoever reads its samples.

Log-probs of one text mean something together only where they are of one distribution. So a score or train
node that does not say another `temperature` takes that of the sampler, and a later turn its truncation too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.kinds import generate
from hflow.graph.ir import Node


def inherited(draft: NodeDraft, sampler: Node) -> Mapping[str, Any]:
    """The options of `draft`, which reads texts of `sampler`, that it does not say itself."""
    said = {name: sampler.options[name] for name in generate.INHERITED if name in sampler.options}
    if draft.op == "generate":
        return {name: value for name, value in said.items() if name not in draft.written}
    is_scored = draft.op in ("score", "train") and draft.head == "lm" and "temperature" not in draft.written
    # A greedy rollout sampled from no distribution that another node could take over.
    return {"temperature": said["temperature"]} if is_scored and said.get("temperature") else {}
