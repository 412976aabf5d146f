"""The text of a row's field, as columns of texts have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hflow.diagnostics import did_you_mean
from hflow.graph.templates.null_field import unwritable
from hflow.runtime.data_files import refused


def text_of(where: str, row: Mapping[str, Any], field: str) -> str:
    """The text of a field: numbers as Python writes them, lists and mappings as JSON with sorted keys.

    Args:
        where: the row, as messages call it.

    Raises:
        HflowError: HF403 when the row has no such field, or it is nothing that has a text.
    """
    if field not in row:
        raise refused(f"{where} has no field `{field}`", did_you_mean(field, row, "fields"))
    value, problem = row[field], ""
    if isinstance(value, dict | list):
        try:
            return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            problem = f", which JSON cannot write: {error}"
    elif isinstance(value, str | int | float) and not isinstance(value, bool) and not unwritable(value):
        return str(value)
    kind = unwritable(value) or f"no text but {type(value).__name__}{problem}"
    raise refused(f"{where}: field `{field}` is {kind}")
