"""What a worker does just now, as it tells the controller from a thread beside that of its calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """An instruction of an evaluation's program or of the step's, since a time of `time.monotonic`.

    `path`: its index in the program; in the body of a loop the loop's, the round and the index in the body.
    So places of one program are ordered as workers pass them. `name`: of a named evaluation.
    """

    evaluation: bool
    path: tuple[int, ...]
    since: float
    name: str = ""


@dataclass(frozen=True)
class Whereabouts:
    """`call`: the number of the worker's present call, or of the last, since it was told to leave its world;
    `method`: the present call's, empty between two. `evaluation`, `path`, `name`: as in `Place`; an empty
    path outside programs. `seconds`: that it has been there, by its own clock. `detail`: for people, of what
    takes long outside programs."""

    call: int
    method: str
    evaluation: bool
    path: tuple[int, ...]
    seconds: float
    detail: str
    name: str = ""
