"""The plans of other systems, as HybridFlow's evaluation describes them (arXiv:2409.19256, section 8.1).

Each system fixes who shares devices and how models are split; what it leaves open is chosen best. They are
plans like all others, priced for the same engines and links: what a system loses otherwise is not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from hflow.compiler.candidates.node_groups import Option, Options, Unit
from hflow.compiler.options import Planner
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.published.mapper import Mapper, Members
from hflow.compiler.planner.published.seating import Placed, options_with, refuse_wishes, seated, unproven
from hflow.compiler.planner.published.standalone import best_split
from hflow.compiler.planner.published.uncached import without_cache
from hflow.compiler.planner.search import Found
from hflow.compiler.planner.space import Space
from hflow.diagnostics import Diagnostic, HflowError


def baseline(space: Space) -> Found:
    """The fastest of the plans that the system named by the draft's options may have. Raises HF305 where
    none fits, HF309 for pins and placements, and where graph or cluster do not suit the system."""
    refuse_wishes(space.draft)
    best = Incumbent(space)
    for placed in SYSTEMS[space.draft.options.planner](space):
        best.offer(seated(placed))
    return unproven(best, best.explored)


def deepspeed_chat(space: Space) -> Iterator[Placed]:
    """All models on all devices: ZeRO-3 to train and score, tensor parallelism inside hosts to generate."""
    choices = {
        name: _on_most(options) for name, options in (_fully_split(space) | _generating(space)).items()
    }
    for chosen in product(*choices.values()):
        yield {name: (option, 0) for name, option in zip(choices, chosen)}


def openrlhf(space: Space) -> Iterator[Placed]:
    """Each model on devices of its own, with ZeRO-3; generation on yet others, with tensor parallelism. The
    numbers of devices are powers of two."""
    placed = best_split(space, _fully_split(space), _generating(space))
    if placed:
        yield placed


def nemo_aligner(space: Space) -> Iterator[Placed]:
    """Models with an ``lm`` head on one half of the devices, the others on the other; generation without a KV
    cache, with the tensor parallelism of training (its stages become replicas)."""
    generation = {u.name: without_cache(space, u, _generating(space)[u.name]) for u in _generators(space)}
    mapper = Mapper(space, generation, _as_trained)
    half = space.num_devices // 2
    language, others = (mapper.on(members, half) for members in _halves(space))
    if language and others:
        placed = {name: (option, 0) for name, option in language.options.items()}
        yield placed | {name: (option, half) for name, option in others.options.items()}


SYSTEMS: Mapping[Planner, Callable[[Space], Iterator[Placed]]] = {
    "deepspeed-chat": deepspeed_chat,
    "openrlhf": openrlhf,
    "nemo-aligner": nemo_aligner,
}


def _on_most(options: Options) -> tuple[Option, ...]:
    """The options on the most devices."""
    return options[max(options)] if options else ()


def _fully_split(space: Space) -> dict[str, Options]:
    """Of units that do not generate, by number of devices: weights, gradients, optimizer split over all."""
    units = [u for u in space.units if u.role != "generate"]
    whole = options_with(space.draft, units, zero=0, offload=False)
    split = options_with(space.draft, units, zero=3, offload=False)
    return {u.name: _replicas({1: whole[u.name].get(1, ()), **split[u.name]}) for u in units}


def _replicas(options: Options) -> Options:
    """Those with data parallelism alone."""
    found = {n: tuple(o for o in each if o.dp == n) for n, each in options.items()}
    return {n: each for n, each in found.items() if each}


def _generators(space: Space) -> list[Unit]:
    return [u for u in space.units if u.role == "generate"]


def _generating(space: Space) -> dict[str, Options]:
    return options_with(space.draft, _generators(space))


def _as_trained(train: Option, generate: Option) -> bool:
    return (train.num_devices, train.tp) == (generate.num_devices, generate.tp)


def _halves(space: Space) -> tuple[Members, Members]:
    """The models by head. Raises HF309 where they, or the devices, make no two halves."""
    draft = space.draft
    language = tuple(m for m in space.models if draft.graph.model(m).head == "lm")
    others = tuple(m for m in space.models if m not in language)
    if language and others and space.num_devices % 2 == 0:
        return language, others
    problem = f"`{draft.graph.name}` has no model with {'a scalar' if language else 'an lm'} head"
    if language and others:
        problem = f"`{draft.cluster.name}` has an odd number of devices"
    message = (
        f"planner `nemo-aligner` puts models with an lm head on one half, others on the other: {problem}"
    )
    raise HflowError(Diagnostic("HF309", message, help="use another planner"))
