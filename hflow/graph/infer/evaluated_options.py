"""Options of the data and generate nodes of a named evaluation: those of the step, with its own over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.kinds import data, generate
from hflow.graph.options import Option, OptionProblem, defaults
from hflow.graph.row_sources import OF_A_SOURCE, OTHER_ROWS

_NEVER_NULL = ("dataset", "batch", "tokenizer")


@dataclass(frozen=True)
class OwnRows:
    """Rows that an evaluation does not hold out of those of the step.

    Attributes:
        draft: of the step's data node.
        said: what the evaluation says of it; null takes away what the node says.
    """

    draft: NodeDraft
    said: Mapping[str, Any]

    @property
    def taken_away(self) -> frozenset[str]:
        """Options that are null."""
        nulls = {name for name, value in self.said.items() if value is None}
        return frozenset(nulls & self.draft.written - {*_NEVER_NULL})

    @property
    def names_others(self) -> bool:
        """Whether they are other rows than those that the step trains on."""
        own, step = {**self.draft.options, **self.said}, self.draft.options
        return any(own.get(name) != step.get(name) for name in ("dataset", *OTHER_ROWS))

    @property
    def options(self) -> dict[str, Any]:
        """Of the node in the evaluation; what it says wrongly is left out."""
        kept = {name: value for name, value in self.draft.options.items() if name not in self._gone}
        unwritten = [o for o in data.OPTIONS if o.name != "tokenizer" or o.name in self.said]
        return {**kept, **defaults(unwritten, self._written)}

    def problems(self) -> Iterator[OptionProblem]:
        """What contradicts itself in the evaluation, and does not in the step: HF101, HF206 and HF212."""
        known = set(data.option_problems(self.draft.declared, _written(self.draft)))
        for problem in data.option_problems(self.draft.declared, self._written):
            name = str(problem.within[0]) if problem.within else problem.option
            if problem in known:
                continue
            if name is not None and name not in self.said:
                help_ = f"`{name}: null` takes away that of `{self.draft.name}`"
                problem = replace(problem, help=help_)
            yield problem
        responses = data.num_responses(self._written)
        for type_ in self.draft.declared.values():
            if message := data.column_problem(type_, responses):
                yield OptionProblem("HF206", message, None)

    @property
    def _gone(self) -> frozenset[str]:
        """Options of the step that are none of these rows: they come in the order of the file, few enough to
        be read at once, and what is said of a dataset is not said of another one."""
        dataset = self.draft.options.get("dataset")
        is_another = self.said.get("dataset", dataset) != dataset
        return self.taken_away | {"curriculum", "streaming", *(OF_A_SOURCE if is_another else ())}

    @property
    def _written(self) -> dict[str, Any]:
        step = {n: v for n, v in _written(self.draft).items() if n not in self._gone}
        return step | _accepted(data.OPTIONS, self.said)


def sampling_options(draft: NodeDraft, said: Mapping[str, Any]) -> dict[str, Any]:
    """Of a generate node in an evaluation that says these; what it says wrongly is left out."""
    return {**draft.options, **_accepted(generate.options(set(draft.sources)), said)}


def sampling_problems(draft: NodeDraft, said: Mapping[str, Any]) -> Iterator[OptionProblem]:
    """What contradicts itself in the evaluation, and does not in the step. A greedy one need not take away
    the step's truncation, which has no effect on it."""
    further, step = generate.continues(set(draft.sources)), _written(draft)
    own = step | _accepted(generate.options(set(draft.sources)), said)
    known = set(generate.option_problems(step, further))
    for problem in generate.option_problems(own, further):
        if problem not in known and (problem.option in said or own.get("temperature") != 0):
            yield problem


def _written(draft: NodeDraft) -> dict[str, Any]:
    return {name: value for name, value in draft.options.items() if name in draft.written}


def _accepted(options: tuple[Option, ...], said: Mapping[str, Any]) -> dict[str, Any]:
    return defaults([option for option in options if option.name in said], said)
