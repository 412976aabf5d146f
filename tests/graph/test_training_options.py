"""Options of train nodes that need not be there: round trips, and graphs without them."""

from __future__ import annotations

import pytest

from hflow.graph.infer.kinds.train import OPTIONS, frozen_patterns
from hflow.graph.ir import Refresh
from hflow.graph.load import load, load_text
from hflow.graph.write.yaml_printer import to_yaml

AT = "nodes.actor_train.with"


@pytest.mark.parametrize("written", [
    ("schedule=constant",),
    ("schedule=cosine", "min_lr=1e-6", "warmup_steps=3"),
    ("schedule=wsd", "decay_steps=20"),
    ("freeze=embed*",),
    ("freeze=[embed*, 'layers.0.*']",),
], ids=str)  # fmt: skip
def test_a_graph_says_what_was_written(written: tuple[str, ...]) -> None:
    graph = load("grpo", [f"{AT}.{option}" for option in written])
    again = load_text(to_yaml(graph))
    assert again == graph and again.node("actor_train").options == graph.node("actor_train").options


def test_a_node_does_not_have_what_it_does_not_write() -> None:
    """So plans and checkpoints from before these options are those of the same graphs."""
    options = load("grpo").node("actor_train").options
    assert not {o.name for o in OPTIONS if o.optional} & options.keys()


def test_one_pattern_is_a_list_of_one() -> None:
    one, several = (
        load("grpo", [f"{AT}.freeze={text}"]).node("actor_train") for text in ("embed*", "[embed*]")
    )
    assert frozen_patterns(one) == frozen_patterns(several) == ("embed*",)


def test_a_decay_makes_an_average() -> None:
    graph = load("iterative_grpo", ["models.ref.refresh={from: actor, every: 3, decay: 0.9}"])
    assert graph.model("ref").refresh == Refresh("actor", 3, 0.9)
    assert load_text(to_yaml(graph)) == graph


def test_updates_of_a_step() -> None:
    """128 prompts with 8 samples, in minibatches of 512 rows, twice."""
    graph = load("grpo", ["nodes.actor_train.repeat={epochs: 2, minibatch: 512}"])
    assert graph.node("actor_train").updates == 4 and graph.node("rollout").updates == 0
    assert load("grpo", ["params.minibatch=1024"]).node("actor_train").updates == 1
