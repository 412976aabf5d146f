"""What it means for a run to go on with a graph in which the value of a key differs from the checkpoint's.

The keys are those of `hflow.graph.keyed_values`. A checkpoint holds what outlives a step: weights and
optimizer state of trained models, weights that a frozen model took over, carried scalars, the rows of
regions that wait, and how often responses to rows were right (of a curriculum by success). Other data, and
samples, need nothing: they are functions of seed and step.
"""

from __future__ import annotations

from collections.abc import Sequence

from hflow.graph.infer.kinds import call, train
from hflow.graph.ir import Graph, Node
from hflow.graph.types import ValueType

_TYPE = "values of another type or size flow from here on"
_BOUND = "a bound that is checked: no value depends on it"
_OTHER_ROUNDS = "steps from here on have other rounds, and so other rows"
_OTHER_DATA = "the order of data is a function of seed and step over other rows: some come twice, some never"
_OTHER_COUNTS = "the checkpoint has counts, and rows that wait to be counted, of the value as it was"
_NEVER_SAVED = "the checkpoint has neither weights nor optimizer state of it"
_ONLY_SAVED = "its trained weights are in the checkpoint only; untrained, it would be the model of its path"


def is_harmless(key: str, old: Graph, new: Graph) -> bool:
    """Whether training is the same whatever the value is."""
    match key.split("."):
        case ["loop", "times"]:
            return not _shifting(old, new)
        case ["name" | "doc"] | ["loop", "name"] | ["eval" | "evaluations", *_]:
            return True
        case ["nodes", _, "lengths"]:
            return True
        case ["nodes", _, "in", _, "derived"]:  # the source is a key of its own
            return True
        case ["models", _, "base"] | ["nodes", _, "model", "delta_weights"]:
            return True
        case ["nodes", name, "with", "max_lag"]:
            return _op(name, old) == _op(name, new) == "train"
        case ["nodes", name, "with", call.TIMEOUT]:
            return _limits_time(name, old) and _limits_time(name, new)
        case ["nodes", name, "times"]:
            return _fails(name, old) and _fails(name, new)
        case _:
            return False


def is_possible(key: str, old: Graph, new: Graph) -> bool:
    """Whether what the checkpoint holds fits, where the user allows the change."""
    match key.split("."):
        case ["models", name] | ["models", name, "frozen"]:
            return name not in _gained(old, new) | _lost(old, new)
        case ["models", name, "refresh", *_] if _has_model(name, new) and new.model(name).refresh:
            return _average_of(name, new) == _average_of(name, old)
        case ["nodes", name, "with", "freeze"] if _trains(name, old) == _trains(name, new):
            return False
        case ["models", name, "adapter"] | ["models", name, "adapter", "rank" | "targets"]:
            return not (_is_saved(name, old) and _is_saved(name, new))
        case ["models", name, "head" | "dtype"]:
            return not (_is_saved(name, old) and _is_saved(name, new))
        case ["nodes", name] | ["nodes", name, "model"]:
            return _trains(name, new) not in _gained(old, new) and _trains(name, old) not in _lost(old, new)
        case ["nodes", name, "in", port, *rest]:
            return not (_carries_rows(name, port, old, new) and rest in ([], ["lag"], ["type"]))
        case ["nodes", name, "out", port] | ["nodes", name, "out", port, "type"]:
            return fits_waiting(name, port, old, new)
        case _:
            return True


def _carries_rows(name: str, port: str, old: Graph, new: Graph) -> bool:
    """Whether an input reads rows of an earlier step, before and now."""
    nodes = (_node(name, graph) for graph in (old, new))
    values = [node.input(port) if node else None for node in nodes]
    return all(value is not None and value.lag > 0 and not value.type.scalar for value in values)


def fits_waiting(region: str, port: str, old: Graph, new: Graph) -> bool:
    """Whether rows of a region that wait can be taken together with those that it makes from now on."""
    if not (_waits(region, old) and _waits(region, new)):
        return True
    before, after = (_output_type(region, port, graph) for graph in (old, new))
    return before is not None and after is not None and _form(before) == _form(after)


