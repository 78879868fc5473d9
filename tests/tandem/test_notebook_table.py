"""tandem.notebook: the bar and the table that take the place of the console's lines."""

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

pytest.importorskip("IPython")


def test_each_evaluation_is_a_row_with_the_loss_before_it(tmp_path, capsys):
    from tandem.notebook import NotebookTable

    arguments, control = TrainingArguments(str(tmp_path)), TrainerControl()
    state = TrainerState(max_steps=4)
    table = NotebookTable()
    table.on_train_begin(arguments, state, control)
    for step in range(1, 5):
        state.global_step = step
        table.on_step_end(arguments, state, control)
        table.on_log(arguments, state, control, logs={"train/loss_ema": 1 / step, "optim/lrm": 1.0})
        if step % 2 == 0:
            table.on_log(arguments, state, control, logs={"val/bpb": 2 / step, "val/bpb/a_source": 9.0})
    table.on_train_end(arguments, state, control)
    rows = [["step", "train/loss", "val/bpb"], [2, "0.5000", "1.0000"], [4, "0.2500", "0.5000"]]
    assert table.tracker.inner_table == rows
    assert "[4/4 " in table.tracker.html_code
