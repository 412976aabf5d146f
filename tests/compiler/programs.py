"""Programs as text, for golden files and messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hflow.compiler.plan import Instruction, Program


def program_text(program: Program) -> str:
    return "\n".join(_lines(program.instructions, ""))


def _lines(instructions: Sequence[Instruction], indent: str) -> Iterator[str]:
    for i in instructions:
        values = " ".join(sorted(i.inputs.values()))
        results = " ".join(sorted(i.outputs.values()))
        more = {"lag": i.lag, "init": i.init, "every": i.every}
        fields = "".join(f" {name} {value}" for name, value in more.items() if value)
        yield f"{indent}{i.op:8} {i.target:12} @{i.devices} ({values}) -> ({results}) after {i.after}{fields}"
        yield from _lines(i.body, f"{indent}  ")