def meaning(key: str, old: Graph, new: Graph) -> str:
    """One sentence, without its capital and its full stop."""
    match key.split("."):
        case ["name" | "doc"] | ["loop", "name"]:
            return "only what people read differs"
        case ["loop", "times"] if shifting := _shifting(old, new):
            names = " and ".join(f"`schedule: {schedule}` of `{name}`" for name, schedule in shifting.items())
            return f"{names} ends with the last step, so its learning rates differ from here on"
        case ["loop", "times"]:
            return "the run ends after another number of steps; each of them is the same"
        case ["eval" | "evaluations", *_]:
            return "held-out rows are measured otherwise from here on; training does not see it"
        case ["seed"]:
            return "samples and the order of data differ from here on"
        case ["models", name, *rest]:
            return _of_model(name, rest, old, new)
        case ["nodes", name]:
            return _of_whole_node(name, old, new)
        case ["nodes", _, "lengths"]:
            return "only what the planner expects differs"
        case ["nodes", name, "with", call.TIMEOUT] if is_harmless(key, old, new):
            return _BOUND
        case ["nodes", _, "with", "freeze"] if not is_possible(key, old, new):
            return "the checkpoint has moments of the parameters that were trained, and of no others"
        case ["nodes", name, "with", *option]:
            return _of_option(_op(name, new), option[0])
        case ["nodes", name, "in" | "until" | "out" as part, *rest]:
            return _of_port(name, part, rest, old, new)
        case ["nodes", name, *rest]:
            return _of_part(name, rest, old, new)
        case _:
            return "the graph that goes on is another one"


def _of_model(name: str, rest: Sequence[str], old: Graph, new: Graph) -> str:
    is_saved = _is_saved(name, old) and _is_saved(name, new)
    match rest:
        case [] | ["frozen"] if name in _gained(old, new):
            return _NEVER_SAVED
        case [] | ["frozen"] if name in _lost(old, new):
            return _ONLY_SAVED
        case [] if _has_model(name, new):
            return "a model comes in that earlier steps did not have"
        case []:
            return "what the checkpoint holds of the model is not used any more"
        case ["path"] if is_saved and new.model(name).adapter:
            return "the checkpoint's adapter goes on beside the weights of another folder"
        case ["path"] if is_saved:
            return "the checkpoint's weights are used whatever the path says; its tokenizer is used"
        case ["head"] if is_saved:
            return "the checkpoint's weights are those of a model with the other head"
        case ["dtype"] if is_saved:
            return "the checkpoint's weights and optimizer state are of the other dtype"
        case ["path" | "head"]:
            return "another model judges from here on"
        case ["dtype"]:
            return "what the model computes is rounded otherwise from here on"
        case ["base"]:
            return "only where frozen weights lie differs"
        case ["adapter", "path"] if is_saved:
            return "the checkpoint's adapter is used whatever the path says"
        case ["adapter", *_] if not (_is_saved(name, old) or _is_saved(name, new)):
            return "another model judges from here on"
        case ["adapter", "alpha"]:
            return "the adapter counts more, or less, from here on"
        case ["adapter", "dropout"]:
            return "more, or less, of the adapter's inputs is left out from here on"
        case ["adapter", *_]:
            return "the checkpoint holds another adapter of the model, or none"
        case ["refresh", *_] if not is_possible(f"models.{name}.refresh", old, new):
            return "the checkpoint does not have the weights that the model would hold by now"
        case ["refresh", "decay"]:
            return "the moving average goes on with another decay"
        case ["refresh"] if _has_model(name, new) and new.model(name).refresh:
            return "the model takes over trained weights from here on"
        case ["refresh"]:
            return "the weights that the model took over are given up: it is that of its path again"
        case ["refresh", *_]:
            return "the model takes over other weights, or at other steps, from here on"
        case _:
            return "the model is another one from here on"


def _of_whole_node(name: str, old: Graph, new: Graph) -> str:
    is_added, is_removed = _op(name, old) == "", _op(name, new) == ""
    if _trains(name, new) in _gained(old, new):
        return f"the checkpoint has no optimizer state of `{_trains(name, new)}`"
    if _trains(name, old) in _lost(old, new):
        return f"nothing trains `{_trains(name, old)}` any more; {_ONLY_SAVED}"
    if is_added and _op(name, new) == "repeat":
        return "a region comes in, and begins with no rows that wait"
    if is_added:
        return "steps from here on have a node that earlier ones did not have"
    if is_removed:
        return "steps from here on lack the node; what the checkpoint holds for it is not used any more"
    return "another kind of node stands here from here on"


def _of_option(op: str, name: str) -> str:
    match op:
        case "train" if name == "max_lag":
            return _BOUND
        case "train":
            return (
                f"updates from here on are made with another `{name}`; a run from the beginning would differ"
            )
        case "data" if name == "date":
            return "prompts from here on say another date"
        case "data" if name in ("curriculum", "streaming"):
            return "rows are drawn in another order from here on"
        case "data":
            return _OTHER_DATA
        case "generate":
            return "samples are drawn otherwise from here on"
        case _:
            return "values are computed otherwise from here on"


