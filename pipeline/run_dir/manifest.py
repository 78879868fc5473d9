"""run_manifest.json: every key, its type and unit, when it is written and by whom; and the check of a manifest against it.

docs/manifest.md prints this page's table (tests/artifacts/test_manifest.py holds them together).
"""

from typing import Any, NamedTuple

# `type?` may be null. `any` is not looked into: its form belongs to the recipe or to who wrote it.
TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "flag": (bool,),
    "object": (dict,),
    "list": (list,),
    "any": (object,),
}


class Key(NamedTuple):
    """A value of the manifest. name: dotted; <...> stands for any name, [] for each entry of a list. unit: "" when it has none."""

    name: str
    type: str
    unit: str
    written: str
    by: str
    meaning: str


# fmt: off
START, INPUTS, SHAPE, END = "every start", "first start, before step 1", "every start, before its first step", "the end"
PLANNED = "a start without steps, before step 1"
OPENING, RECORD, CLOSING = "run/open_run.py", "run/finish.py", "run/finish.py"
KEYS = (
    Key("name", "text", "", START, OPENING, "the run's name, which is its folder's"),
    Key("recipe_name", "text", "", START, OPENING, "stem of the recipe's file, as latest:<recipe> finds it"),
    Key("stage", "text", "", START, OPENING, "pretrain or sft"),
    Key("note", "text?", "", START, OPENING, "run.note"),
    Key("tags", "list", "", START, OPENING, "run.tags"),
    Key("tags.[]", "text", "", START, OPENING, "one label"),
    Key("created", "text", "ISO 8601, UTC", "first start", OPENING, "when the run was begun"),
    Key("must_match", "object", "", "starts before the first step", OPENING, "the keys of the recipe that a continuation may not change"),
    Key("must_match.<key>", "any", "as the recipe", "starts before the first step", OPENING, "its value"),
    Key("attempts", "integer", "starts", START, OPENING, "how often the run was started"),
    Key("status", "text", "", "every start, the end", f"{OPENING}, {CLOSING}", "running or finished; of a crash failure.json tells"),
    Key("command", "list", "", START, OPENING, "the command line, secrets blacked out"),
    Key("command.[]", "text", "", START, OPENING, "one argument"),
    Key("versions", "object", "", START, OPENING, "what the run is computed with"),
    Key("versions.<package>", "text", "", START, OPENING, "installed version"),
    Key("git", "object?", "", START, OPENING, "state of the clone; null outside one"),
    Key("git.commit", "text", "", START, OPENING, "commit"),
    Key("git.changed_files", "integer", "files", START, OPENING, "files that differ from it"),
    Key("host", "object", "", START, OPENING, "the first process's machine"),
    Key("host.system", "text", "", START, OPENING, "operating system"),
    Key("host.cpus", "integer?", "cores", START, OPENING, "of the machine; a container may use fewer"),
    Key("world_size", "integer", "processes", START, OPENING, "processes of this start"),
    Key("forked_from", "object", "", "starts of a fork", OPENING, "run.fork_from, resolved"),
    Key("forked_from.run", "text", "", "starts of a fork", OPENING, "the parent"),
    Key("forked_from.step", "integer", "optimizer steps", "starts of a fork", OPENING, "of its checkpoint"),
    Key("forked_from.differences", "list", "", "starts of a fork", OPENING, "keys that differ from the parent's"),
    Key("forked_from.differences.[]", "text", "", "starts of a fork", OPENING, "`key: parent's -> this run's`"),
    Key("inputs", "object", "", INPUTS, "run/data.py", "what the run was fed; a later start compares"),
    Key("inputs.tokenizer", "object", "", INPUTS, "run/data.py", "the tokenizer"),
    Key("inputs.tokenizer.identity", "text", "sha256", INPUTS, "run/data.py", "of ids, merges, normalization and template"),
    Key("inputs.tokenizer.size", "integer", "ids", INPUTS, "run/data.py", "special ones included"),
    Key("inputs.sources", "list", "", INPUTS, "run/data.py", "what is trained on"),
    Key("inputs.sources.[]", "object", "", INPUTS, "run/data.py", "name, id, revision, format, fingerprint, files (label, sha256, bytes)"),
    Key("inputs.sources.[].<fact>", "any", "", INPUTS, "run/data.py", "as sources/ describes it"),
    Key("inputs.validation", "list", "", INPUTS, "run/data.py", "what is held out, described alike"),
    Key("inputs.validation.[]", "object", "", INPUTS, "run/data.py", "as above"),
    Key("inputs.validation.[].<fact>", "any", "", INPUTS, "run/data.py", "as above"),
    Key("inputs.validation_bytes", "object", "", INPUTS, "run/data.py", "how much text each validation number is over; absent where ids of conversations have no fixed bytes"),
    Key("inputs.validation_bytes.<metric>", "integer", "bytes", INPUTS, "run/data.py", "of text that it scores"),
    Key("inputs.overlap", "object", "", INPUTS, "run/data.py", "validation documents that are trained on, too; absent where none is held out"),
    Key("inputs.overlap.documents", "integer", "documents", INPUTS, "run/data.py", "looked for: the first ones of each validation source"),
    Key("inputs.overlap.found", "integer", "documents", INPUTS, "run/data.py", "of these, equal but for white space around them to one that is trained on"),
    Key("inputs.overlap.place", "text", "", INPUTS, "run/data.py", "file:row of one that was found"),
    Key("inputs.overlap.whole", "flag", "", INPUTS, "run/data.py", "all training text was looked through; else found is at least so many"),
    Key("inputs.protocols", "object", "", INPUTS, "run/data.py", "under which protocol validation is scored"),
    Key("inputs.protocols.<metric>", "text?", "", INPUTS, "run/data.py", "the hash of its parts: two figures compare only when it is equal; null where there are no bits per byte"),
    Key("inputs.protocol_parts", "object", "", INPUTS, "run/data.py", "what the protocols are made of (run_dir/protocol.py); in SFT val/bpb stands for sft/assistant_bpb"),
    Key("inputs.protocol_parts.<metric>", "object", "", INPUTS, "run/data.py", "texts, bytes, window, stride, bos, dtype, coverage, rule; of rows also packing and tokenizer"),
    Key("inputs.protocol_parts.<metric>.<part>", "any", "", INPUTS, "run/data.py", "its value"),
    Key("inputs.batch_tokens", "integer?", "row positions", INPUTS, "run/data.py", "of an optimizer step over all processes"),
    Key("inputs.batch_warmup", "object", "", INPUTS, "run/data.py", "smaller batches at the beginning (optimizer.schedule)"),
    Key("inputs.batch_warmup.warmup_steps", "integer", "optimizer steps", INPUTS, "run/data.py", "that have them"),
    Key("inputs.batch_warmup.halvings", "integer", "halvings", INPUTS, "run/data.py", "of the first step's batch"),
    Key("inputs.max_steps", "integer", "optimizer steps", INPUTS, "run/data.py", "of the whole run"),
    Key("inputs.start_from", "object?", "", INPUTS, "run/data.py", "model.start_from, resolved"),
    Key("inputs.start_from.<file>", "text", "sha256", INPUTS, "run/data.py", "of each file of weights; `from`: the folder, or a Hub id, and then its `commit` instead"),
    Key("code", "object", "", "every start, before step 1", "run/data.py", "the user's code that this start runs (process/user_code.py)"),
    Key("code.trusted", "flag", "", "every start, before step 1", "run/data.py", "run.trust_code: installed modules and a model's code files were allowed"),
    Key("code.ran", "list", "", "every start, before step 1", "run/data.py", "what was run"),
    Key("code.ran.[]", "object", "", "every start, before step 1", "run/data.py", "one module:attr, or the classes of a model"),
    Key("code.ran.[].name", "text", "", "every start, before step 1", "run/data.py", "as the recipe names it"),
    Key("code.ran.[].file", "text", "", "every start, before step 1", "run/data.py", "its file or folder"),
    Key("code.ran.[].sha256", "text?", "sha256", "every start, before step 1", "run/data.py", "of that file; null for several or none"),
    Key("shares", "object", "", "before step 1 and the end", f"run/data.py, {CLOSING}", "each source's part of the rows"),
    Key("shares.<source>", "object", "", "before step 1 and the end", f"run/data.py, {CLOSING}", "key, rows, tokens, share, targets_per_row, epochs, lost (shares padded, cropped, split, cut, too long, no target, empty, bad); of conversations `conversations`: read, too_long, cut, no_target, tokens_lost (share), row_tokens_99 (rows that hold 99 % of them), sampled (conversations that these two were estimated from, where not counted)"),
    Key("shares.<source>.<fact>", "any", "", "before step 1 and the end", f"run/data.py, {CLOSING}", "as data/rows.py counts it"),
    Key("shape", "object", "", SHAPE, "run/finish.py", "what the last bits depend on"),
    Key("shape.device", "text", "", SHAPE, "run/finish.py", "name of one device"),
    Key("shape.processes", "integer", "processes", SHAPE, "run/finish.py", "one a device"),
    Key("shape.micro_batch", "integer", "rows", SHAPE, "run/finish.py", "of one forward pass"),
    Key("shape.micro_steps", "integer", "forward passes", SHAPE, "run/finish.py", "of an optimizer step, of each process"),
    Key("shape.sharded", "flag", "", SHAPE, "run/finish.py", "FSDP2 or tensor parallel: each process holds a part of the model"),
    Key("shape.replicas", "integer", "copies", SHAPE, "run/finish.py", "of the sharded model: more than 1 under HSDP"),
    Key("shape.tensor_parallel", "integer", "processes", SHAPE, "run/finish.py", "that compute each layer together, on the same rows; 1 without"),
    Key("shape.threads", "integer", "threads", SHAPE, "run/finish.py", "torch's, on the CPU"),
    Key("shape.dtype", "text", "", SHAPE, "run/finish.py", "format of the matrix products"),
    Key("shape.compiled", "flag", "", SHAPE, "run/finish.py", "torch.compile"),
    Key("shape.attention", "text?", "", SHAPE, "run/finish.py", "transformers' name of the attention"),
    Key("plan", "object", "", PLANNED, RECORD, "what the recipe promised; a number that was not known is absent"),
    Key("plan.device", "text", "", PLANNED, RECORD, "name of one device"),
    Key("plan.processes", "integer", "processes", PLANNED, RECORD, "one a device"),
    Key("plan.parameters", "integer", "parameters", PLANNED, RECORD, "all of them"),
    Key("plan.scaling_parameters", "integer", "parameters", PLANNED, RECORD, "matrices of the blocks and head"),
    Key("plan.steps", "integer", "optimizer steps", PLANNED, RECORD, "of the whole run"),
    Key("plan.tokens", "integer", "row positions", PLANNED, RECORD, "of the whole run"),
    Key("plan.flops", "number", "FLOPs", PLANNED, RECORD, "of the whole run, nanochat's formula"),
    Key("plan.memory_bytes", "object", "", PLANNED, RECORD, "of one process, by arithmetic; of an accelerator's, the framework is not in it"),
    Key("plan.memory_bytes.<part>", "integer", "bytes", PLANNED, RECORD, "weights, gradients, optimizer, activations, total; on a CPU process (Python and libraries) and saved (the copy of a checkpoint being written) too"),
    Key("plan.process_bytes", "integer", "bytes", PLANNED, RECORD, "the most memory of one process, as probed; on a CPU with a checkpoint's copy"),
    Key("plan.checkpoint_bytes", "integer", "bytes", PLANNED, RECORD, "weights and optimizer of one checkpoint"),
    Key("plan.run_disk_bytes", "integer", "bytes", PLANNED, RECORD, "checkpoints and model at the fullest moment"),
    Key("plan.assumed_mfu", "number", "share of the peak", "no longer", RECORD, "what training_s of older runs stands on where nothing was measured"),
    Key("plan.training_s", "number", "seconds", PLANNED, RECORD, "in steps, without compilation, evaluations and saves"),
    Key("plan.duration_s", "object", "", PLANNED, RECORD, "of the whole run without preparing its data (preflight/plan.py)"),
    Key("plan.duration_s.<part>", "object", "", PLANNED, RECORD, "total, start (and end), steps, evaluations, saves"),
    Key("plan.duration_s.<part>.<end>", "number", "seconds", PLANNED, RECORD, "low, value, high: from, expected, to"),
    Key("plan.duration_source", "text", "", PLANNED, RECORD, "what it is known from: a probe, a finished run, arithmetic"),
    Key("plan.cost", "number", "as run.gpu_hour_cost", PLANNED, RECORD, "of the expected duration on all devices"),
    Key("plan.energy_kwh", "number", "kWh", PLANNED, RECORD, "of the expected duration at the devices' rated power"),
    Key("plan.probe", "object", "", PLANNED, RECORD, "the steps that training_s was measured with (preflight/probe.py)"),
    Key("plan.probe.step_s", "number", "seconds", PLANNED, RECORD, "median of the measured steps"),
    Key("plan.probe.low_s", "number", "seconds", PLANNED, RECORD, "the quickest of them"),
    Key("plan.probe.high_s", "number", "seconds", PLANNED, RECORD, "the slowest of them"),
    Key("plan.probe.steps", "integer", "optimizer steps", PLANNED, RECORD, "how many were measured"),
    Key("plan.probe.first_step_s", "number", "seconds", PLANNED, RECORD, "the first step, which compiles"),
    Key("plan.probe.peak_bytes", "integer", "bytes", PLANNED, RECORD, "most that the process took of the device; on a CPU its resident memory"),
    Key("plan.probe.time", "number", "seconds since 1970", PLANNED, RECORD, "when it was measured"),
    Key("plan.val_bpb", "object", "", PLANNED, RECORD, "the last val/bpb as earlier runs let expect it (report/fit.py)"),
    Key("plan.val_bpb.value", "number", "bits per byte", PLANNED, RECORD, "expected"),
    Key("plan.val_bpb.low", "number", "bits per byte", PLANNED, RECORD, "lower end of the 95 % prediction interval"),
    Key("plan.val_bpb.high", "number", "bits per byte", PLANNED, RECORD, "upper end"),
    Key("plan.val_bpb.fit", "text", "", PLANNED, RECORD, "the file that says so"),
    Key("model", "object", "", SHAPE, RECORD, "the model as it was built"),
    Key("model.class", "text", "", SHAPE, RECORD, "its Python class"),
    Key("model.parameters", "integer", "parameters", SHAPE, RECORD, "counted, shared ones once"),
    Key("model.flops_per_token", "number", "FLOPs", SHAPE, RECORD, "a row position, forward and backward, nanochat's formula, by its config"),
    Key("wandb_id", "text", "", "the first start with W&B", "callbacks/trackers.py", "id of the W&B run, which a restart continues"),
    Key("ended", "number", "seconds since 1970", END, CLOSING, "when the training was over"),
    Key("results", "object", "", END, CLOSING, "last numbers; <name>/first the first one"),
    Key("results.<metric>", "number", "as docs/metrics.md", END, CLOSING, "its value"),
    Key("peak_memory_bytes", "object", "", END, CLOSING, "most that the first process of the last start took"),
    Key("peak_memory_bytes.host", "integer", "bytes", END, CLOSING, "resident memory"),
    Key("peak_memory_bytes.device", "integer", "bytes", END, CLOSING, "allocated on the CUDA device"),
    Key("hub", "object", "", "each publication", "hub/", "the last commit that was pushed"),
    Key("hub.id", "text", "", "each publication", "hub/", "repository"),
    Key("hub.commit", "text?", "", "each publication", "hub/", "commit"),
    Key("hub.time", "number", "seconds since 1970", "each publication", "hub/", "when"),
    Key("finished", "number", "seconds since 1970", END, "training/build.py", "written last: the run is done and its results stay"),
    Key("pulled_from", "object", "", "python -m pipeline.hub pull, a start that took its checkpoint from the Hub", "hub/", "where the run was restored from"),
    Key("pulled_from.id", "text", "", "python -m pipeline.hub pull", "hub/pull.py", "repository"),
    Key("pulled_from.commit", "text", "", "python -m pipeline.hub pull", "hub/pull.py", "commit"),
)
# fmt: on


