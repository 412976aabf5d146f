"""Matching the ports of a signature with the values that arrive at them.

A dim name in a signature is a variable; it stands for the factors of an actual dim: ``rows`` for
``batch`` or for ``batch*group``. A product ``a*b`` takes the last factor as `b` and the rest as `a`, so it
matches grouped rows only. A variable means the same rows at every port: same factors, made by the
same nodes. The ragged names ``prompt~``, ``resp~`` and ``seq~`` match themselves, and all responses of one
call must be of one rollout (``seq~`` is prompt and response, so it goes with ``resp~``). All values that
enter one call, and all numbers that were made from values, must be of one model, unless the signature mixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hflow.graph.infer.signature import Port
from hflow.graph.types import Dim, Factor, Provenance, Role, ValueType, same_rows


@dataclass(frozen=True)
class Argument:
    """What arrives at a port, and the `node.port` that it comes from."""

    type: ValueType
    source: str


@dataclass(frozen=True)
class Mismatch:
    """Why a value cannot enter a port; `code` is HF208, HF209 or HF210."""

    port: str
    code: str
    message: str
    help: str = ""


@dataclass(frozen=True)
class Bindings:
    """What the dim names of a signature stand for in one call, and which model made what entered, by port.
    `values`: the model from whose values the call makes its numbers, None if from nobody's."""

    rows: Mapping[str, tuple[Factor, ...]]
    texts: Mapping[str, Dim]
    made_by: Mapping[str, Provenance] = field(default_factory=dict[str, Provenance])
    values: Provenance | None = None

    def made(self, output: Port) -> ValueType:
        """The actual type of an output: its dims, and whose values it is made from."""
        belongs = output.numbers and output.tag != "mixed"
        return replace(self.apply(output.type), provenance=self.values if belongs else None)

    def apply(self, pattern: ValueType) -> ValueType:
        """The actual type of a port whose dim names are all bound."""
        return ValueType(pattern.dtype, tuple(self._dim(d) for d in pattern.dims))

    def _dim(self, dim: Dim) -> Dim:
        if dim.ragged:
            return self.texts[dim.factors[0].name]
        return Dim(tuple(actual for f in dim.factors for actual in self.rows[f.name]))


def unify(
    ports: Sequence[Port],
    values: Mapping[str, Argument],
    trained: str | None = None,
    critic: str | None = None,
    mixes: bool = False,
) -> tuple[Bindings, tuple[Mismatch, ...]]:
    """Bind the dim names of `ports` by the `values` given for them (by port name).

    `trained` is the model that a train node trains, or that goes on with a conversation; ``<behaviour>``,
    ``<old>`` and ``<value>`` inputs must be of that model. `critic` is the trained model if it makes values:
    numbers made from values must be made from its own. With `mixes`, from those of any models. At most one
    mismatch per port is reported; a port that does not match binds nothing.
    """
    unifier = _Unifier(trained, critic, mixes)
    for port in ports:
        if port.name in values:
            unifier.enter(port, values[port.name])
    made_by = {name: p for name, v in values.items() if (p := v.type.provenance)}
    bound = Bindings(dict(unifier.rows), dict(unifier.texts), made_by, unifier.derived)
    return bound, tuple(unifier.mismatches)


