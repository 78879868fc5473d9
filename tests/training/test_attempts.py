"""Steps lost to restarts, from the rows of a run."""

from pipeline.run_dir.rows import first_start, lost_steps


def attempt(step, time=0.0):
    return {"event": "attempt", "step": step, "time": time}


def logged(*steps):
    return [{"step": step, "train/loss": 1.0, "time": 0.0} for step in steps]


def test_steps_beyond_the_checkpoint_of_the_next_attempt_are_lost():
    rows = [attempt(0, time=5.0), *logged(1, 10, 20, 27), attempt(20, time=90.0), *logged(30, 33), attempt(30)]
    assert lost_steps(rows) == 7 + 3
    assert first_start(rows) == 5.0


def test_a_run_that_stopped_after_a_whole_checkpoint_lost_nothing():
    assert lost_steps([attempt(0), *logged(1, 12), attempt(12), *logged(20)]) == 0


def test_an_attempt_that_died_before_its_first_log_loses_nothing_known():
    assert lost_steps([attempt(0), *logged(10), attempt(5), attempt(5), *logged(6)]) == 5


def test_a_fork_loses_nothing_of_its_parents_steps():
    assert lost_steps([attempt(40), *logged(50)]) == 0


def test_a_step_that_a_later_attempt_deliberately_goes_back_behind_is_lost():
    rows = [attempt(0), *logged(10), {"event": "spike", "step": 11}, attempt(10), *logged(20), attempt(5)]
    assert lost_steps(rows) == 15


def test_a_run_begins_with_its_process_which_imports_before_it_writes():
    rows = [{**attempt(0, time=25.0), "began": 5.0}, *logged(1), {**attempt(0, time=90.0), "began": 80.0}]
    assert first_start(rows) == 5.0


def test_without_a_row_of_an_attempt_no_start_is_known():
    assert first_start(logged(1)) is None
