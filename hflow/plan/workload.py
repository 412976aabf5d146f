"""How much a node has to do in one step: rows and token counts, read from its typed ports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, prod

from hflow.graph.infer.kinds.generate import ROUTES
from hflow.graph.infer.kinds.train import balance_coef, frozen_patterns
from hflow.graph.infer.signature import parse_signature
from hflow.graph.ir import Function, Graph, Node
from hflow.graph.lengths import Lengths
from hflow.graph.types import ValueType
from hflow.plan.ports import row_unit
from hflow.plan.row_lengths import UNSTATED, RowLengths


@dataclass(frozen=True)
class Workload:
    """`rows` sequences of `prompt` + `response` tokens (the greatest lengths that the types admit).

    `samples`: sequences that share one prompt; `group`: rows that a loss sees together;
    `optimizer_steps`: updates per step of a train node, each over `rows_per_update` rows;
    `prompts`, `responses`: how long they are, where that is stated, else they count at the greatest, as they
    do in memory but for a KV cache with pages; `alike`: rows that stand together for having one prompt;
    `freeze`: patterns of the names of parameters that a train node leaves as they are; `kept`: the most
    tokens over which log-probs of a truncated distribution are taken; 0: over all. `counts_choices`: an
    update's rows pass forward once more, for their choices of experts to be counted before. `choices`:
    experts of a token, over all layers, that a node tells or follows; 0: none.
    """

    rows: int
    prompt: int
    response: int
    samples: int = 1
    optimizer_steps: int = 0
    rows_per_update: int = 0
    group: int = 1
    prompts: Lengths | None = None
    responses: Lengths | None = None
    alike: int = 1
    freeze: tuple[str, ...] = ()
    kept: int = 0
    counts_choices: bool = False
    choices: int = 0

    @property
    def alike_in_update(self) -> float:
        """The same of an update. A minibatch has every so many sets of `group` rows, so a prompt has its own
        in as many minibatches as it has sets."""
        if not self.rows_per_update:
            return self.alike
        return self.alike / min(self.rows // self.rows_per_update, max(1, self.alike // self.group))

    def samples_on_one(self, replicas: int) -> int:
        """Of one prompt, those that one of `replicas` has: all, unless several share a prompt."""
        return min(self.samples, max(1, self.rows // replicas))

    @property
    def sequence(self) -> int:
        return self.prompt + self.response

    @property
    def varies(self) -> bool:
        """Whether rows may be shorter than the greatest."""
        return self.prompts is not None or self.responses is not None

    @property
    def mean_prompt(self) -> float:
        return self.prompts.mean if self.prompts else self.prompt

    @property
    def mean_response(self) -> float:
        return self.responses.mean if self.responses else self.response

    @property
    def mean_sequence(self) -> float:
        return self.mean_prompt + self.mean_response

    @property
    def sequence_variance(self) -> float:
        """Of the lengths of rows, in tokens squared; a response is as long whatever its prompt."""
        return sum(lengths.variance for lengths in (self.prompts, self.responses) if lengths)

    @property
    def surrounding(self) -> float:
        """The mean length of the row in which a token stands: long rows have more tokens."""
        if not self.varies:
            return self.mean_sequence
        return self.mean_sequence + self.sequence_variance / self.mean_sequence


def workload(node: Node, lengths: RowLengths = UNSTATED) -> Workload:
    """The workload of one execution of a generate, score or train node, with rows of such `lengths`."""
    counted = _counted(node)
    if lengths == UNSTATED:
        return counted
    return replace(counted, prompts=lengths.prompts, responses=lengths.responses)


def _counted(node: Node) -> Workload:
    """With rows of the greatest lengths."""
    tokens = node.type_of("tokens")
    longest, alike = _ragged_size(tokens), row_unit(tokens)
    if node.op == "generate":
        response = node.options["max_new_tokens"]
        samples = node.options.get("n", 1)
        return Workload(
            tokens.rows, longest - response, response, samples, alike=alike, choices=_choices(node)
        )
    rows, response = tokens.rows, _ragged_size(node.type_of("mask"))
    if node.repeat is None or node.function is None:  # a score node
        kept, choices = _most_kept(node), _choices(node)
        return Workload(rows, longest - response, response, alike=alike, kept=kept, choices=choices)
    size = node.repeat.minibatch or rows
    updates = node.repeat.epochs * (rows // size)
    group = _group(node.function, tokens)
    freeze, kept = frozen_patterns(node), _most_kept(node)
    return Workload(
        rows, longest - response, response, 1, updates, size, group, alike=alike,
        freeze=freeze, kept=kept, counts_choices=balance_coef(node) > 0, choices=_choices(node),
    )  # fmt: skip


def rounds(graph: Graph, node: Node) -> int:
    """How often a node runs in a step at least: the rounds that its region needs when all rows are kept."""
    region = graph.region(node.name if node.op == "repeat" else node.region)
    if region.until is None:
        return 1
    keep = graph.node(region.until.node).type_of(region.until.port)
    return min(region.times, ceil(region.rows / keep.rows))


def token_makers(graph: Graph) -> tuple[Node, ...]:
    """The nodes whose tokens count as the step's: the rollouts (the last turns of them) whose texts are
    trained on; not those that only give a baseline, or a validation. Without any, what is trained on; in a
    graph that trains nothing, all rollouts."""
    trains = tuple(n for n in graph.nodes if n.op == "train")
    made = {name for node in trains for name in _sampled_for(graph, node)}
    found = tuple(n for n in graph.nodes if n.name in made) or trains
    return found or tuple(n for n in graph.nodes if n.op == "generate")


def _sampled_for(graph: Graph, node: Node) -> Iterator[str]:
    """The generate nodes whose tokens a node reads: itself, through calls, or from a region."""
    for value in (v for v in node.inputs if v.type.dtype == "i32" and not v.lag):
        source = graph.node(value.source.node)
        if source.op == "repeat":
            inner = source.input(value.source.port)
            source = graph.node(inner.source.node) if inner else source
        if source.op == "generate":
            yield source.name
        else:
            yield from _sampled_for(graph, source)


def _group(loss: Function, rows: ValueType) -> int:
    """Rows of one group where the loss is over groups (``pairs*k``), else 1."""
    signature = parse_signature(loss.signature)
    factors = max(len(p.type.dims[0].factors) for p in signature.inputs if p.type.dims)
    inner = rows.dims[0].factors[len(rows.dims[0].factors) - factors + 1 :]
    return prod(f.size or 1 for f in inner)


def _most_kept(node: Node) -> int:
    kept = node.input("kept")
    return kept.type.dims[-1].size or 0 if kept else 0


def _choices(node: Node) -> int:
    routes = node.output(ROUTES) or node.input(ROUTES)
    return routes.type.dims[-1].size or 0 if routes else 0


def _ragged_size(type_: ValueType) -> int:
    size = next((d.size for d in type_.dims if d.ragged), None)
    assert size is not None, f"{type_} has no greatest length"
    return size
