"""Templates of this package, rendered with every value escaped."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_ENVIRONMENT = Environment(
    loader=PackageLoader("hflow.view"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> str:
    """The text of ``templates/<template>``; a value that is missing is an error."""
    return _ENVIRONMENT.get_template(template).render(**values)
