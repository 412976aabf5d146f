"""The rows of a `data` node as texts: templates over their fields, and the tokens of what these give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hflow.diagnostics import did_you_mean
from hflow.graph.templates.budget import BadTemplateError
from hflow.graph.templates.null_field import guarded
from hflow.graph.templates.template import Template
from hflow.runtime.data_files import DataRow, refused
from hflow.runtime.source_rows import SourceRows
from hflow.runtime.tokenizer import Tokenizer, UnknownTextError

CHUNK = 4096  # texts at once: what tokenizers say of a text beside its tokens takes many times their memory


@dataclass(frozen=True)
class RowTexts:
    """The rows of a data node called `name` that have some `numbers`, as texts. HF403 names the row."""

    name: str
    found: SourceRows
    numbers: Sequence[int]

    @property
    def rows(self) -> list[DataRow]:
        return [self.found.rows[number] for number in self.numbers]

    def where(self, place: int) -> str:
        """The row at a place among these, as messages call it."""
        return self.found.where(self.numbers[place])

    def render(self, what: str, template: str) -> list[str]:
        compiled = self._compile(what, template)
        return [self._rendered(what, number, compiled) for number in self.numbers]

    def encode(self, what: str, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = []
        for first in range(0, len(texts), CHUNK):
            try:
                found += tokenizer.encode(texts[first : first + CHUNK])
            except UnknownTextError as error:
                raise refused(f"{self.where(first + error.index)}, {what}: {error}") from None
        return found

    def _compile(self, what: str, template: str) -> Template:
        try:
            compiled = Template(template)
        except BadTemplateError as error:
            raise refused(f"the {what} template {template!r} is not valid: {error}", error.help) from None
        for field in sorted(compiled.fields - set(self.found.fields)):
            help_ = did_you_mean(field, self.found.fields, "fields")
            message = f"rows of `{self.name}` have no field `{field}`, which the {what} template asks for"
            raise refused(message, help_)
        return compiled

    def _rendered(self, what: str, number: int, template: Template) -> str:
        try:
            return template.render(guarded(self.found.rows[number]))
        except BadTemplateError as error:
            raise refused(f"{self.found.where(number)}, {what} template: {error}", error.help) from None
