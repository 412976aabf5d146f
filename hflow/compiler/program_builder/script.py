"""A list of instructions in the making: each knows which of the earlier ones must have ended before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hflow.plan.program import Instruction, handles_read, handles_written
from hflow.plan.replicas import Instance

# What instructions read and write: a handle, the weights of an instance, or a fact about a node.
Key = str | Instance | tuple[str, str]


@dataclass
class Script:
    """Instructions in an order in which they could run one by one; `reads`, `writes`: what all of them do."""

    instructions: list[Instruction] = field(default_factory=list[Instruction])
    reads: set[Key] = field(default_factory=set[Key])
    writes: set[Key] = field(default_factory=set[Key])
    _writer: dict[Key, int] = field(default_factory=dict[Key, int])
    _readers: dict[Key, set[int]] = field(default_factory=lambda: defaultdict[Key, set[int]](set))

    def add(self, instruction: Instruction, reads: Iterable[Key] = (), writes: Iterable[Key] = ()) -> None:
        """Append it with `after` filled in: whoever wrote what it touches, and whoever read what it
        overwrites. Its own handles count without being named."""
        read, written = {*reads, *handles_read(instruction)}, {*writes, *handles_written(instruction)}
        after = {self._writer[key] for key in read | written if key in self._writer}
        after.update(number for key in written for number in self._readers.pop(key, ()))
        number = len(self.instructions)
        self.instructions.append(replace(instruction, after=tuple(sorted(after))))
        for key in read:
            self._readers[key].add(number)
        self._writer.update(dict.fromkeys(written, number))
        self.reads |= read
        self.writes |= written
