"""What a run promised and what it was built as, in its manifest: the two sides of the report's plan against outcome."""

import copy
from dataclasses import asdict
from typing import Any

from pipeline.hardware.device import device_info
from pipeline.preflight.opening import OpenRun
from pipeline.preflight.plan import Plan, make_plan
from pipeline.recipe import Recipe
from pipeline.recipe.sizes import sizes_from_model

PARTS = ("total", "start", "steps", "evaluations", "saves")


def record_plan(recipe: Recipe, run: OpenRun, trainer: Any) -> None:
    """Write `plan` and `model` to the manifest, when steps and micro-batch are known. A run that goes on keeps its first plan.

    The plan is arithmetic on the recipe, and what a probe has measured for it: nothing is measured here, so that the training
    starts at once, and nothing is read from the model that was built.
    """
    if not trainer.is_world_process_zero():
        return
    model = trainer.model
    flops = sizes_from_model(model, recipe.data.row_tokens).flops_per_token("nanochat")
    facts: dict[str, Any] = {
        "model": _known(
            {
                "class": type(model).__name__,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "flops_per_token": flops,
            }
        )
    }
    if not (run.step and "plan" in run.directory.read_manifest()):
        facts["plan"] = plan_facts(plan_of(recipe, run, trainer))
    run.directory.update_manifest(**facts)


def plan_of(recipe: Recipe, run: OpenRun, trainer: Any) -> Plan:
    """Return the plan of the run as it was built: its micro-batch, and the validation that it scores."""
    settled = copy.deepcopy(recipe)  # make_plan fills what is open
    settled.train["per_device_train_batch_size"] = trainer.args.per_device_train_batch_size
    scored = run.directory.read_manifest().get("inputs", {}).get("validation_bytes")
    scored_bytes = sum(scored.values()) if scored else None
    return make_plan(settled, device_info(), processes=trainer.args.world_size, scored_bytes=scored_bytes)


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The plan as run_manifest.json holds it (artifacts/manifest.py); what is not known is left out."""
    memory = plan.memory
    parts = {name: getattr(memory, name) for name in ("weights", "gradients", "optimizer", "activations", "total")} if memory else {}  # fmt: skip
    parameters = plan.sizes.parameters() if plan.sizes else {}
    expected = plan.val_bpb
    cost, energy, duration = plan.cost, plan.energy_kwh, plan.duration
    return _known(
        {
            "device": plan.device.name,
            "processes": plan.processes,
            "parameters": parameters.get("total"),
            "scaling_parameters": plan.sizes.scaling if plan.sizes else None,
            "steps": plan.steps,
            "tokens": plan.tokens,
            "flops": plan.flops,
            "memory_bytes": _known(parts) or None,
            "process_bytes": plan.process_bytes,
            "checkpoint_bytes": plan.checkpoint_bytes,
            "run_disk_bytes": plan.run_disk_bytes,
            "training_s": plan.training_s,
            "duration_s": {name: asdict(getattr(duration, name)) for name in PARTS} if duration else None,
            "duration_source": duration.source if duration else None,
            "cost": cost.value if cost else None,
            "energy_kwh": energy.value if energy else None,
            "probe": plan.probe.facts() if plan.probe else None,
            "val_bpb": expected.facts() if expected else None,
        }
    )


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}
