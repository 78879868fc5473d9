"""The --help text of the entries: short, because docs/recipes.md says the rest."""

from dataclasses import fields

from pipeline.recipe.schema import SECTIONS, Recipe

EXAMPLES = {
    "pretrain": "accelerate launch pipeline/pretrain.py recipes/quickstart_pretrain.yaml train.max_steps=100",
    "sft": "accelerate launch pipeline/sft.py recipes/quickstart_sft.yaml train.num_train_epochs=2",
}
WHAT = {"pretrain": "Stage 1: train a model on text.", "sft": "Stage 2: teach a pretrained model to chat."}


def help_text(stage: str) -> str:
    """What the entry of a stage prints for --help."""
    hints = {f.name: f for f in fields(Recipe)}
    lines = []
    for name in SECTIONS:
        doc = (
            "transformers.TrainingArguments by their own names."
            if name == "train"
            else (hints[name].type.__doc__ or "").split("\n")[0]
        )
        lines.append(f"  {name:<11}{doc}")
    return "\n".join(
        [
            f"usage: accelerate launch pipeline/{stage}.py RECIPE.yaml [section.key=value ...]",
            "",
            f"{WHAT[stage]} One recipe is one run; the same command again continues it.",
            "",
            "sections of a recipe:",
            *lines,
            "",
            "example:",
            f"  {EXAMPLES[stage]}",
            "",
            "Every key with its default: docs/recipes.md. The plan without training: python -m pipeline.preflight RECIPE.yaml",
            "Status: 0 done, 64 recipe, 65 data, 66 input missing, 69 service away, 70 hang or lost rank, 71 out of",
            "memory, 73 cannot write, 74 disk full, 75 stopped by a signal after a checkpoint, 76 diverged, 130 Ctrl-C after a",
            "checkpoint, 1 our bug.",
        ]
    )
