"""The shape of a model, read from its ``config.json`` or known by name."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from hflow.bounded_read import UnreadableError
from hflow.diagnostics import Diagnostic, HflowError, Span, did_you_mean
from hflow.graph.ir import Head
from hflow.plan.families.registry import shape_of
from hflow.plan.model_config import CONFIG, ConfigError, read_config
from hflow.plan.model_shape import NAMED, ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES

MODELS = "models"  # the folder of models in the shipped graph files


def read_shape(path: str, span: Span | None = None, head: Head = "lm", tiny: str = "") -> ModelShape:
    """The shape of the HF model in folder `path`, or, for ``shape:NAME``, of the well-known model NAME; with
    `head`.

    Args:
        tiny: options of `hflow new-model` for the model that the help proposes where there is none.

    Raises:
        HflowError: HF303 when the name is unknown, there is no ``config.json``, it is not of a known family,
            or it asks for something that hflow does not know (e.g. quantized weights).
    """
    if path.startswith(NAMED):
        return named_shape(path.removeprefix(NAMED), span).with_head(head)
    file = Path(path) / CONFIG
    try:
        return shape_of(read_config(file)).with_head(head)
    except UnreadableError as error:
        raise HflowError(_unread(path, file, error, span, tiny)) from None
    except ConfigError as error:
        raise HflowError(Diagnostic("HF303", f"`{file}`: {error}", span)) from None


def _unread(path: str, file: Path, error: UnreadableError, span: Span | None, tiny: str) -> Diagnostic:
    if error.reason != "missing":
        return Diagnostic("HF303", f"`{file}` cannot be read: {error}", span)
    if _is_hub_name(path):
        command = f"hf download {path} --local-dir {MODELS}/{path.split('/')[1]}"
        help_ = f"nothing is downloaded by itself: `{command}`, and `path` is that folder{_without(path)}"
        return Diagnostic("HF303", f"no file `{file}`", span, help_)
    command = " ".join(filter(None, ("hflow new-model", path, tiny)))
    help_ = f"`path` is a local folder with an HF model, nothing is downloaded; `{command}` makes a tiny one"
    help_ = "; ".join([*_near(path), help_]) + _without(path)
    return Diagnostic("HF303", f"no file `{file}`", span, help_)


def _without(path: str) -> str:
    """More help, where a well-known model is called like the folder that is not there."""
    name = path.rpartition("/")[2].lower().removesuffix("-instruct")
    return f"; to plan without weights: `{NAMED}{name}`" if name in NAMED_SHAPES else ""


def _near(path: str) -> list[str]:
    """Help for a folder that is not there: the one beside it with a model and nearly that name, if any."""
    try:
        beside = [folder.name for folder in Path(path).parent.iterdir() if (folder / CONFIG).is_file()]
    except OSError:
        return []
    near = get_close_matches(Path(path).name, beside, n=1, cutoff=0.75)
    return [f"did you mean `{Path(path).parent / name}`?" for name in near]


def _is_hub_name(path: str) -> bool:
    """Whether it looks like a name on Hugging Face's hub, ``owner/model``, and like no folder here."""
    owner, _, _ = path.partition("/")
    is_here = owner == MODELS or Path(owner).exists()
    return not is_here and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None


def named_shape(name: str, span: Span | None = None) -> ModelShape:
    """The shape of a well-known model. Raises HflowError HF303 when there is none of this name."""
    shape = NAMED_SHAPES.get(name)
    if shape is None:
        help_ = did_you_mean(name, NAMED_SHAPES, "shapes")
        raise HflowError(Diagnostic("HF303", f"no shape is called `{name}`", span, help_))
    return shape