def manifest_problems(manifest: Any) -> list[str]:
    """Return what a manifest, or a part of one, holds in another type than documented; keys that are not documented are in `unknown_keys`."""
    return [what for what, known in _findings(manifest) if known]


def unknown_keys(manifest: Any) -> list[str]:
    """Dotted names that are not documented: of a newer or an older version, or a mistake of ours."""
    return [what for what, known in _findings(manifest) if not known]


def documented_part(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest without what is of another type than documented."""
    return _part(manifest, _TREE)


def _part(value: Any, node: dict[str, Any]) -> Any:
    if isinstance(value, list) and "[]" in node:
        return [_part(v, node["[]"]) for v in value if not _type_problem(v, node["[]"], "")]
    if not isinstance(value, dict) or ("" in node and node[""].type == "any"):
        return value
    below = {name: node.get(name) or node.get("<>") or {} for name in value}
    return {name: _part(v, below[name]) for name, v in value.items() if not _type_problem(v, below[name], name)}


def _tree() -> dict[str, Any]:
    """Return the keys by the parts of their names; "" holds the key itself, "<>" stands for any name."""
    tree: dict[str, Any] = {}
    for key in KEYS:
        node = tree
        for part in key.name.split("."):
            node = node.setdefault("<>" if part.startswith("<") else part, {})
        node[""] = key
    return tree


_TREE = _tree()


def _findings(manifest: Any) -> list[tuple[str, bool]]:
    """(what, whether the key is known) of everything that is not as documented."""
    if not isinstance(manifest, dict):
        return [("it is no object of keys", True)]
    return _walk(manifest, _TREE, "")


def _walk(value: Any, node: dict[str, Any], name: str) -> list[tuple[str, bool]]:
    key: Key | None = node.get("")
    if problem := _type_problem(value, node, name):
        return [(problem, True)]
    if key is not None and key.type == "any":
        return []
    if isinstance(value, list):
        return [line for i, v in enumerate(value) for line in _walk(v, node["[]"], f"{name}[{i}]")]
    if not isinstance(value, dict):
        return []
    found: list[tuple[str, bool]] = []
    for part, child in value.items():
        dotted = f"{name}.{part}" if name else part
        below = node.get(part) or node.get("<>")
        found += [(dotted, False)] if below is None else _walk(child, below, dotted)
    return found


def _type_problem(value: Any, node: dict[str, Any], name: str) -> str:
    """Return what is wrong with a value's own type, or ""."""
    key: Key | None = node.get("")
    if key is None or (value is None and key.type.endswith("?")):
        return ""
    kind = key.type.removesuffix("?")
    # To Python True is a number; here a number is no flag.
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind not in ("flag", "any")):
        return f"{name} is {_short(value)}, not of type {kind}"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
