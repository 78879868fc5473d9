"""Tool calls inside an answer: the model writes an expression, the calculator's result is put after it."""

from pipeline.generation.calculator import calculate
from pipeline.tokenizer.encode import encode_documents
from pipeline.tokenizer.specials import tool_marks


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
