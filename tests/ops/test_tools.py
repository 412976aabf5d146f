"""The calculator against Python's own arithmetic, and what it must refuse."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hflow.ops.tools import calculator, evaluate


def one(text: str) -> str:
    return calculator([text])[0]


@pytest.mark.parametrize(
    "expression,result",
    [
        ("1+2*3", "7"),
        (" ( 1 + 2 ) * 3 ", "9"),
        ("6/3", "2"),
        ("1/3", "0.333333"),
        ("-1/81000", "-1.23457e-05"),
        ("7//2 - 7%4", "0"),
        ("-2**2", "-4"),
        ("2**-1", "0.5"),
        ("-7 // 2", "-4"),
        (".5 + 0.25", "0.75"),
        ("10**11 - 1", "99999999999"),
        ("-10**11", "-1e+11"),
        ("10**30", "1e+30"),
    ],
)
def test_results(expression: str, result: str) -> None:
    assert one(f"So <calc>{expression}</calc>") == f" = {result}\n"
    assert len(result) <= 12


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1/0",
        "0**-1",
        "5 % 0",
        "(-8)**0.5",
        "10**31",
        "10**15 * 10**16",
        "__import__('os').system('true')",
        "a",
        "True",
        "1e5",
        "1_000",
        "0x10",
        "1,000",
        "(1)(2)",
        "1 < 2",
        "1\n+2",
        "007",
        "²",
        "٣",
        "(" * 90 + "1" + ")" * 90 + "+",
        "1+" * 100 + "1",
    ],
)
def test_what_is_no_arithmetic_is_an_error(expression: str) -> None:
    assert one(f"<calc>{expression}</calc>") == " = error\n"


@pytest.mark.parametrize(
    "expression",
    ["9**9**9**9", "(-9)**9**9", "9.0**9**9", "2**10**30", "-" * 198 + "1", "(" * 99 + "1" + ")" * 99],
)
def test_hostile_expressions_are_quick(expression: str) -> None:
    start = time.perf_counter()
    assert one(f"<calc>{expression}</calc>").startswith(" = ")
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    "text,observation",
    [
        ("no call", ""),
        ("<calc>1+1", ""),
        ("1+1</calc>", ""),
        ("<calc>1+1</calc>", " = 2\n"),
        ("<calc>1+1</calc> \n\t", " = 2\n"),
        ("<calc>1+1</calc> so", ""),  # the turn did not end with the call
        ("<calc>1+1</calc> = 2\n", ""),
        ("<calc>1+1</calc> = 3\n", ""),  # a result that the model made up
        ("<calc>1+1</calc> = 3\nso <calc>2*3</calc>", " = 6\n"),
        ("<calc>1+1</calc> = 3</calc>", ""),
        ("<calc>1+1</calc> = 2\n<calc>2*3</calc>", " = 6\n"),
        ("<calc>1+1</calc> = 2\n<calc>2*3</calc> = 6\nThe answer is 6", ""),
        ("<calc>1+1</calc> = 2\n<calc>2*3", ""),
        ("<calc><calc>4-1</calc>", " = 3\n"),
        ("<calc>x</calc> = error\n", ""),
    ],
)
def test_which_call_is_answered(text: str, observation: str) -> None:
    assert one(text) == observation


def test_other_marks_and_several_rows() -> None:
    found = calculator(["<calc>5</calc> [1+1]", "", "[2]", "[2] <calc>5</calc>"], open="[", close="]")
    assert found == [" = 2\n", "", " = 2\n", ""]
    with pytest.raises(ValueError, match="open and close"):
        calculator([""], open="")


NUMBERS = st.integers(0, 10**6).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({''.join(parts)})"),
    max_leaves=4,
)


@given(EXPRESSIONS)
def test_whole_numbers_are_exact(expression: str) -> None:
    assert evaluate(expression) == Fraction(eval(expression))
