"""What stands between two marks in a text."""

from __future__ import annotations


def last_marked(text: str, open_: str, close: str) -> tuple[str, str] | None:
    """What the last `open_` and the `close` after it enclose, and what stands behind; None where there is no
    such pair. Where both are one mark, it opens and closes in turns."""
    if open_ == close:
        parts = text.split(close)
        return (parts[-2], parts[-1]) if len(parts) % 2 and len(parts) > 1 else None
    _, opened, rest = text.rpartition(open_)
    inside, closed, after = rest.partition(close)
    return (inside, after) if opened and closed else None
