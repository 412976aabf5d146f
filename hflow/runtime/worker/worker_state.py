"""What a worker remembers from one step to the next beside its models, under the names of the run's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from hflow.runtime.rows import Rows
from hflow.runtime.worker.carried import Carried
from hflow.runtime.worker.collector import Surplus

PARTS = ("values", "lengths", "versions")  # of rows


class WorkerState:
    """`carried`: scalars of earlier steps; `surplus`: of each region, rows for the next step; `rounds`: that
    each region has run so far, over all steps."""

    def __init__(self) -> None:
        self.carried = Carried()
        self.surplus: dict[str, Surplus] = {}
        self.rounds = Counter[str]()

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by names of `hflow.plan.run_state`."""
        return dict(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, values in self.carried.values():
            yield f"carried/{name}", values
        for region, number in self.rounds.items():
            yield f"regions/{region}/rounds", torch.tensor(number)
        for region, surplus in self.surplus.items():
            yield f"regions/{region}/waited", surplus.waited
            for port, rows in surplus.rows.items():
                parts = ((part, getattr(rows, part)) for part in PARTS)
                found = ((part, values) for part, values in parts if values is not None)
                yield from ((f"regions/{region}/waiting/{port}/{part}", values) for part, values in found)

    def restore(self, names: Iterator[str], read: Callable[[str], Tensor]) -> None:
        """Set what `tensors` has told, of those `names` that it told.

        Raises:
            ValueError: when waiting rows do not fit together.
        """
        rows: dict[str, dict[str, dict[str, Tensor]]] = {}
        waited: dict[str, Tensor] = {}
        for name in names:
            match name.split("/"):
                case "carried", value:
                    self.carried.restore(value, read(name))
                case "regions", region, "rounds":
                    self.rounds[region] = int(read(name))
                case "regions", region, "waited":
                    waited[region] = read(name)
                case "regions", region, "waiting", port, part:
                    rows.setdefault(region, {}).setdefault(port, {})[part] = read(name)
                case _:
                    raise AssertionError(name)
        for region, steps in waited.items():
            ports = {port: _rows(region, port, parts, steps) for port, parts in rows.get(region, {}).items()}
            self.surplus[region] = Surplus(ports, steps)


def _rows(region: str, port: str, parts: Mapping[str, Tensor], waited: Tensor) -> Rows:
    """As many rows of every prompt, with as many values as they are long."""
    values, lengths, versions = (parts.get(part) for part in PARTS)
    if values is None or (lengths is not None and not _add_up(lengths, len(values))):
        raise ValueError(f"region `{region}`: the waiting rows of `{port}` are longer or shorter than told")
    rows = Rows(values, lengths, versions)
    fits = len(rows) % len(waited) == 0 if len(waited) else not len(rows)
    if not fits or (versions is not None and len(versions) != len(rows)):
        raise ValueError(f"region `{region}`: other prompts wait than those of `{port}`")
    return rows


def _add_up(lengths: Tensor, size: int) -> bool:
    return bool((lengths >= 0).all() and (lengths <= size).all()) and int(lengths.sum()) == size
