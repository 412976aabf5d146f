"""Templates of this package, rendered with every value escaped."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hflow.view.picture.palette import dark_style


def _short(value: Any) -> Any:
    """Whole pixels without a needless ``.0``."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_ENVIRONMENT = Environment(
    loader=PackageLoader("hflow.view"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_short,
)
_DARK = Markup(dark_style())


def render(template: str, **values: Any) -> str:
    """The text of ``templates/<template>``; a value that is missing is an error."""
    return _ENVIRONMENT.get_template(template).render(dark_style=_DARK, **values)
