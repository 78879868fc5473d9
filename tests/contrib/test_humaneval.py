"""HumanEval: the program made of an answer, and its permission."""

import pytest

from pipeline.contrib.humaneval import humaneval_item, humaneval_program
from pipeline.evals.chat_tasks import built_in_tasks
from pipeline.process.errors import RecipeError
from tests.evals.chat_task_files import humaneval_row


def test_humaneval_is_refused_in_one_line_without_execute():
    with pytest.raises(RecipeError, match=r"recipe\.yaml:3: humaneval runs programs that the model wrote") as caught:
        built_in_tasks(["humaneval"], execute=False, unsafe_exec=True, where="recipe.yaml:3")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "def add(x):\n    return x",
        "Sure:\n```python\ndef add(x):\n    return x\n```\nor\n```\ndef add(y): ...\n```",
        "```\n\ndef add(x):\n    return x\n```",
    ],
)
def test_a_humaneval_program_is_imports_first_block_test_and_call(text):
    row = humaneval_row(1) | {"prompt": "# sums\nimport math\n\nfrom typing import List\nx = 1\nimport os\n"}
    item = humaneval_item(row | {"entry_point": "add", "test": "def check(f):\n    assert f(1)\n"})
    assert item.messages[-1]["content"] == row["prompt"]
    assert humaneval_program(item, text) == (
        "import math\nfrom typing import List\n\ndef add(x):\n    return x\n\n"
        "def check(f):\n    assert f(1)\n\ncheck(add)"
    )
