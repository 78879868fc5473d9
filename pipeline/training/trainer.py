"""The one Trainer of both stages: rows by step number, true losses, whole checkpoints, exact resume."""

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerCallback, TrainingArguments

from pipeline.data.loader import StepLoader, on_device
from pipeline.evals.bpb import EvaluationInterrupted, score_validation
from pipeline.hardware.device import batch_rank, batch_ranks, tensor_parallel_size
from pipeline.metrics import Numbers
from pipeline.process.errors import TandemError
from pipeline.recipe.schema import Hub, Monitor, Schedule
from pipeline.run_dir.failures import is_out_of_memory
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.training import checkpoint as files
from pipeline.training.checkpoint import CheckpointSaver
from pipeline.training.distributed import (
    from_every_rank,
    get_rng_state,
    on_every_rank,
    on_rank_0,
    preserved_rng,
    set_rng_state,
)
from pipeline.training.guard import StepGuard
from pipeline.training.log_row import LogRow, measures_update
from pipeline.training.meters import LossSum, RankStepTimer, StepMeter
from pipeline.training.nonfinite import NonFiniteReport, RowOrigins, find_nonfinite
from pipeline.training.norms import group_by_placement, total_norm
from pipeline.training.optimizer_state import Tensors, optimizer_settings, optimizer_tensors
from pipeline.training.ranks import Ranks
from pipeline.training.schedules import StepSchedule, logged_rates
from pipeline.training.stages import stage_of
from pipeline.training.step_errors import RESERVE, MemoryAdvice, translate_errors
from pipeline.training.train_bpb import TrainBpbMeter

PART_PATIENCE_S = 30.0  # that a rank whose training failed waits for parts of other ranks, which may be gone
CLIP_EPS = 1e-6  # that torch adds to the norm: from here on its factor is below 1
BALANCE_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")  # as the mixtures of experts of transformers call it


class StepCallback(TrainerCallback):
    """A callback with an event that transformers has not."""

    def on_step_done(self, args: Any, state: Any, control: Any) -> None:
        """Act after a step is logged, saved and evaluated. Every rank calls it."""


