"""What of transformers.Trainer's own, private workings the training relies on, looked up in the installed version."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers import Trainer, TrainingArguments

from pipeline.training.trainer import TandemTrainer

PACKAGE = Path(inspect.getfile(TandemTrainer)).parents[1]
# Private methods that TandemTrainer overrides; the reasons stand at each. At most three: a public hook or a callback is better.
OVERRIDDEN = {
    "_clip_grad_norm": "the update of a step whose gradient is not finite, or too large, is made",
    "_maybe_log_save_evaluate": "an evaluation that fails loses the step, and the last step is not logged",
}
# What Trainer hands them, and we read.
ARGUMENTS = {"_clip_grad_norm": ["model"], "_maybe_log_save_evaluate": ["tr_loss", "grad_norm", "learning_rate"]}
# What names a Trainer and its arguments.
INSIDE = ("self", "super()", "self.args")
OUTSIDE = ("trainer", "self.trainer", "args", "trainer.args", "self.trainer.args", "built", "Trainer", "TandemTrainer")


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names(owner):
    """Names of methods, and of attributes that its methods set on self."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(owner))))
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    names = [*vars(owner), *(node.attr for node in stored if ast.unparse(node.value) == "self")]
    return {name for name in names if is_private(name)}


def test_the_private_methods_of_trainer_that_are_overridden_are_known_and_few():
    overridden = {name for name in vars(TandemTrainer) if is_private(name) and hasattr(Trainer, name)}
    assert overridden == OVERRIDDEN.keys()
    assert len(overridden) <= 3


def test_transformers_still_has_and_calls_the_private_methods_that_are_overridden():
    called = inspect.getsource(Trainer._run_epoch) if hasattr(Trainer, "_run_epoch") else inspect.getsource(Trainer)
    version = f"transformers {transformers.__version__}"
    for name, without in OVERRIDDEN.items():
        here = f"pipeline/training/trainer.py overrides it, and without it {without}"
        assert hasattr(Trainer, name), f"{version} has no Trainer.{name} any more: {here}"
        assert f"self.{name}(" in called, f"{version} does not call Trainer.{name} in a step any more: {here}"
        missing = {*ARGUMENTS[name]} - inspect.signature(getattr(Trainer, name)).parameters.keys()
        assert not missing, f"{version}: Trainer.{name} takes no {', '.join(missing)} any more: {here}"


def attributes_of_trainers() -> Iterator[tuple[str, str, ast.Attribute]]:
    """File, what the attribute is one of, and the attribute; `self` counts where it is the Trainer."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if owner in OUTSIDE or (owner in INSIDE and path.name == "trainer.py"):
                    yield str(path.relative_to(PACKAGE)), owner, node


def test_nothing_else_touches_a_private_name_of_trainer_or_its_arguments():
    private = private_names(Trainer) | private_names(TrainingArguments)
    assert {"_tr_loss", "_globalstep_last_logged", "_train_batch_size", "_n_gpu", "_save_checkpoint"} <= private
    found = [f"{file}: {owner}.{node.attr}" for file, owner, node in attributes_of_trainers() if node.attr in private]
    assert found == []


def test_no_file_sets_an_attribute_of_the_trainer_from_outside():
    stores = [(f, o, n) for f, o, n in attributes_of_trainers() if o in OUTSIDE and isinstance(n.ctx, ast.Store)]
    assert [f"{file}:{node.lineno}: {owner}.{node.attr}" for file, owner, node in stores if owner != "args"] == []


def test_no_signature_takes_a_trainer_of_any_type():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        arguments = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.arg))
        for node in (node for node in arguments if node.arg == "trainer"):
            if node.annotation is None or ast.unparse(node.annotation) == "Any":
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert found == []
