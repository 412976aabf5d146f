"""Tools that a model may call in its text."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence

from hflow.ops.marks import last_marked
from hflow.ops.op import op

Number = int | float

MAX_CHARS = 200
MAX_NUMBER = 10**30
MAX_EXACT = 10**11 - 1
_ALLOWED = re.compile(r"[\d\s.()+*/%-]+", re.ASCII)
_ERRORS = (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError)


@op("text: str[rows] -> observation: str[rows]")
def calculator(text: Sequence[str], *, open: str = "<calc>", close: str = "</calc>") -> list[str]:
    """Answers the call that a text ends with, ``<calc>expression</calc>``: `` = result`` and a line end.

    A call must end its turn, trailing white space aside. An observation is put at the end of the text: were
    a call answered after which the model wrote on, the result would follow that and not the call, and a
    model could go on with a result that it made up.

    Expressions are numbers, parentheses and ``+ - * / // % **``. Whole results of up to 11 digits are
    exact, others have six significant digits, so an observation has at most 16 characters. The result is
    ``error`` where the expression is none, divides by 0 or leaves +-10^30.

    Args:
        text: what the model has written so far, with or without earlier observations.
        open, close: what stands around an expression.

    Returns:
        One observation per text, empty when none is due: there is no call, it is not closed, or something,
        like its result, already stands behind it.

    Raises:
        ValueError: `open` or `close` is empty.
    """
    if not open or not close:
        raise ValueError("open and close are the marks around an expression; they cannot be empty")
    return [_observe(written, open, close) for written in text]


def _observe(text: str, open_: str, close: str) -> str:
    call = last_marked(text, open_, close)
    if call is None or call[1].strip():
        return ""
    return f" = {_result(call[0])}\n"


def _result(expression: str) -> str:
    try:
        return _shown(evaluate(expression))
    except _ERRORS:
        return "error"


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression. Nothing is executed but arithmetic on bounded numbers.

    Raises:
        ValueError: what stands there is more than arithmetic, is too long, or a number is too large.
        SyntaxError, ArithmeticError, RecursionError, MemoryError: as of Python's parser and operators.
    """
    if len(expression) > MAX_CHARS or not _ALLOWED.fullmatch(expression):
        raise ValueError("not an arithmetic expression")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            return _bounded(_BINARY[type(operation)](_value(left), _value(right)))
    raise ValueError(f"{type(node).__name__} is no arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    """Refuses before computing: 9**9**9 has 370 million digits."""
    if abs(base) > 1 and exponent * math.log10(abs(base)) > math.log10(MAX_NUMBER):
        raise ValueError("the power is too large")
    return base**exponent


def _bounded(number: Number | complex) -> Number:
    if isinstance(number, complex) or not abs(number) <= MAX_NUMBER:  # nan is not <= either
        raise ValueError("out of range")
    return number


def _shown(number: Number) -> str:
    whole = int(number)
    return str(whole) if whole == number and abs(whole) <= MAX_EXACT else f"{number:.6g}"


_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number | complex]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
