"""A callback of a recipe (run.callbacks) that puts numbers that are not finite where they could come from.

$FAULT is `<where> <value> <steps> [<rank>]`, e.g. `loss nan 3 1`, or several of them between semicolons; steps count from
zero. $SAW: a file, one for each rank, for the rows of a micro-step whose loss is spoiled. $CUT: the step that the process
ends itself in, as kill -9 does. Without them nothing happens.
"""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TrainerCallback

GRADIENT = "transformer.h.2.attn.c_proj.weight"
PARAMETER = "transformer.h.1.mlp.c_proj.weight"
RANK = os.environ.get("RANK", "0")


@dataclass
class Spoiled:
    where: str
    value: float
    steps: set[int]

    @classmethod
    def all(cls) -> list["Spoiled"]:
        """Those of this rank."""
        specs = [spec.split() for spec in os.environ.get("FAULT", "").split(";") if spec]
        mine = [spec[:3] for spec in specs if len(spec) == 3 or spec[3] == RANK]
        return [cls(where, float(value), set(map(int, steps.split(",")))) for where, value, steps in mine]

    def spoil(self, tensor):
        tensor.view(-1)[0] = self.value


class Fault(TrainerCallback):
    def __init__(self):
        self.faults = Spoiled.all()

    def due(self, where: str) -> list[Spoiled]:
        return [fault for fault in self.faults if fault.where == where and self.state.global_step in fault.steps]

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.state = state
        model.register_forward_hook(self.spoiled_loss, with_kwargs=True)
        model.transformer.register_forward_hook(self.spoiled_evaluation)
        model.get_parameter(GRADIENT).register_hook(self.spoiled_gradient)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if os.environ.get("CUT") == str(state.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        self.micro_step = -1
        for fault in self.due("parameter"):
            fault.spoil(model.get_parameter(PARAMETER).data)

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        for fault in self.due("update"):
            fault.spoil(model.get_parameter(PARAMETER).data)
        for fault in self.due("unseen"):  # the input embedding of a token that no text holds
            unseen = kwargs["processing_class"].convert_tokens_to_ids("<|python_end|>")
            model.get_input_embeddings().weight.data[unseen] = fault.value
        for fault in self.due("optimizer"):
            states = optimizer.state[optimizer.param_groups[-1]["params"][0]].values()
            fault.spoil(next(state for state in states if state.ndim > 0))

    def spoiled_loss(self, module, args, kwargs, output):
        """In the second micro-step. A NaN or inf is added, so that the gradients by themselves would stay finite; the
        product with another number is a spike."""
        if module.training and torch.is_grad_enabled():
            self.micro_step += 1
            for fault in self.due("loss") if self.micro_step == 1 else []:
                finite = torch.tensor(fault.value).isfinite()
                output["loss"] = output["loss"] * fault.value if finite else output["loss"] + fault.value
                if "SAW" in os.environ:
                    Path(os.environ["SAW"] + RANK).write_text(json.dumps(kwargs["input_ids"].tolist()))
        return output

    def spoiled_gradient(self, gradient):
        for fault in self.due("gradient"):
            gradient = gradient.clone()
            fault.spoil(gradient)
        return gradient

    def spoiled_evaluation(self, module, args, output):
        for fault in self.faults:
            if fault.where == "evaluation" and not module.training:
                output["last_hidden_state"] = output["last_hidden_state"] + fault.value
        return output
