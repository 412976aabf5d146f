"""What a notebook shows for our values. Views register here, so that values need not know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Bundle = dict[str, str]  # text by MIME type
_bundles: dict[str, Callable[[Any], Bundle]] = {}


def show_with(type_name: str, bundle: Callable[[Any], Bundle]) -> None:
    """From now on a notebook shows values of the class called `type_name` as `bundle` says."""
    _bundles[type_name] = bundle


class Displayed:
    """For classes whose values a notebook draws (IPython's ``_repr_mimebundle_``)."""

    def _repr_mimebundle_(self, **_: Any) -> Bundle:
        return _bundles[type(self).__name__](self)
