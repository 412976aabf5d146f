"""What another library calls a thing, and what to write here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignName:
    """`names`: spellings that mean one thing, dotted where the other library nests its keys. `ours`: what to
    write here, in one of these forms; empty where there is nothing.

    - ``lr of train``: an option of a kind of node, or a key of it (``loss of train``, ``repeat.epochs of
      train``);
    - ``clip of hflow.ops.losses.ppo_clip``: an option of a function;
    - ``run.checkpoint.every``, ``models.NAME.dtype``: a key of the graph file, NAME being the user's own;
    - ``hflow.ops.whitening.whiten``: a function;
    - ``--engine``: an option of `hflow compile` or `hflow exec`;
    - ``hflow samples``: a command.

    `remark`: what else has to be known, required where there is nothing.
    """

    names: tuple[str, ...]
    ours: tuple[str, ...]
    remark: str = ""

    @property
    def told(self) -> str:
        """`ours` for people, as `lr` of `train`; or none."""
        return ", ".join(_marked(own) for own in self.ours) or "none"


def said(names: str, ours: str, remark: str = "") -> ForeignName:
    """A line of a table: names, and what to write, are separated by commas."""
    return ForeignName(tuple(names.split(", ")), tuple(ours.split(", ")), remark)


def unsaid(names: str, remark: str) -> ForeignName:
    """A line for what cannot be said here, with the reason, or with what is there instead."""
    return ForeignName(tuple(names.split(", ")), (), remark)


def _marked(own: str) -> str:
    return " of ".join(f"`{part}`" for part in own.split(" of "))
