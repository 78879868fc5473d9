"""The one Trainer of both stages: rows by step number, true losses, whole checkpoints, exact resume."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerCallback, TrainingArguments

from pipeline.data.loader import StepLoader
from pipeline.evals.bpb import EvaluationInterrupted
from pipeline.hardware.device import batch_rank, batch_ranks, tensor_parallel_size
from pipeline.process.errors import TandemError
from pipeline.recipe import Recipe
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training import checkpoint as files
from pipeline.training.checkpoint import (
    CheckpointSaver,
    Restore,
    TrainedText,
    load_model,
    optimizer_tensors,
    write_state,
)
from pipeline.training.distributed import (
    Ranks,
    from_every_rank,
    get_rng_state,
    on_every_rank,
    on_rank_0,
    preserved_rng,
)
from pipeline.training.guard import StepGuard, explained_errors, total_norm
from pipeline.training.metrics import LogRow, LossSum, OwnTime, StepMeter
from pipeline.training.muon import alike
from pipeline.training.optimizer import average_weights, build_optimizer
from pipeline.training.schedules import StepSchedule

LOST_PART_S = 30.0  # that a rank whose training failed waits for the parts of others, which may be gone
CLIP_EPS = 1e-6  # that torch adds to the norm: from here on its factor is below 1
BALANCE_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")  # as the mixtures of experts of transformers call it


class StepCallback(TrainerCallback):
    """A callback with an event that transformers has not."""

    def on_step_done(self, args: Any, state: Any, control: Any) -> None:
        """Act after a step is logged, saved and evaluated. Every rank calls it."""


def balancing_loss(model: Any, outputs: Any) -> torch.Tensor | None:
    """Return what the model added to its loss to balance its experts, None where it added nothing.

    transformers adds it undivided by the micro-batches and ranks of a step: the loss is then not of the text alone.
    """
    if getattr(outputs, "aux_loss", None) is None:
        return None
    for holder in (model, model.config.get_text_config()):
        for name in BALANCE_FACTORS:
            if hasattr(holder, name):
                return getattr(holder, name) * outputs.aux_loss
    return None


class TandemTrainer(Trainer):
    """transformers.Trainer over rows that are a pure function of the step.

    rows: TrainingRows; evaluate_model: gives metrics of the bare model by name; watched: what its batches go through,
    and which may raise EvaluationInterrupted on every rank; meter: counts time, tokens; byte_lengths_V: raw bytes per
    id, None where ids have no fixed ones. Both stages use this class; they differ in rows and evaluation only.
    """

    # Set by Trainer.__init__ and train(), where they are declared as optional.
    model: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        args: TrainingArguments,
        recipe: Recipe,
        run: RunDirectory,
        tokenizer: Any,
        rows: Any,
        evaluate_model: Callable[..., dict[str, float]],
        watched: Callable[..., Iterable],
        meter: StepMeter,
        byte_lengths_V: Any,
    ):
        # Sharded before it comes here (training/sharding.py); Trainer takes it as one that transformers loaded so.
        self.is_sharded = getattr(model, "is_distributed_loading_by_transformers", False)
        # Ranks that compute each layer together (tensor parallelism) read the same rows.
        self.batch_rank = batch_rank(args.process_index)
        self.batch_ranks = batch_ranks(args.world_size)
        # Says Trainer that its own checkpoints are not asked for; ours are whole.
        args.save_only_model = self.is_sharded
        self.recipe, self.run, self.rows, self.meter = recipe, run, rows, meter
        self.evaluate_model, self.watched = evaluate_model, watched
        self.loader: StepLoader | None = None
        self.guard = StepGuard(run, recipe.monitor)
        self.recorded_evaluations: set[int] = set()
        self.averaged_step = 0
        self.balancing: torch.Tensor | None = None  # of the micro-batch that is on its way
        keep, every = args.save_total_limit, recipe.run.keep_every_steps
        saver = CheckpointSaver
        if self.is_sharded:
            from pipeline.training.sharding import PartSaver

            saver = PartSaver
        self.saver = saver(run, keep=keep, every=every, best=recipe.run.keep_best)
        self.model_files = files.ModelFiles(tokenizer)
        self.ranks, self.own_time = Ranks(), OwnTime(args.device, world_size=1 if self.is_sharded else args.world_size)
        self.log_row, self.text = LogRow(run, args), TrainedText(byte_lengths_V, args.device)
        self.loss_sum, self.restore = LossSum(args.device), Restore(self)
        args.max_grad_norm = args.max_grad_norm or math.inf  # Trainer reads 0 as: do not ask _clip_grad_norm
        data: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer}
        super().__init__(model=model, args=args, callbacks=[self.restore], **data)
        self.model_accepts_loss_kwargs = True  # a foreign model was checked when it was built (training/build.py)

    def set_micro_batch(self, recipe: Recipe, *, rows: int, micro_steps: int) -> None:
        """Train with the micro-batch that was found for `auto`. recipe: with that number."""
        self.recipe = recipe
        self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps = rows, micro_steps

    # ---- data ----

    def get_train_dataloader(self) -> Any:
        self.loader = StepLoader(
            self.rows,
            start_step=self.restore.start_step,
            max_steps=self.args.max_steps,
            micro_steps=self.args.gradient_accumulation_steps,
            micro_batch=self.args.per_device_train_batch_size,
            rank=self.batch_rank,
            world_size=self.batch_ranks,
            device=self.args.device,
            look=self._look,
        )
        return self.loader

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple:
        """Return the same as Trainer, but no epoch is made where the checkpoint is of the last step: its run owes
        evaluations at most."""
        num_train_epochs, *values = super().set_initial_training_values(args, dataloader)
        return (0 if self.restore.start_step >= args.max_steps else num_train_epochs), *values

    def _look(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Count what a batch holds while it is on the host; returns the tensors that it gets with it."""
        self.meter.look(batch)
        return self.text.look(batch)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor]:
        """Return the step's micro-batches and its number of targets over all ranks, known from the rows without a
        gather."""
        self.meter.begin()
        self.guard.begin()
        self.loss_sum.begin()
        self.text.begin()
        self.own_time.begin()
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        targets = self.rows.num_targets(self.state.global_step)
        self.meter.step(targets)
        return batches, torch.full((), float(max(targets, 1)), device=device)  # torch.tensor would wait for the device

    # ---- steps ----

    def get_tp_size(self) -> int:
        """Return how many ranks compute each layer together; Trainer multiplies the loss by the number of their
        groups."""
        return tensor_parallel_size()

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        loss = self.forward_backward(model, inputs, num_items_in_batch)
        self.guard.losses.append(loss)
        self.loss_sum.add(loss)
        return loss

    def forward_backward(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Run forward and backward of one micro-batch that is on the device; return this micro-batch's share of the
        global token mean, of the text alone."""
        if not self.model.training:  # model.train() walks every module: not per micro-batch
            model.train()
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        value = loss.detach()
        if self.balancing is not None:
            # Gradients of ranks are averaged and those of micro-steps summed: the factor is that of their mean.
            loss = loss + self.balancing / self.args.gradient_accumulation_steps
            self.balancing = None
        self.own_time.before_backward(loss)
        # 1, or NaN where the loss is not finite: its gradients then say so on every rank, and nobody has to ask.
        self.accelerator.backward(loss, gradient=1 + (value - value))
        return value

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        special = inputs.pop("special_targets", None)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.balancing = balancing_loss(self.model, outputs)
        if self.balancing is not None:
            loss = loss - self.balancing * self.batch_ranks  # by which Trainer multiplied the model's loss
        if special is not None:  # a batch of the training: the mean of the ranks' losses is that of the step
            nats = loss.detach() * num_items_in_batch / self.batch_ranks
            self.text.add(nats, outputs, inputs["shift_labels"], special)
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: dict[str, torch.Tensor]) -> int:
        return 0  # the meter counts exactly; Trainer's leaves attention out and walks the model every micro-batch

    def _clip_grad_norm(self, model):
        """Return the norm before clipping; without a return when the guard ends the run here, before the update.

        Overridden because no event comes between the norm and the clipping: the norm is judged first, and mostly
        nothing is to clip then.
        """
        self.accelerator.unscale_gradients()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = total_norm([p.grad for p in parameters])
        if self.log_row.measures_update(self):
            self.log_row.update.look(parameters, self.optimizer)
        if self.guard.check_update(self, model, norm) + CLIP_EPS > self.args.max_grad_norm:
            for some in alike(parameters):
                torch.nn.utils.clip_grads_with_norm_(some, self.args.max_grad_norm, norm)
        return norm

    # ---- optimizer ----

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.recipe.optimizer.type == "trainer":
            return super().create_optimizer(model)
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.recipe)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.recipe.optimizer.type == "trainer":
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            self.lr_scheduler = StepSchedule(self.optimizer, self.recipe.optimizer.schedule, num_training_steps)
        return self.lr_scheduler

    # ---- evaluation and logging ----

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Return metrics of the bare model by name, the same on every rank; the training's random state does not
        move."""
        started = time.perf_counter()
        # Under FSDP a forward needs every rank: they agree before each batch.
        watched = partial(self.watched, lockstep=True) if self.is_sharded else self.watched
        metrics: dict[str, float] | None = None
        with suppress(EvaluationInterrupted), self.meter.pause(), preserved_rng(), forward_only(self.model):
            metrics = self.evaluate_model(self.model, watched=watched)
        self.recorded_evaluations.add(self.state.global_step)
        if metrics is None:  # given up on a signal: the step is saved, and evaluated first after the resume
            self.control.should_save = self.control.should_training_stop = True
            return {}
        metrics["perf/eval_s"] = time.perf_counter() - started
        self.saver.add_score(self.state.global_step, metrics)
        self.log(self.guard.check_evaluation(self, metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Hand one row of metrics, under this project's names, to the callbacks that write them."""
        if "train_runtime" in logs:
            return  # Trainer's closing summary averages over evaluations and saves; report/ has the true one
        row: dict[str, Any] = {name: value for name, value in logs.items() if "/" in name}
        if "loss" in logs:
            row |= self.log_row.row(self, logs)
        self.control = self.callback_handler.on_log(
            self.args, self.state, self.control, {k: v for k, v in row.items() if v is not None}
        )

    # ---- checkpoints ----

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args: Any, learning_rate=None, **kwargs: Any) -> None:
        """Log, save and evaluate, in this order.

        Overridden because Trainer evaluates before it saves: here an evaluation that fails loses nothing. The last
        step is always logged and evaluated.
        """
        step, last = self.state.global_step, self.state.global_step >= self.state.max_steps
        # Before the save: the last checkpoint is the finished model. Without an update so far there is nothing to
        # average. Once: Trainer comes here a second time when the epoch ends.
        if self.recipe.optimizer.average_steps and self.guard.skipped_steps < step != self.averaged_step:
            average_weights(self.optimizer, self.recipe.optimizer, last=last)
            self.averaged_step = step
        if (self.control.should_log or last) and self.loss_sum.kept:
            losses, norms = self.loss_sum.read(gather=self.accelerator.gather), self.guard.norms
            self.loss_sum.load([])
            self.log({"loss": losses, "learning_rate": learning_rate})
            if self.recipe.monitor.on_spike != "skip":  # then each step was judged before its update
                self.guard.report_spikes(self, {"optim/grad_norm": norms, "train/loss": losses})
        if self.control.should_save:
            self.save_checkpoint()
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self.log_written(self.saver.check())
        if (self.control.should_evaluate or last) and step not in self.recorded_evaluations:
            self.evaluate()
        self.control.should_evaluate = False
        if last or not self.control.should_training_stop:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, StepCallback):
                    callback.on_step_done(self.args, self.state, self.control)
        if last or self.control.should_training_stop:  # here, where the watch for hangs still looks
            self.log_written(on_every_rank(self.saver.wait)[0])

    def save_checkpoint(self) -> None:
        """Copy checkpoint-<step>, which is written while training goes on. All ranks take part; the first one writes,
        of a sharded model each rank a part."""
        started = time.perf_counter()
        step = self.state.global_step
        with self.meter.pause():
            ranks = from_every_rank((get_rng_state(), self.loss_sum.read(), self.text.state()))
            optimizer = optimizer_tensors(self.optimizer, self.model)
            self.guard.check_state(self, optimizer, so=f"checkpoint-{step} was not written")
            model = self.accelerator.unwrap_model(self.model)
            facts = {"tokens": self.meter.tokens_at(step), "world_size": self.args.world_size}

            def write_small(folder: Path) -> dict:
                write_state(self, folder, ranks=ranks)
                return {} if self.is_sharded else files.large_files(self.model_files.weights(model), optimizer)

            if self.is_sharded:
                from pipeline.training.sharding import own_part

                own = self.model_files.weights(model, own_part(model.state_dict())), own_part(optimizer)
                saver: Any = self.saver
                saver.save_part(step, write_small=write_small, large=files.large_files(*own), **facts)
            else:
                on_rank_0(lambda: self.saver.save(step, write_small=write_small, **facts))
        self.log({"ckpt/save_s": time.perf_counter() - started})
        on_rank_0(self.rows.raise_if_too_bad)  # after the save, so that the run can go on once the data is mended

    def log_written(self, seconds: float | None) -> None:
        """Log the seconds that the writing of a checkpoint took, once it is done."""
        if seconds is not None:
            self.log({"ckpt/write_s": seconds})

    def resume(self, checkpoint: Path | None) -> None:
        """Train to the end, from a whole checkpoint or from the start. What was due at the checkpoint's step is done
        first."""
        if checkpoint is not None:
            self.restore.read(checkpoint)
        try:
            with explained_errors(self):
                if checkpoint is not None:
                    load_model(self.model, checkpoint)
                if self.recipe.train.get("fp8"):
                    from pipeline.training.sharding import convert_to_fp8

                    convert_to_fp8(self.model, self.args.device)
                self.train()
        except BaseException:
            with suppress(TandemError):  # what ended the training is the thing to tell
                # Whoever is to write another part of a sharded model may have been lost with its rank.
                self.saver.wait(patience_s=LOST_PART_S if self.is_sharded else math.inf)
            raise
        self.guard.check_state(self, {}, so="the finished model was not written")


def forward_only(model: nn.Module) -> AbstractContextManager[None]:
    """Let evaluations and samples use the model: one that is sharded or in float8 is prepared for it
    (training/sharding.py)."""
    if any(
        isinstance(module, FSDPModule) or type(module).__module__.startswith("torchao.") for module in model.modules()
    ):
        from pipeline.training.sharding import between_steps

        return between_steps(model)
    return nullcontext()
