"""What flows on an edge: dtype, named dims, and what the value is.

A dim is a product of factors and may be ragged: ``f32[batch*group, resp~]``. A factor knows the
node that made it, so two dims are the same only if their *rows* are the same, not merely if they
are equally long:

- `batch` is made by a `data` node, `group` (samples per prompt) by a `generate` node;
- the ragged dims are `prompt~`, `resp~` and `seq~` (= prompt followed by response); each is made by
  the node that made the text, so log-probs of one rollout never align with tokens of another;
- `kept~`, inside of `resp~`, has a length per token: the tokens among which a truncated sampler chose;
- `choice`, inside of `seq~`, has the experts through which a token passes: of every layer as many as its
  router chooses. The compiler reads the size from the model.

One sample per prompt is a row of its prompt: such a factor may be missing where rows are compared, but two
nodes that each draw one sample make different rows.

A type without dims, ``f32[]``, is a scalar: one number for the whole batch, the same on all devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, get_args

DType = Literal["i16", "i32", "i64", "f32", "bf16", "bool", "str"]
Role = Literal["behaviour", "scored", "value", "score", "derived", "support", "routed"]
RAGGED_DIMS = ("prompt", "resp", "seq")
CHOICE = "choice"


@dataclass(frozen=True)
class Factor:
    """One factor of a dim. `size` is None where a type is only an annotation or a pattern."""

    name: str
    size: int | None = None
    origin: str | None = None


@dataclass(frozen=True)
class Dim:
    """A product of factors. A ragged dim has one factor, whose size is the greatest length.

    `optional` occurs in patterns only, ``resp~?``: the value may lack this dim.
    """

    factors: tuple[Factor, ...]
    ragged: bool = False
    optional: bool = False

    @property
    def size(self) -> int | None:
        sizes = [f.size for f in self.factors if f.size is not None]
        return prod(sizes) if len(sizes) == len(self.factors) else None

    @property
    def significant(self) -> tuple[Factor, ...]:
        """The factors that tell rows apart: one sample per prompt does not."""
        return self.factors[:1] + tuple(f for f in self.factors[1:] if f.size != 1)

    def __str__(self) -> str:
        names = self.significant if not self.ragged else self.factors
        text = "*".join(f.name for f in names) or (self.factors[0].name if self.factors else "1")
        return text + "~" * self.ragged + "?" * self.optional


def same_rows(a: tuple[Factor, ...], b: tuple[Factor, ...]) -> bool:
    """Whether two products stand for the same rows: one sample per prompt may go with the prompt itself, but
    not with one sample that another node drew."""
    alone, other = (frozenset(f for f in factors[1:] if f.size == 1) for factors in (a, b))
    return Dim(a).significant == Dim(b).significant and (alone <= other or other <= alone)


def group_size(rows: Dim, pattern: Dim) -> int:
    """Rows of one group where `rows` are matched with a product such as ``prompts*k``."""
    inner = len(pattern.factors) - 1
    sizes = [f.size or 1 for f in rows.factors]
    return prod(sizes[len(sizes) - inner :])


@dataclass(frozen=True)
class Truncation:
    """Which tokens a sampler chooses among, of the distribution at its temperature: the `top_k` most likely;
    of these the most likely that together have the probability `top_p`; of these those that have at least
    `min_p` of the probability of the most likely. None: this does not apply. `runtime.truncation` says it
    exactly."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @staticmethod
    def of(options: Mapping[str, Any]) -> Truncation:
        """From a node's options; a `top_p` of 1 and a `min_p` of 0 say nothing."""
        top_p, min_p = options.get("top_p"), options.get("min_p")
        return Truncation(options.get("top_k"), None if top_p == 1 else top_p, min_p or None)

    def __bool__(self) -> bool:
        return self != Truncation()

    def __str__(self) -> str:
        limits = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return " ".join(f"{name}={limit}" for name, limit in limits.items() if limit is not None)


NO_TRUNCATION = Truncation()


