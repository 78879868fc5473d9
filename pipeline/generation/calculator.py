"""The calculator that a chat model may call: arithmetic, and how often a text holds another."""

import ast
import operator
import re
from collections.abc import Callable

# Bounds the work, the depth of the tree and, without powers, every result: its digits are at most those written.
LONGEST = 256  # characters

# All that may be written: numbers, operators, parentheses, quoted texts without escapes, and the one method.
WRITTEN = re.compile(r"""(?:[0-9.+\-*/% ()]|"[^"\\\n]*"|'[^'\\\n]*'|\.count\()+""")
THOUSANDS_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
OPERATIONS: dict[type, Callable[..., int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str | None:
    """The value of + - * / // % and parentheses over decimal numbers, and of "text".count("x"), as Python prints it.

    1,234 is read as 1234. None for all else: other syntax, a power, division by zero, more than 256 characters. Nothing
    is executed, and neither time nor memory depends on what stands there.
    """
    expression = expression.strip()
    if '"' not in expression and "'" not in expression:
        expression = THOUSANDS_COMMA.sub("", expression)
    if len(expression) > LONGEST or not WRITTEN.fullmatch(expression):
        return None
    try:
        return str(_value(ast.parse(expression, mode="eval").body))
    # ValueError: a NUL byte, before Python 3.12. The last two: a parser or a caller that is deep in calls already leaves no room for the tree.
    except (SyntaxError, ValueError, _NotArithmetic, ZeroDivisionError, RecursionError, MemoryError):
        return None


class _NotArithmetic(Exception):
    pass


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in OPERATIONS:
            return OPERATIONS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATIONS:
            return OPERATIONS[type(sign)](_value(left), _value(right))
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as text), attr="count"),
            args=[ast.Constant(value=str() as part)],
            keywords=[],
        ):
            return text.count(part)
    raise _NotArithmetic