def _of_port(name: str, part: str, rest: Sequence[str], old: Graph, new: Graph) -> str:
    match rest:
        case [port, *_] if part == "out" and not fits_waiting(name, port, old, new):
            return (
                "rows of earlier steps that wait in the checkpoint have another form; under another name the"
                " region begins without them"
            )
        case [port, *_] if part == "in" and _carries_rows(name, port, old, new):
            return _OTHER_COUNTS
        case ["rows" | "max_age"] if part == "until":
            return _OTHER_ROUNDS
        case [*_, "lag"]:
            return "the value of another step is read from here on, or `init` where the checkpoint has none"
        case [*_, "init"]:
            return "steps that have no value before them read another one"
        case [*_, "derived"]:
            return "the same value is read, whether the file writes it or not"
        case [*_, "type"]:
            return _TYPE
        case _ if part == "out" and _op(name, new) != "repeat":
            return _TYPE
        case _:
            return "another value is read here from here on"


def _of_part(name: str, rest: Sequence[str], old: Graph, new: Graph) -> str:
    match rest:
        case ["model", "lag"]:
            return "weights of another age are used from here on; at first those that the checkpoint has"
        case ["model"] if not is_possible(f"nodes.{name}.model", old, new):
            return _of_whole_node(name, old, new)
        case ["model"]:
            return "another model is used here from here on"
        case ["fn" | "loss", *_]:
            return "another function computes this from here on"
        case ["repeat", *_]:
            return "a step makes other updates, and these are what `warmup_steps` and `schedule` count"
        case ["place"]:
            return "a node draws by its place among those of its kind: other samples or rows from here on"
        case ["times"] if is_harmless(f"nodes.{name}.times", old, new):
            return _BOUND
        case ["times" | "short"]:
            return _OTHER_ROUNDS
        case ["after" | "region"]:
            return "nodes run in another order from here on"
        case _:
            return "the node is another one from here on"


def _node(name: str, graph: Graph) -> Node | None:
    return next((n for n in graph.nodes if n.name == name), None)


def _op(name: str, graph: Graph) -> str:
    """Empty where there is no such node."""
    node = _node(name, graph)
    return node.op if node else ""


def _fails(region: str, graph: Graph) -> bool:
    """Whether a region whose rounds do not suffice ends the run, rather than going on with other rows."""
    node = _node(region, graph)
    return node is not None and node.options.get("short") == "fail"


def _limits_time(name: str, graph: Graph) -> bool:
    """Whether `timeout_s` is the node's, and not its function's."""
    node = _node(name, graph)
    return node is not None and call.has_own_limit(node)


def _waits(region: str, graph: Graph) -> bool:
    return any(r.name == region and r.max_age for r in graph.regions)


def _output_type(name: str, port: str, graph: Graph) -> ValueType | None:
    node = _node(name, graph)
    output = node.output(port) if node else None
    return output.type if output else None


def _form(type_: ValueType) -> tuple[str, tuple[bool, ...], tuple[int | None, ...]]:
    """What rows of two steps must have in common to lie in one tensor."""
    inner = type_.dims[0].factors[1:] if type_.dims else ()
    return type_.dtype, tuple(d.ragged for d in type_.dims), tuple(f.size for f in inner)


def _has_model(name: str, graph: Graph) -> bool:
    return any(m.name == name for m in graph.models)


def _is_saved(name: str, graph: Graph) -> bool:
    """Whether a checkpoint has weights of the model: it is trained, or takes over those of one that is."""
    return _has_model(name, graph) and bool(graph.trainers(name) or graph.model(name).refresh)


def _trains(node: str, graph: Graph) -> str:
    """The model that a node trains; empty for one that trains none."""
    found = _node(node, graph)
    return found.model.model if found and found.op == "train" and found.model else ""


def _shifting(old: Graph, new: Graph) -> dict[str, str]:
    """The train nodes of both graphs whose learning rates depend on the number of steps, with their
    schedules."""
    before = {n.name for n in old.nodes if n.op == "train"}
    schedules = {n.name: n.options.get("schedule") for n in new.nodes if n.op == "train"}
    return {name: s for name, s in schedules.items() if s in train.FALLING and name in before}


def _average_of(name: str, graph: Graph) -> str:
    """The model of whose weights `name` takes over a moving average; empty where it takes over none."""
    refresh = graph.model(name).refresh if _has_model(name, graph) else None
    return refresh.model if refresh and refresh.is_average else ""


def _trained(graph: Graph) -> set[str]:
    return {n.model.model for n in graph.nodes if n.op == "train" and n.model}


def _gained(old: Graph, new: Graph) -> set[str]:
    """Models that are trained from now on."""
    return _trained(new) - _trained(old)


def _lost(old: Graph, new: Graph) -> set[str]:
    """Models that stay, and are trained no more."""
    return (_trained(old) - _trained(new)) & {m.name for m in new.models}
