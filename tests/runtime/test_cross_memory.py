"""Reading another process's memory, against `Tensor.copy_`. A process may read its own in the same way."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hflow.runtime.worker import cross_memory
from hflow.runtime.worker.cross_memory import place, read

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@st.composite
def parts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A part of a matrix or vector, and memory for it, each between columns of its own."""
    dtype, flat = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    rows, columns = (1 if flat else draw(st.integers(1, 40))), draw(st.integers(1, 30))

    def side() -> torch.Tensor:
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        whole = torch.randint(0, 200, (rows, before + columns + after), dtype=torch.int32).to(dtype)
        view = whole[:, before : before + columns]
        return view[0] if flat else view

    return side(), side()


@pytest.mark.slow
@given(st.lists(parts(), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 300))
def test_reading_is_copying(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], entries: int, call_bytes: int
) -> None:
    """However few entries and bytes a call takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_memory, "ENTRIES", entries)
        patch.setattr(cross_memory, "CALL_BYTES", call_bytes)
        copied = read(os.getpid(), [place(there) for there, _ in pairs], [here for _, here in pairs])
    assert copied == sum(here.nbytes for _, here in pairs)
    assert all(torch.equal(there, here) for there, here in pairs)


def test_what_lies_around_stays() -> None:
    whole, ones = torch.zeros(5, 7), torch.ones(3, 2)
    read(os.getpid(), [place(ones)], [whole[1:4, 2:4]])
    expected = torch.zeros(5, 7)
    expected[1:4, 2:4] = 1
    assert torch.equal(whole, expected)


def test_a_process_that_is_gone_is_an_error() -> None:
    with pytest.raises(OSError, match="No such process"):
        read(2**22 + 1, [place(torch.ones(3))], [torch.ones(3)])