def balancing_loss(model: Any, outputs: Any) -> torch.Tensor | None:
    """Return the term that the model added to its loss to balance its experts, None where it added nothing.

    transformers adds it undivided by the micro-batches and ranks of a step: the loss is then not of the text alone.
    """
    if getattr(outputs, "aux_loss", None) is None:
        return None
    for holder in (model, model.config.get_text_config()):
        for name in BALANCE_FACTORS:
            if hasattr(holder, name):
                return getattr(holder, name) * outputs.aux_loss
    return None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out rows and the user's tasks, and how they are scored. options: of score_validation."""

    validation: Any
    options: dict[str, Any]
    tasks: dict[str, Any]
    tokenizer: Any

    def score(self, model: nn.Module, *, interruptible: Callable[[Iterable], Iterable]) -> Numbers:
        """Return metrics of the bare model by name. interruptible: wraps batches, and may raise
        EvaluationInterrupted on every rank."""
        metrics = score_validation(model, self.validation, watched=interruptible, **self.options)
        if self.tasks:
            from pipeline.evals.tasks import score_tasks

            metrics |= score_tasks(self.tasks, model, self.tokenizer, watched=interruptible)
        return metrics


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Values of the recipe that the Trainer uses besides its TrainingArguments.

    path, where: of the recipe and of its keys, for messages. make_optimizer: None where transformers makes it and its
    schedule; schedule: of the others. sets_accumulation: whether the recipe gives gradient_accumulation_steps.
    """

    path: Path | str | None
    where: Callable[[str], str]
    stage: str
    monitor: Monitor
    hub: Hub
    keep_every_steps: int | None
    keep_best: bool
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None
    schedule: Schedule
    fp8: bool
    eval_rows: int
    sets_accumulation: bool


class TandemTrainer(Trainer):
    """transformers.Trainer over rows that are a pure function of the step.

    rows: TrainingRows; interruptible: wraps the batches of evaluations, and may raise EvaluationInterrupted on every
    rank; meter: counts time, tokens; byte_lengths_V: raw bytes per id, None where ids have no fixed ones. Both stages
    use this class; they differ in rows and evaluation only.
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
        settings: TrainerSettings,
        run: RunDirectory,
        tokenizer: Any,
        rows: Any,
        evaluation: Evaluation,
        interruptible: Callable[..., Iterable],
        meter: StepMeter,
        byte_lengths_V: Any,
    ):
        # Sharded before it comes here (training/sharding.py); Trainer takes it as one that transformers loaded so.
        self.is_sharded = getattr(model, "is_distributed_loading_by_transformers", False)
        # Ranks that compute each layer together (tensor parallelism) read the same rows.
        self.batch_rank = batch_rank(args.process_index)
        self.batch_ranks = batch_ranks(args.world_size)
        args.save_only_model = self.is_sharded  # or Trainer refuses the model: its own checkpoints could not hold it
        self.settings, self.run, self.rows, self.meter = settings, run, rows, meter
        self.evaluation, self.interruptible = evaluation, interruptible
        self.loader: StepLoader | None = None
        is_first = args.process_index == 0
        self.guard = StepGuard(run, settings.monitor, is_first=is_first)
        self.losses: list[torch.Tensor] = []  # of this rank's micro-steps of the step, on the device
        self.recorded_evaluations: set[int] = set()
        self.balancing: torch.Tensor | None = None  # of the micro-batch that is being computed
        saver = CheckpointSaver
        if self.is_sharded:
            from pipeline.training.checkpoint_parts import PartSaver

            saver = PartSaver
        self.saver = saver(run, keep=args.save_total_limit, every=settings.keep_every_steps, best=settings.keep_best)
        self.model_files = files.ModelFiles(tokenizer)
        self.ranks = Ranks()
        self.timer = RankStepTimer(args.device, world_size=1 if self.is_sharded else args.world_size)
        self.train_bpb = TrainBpbMeter(byte_lengths_V, args.device)
        self.loss_sum = LossSum(args.device)
        self.log_row = LogRow(
            run,
            device=args.device,
            is_first=is_first,
            rows=rows,
            meter=meter,
            guard=self.guard,
            timer=self.timer,
            train_bpb=self.train_bpb,
            saver=self.saver,
            stage=settings.stage,
            hub=settings.hub,
        )
        self.restore = Restore(self.load_state)
        args.max_grad_norm = args.max_grad_norm or math.inf  # Trainer reads 0 as: do not call _clip_grad_norm
        data: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer}
        super().__init__(model=model, args=args, callbacks=[self.restore], **data)
        self.model_accepts_loss_kwargs = True  # a foreign model was checked when it was built (training/build.py)

    def set_micro_batch(self, *, rows: int, micro_steps: int) -> None:
        """Train with the micro-batch that was found for `auto`."""
        self.args.per_device_train_batch_size = rows
        self.args.gradient_accumulation_steps = micro_steps

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
            look=self.count_batch,
        )
        return self.loader

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple:
        """Return the same as Trainer, but no epoch is made where the checkpoint is of the last step: its run owes
        evaluations at most."""
        num_train_epochs, *values = super().set_initial_training_values(args, dataloader)
        if self.restore.start_step >= args.max_steps:
            num_train_epochs = 0
        return num_train_epochs, *values

    def count_batch(self, batch: Tensors) -> Tensors:
        """Count tokens and bytes of a batch while it is on the host; return the tensors to add to it."""
        self.meter.count(batch)
        return self.train_bpb.count(batch)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor]:
        """Return the step's micro-batches and its number of targets over all ranks."""
        self.losses = []
        for meter in (self.meter, self.loss_sum, self.train_bpb, self.timer):
            meter.begin()
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        # By this number all losses of the step are divided. The rows tell it on every rank, without a gather.
        targets = self.rows.num_targets(self.state.global_step)
        self.meter.step(targets)
        return batches, torch.full((), float(max(targets, 1)), device=device)  # torch.tensor would wait for the device

    # ---- steps ----

    # From a micro-batch to the gradient of the step. The loss of a step is the mean over all its targets, however
    # many of them each rank and each micro-batch has:
    #   1. the model sums the nats of a micro-batch and divides them by the targets of the whole step;
    #   2. Trainer multiplies by the ranks that read different rows, since DDP averages their gradients;
    #   3. what a mixture of experts added to balance them is taken off: a loss is of the text alone;
    #   4. for the gradient it is added again, divided by the micro-steps: averaged over ranks and summed over
    #      micro-steps it keeps its factor;
    #   5. backward passes add up the micro-steps, and DDP averages the ranks;
    #   6. the norm of the sum is checked, then clipped; then the optimizer makes its update.

    def get_tp_size(self) -> int:
        """Return how many ranks compute each layer together; Trainer multiplies the loss by the number of their
        groups."""
        return tensor_parallel_size()

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: Tensors,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        loss = self.forward_backward(model, inputs, num_items_in_batch)
        self.losses.append(loss)
        self.loss_sum.add(loss)
        return loss

    def forward_backward(
        self, model: torch.nn.Module, inputs: Tensors, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Run forward and backward of one micro-batch that is on the device; return this micro-batch's share of the
        global token mean, of the text alone."""
        if not self.model.training:  # model.train() walks every module: not per micro-batch
            model.train()
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        of_text = loss.detach()
        if self.balancing is not None:
            loss = loss + self.balancing / self.args.gradient_accumulation_steps
            self.balancing = None
        self.timer.before_backward(loss)
        # 1, or NaN where the loss is not finite: its gradients then say so on every rank, without a collective.
        one = 1 + (of_text - of_text)
        self.accelerator.backward(loss, gradient=one)
        return of_text

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        special = inputs.pop("special_targets", None)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.balancing = balancing_loss(self.model, outputs)
        if self.balancing is not None:
            loss = loss - self.balancing * self.batch_ranks  # by which Trainer multiplied the model's whole loss
        if special is not None:  # a batch of the training, whose nats are counted: the two factors are taken off
            nats = loss.detach() * num_items_in_batch / self.batch_ranks
            self.train_bpb.add(nats, outputs, inputs["shift_labels"], special)
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: Tensors) -> int:
        return 0  # the meter counts exactly; Trainer's leaves attention out and walks the model every micro-batch

    def _clip_grad_norm(self, model):
        """Return the norm before clipping; without a return when the guard ends the run here, before the update.

        Overridden because no event comes between the norm and the clipping: the norm is checked first, and mostly
        nothing is to clip then.
        """
        # 1. The norm over all parameters, of whole gradients: fp16's factor is taken off first.
        self.accelerator.unscale_gradients()
        parameters: list[Any] = [p for p in self.trained_parameters() if p.grad is not None]
        norm = total_norm([p.grad for p in parameters])

        # 2. Whether the update may be made. The host waits for the device here, and nowhere else in a step.
        step, state, scaler = self.state.global_step, self.state, self.accelerator.scaler
        if measures_update(step + 1, max_steps=state.max_steps, logging_steps=state.logging_steps):
            self.log_row.update.record(parameters, self.optimizer)
        check = self.guard.check_update(
            norm,
            step=step,
            losses=self.losses,
            scaler_is_used=scaler is not None and scaler.is_enabled(),
            find_cause=partial(self.find_nonfinite, model),
            find_rows=lambda: self.row_origins().of_step(step),
        )
        if not check.loss_is_finite:  # else averages would stay NaN for ever
            self.loss_sum.undo()
            self.train_bpb.undo()

        # 3. The clipping. torch's factor is max_grad_norm / (norm + 1e-6), and at most 1.
        if check.skip:
            model.zero_grad()  # optimizers leave a parameter without a gradient as it is
        elif check.norm + CLIP_EPS > self.args.max_grad_norm:
            for of_one_placement in group_by_placement(parameters):
                torch.nn.utils.clip_grads_with_norm_(of_one_placement, self.args.max_grad_norm, norm)
        return norm

    def trained_parameters(self) -> list[Any]:
        """Return the optimizer's parameters, in the order of its groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def row_origins(self) -> RowOrigins:
        return RowOrigins(self.rows, self.run, self.args.per_device_train_batch_size, self.batch_ranks)

    def find_nonfinite(self, model: nn.Module, norm: float) -> NonFiniteReport:
        """Return where a gradient norm that is not finite began. Every rank calls it; the gradients are gone
        afterwards. The host waits for the device here."""
        return find_nonfinite(
            self.model.state_dict(),
            step=self.state.global_step,
            norm=norm,
            losses=self.losses,
            origins=self.row_origins(),
            gradients=self.micro_step_gradients(model),
            one_gradient=self.is_sharded,
        )

    def micro_step_gradients(self, model: nn.Module) -> Iterator[Tensors]:
        """Yield the gradients of each micro-step of this step, computed again, before they are summed over ranks or
        clipped. Another dropout may hide what was not finite."""
        step, device = self.state.global_step, self.args.device
        rows = self.rows.micro_rows(step, self.args.per_device_train_batch_size)
        targets = torch.tensor(float(max(self.rows.num_targets(step), 1)), device=device)
        try:
            with preserved_rng():
                for micro_step in range(self.args.gradient_accumulation_steps):
                    model.zero_grad()
                    batch = self.rows.micro_batch(
                        step, micro_step, rank=self.batch_rank, world_size=self.batch_ranks, rows=rows
                    )
                    with nullcontext() if self.is_sharded else self.accelerator.no_sync(model=model):
                        self.forward_backward(model, on_device(batch, device), targets)
                    yield {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        finally:
            model.zero_grad()

    def fits_in_memory(self, rows: int, *, step: int, reserve: int = 0) -> bool:
        """Return whether two forward and backward passes and the optimizer's state fit with that micro-batch, and
        `reserve` bytes besides.

        On this rank alone, with its rows of the step, without DDP and not compiled: the other ranks wait in a
        collective. No gradient is left, and the random state does not move.
        """
        model, device = self.accelerator.unwrap_model(self.model), self.args.device
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()  # nothing without CUDA
        kept = []
        try:
            # 1. The optimizer's state, where no update has made it: two numbers a parameter are the most of ours.
            made = self.optimizer.state if self.optimizer is not None else {}
            for parameter in model.parameters():
                if parameter.requires_grad and not made.get(parameter):
                    kept += [torch.empty_like(parameter), torch.empty_like(parameter)]
            # 2. What a run takes besides.
            kept.append(torch.empty(reserve, dtype=torch.uint8, device=device))
            # 3. Two micro-steps: the second one has the gradients besides its activations.
            for micro_step in range(2):
                batch = self.rows.micro_batch(
                    step, micro_step, rank=self.args.process_index, world_size=self.args.world_size, rows=rows
                )
                batch = on_device(batch, device)
                with preserved_rng(), self.accelerator.autocast():  # which the model has itself once it is prepared
                    loss: Any = self.compute_loss(model, batch, num_items_in_batch=torch.tensor(1.0, device=device))
                loss.backward()
                del loss, batch
            return True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            return False
        finally:
            kept.clear()
            model.zero_grad(set_to_none=True)

    def memory_error(self, error: BaseException) -> Exception:
        """Return the error for the user, when memory ran out: with the micro-batch that fits, as is tried here."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        traceback.clear_frames(error.__traceback__)  # activations, whose memory a trial needs
        args, step = self.args, self.state.global_step
        advice = MemoryAdvice(
            path=self.settings.path,
            where=self.settings.where,
            micro_batch=args.per_device_train_batch_size,
            row_tokens=self.rows.row_tokens,
            eval_rows=self.settings.eval_rows,
            accumulation=args.gradient_accumulation_steps if self.settings.sets_accumulation else None,
            # Of a sharded model nothing can be tried: a forward needs all ranks.
            fits=None if self.is_sharded else partial(self.fits_in_memory, step=step, reserve=RESERVE),
        )
        return advice.error(error, step=step, stage=stage_of(frames[::-1]))

    # ---- optimizer ----

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.settings.make_optimizer is None:
            return super().create_optimizer(model)
        if self.optimizer is None:
            self.optimizer = self.settings.make_optimizer(self.model if model is None else model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.settings.make_optimizer is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            self.lr_scheduler = StepSchedule(self.optimizer, self.settings.schedule, num_training_steps)
        return self.lr_scheduler

    # ---- evaluation and logging ----

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> Numbers:
        """Return metrics of the bare model by name, the same on every rank; the training's random state does not
        move."""
        started, step = time.perf_counter(), self.state.global_step
        # Under FSDP a forward needs every rank: they agree before each batch.
        interruptible = self.interruptible
        if self.is_sharded:
            interruptible = partial(interruptible, lockstep=True)
        metrics: Numbers | None = None
        with suppress(EvaluationInterrupted), self.meter.pause(), preserved_rng(), forward_only(self.model):
            metrics = self.evaluation.score(self.model, interruptible=interruptible)
        self.recorded_evaluations.add(step)
        if metrics is None:  # given up on a signal: the step is saved, and evaluated first after the resume
            self.control.should_save = self.control.should_training_stop = True
            return {}
        metrics["perf/eval_s"] = time.perf_counter() - started
        self.saver.add_score(step, metrics)
        self.log(self.guard.finite_metrics(metrics, step=step, parameters=self.model.state_dict))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Hand one row of metrics, under this project's names, to the callbacks that write them.

        Trainer's own rows have names without a slash: its closing summary averages over evaluations and saves.
        """
        row = {name: value for name, value in logs.items() if "/" in name and value is not None}
        if row:
            self.control = self.callback_handler.on_log(self.args, self.state, self.control, row)

    def log_step(self, *, learning_rate: float) -> None:
        """Log the steps since the last row. learning_rate: of transformers' own schedule."""
        losses = self.loss_sum.read(gather=self.accelerator.gather)
        norms = self.guard.norms
        self.loss_sum.load([])
        rates = logged_rates(
            self.lr_scheduler,
            trainer_rate=learning_rate,
            peak=self.args.learning_rate,
            skipped=self.accelerator.optimizer_step_was_skipped,
        )
        row = self.log_row.row(
            step=self.state.global_step,
            losses=losses,
            rates=rates,
            parameters=self.trained_parameters(),
            wait_s=self.loader.wait_s if self.loader else 0.0,
            max_norm=self.args.max_grad_norm,
        )
        self.log(row)
        if self.settings.monitor.on_spike != "skip":  # then each step was checked before its update
            self.guard.report_spikes(self.state.global_step, {"optim/grad_norm": norms, "train/loss": losses})

    # ---- checkpoints ----

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args: Any, learning_rate=None, **kwargs: Any) -> None:
        """Log, save and evaluate, in this order.

        Overridden because Trainer evaluates before it saves: here an evaluation that fails loses nothing. The last
        step is always logged and evaluated.
        """
        step = self.state.global_step
        last = step >= self.state.max_steps
        # 1. The row of the steps since the last one; there is none where all of them were skipped.
        if (self.control.should_log or last) and self.loss_sum.kept:
            self.log_step(learning_rate=learning_rate)
        # 2. The checkpoint.
        if self.control.should_save:
            self.save_checkpoint()
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self.log_written(self.saver.check())
        # 3. The evaluation, and what comes after a step that is saved: CORE and chat tasks.
        if (self.control.should_evaluate or last) and step not in self.recorded_evaluations:
            self.evaluate()
        self.control.should_evaluate = False
        if last or not self.control.should_training_stop:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, StepCallback):
                    callback.on_step_done(self.args, self.state, self.control)
        # 4. A run that ends waits until its checkpoint is on the disk.
        if last or self.control.should_training_stop:  # here, where the watch for hangs is still on
            self.log_written(on_every_rank(self.saver.wait)[0])

    def save_checkpoint(self) -> None:
        """Copy checkpoint-<step>, which is written while training continues. All ranks take part; the first one
        writes, of a sharded model each rank a part."""
        started = time.perf_counter()
        step = self.state.global_step
        with self.meter.pause():
            # 1. What the ranks have each for itself, and the tensors, none of which may be NaN.
            ranks = from_every_rank((get_rng_state(), self.loss_sum.read(), self.train_bpb.state()))
            optimizer = optimizer_tensors(self.optimizer, self.model)
            tensors = {**self.model.state_dict(), **optimizer}
            self.guard.check_state(tensors, step=step, consequence=f"checkpoint-{step} was not written")
            model = self.accelerator.unwrap_model(self.model)
            facts = {"tokens": self.meter.tokens_at(step), "world_size": self.args.world_size}
            if hasattr(model, "peft"):  # the checkpoint is whole with these weights alone
                facts["base"] = self.run.read_manifest()["inputs"]["start_from"]

            # 2. Small files are written here; large ones are copied, and another process writes the copy.
            def write_small(folder: Path) -> dict:
                self.model_files.write_small(model, folder)
                self.write_state(folder, ranks)
                if self.is_sharded:
                    return {}
                weights, name = self.model_files.weights(model), self.model_files.weights_file
                return files.large_files(weights, optimizer, model=name)

            if self.is_sharded:
                from pipeline.training.checkpoint_parts import own_part

                own = self.model_files.weights(model, own_part(model.state_dict())), own_part(optimizer)
                saver: Any = self.saver
                saver.save_part(step, write_small=write_small, large=files.large_files(*own), **facts)
            else:
                on_rank_0(lambda: self.saver.save(step, write_small=write_small, **facts))
        self.log({"ckpt/save_s": time.perf_counter() - started})
        on_rank_0(self.rows.raise_if_too_bad)  # after the save, so that the run can continue once the data is fixed

    def write_state(self, folder: Path, ranks: list[tuple[dict, list, dict]]) -> None:
        """Write the state of everything but the tensors. ranks: each one's random state, and the losses and sums of
        TrainBpbMeter that it has not logged."""
        step, scaler = self.state.global_step, self.accelerator.scaler
        scheduler = {
            "schedule": self.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "optimizer": optimizer_settings(self.optimizer),
        }
        position = {
            "step": step,
            "rows": self.rows.position(step),
            "meter": self.meter.state_dict(),
            "unlogged": {
                "losses": [losses for _, losses, _ in ranks],
                "text": [text for _, _, text in ranks],
            },
            "guard": self.guard.state_dict(),
            "log_row": self.log_row.state_dict(),
        }
        rng = [state for state, _, _ in ranks]
        files.write_state(folder, state=self.state, scheduler=scheduler, rng=rng, position=position)

    def load_state(self, checkpoint: Path, position: dict[str, Any]) -> None:
        """Take over what write_state wrote, and the optimizer's state."""
        rank, ranks = self.args.process_index, self.args.world_size
        saved = files.read_scheduler(checkpoint)
        # The groups' settings are the recipe's, but transformers' schedules keep the current rate in the groups.
        settings = saved["optimizer"] if self.settings.make_optimizer is None else None
        files.load_optimizer(self.optimizer, self.model, checkpoint, settings=settings)
        self.lr_scheduler.load_state_dict(saved["schedule"])
        if saved["scaler"] and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved["scaler"])
        # What was not logged: the next logged loss is then that of the uncut run.
        unlogged = position["unlogged"]
        step = self.restore.start_step
        self.loss_sum.load(files.unlogged_losses(unlogged, step=step, rank=rank, ranks=ranks))
        texts = unlogged["text"]
        if len(texts) == ranks:
            texts = [texts[rank]]
        elif rank > 0:  # of another number of ranks: the first one takes all
            texts = []
        self.train_bpb.load(texts)
        self.guard.load_state_dict(position["guard"])

    def log_written(self, seconds: float | None) -> None:
        """Log the seconds that the writing of a checkpoint took, once it is done."""
        if seconds is not None:
            self.log({"ckpt/write_s": seconds})

    def resume(self, checkpoint: Path | None) -> None:
        """Train to the end, from a whole checkpoint or from the start. What was due at the checkpoint's step is done
        first."""
        if checkpoint is not None:
            position = self.restore.read(checkpoint)
            is_fork = checkpoint.parent != self.run.checkpoints
            self.meter.load_state_dict(position["meter"])
            self.log_row.load_state_dict(position.get("log_row", {}), is_fork=is_fork)
            if self.args.process_index == 0:
                self.saver.note_good(checkpoint)
        try:
            with translate_errors(
                self.run, self.ranks, step=lambda: self.state.global_step, out_of_memory=self.memory_error
            ):
                if checkpoint is not None:
                    files.load_model(self.model, checkpoint)
                if self.settings.fp8:
                    from pipeline.training.fp8 import convert_to_fp8

                    convert_to_fp8(self.model, self.args.device)
                self.train()
        except BaseException:
            with suppress(TandemError):  # the error that ended the training is the one to report
                self.saver.wait(patience_s=PART_PATIENCE_S if self.is_sharded else math.inf)
            raise
        self.guard.check_state(
            self.model.state_dict(), step=self.state.global_step, consequence="the finished model was not written"
        )