class _Unifier:
    def __init__(self, trained: str | None, critic: str | None, mixes: bool):
        self.trained = trained
        self.critic = critic
        self.mixes = mixes
        self.derived: Provenance | None = None
        self.rows: dict[str, tuple[Factor, ...]] = {}
        self.grouped: set[str] = set()
        self.texts: dict[str, Dim] = {}
        self.mismatches: list[Mismatch] = []
        self.first: dict[str, tuple[Port, Argument]] = {}  # who bound a name or text

    def enter(self, port: Port, value: Argument) -> None:
        mismatch = (
            kind_mismatch(port, value)
            or self._grouping_mismatch(port, value)
            or self._rows_mismatch(port, value)
            or self._text_mismatch(port, value)
            or provenance_mismatch(port, value, self.trained)
            or self._critic_mismatch(port, value)
        )
        if mismatch:
            self.mismatches.append(mismatch)
            return
        for name, factors in split_rows(port.type, value.type).items():
            self._bind(name, factors, grouped=len(port.type.dims[0].factors) > 1)
            self.first.setdefault(name, (port, value))
        for dim in value.type.dims:
            if dim.ragged:
                self.texts.setdefault(dim.factors[0].name, dim)
                self.first.setdefault(_family(dim), (port, value))
        if (made_by := value.type.provenance) and made_by.role in _FROM_VALUES:
            lag = max(made_by.lag, self.derived.lag if self.derived else 0)
            self.derived = Provenance(made_by.model, "derived", lag)
            self.first.setdefault(_VALUES, (port, value))

    def _bind(self, name: str, factors: tuple[Factor, ...], grouped: bool) -> None:
        """Of equal rows, those of a group's prompt are the prompt; else the ones that name their sample."""
        longer = len(factors) > len(self.rows.get(name, ())) and name not in self.grouped
        if grouped or longer:
            self.rows[name] = factors
        if grouped:
            self.grouped.add(name)

    def _grouping_mismatch(self, port: Port, value: Argument) -> Mismatch | None:
        for pattern, actual in zip(port.type.dims, value.type.dims):
            if len(pattern.factors) > len(actual.factors):
                message = f"{_expects(port)}, but rows of `{value.source}` are not grouped: {_rows(actual)}"
                help_ = "a generate node with `n` samples per prompt groups its rows"
                return Mismatch(port.name, "HF209", message, help_)
        return None

    def _rows_mismatch(self, port: Port, value: Argument) -> Mismatch | None:
        for name, factors in split_rows(port.type, value.type).items():
            bound = self.rows.get(name)
            if bound is None or same_rows(bound, factors):
                continue
            message, help_ = _other_rows(name, (port, value, factors), (*self.first[name], bound))
            return Mismatch(port.name, "HF209", message, help_)
        return None

    def _critic_mismatch(self, port: Port, value: Argument) -> Mismatch | None:
        made_by = value.type.provenance
        if self.mixes or not made_by or made_by.role not in _FROM_VALUES:
            return None
        if self.critic and made_by.model != self.critic:
            message = (
                f"`{port.name}` expects numbers made from values of `{self.critic}`, "
                f"but `{value.source}` {_made_by(made_by)}"
            )
            help_ = (
                f"a critic learns from its own values: wire what was made from those of `{self.critic}`, "
                "or let the function that mixes them say so, `<mixed>` at its outputs"
            )
            return Mismatch(port.name, "HF210", message, help_)
        if self.derived and made_by.model != self.derived.model:
            return _of_another_critic(port, value, *self.first[_VALUES])
        return None

    def _text_mismatch(self, port: Port, value: Argument) -> Mismatch | None:
        for dim in value.type.dims:
            origins = {d.factors[0].origin for d in self.texts.values() if _family(d) == _family(dim)}
            if not dim.ragged or not origins or dim.factors[0].origin in origins:
                continue
            first, other = self.first[_family(dim)]
            message = (
                f"`{port.name}` and `{first.name}` must be of the same texts, "
                f"but `{value.source}` is of `{dim.factors[0].origin}` "
                f"and `{other.source}` of `{min(map(str, origins))}`"
            )
            return Mismatch(port.name, "HF209", message, "take both from the same node")
        return None


_Entered = tuple[Port, Argument, tuple[Factor, ...]]  # with what a dim name stands for there


def _other_rows(name: str, second: _Entered, first: _Entered) -> tuple[str, str]:
    """Message and help: two values have not the same `name`."""
    (port, value, _), (other, other_value, _) = second, first
    have = (
        f"`{value.source}` has {_rows(value.type.dims[0])} "
        f"and `{other_value.source}` has {_rows(other_value.type.dims[0])}"
    )
    if len(port.type.dims[0].factors) == len(other.type.dims[0].factors):
        help_ = f"a signature tells values of prompts and of samples apart: `{name}` and `{name}*k`"
        message = f"`{port.name}` and `{other.name}` must have the same `{name}`, but {have}"
        return message, help_ if _is_part(second[2], first[2]) else ""
    narrow, wide = sorted((second, first), key=lambda entered: len(entered[0].type.dims[0].factors))
    takes = (
        f"`{narrow[0].name}` takes one value per prompt (`{narrow[0].type.dims[0]}`) "
        f"and `{wide[0].name}` one per sample (`{wide[0].type.dims[0]}`)"
    )
    help_ = f"with this `{wide[0].name}`, `{narrow[0].name}` must have {_rows(Dim(wide[2]))}"
    return f"{takes}, but {have}", help_


def _is_part(one: tuple[Factor, ...], other: tuple[Factor, ...]) -> bool:
    """Whether one value has rows of prompts, and the other of their samples."""
    short, long = sorted((one, other), key=len)
    return len(short) < len(long) and same_rows(short, long[: len(short)])


def _of_another_critic(port: Port, value: Argument, first: Port, other: Argument) -> Mismatch:
    """HF210 for values of two models in a function whose outputs would be of both."""
    message = (
        f"`{first.name}` and `{port.name}` must be made from values of one model, "
        f"but `{other.source}` {_made_by(other.type.provenance)} "
        f"and `{value.source}` {_made_by(value.type.provenance)}"
    )
    help_ = "a function that is to mix them says so: `<mixed>` at its outputs, which then belong to no model"
    return Mismatch(port.name, "HF210", message, help_)


