"""What of a Trainer goes into a checkpoint, and how it comes back."""

from pathlib import Path
from typing import Any

from pipeline.training import checkpoint as files
from pipeline.training.finite import refuse_nonfinite
from pipeline.training.optimizer_state import load_optimizer_state, optimizer_settings
from pipeline.training.rng import set_rng_state

ANOTHER = "Take an earlier checkpoint with run.resume=STEP."


def write_state(trainer: Any, folder: Path, *, ranks: list[tuple[dict, float, dict]]) -> dict[str, tuple[dict, dict]]:
    """Write all files but the large ones; gives the weights for theirs. ranks: each one's random state, and what it has not
    logged: loss, and sums of TrainedText."""
    weights = trainer.model_files.write(trainer.accelerator.unwrap_model(trainer.model), folder)
    state, scaler = trainer.state, trainer.accelerator.scaler
    state.save_to_json(str(folder / "trainer_state.json"))
    files.write_training_state(
        folder,
        settings=optimizer_settings(trainer.optimizer),
        schedule=trainer.lr_scheduler.state_dict(),
        scaler=scaler.state_dict() if scaler is not None else None,
        rng=[rng for rng, _, _ in ranks],
        position={
            "step": state.global_step,
            "rows": trainer.rows.position(state.global_step),
            "meter": trainer.meter.state_dict(),
            "unlogged": {
                "since": trainer._globalstep_last_logged,
                "losses": [loss for _, loss, _ in ranks],
                "text": [text for _, _, text in ranks],
            },
            "guard": trainer.guard.state_dict(),
            "log_row": trainer.log_row.state_dict(),
        },
    )
    return {files.MODEL: (weights, {"format": "pt"})}


def load_optimizer_and_schedule(trainer: Any, checkpoint: Path) -> None:
    """Raises DataError for a state that is not this optimizer's."""
    tensors, saved = files.read_optimizer(checkpoint)
    refuse_nonfinite(tensors, where=str(checkpoint), instead=ANOTHER)
    # The groups' settings are the recipe's, but for transformers' schedules, whose current rate lives in the groups.
    settings = saved["optimizer"] if trainer.recipe.optimizer.type == "trainer" else None
    load_optimizer_state(trainer.optimizer, trainer.model, tensors, settings=settings)
    trainer.lr_scheduler.load_state_dict(saved["schedule"])
    if saved["scaler"] and trainer.accelerator.scaler is not None:
        trainer.accelerator.scaler.load_state_dict(saved["scaler"])


def take_up(trainer: Any, checkpoint: Path) -> None:
    """The rank's random state, and the sums that were open: the next logged loss is then that of the uncut run."""
    rank = trainer.args.process_index
    rng = files.read_rng(checkpoint, rank)
    if rng is not None:
        set_rng_state(rng)
    position = files.read_position(checkpoint)
    if unlogged := position.get("unlogged"):
        losses = unlogged["losses"]
        same_ranks = len(losses) == trainer.args.world_size
        trainer._tr_loss.fill_(losses[rank] if same_ranks else sum(losses) / len(losses))
        trainer._globalstep_last_logged = unlogged["since"]
        texts = unlogged.get("text", [])
        trainer.text.load(texts[rank : rank + 1] if same_ranks else texts if rank == 0 else [])
    if guard := position.get("guard"):
        trainer.guard.load_state_dict(guard)