class Restore(TrainerCallback):
    """Continues exactly from a checkpoint. The first callback: the others see the run as the checkpoint left it.

    Trainer.train is not given the checkpoint: it would look for files of its own, and for cadences of that start.
    load_state: takes over all of a checkpoint but model and random state.
    """

    def __init__(self, load_state: Callable[[Path, dict[str, Any]], None]):
        self.load_state, self.start_step = load_state, 0
        self.checkpoint: Path | None = None
        self.rng: Tensors | None = None

    def read(self, checkpoint: Path) -> dict[str, Any]:
        """Read where the training begins, before it does; return position.json."""
        self.checkpoint = checkpoint
        self.saved, self.position = files.read_state(checkpoint)
        self.start_step = self.saved.global_step
        return self.position

    def on_train_begin(self, args, state, control, **kwargs):
        state.train_batch_size = args.per_device_train_batch_size  # found after Trainer noted it, where it was auto
        if self.checkpoint is None:
            return
        state.global_step, state.epoch = self.start_step, self.saved.epoch
        self.load_state(self.checkpoint, self.position)
        self.rng = files.read_rng(self.checkpoint, args.process_index)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.rng is not None:  # only now: numbers drawn at the beginning of this start are not the training's
            set_rng_state(self.rng)
            self.rng = None


def forward_only(model: nn.Module) -> AbstractContextManager[None]:
    """Let evaluations and samples use the model: one that is sharded or in float8 is prepared for it
    (training/sharding.py)."""
    for module in model.modules():
        if isinstance(module, FSDPModule) or type(module).__module__.startswith("torchao."):
            from pipeline.training.sharding import between_steps

            return between_steps(model)
    return nullcontext()
