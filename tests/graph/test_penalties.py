"""Penalties on length need the tokens of every response."""

from __future__ import annotations

import pytest

import hflow
from hflow.diagnostics import HflowError

DROPS = "nodes.sampling.nodes.rollout.with.mask_truncated=true"


@pytest.mark.parametrize("name", ["overlong_penalty", "length_penalty"])
def test_a_penalty_does_not_call_dropped_responses_short(name: str) -> None:
    """DAPO's stands outside of the region that samples."""
    options = {"overlong_penalty": None, "length_penalty": "{per_token: 0.1}"}[name]
    penalty = [f"nodes.overlong.fn=hflow.ops.penalties.{name}"]
    penalty += [f"nodes.overlong.with={options}"] if options else []
    hflow.load("algorithms/dapo.yaml", penalty)
    with pytest.raises(HflowError) as raised:
        hflow.load("algorithms/dapo.yaml", [*penalty, DROPS])
    (problem,) = raised.value.diagnostics
    assert problem.code == "HF212" and "`rollout` drops" in problem.message