def split_rows(pattern: ValueType, actual: ValueType) -> dict[str, tuple[Factor, ...]]:
    """What each name of the pattern's dense dims takes of the actual factors."""
    out: dict[str, tuple[Factor, ...]] = {}
    for want, have in zip(pattern.dims, actual.dims):
        if want.ragged:
            continue
        first, *rest = want.factors
        cut = len(have.factors) - len(rest)
        out[first.name] = have.factors[:cut]
        out.update({name.name: (factor,) for name, factor in zip(rest, have.factors[cut:])})
    return out


def kind_mismatch(port: Port, value: Argument) -> Mismatch | None:
    """HF208 when dtype, number of dims or ragged names differ."""
    want, have = port.type.dims, value.type.dims
    if len(have) == len(want) - 1 and want[-1].optional:
        want = want[:-1]
    if port.type.dtype == value.type.dtype and _ragged_names(want) == _ragged_names(have):
        return None
    return Mismatch(port.name, "HF208", f"{_expects(port)}, but `{value.source}` is `{value.type}`")


def _ragged_names(dims: Sequence[Dim]) -> list[str]:
    return [d.factors[0].name if d.ragged else "" for d in dims]


# What a tag of a port admits, and how to get it.
_ROLES: Mapping[str, tuple[Role, ...]] = {
    "behaviour": ("behaviour",),
    "old": ("behaviour", "scored"),
    "scored": ("scored",),
    "value": ("value",),
    "kept": ("support",),
    "routes": ("routed",),
}
_BUILTIN = ("kept", "routes")
_OF_ANY_MODEL = ("scored", *_BUILTIN)
_PLAIN: tuple[Role, ...] = ("score", "derived")  # made by a model, and numbers like others
_FROM_VALUES: tuple[Role, ...] = ("value", "derived")
_VALUES = "<value>"  # no name of a dim
_WANTED = {
    "behaviour": ("log-probs that {who} sampled with", "wire the `logprobs` of a generate node that uses it"),
    "old": (
        "log-probs of {who} before the update",
        "wire the `logprobs` of a generate or score node that uses it",
    ),
    "scored": ("log-probs from a score node", "wire the `logprobs` of a score node"),
    "value": ("values of {who}", "wire the `values` of a score node that uses it (`head: scalar`)"),
    "kept": ("the kept sets of a sampler", "wire the `kept` of the generate node that made the texts"),
    "routes": (
        "the experts that a sampler's routers chose",
        "wire the `routes` of the generate node that made the texts",
    ),
}


def provenance_mismatch(port: Port, value: Argument, trained: str | None) -> Mismatch | None:
    """HF210 when the tag of the port asks for what another model made, or for what was made otherwise.

    Log-probs and values are no plain numbers: they enter only where a tag asks for them.
    """
    have, of_trained = value.type.provenance, port.tag not in _OF_ANY_MODEL
    if port.tag is None or port.tag not in _ROLES:
        return _untagged_mismatch(port, value) if have and have.role not in _PLAIN else None
    right_model = have is not None and (not of_trained or trained in (None, have.model))
    if have and have.role in _ROLES[port.tag] and right_model:
        return None
    expected, help_ = _WANTED[port.tag]
    who = f"`{trained}`" if trained else "a model"
    message = f"`{port.name}` expects {expected.format(who=who)}, but `{value.source}` {_made_by(have)}"
    return Mismatch(port.name, "HF210", message, help_)


def _untagged_mismatch(port: Port, value: Argument) -> Mismatch:
    made = _made_by(value.type.provenance)
    message = f"`{port.name}` takes plain numbers, but `{value.source}` {made}"
    tags = ", ".join(f"`<{tag}>`" for tag in _ROLES if tag not in _BUILTIN)
    help_ = f"a signature that takes log-probs or values says which: {tags}"
    return Mismatch(port.name, "HF210", message, help_)


_VERBS: Mapping[Role, str] = {
    "behaviour": "was sampled with",
    "scored": "was scored by",
    "value": "has values of",
    "score": "is a score of",
    "derived": "was made from values of",
    "support": "holds the tokens that were likely enough to",
    "routed": "holds the experts that were chosen by",
}


def _made_by(provenance: Provenance | None) -> str:
    if provenance is None:
        return "was made by no model"
    return f"{_VERBS[provenance.role]} `{provenance.model}`"


def _family(dim: Dim) -> str:
    """`resp~` and `seq~` are parts of the same text."""
    return "prompt~" if dim.factors[0].name == "prompt" else "resp~"


def _expects(port: Port) -> str:
    return f"`{port.name}` expects `{port.type}`"


def _rows(dim: Dim) -> str:
    origins = ", ".join(f"`{o}`" for o in dict.fromkeys(f.origin for f in dim.factors) if o)
    return f"`{dim}`" + (f" of {origins}" if origins else "")