@dataclass(frozen=True)
class Distribution:
    """Over the next token: softmax of the logits divided by `temperature` (0: all on the most likely), over
    the tokens that `truncation` leaves."""

    temperature: float = 1.0
    truncation: Truncation = NO_TRUNCATION

    def __str__(self) -> str:
        heat = f"temperature={self.temperature}" if self.temperature != 1 else ""
        return " ".join(filter(None, (heat, str(self.truncation))))


PLAIN = Distribution()  # that of the model itself


@dataclass(frozen=True)
class Provenance:
    """Which model made a value, and how.

    `behaviour`: log-probs that it sampled with; `scored`: log-probs by a forward pass over given tokens;
    `value`: its estimates per token (scalar head); `score`: its judgement of whole rows (scalar head);
    `derived`: numbers that calls made from its values (returns, advantages); `support`: the tokens among
    which it sampled; `routed`: the experts that its routers chose. `lag` is how many updates old the weights
    may be.
    """

    model: str
    role: Role
    lag: int = 0

    @property
    def distribution(self) -> Distribution:
        """Of log-probs: that which they are of."""
        return PLAIN

    def __str__(self) -> str:
        age = f"-{self.lag}" if self.lag else ""
        of = f" {self.distribution}" if self.distribution != PLAIN else ""
        return f"<{self.model}@k{age} {self.role}{of}>"


@dataclass(frozen=True)
class ShapedProvenance(Provenance):
    """Of log-probs, or of kept sets, of another distribution than the model's own. A class of its own, so
    that plans without such values read as they did before there were any."""

    shape: Distribution = field(kw_only=True)

    @property
    def distribution(self) -> Distribution:
        return self.shape

    @staticmethod
    def of(model: str, role: Role, lag: int, distribution: Distribution) -> Provenance:
        """A `Provenance` where the distribution is the model's own."""
        if distribution == PLAIN:
            return Provenance(model, role, lag)
        return ShapedProvenance(model, role, lag, shape=distribution)


@dataclass(frozen=True)
class ValueType:
    dtype: DType
    dims: tuple[Dim, ...]
    provenance: ShapedProvenance | Provenance | None = None

    @property
    def ragged(self) -> bool:
        return any(d.ragged for d in self.dims)

    @property
    def scalar(self) -> bool:
        return not self.dims

    @property
    def rows(self) -> int:
        """Number of rows (the size of dim 0; 1 for a scalar); every value of a typed graph has it."""
        size = self.dims[0].size if self.dims else 1
        assert size is not None, f"{self} has no row count"
        return size

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.dims))
        return f"{self.dtype}[{dims}]{self.provenance or ''}"


_TYPE = re.compile(r"^\s*(\w+)\s*\[([^\]]*)\]\s*$")
_FACTOR = re.compile(r"^[A-Za-z_]\w*$")


def parse_type(text: str) -> ValueType:
    """Read ``dtype[dim, dim]``, dims being ``a``, ``a*b`` or ``a~`` (in patterns also ``a~?``).

    Raises:
        ValueError: with a message for the user, when the text is not such a type.
    """
    match = _TYPE.match(text)
    if not match:
        raise ValueError(f"`{text}` is not a type; write it like `f32[batch, resp~]`")
    dtype, body = match.groups()
    if dtype not in get_args(DType):
        raise ValueError(f"unknown dtype `{dtype}`; dtypes: {', '.join(get_args(DType))}")
    dims = tuple(_parse_dim(part.strip()) for part in body.split(",")) if body.strip() else ()
    return ValueType(dtype, dims)  # type: ignore[arg-type]


def _parse_dim(text: str) -> Dim:
    optional, text = text.endswith("?"), text.removesuffix("?")
    ragged = text.endswith("~")
    names = [part.strip() for part in text.removesuffix("~").split("*")]
    for name in names:
        if not _FACTOR.match(name):
            raise ValueError(f"`{text}` is not a dim; write it like `batch`, `batch*group` or `seq~`")
    if ragged and len(names) > 1:
        raise ValueError(f"`{text}`: a ragged dim has one name")
    return Dim(tuple(Factor(name) for name in names), ragged, optional)
