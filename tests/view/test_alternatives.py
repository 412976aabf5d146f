from __future__ import annotations

import pytest

from hflow.compiler.explain.alternatives import Alternative
from hflow.view.terminal.alternatives import alternatives_text

FOUND = (
    Alternative("tp4 dp2", (0, 1, 2, 3, 4, 5, 6, 7), 6.0, 27.5, "chosen: no other step is shorter"),
    Alternative("tp2 dp4", (0, 1, 2, 3, 4, 5, 6, 7), 7.2, 28.7, "slower by 1.2 s"),
    Alternative("dp8", (0, 1, 2, 3, 4, 5, 6, 7), None, None, "does not fit: 84.9 of 80 GB"),
)


def test_the_chosen_way_comes_first_and_others_tell_why_they_lost() -> None:
    assert alternatives_text("actor_train", FOUND).splitlines() == [
        "actor_train: 3 layouts compared",
        "        layout   device   time    step  why",
        "chosen  tp4 dp2  0-7     6.0 s  27.5 s  chosen: no other step is shorter",
        "2       tp2 dp4  0-7     7.2 s  28.7 s  slower by 1.2 s",
        "3       dp8      0-7         -       -  does not fit: 84.9 of 80 GB",
    ]


@pytest.mark.parametrize("width", [60, 100])
def test_no_line_is_wider_than_asked(width: int) -> None:
    assert max(map(len, alternatives_text("actor_train", FOUND, width).splitlines())) <= width
