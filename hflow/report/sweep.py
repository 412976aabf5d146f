"""A sweep: one graph on several clusters, with several values of its keys; of each plan, what it comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.plan import Plan

# What says that there is no such plan, rather than that something is written wrongly: a pin or a placement
# that a cluster is too small for, no layout, not enough memory.
UNPLANNED = frozenset({"HF302", "HF304", "HF305", "HF309"})
OPENING, CLOSING, QUOTES = "[{", "]}", "'\""
BEFORE_QUOTES = "[{,:"  # or nothing: elsewhere an apostrophe is one


@dataclass(frozen=True)
class SweptValue:
    """A key of the graph and one of the values that it is to have, as YAML."""

    key: str
    value: str

    @property
    def override(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class SweptPlan:
    """Predictions for one combination. `devices` and what is counted by them are those of the whole cluster,
    `devices_used` those on which anything runs. `bound_s`, `gap`: as in `hflow.plan.plan.Search`, None where
    nothing is proven. `peak_memory`: the part of what plans may use that the fullest device needs."""

    cluster: str
    settings: tuple[SweptValue, ...]
    plan: str
    step_time_s: float
    bound_s: float | None
    gap: float | None
    tokens_per_s_per_device: float
    peak_memory: float
    devices_used: int
    devices: int

    @property
    def device_s_per_step(self) -> float:
        """What a step costs where one pays for the whole cluster."""
        return self.devices * self.step_time_s


@dataclass(frozen=True)
class NoPlan:
    """A combination for which there is no plan, and why."""

    cluster: str
    settings: tuple[SweptValue, ...]
    reason: Diagnostic


SweptRow = SweptPlan | NoPlan


def settings_of(texts: Sequence[str]) -> list[tuple[SweptValue, ...]]:
    """Every combination of the values in texts like ``params.batch=64,128``; the last key varies fastest.

    Raises:
        HflowError: HF105 for a text without a key or a value, and a key that is there twice.
    """
    varied = [_values(text) for text in texts]
    keys = [values[0].key for values in varied]
    if twice := [key for key in keys if keys.count(key) > 1]:
        help_ = f"give all its values at once: `--set {twice[0]}=1,2`"
        raise HflowError(Diagnostic("HF105", f"`{twice[0]}` is set twice", help=help_))
    return list(product(*varied))


def _values(text: str) -> tuple[SweptValue, ...]:
    key, _, values = text.partition("=")
    found = tuple(SweptValue(key.strip(), value.strip()) for value in split_values(values))
    if not key.strip() or not all(setting.value for setting in found):
        help_ = "write it like `--set params.batch=64,128`; quote a value that has commas"
        raise HflowError(Diagnostic("HF105", f"`{text}` is not of the form key.path=value,value", help=help_))
    return found


def split_values(text: str) -> Iterator[str]:
    """The parts between commas; those in brackets and in quotes separate nothing."""
    part, depth, quote = "", 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in QUOTES and part.strip()[-1:] in BEFORE_QUOTES:
            quote = sign
        depth += 0 if quote else (sign in OPENING) - (sign in CLOSING)
        if sign == "," and not quote and depth <= 0:
            yield part
            part = ""
        else:
            part += sign
    yield part


def swept(plan: Plan, cluster: str, settings: tuple[SweptValue, ...]) -> SweptPlan:
    """What `plan` comes to."""
    devices, proven = plan.cluster.num_devices, plan.search.gap is not None
    rate = plan.tokens_per_step / plan.step_time_s if plan.step_time_s else 0.0
    return SweptPlan(
        cluster,
        settings,
        plan.hash,
        plan.step_time_s,
        plan.search.bound_s if proven else None,
        plan.search.gap,
        rate / devices,
        max((m.peak_bytes / m.capacity_bytes for m in plan.memory), default=0.0),
        len(plan.devices),
        devices,
    )


def no_plan(error: HflowError, cluster: str, settings: tuple[SweptValue, ...]) -> NoPlan:
    """Why there is none. Raises as `check_unplanned`."""
    check_unplanned(error)
    return NoPlan(cluster, settings, error.diagnostics[0])


def check_unplanned(error: HflowError) -> None:
    """Raises `error` where it says more than that there is no plan: that something is written wrongly."""
    if not {d.code for d in error.diagnostics} <= UNPLANNED:
        raise error


def check_planned(rows: Sequence[SweptRow]) -> bool:
    """Whether any combination has a plan.

    Raises:
        HflowError: when nothing could be planned for another reason than that it does not fit: then it is
            something that all combinations share, such as a pin.
    """
    reasons = [row.reason for row in rows if isinstance(row, NoPlan)]
    if len(reasons) == len(rows) and not {r.code for r in reasons} & {"HF304", "HF305"}:
        raise HflowError(dict.fromkeys(reasons))
    return len(reasons) < len(rows)
