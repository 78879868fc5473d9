"""The calculator that a chat model may call while it writes an answer."""

import ast
import operator
import re
from collections.abc import Callable

from pipeline.tokenizer.encode import encode_documents, tool_marks

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
    """Return the value of + - * / // % and parentheses over decimal numbers, and of "text".count("x"), as Python
    prints it.

    1,234 is read as 1234. None for all else: other syntax, a power, division by zero, more than 256 characters.
    Nothing is executed, and neither time nor memory depends on what is there.
    """
    expression = expression.strip()
    if '"' not in expression and "'" not in expression:
        expression = THOUSANDS_COMMA.sub("", expression)
    if len(expression) > LONGEST or not WRITTEN.fullmatch(expression):
        return None
    try:
        return str(_value(ast.parse(expression, mode="eval").body))
    # ValueError: a NUL byte, before Python 3.12. The last two: a parser or a caller that is deep in calls already
    # leaves no room for the tree.
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


class ToolCalls:
    """Reads one answer token by token: `push(token)` gives the tokens that must follow it.

    These are, after the end of a call that has a value, that value between the output marks, as the chat template
    renders it; else none, and the model goes on by itself. Nothing ever follows where the tokenizer has no tool marks.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.marks = tool_marks(tokenizer)
        self.call: list[int] | None = None  # The tokens of the call that is being written.

    def push(self, token: int) -> list[int]:
        if self.marks is None:
            return []
        start, end, output_start, output_end = self.marks
        if token == start:
            self.call = []
        elif token == end and self.call is not None:
            expression = self.tokenizer.decode(self.call, clean_up_tokenization_spaces=False)
            self.call = None
            if (value := calculate(expression)) is not None:
                return [output_start, *encode_documents(self.tokenizer, [value])[0].tolist(), output_end]
        elif self.call is not None:
            self.call.append(token)
        return []
