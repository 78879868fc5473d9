"""Wrong recipes, each a single mistake in a right one, and what must be said of it after `recipe.yaml:`."""

GOOD = """\
run:
  stage: pretrain
tokenizer:
  vocab_size: 512
data:
  sources:
    - files: texts/*.parquet
  row_tokens: 64
  batch_tokens: 512
model:
  n_layer: 2
  n_embd: 32
  n_head: 4
optimizer:
  type: muon_adamw
train:
  max_steps: 100
"""


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def in_run(line: str) -> str:
    return changed("stage: pretrain", f"stage: pretrain\n  {line}")


def in_source(line: str) -> str:
    return changed("files: texts/*.parquet", f"files: a.jsonl\n      {line}")


def in_data(line: str) -> str:
    return changed("batch_tokens: 512", f"batch_tokens: 512\n  {line}")


def in_model(line: str) -> str:
    return changed("n_head: 4", f"n_head: 4\n  {line}")


def in_schedule(entry: str) -> str:
    return changed("type: muon_adamw", f"type: muon_adamw\n  schedule: {{{entry}}}")


def in_train(line: str) -> str:
    return GOOD + f"  {line}\n"


def trainer(line: str) -> str:
    """With the trainer's own optimizer, whose keys `train` then has."""
    return changed("type: muon_adamw", "type: trainer") + f"  {line}\n"


# what the file says, and all that the message must hold after `recipe.yaml:`
WRONG = {
    "a key with a typo": (changed("max_steps", "max_stepz"), ["17: train.max_stepz: unknown key. Did you mean train.max_steps?"]),
    "a key with a typo in a section": (changed("vocab_size", "vocab_sise"), ["4: tokenizer.vocab_sise: unknown key. Did you mean tokenizer.vocab_size?"]),
    "a section with a typo": (changed("tokenizer:", "tokeniser:"), ["3: tokeniser: unknown key. Did you mean tokenizer?"]),
    "a key of another section": (changed("  n_layer: 2", "  n_layer: 2\n  row_tokens: 64"), ["12: model.row_tokens: unknown key here; it belongs to another section. Write it as data.row_tokens."]),
    "a train key at the top": (GOOD + "eval_steps: 5\n", ["18: eval_steps: unknown key here; it belongs to another section. Write it as train.eval_steps."]),
    "a removed name": (GOOD + "  warmup_ratio: 0.1\n", ["18: train.warmup_ratio: is not a key here. Use train.warmup_steps"]),
    "a renamed name": (GOOD + "  evaluation_strategy: steps\n", ["18: train.evaluation_strategy: is not a key here. Use train.eval_strategy."]),
    "torch_dtype": (GOOD + "  torch_dtype: bfloat16\n", ["18: train.torch_dtype: is not a key here:", "train.bf16"]),
    "overwrite_output_dir": (GOOD + "  overwrite_output_dir: true\n", ["18: train.overwrite_output_dir: is not a key here:", "run.resume"]),
    "a field that is ours": (GOOD + "  output_dir: out\n", ["18: train.output_dir: is set by run.directory and run.name."]),
    "report_to": (GOOD + "  report_to: wandb\n", ["18: train.report_to: is set by monitor.trackers."]),
    "data_seed": (GOOD + "  data_seed: no\n", ["18: train.data_seed: is set by train.seed."]),
    "a refused field": (GOOD + "  auto_find_batch_size: true\n", ["18: train.auto_find_batch_size: is refused: it changes the global batch"]),
    "a default that must stay": (GOOD + "  logging_nan_inf_filter: true\n", ["18: train.logging_nan_inf_filter: is true and must stay false:"]),
    "text for a boolean": (GOOD + '  bf16: "false"\n', ["18: train.bf16: is the text 'false'; it must be true or false or auto. Write true or false without quotes."]),
    "off for a boolean": (GOOD + "  fp16: off\n", ["18: train.fp16: is the text 'off'; it must be true or false."]),
    "a fraction for a count": (changed("100", "1000.5"), ["17: train.max_steps: is 1000.5; it must be a whole number. Write 1000."]),
    "a quoted number": (changed("100", '"100"'), ["17: train.max_steps: is the text '100'; it must be a whole number. Write the number without quotes."]),
    "a boolean for a number": (GOOD + "  seed: true\n", ["18: train.seed: is true; it must be a whole number."]),
    "a word for a number": (GOOD + "  eval_steps: often\n", ["18: train.eval_steps: is the text 'often'; it must be a whole number."]),
    "null for a number": (GOOD + "  seed:\n", ["18: train.seed: is null; it must be a whole number."]),
    "a number that is none": (GOOD + "  max_grad_norm: .nan\n", ["18: train.max_grad_norm: is nan; it must be a number."]),
    "save_steps zero": (GOOD + "  save_steps: 0\n", ["18: train.save_steps: is 0; it must be at least 1"]),
    "a negative rate": (changed("type: muon_adamw", "type: trainer") + "  learning_rate: -1\n", ["18: train.learning_rate: is -1; it must be at least 0"]),
    "a micro-batch of nothing": (GOOD + "  per_device_train_batch_size: 0\n", ["18: train.per_device_train_batch_size: is 0; it must be at least 1"]),
    "accumulation of nothing": (changed("  batch_tokens: 512\n", "") + "  gradient_accumulation_steps: 0\n", ["17: train.gradient_accumulation_steps: is 0; it must be at least 1"]),
    "an unknown choice": (changed("batch_tokens: 512", "batch_tokens: 512\n  packing: cut_and_fill"), ["10: data.packing: is the text 'cut_and_fill'; it must be cut_and_fit | best_fit_crop | concat. Did you mean cut_and_fit?"]),
    "an unknown scheduler": (changed("type: muon_adamw", "type: trainer") + "  lr_scheduler_type: cosin\n", ["18: train.lr_scheduler_type: is the text 'cosin'", "Did you mean cosine?"]),
    "text for a list": (GOOD + "monitor:\n  trackers: wandb\n", ["19: monitor.trackers: is the text 'wandb'", "Write it as a list: [a, b]."]),
    "a list for a section": (changed("data:\n  sources:\n    - files: texts/*.parquet\n  row_tokens: 64\n  batch_tokens: 512\n", "data:\n  - 1\n"), ["5: data: holds a list; it must be keys with values."]),
    "a key given twice": (GOOD + "  max_steps: 200\n", ["18: max_steps: is given twice, here and at", ":17. Remove one of them."]),
    "a section given twice": (GOOD + "data: {}\n", ["18: data: is given twice, here and at", ":5."]),
    "an unknown option": (changed("n_head: 4", "n_head: 4\n  options: {final_logit_softcap: 15}"), ["14: model.options.final_logit_softcap: unknown key. Did you mean model.options.final_logit_softcapping?"]),
    "a size among the options": (changed("n_head: 4", "n_head: 4\n  options: {n_inner: 64}"), ["14: model.options.n_inner: is no option. It is set by model.n_inner."]),
    "a token": (GOOD + "hub:\n  id: hf_abcdefghijklmnopqrstuv\n", ["19: holds a token or password. Remove it, and set HF_TOKEN"]),
    "a key of AWS": (in_run("note: AKIA" + "ABCDEFGHIJKLMNOP"), ["3: holds a token or password."]),
    "a key for a token": (GOOD + "  hub_token: secret-value\n", ["18: hub_token: a recipe holds no secrets."]),
    "an API key": (GOOD + "monitor:\n  api_key: secret-value\n", ["19: api_key: a recipe holds no secrets."]),
    "two horizons": (GOOD + "  num_train_epochs: 1\n", ["17: train.max_steps: is a second horizon after train.num_train_epochs", ":18). Keep exactly one."]),
    "no horizon": (changed("  max_steps: 100\n", "  seed: 1\n"), [" train: says nothing on how long to train. Give one of train.max_steps"]),
    "less than a step": (changed("  max_steps: 100\n", "  seed: 1\n").replace("stage: pretrain", "stage: pretrain\n  tokens: 100"), ["3: run.tokens: is less than one step of 512 tokens"]),
    "batch and accumulation": (GOOD + "  gradient_accumulation_steps: 2\n", ["9: data.batch_tokens: and train.gradient_accumulation_steps are both given"]),
    "no batch": (changed("  batch_tokens: 512\n", ""), [" data.batch_tokens: is missing"]),
    "a batch of broken rows": (changed("512\nmodel", "500\nmodel"), ["9: data.batch_tokens: is 500, not a multiple of data.row_tokens (64): a step is whole rows. Write 448 or 512."]),
    "heads that do not divide the width": (changed("n_head: 4", "n_head: 5"), ["12: model.n_embd: is 32, not a multiple of model.n_head (5). Write 30 or 35"]),
    "grouped heads that do not divide": (changed("n_head: 4", "n_head: 4\n  n_kv_head: 3"), ["14: model.n_kv_head: is 3 and does not divide model.n_head (4)."]),
    "odd heads under rope": (changed("n_embd: 32\n  n_head: 4", "n_embd: 36\n  n_head: 4\n  preset: modern"), ["13: model.n_head: gives heads of 9 channels, and rope turns pairs."]),
    "rows longer than the positions": (changed("n_head: 4", "n_head: 4\n  n_positions: 32"), ["8: data.row_tokens: is 64, more than model.n_positions (32)."]),
    "a width that the dial cannot divide": (changed("n_layer: 2\n  n_embd: 32\n  n_head: 4", "depth: 2\n  n_embd: 200"), ["12: model.n_embd: is 200, not a multiple of model.head_dim (128), so model.depth cannot set the heads."]),
    "rates by a batch that is not known": (changed("n_layer: 2\n  n_embd: 32\n  n_head: 4", "depth: 2").replace("  batch_tokens: 512\n", "") + "  gradient_accumulation_steps: 2\n", ["15: train.gradient_accumulation_steps: leaves the batch to the number of processes"]),
    "an absurd depth": (changed("n_layer: 2", "n_layer: 99999999999"), ["11: model.n_layer: is 99999999999; it must be at least 1 and at most 1000."]),
    "a number beyond 64 bits": (changed("100", "99999999999999999999"), ["17: train.max_steps: is 99999999999999999999; it must be at least 1 and at most 1000000000."]),
    "a control character": (GOOD + "# \x07\n", ["18: holds the control character U+0007. Remove it"]),
    "no sizes": (changed("  n_layer: 2\n  n_embd: 32\n  n_head: 4\n", "  preset: modern\n"), [" model: model.n_layer and model.n_embd and model.n_head missing."]),
    "a wrong window pattern": (changed("n_head: 4", "n_head: 4\n  options: {window_pattern: SSX}"), ["14: model.options.window_pattern: is 'SSX'; it must be letters S (sliding) and L (full)"]),
    "a warm-up longer than the run": (changed("type: muon_adamw", "type: muon_adamw\n  schedule: {warmup_steps: 400}"), ["16: optimizer.schedule.warmup_steps: is 400, longer than the run of 100 steps"]),
    "a trainer's warm-up longer than the run": (changed("type: muon_adamw", "type: trainer") + "  warmup_steps: 400\n", ["18: train.warmup_steps: is 400, longer than the run of 100 steps"]),
    "groups beside the trainer's optimizer": (changed("type: muon_adamw", "type: trainer\n  groups: {head: {learning_rate: 0.1}}"), ["16: optimizer.groups.head.learning_rate: is not used by optimizer.type trainer"]),
    "a trainer's rate beside groups": (GOOD + "  learning_rate: 3e-4\n", ["18: train.learning_rate: is not used by optimizer.type muon_adamw. Use optimizer.rate_scale (all groups) or optimizer.groups.<group>.learning_rate, or set optimizer.type: trainer."]),
    "betas of Muon's matrices": (changed("type: muon_adamw", "type: muon_adamw\n  groups: {matrices: {betas: [0.9, 0.95]}}"), ["16: optimizer.groups.matrices.betas: is not a setting of this group under optimizer.type muon_adamw"]),
    "one beta": (changed("type: muon_adamw", "type: muon_adamw\n  groups: {head: {betas: [0.9]}}"), ["16: optimizer.groups.head.betas: is [0.9]; it must be two numbers"]),
    "an unknown optimizer": (changed("muon_adamw", "adam"), ["15: optimizer.type: is 'adam'. Write trainer, adamw, muon_adamw, or module:attr."]),
    "no sources": (changed("  sources:\n    - files: texts/*.parquet\n", ""), [" data.sources: is missing"]),
    "a source of nothing": (changed("files: texts/*.parquet", "weight: 1"), ["7: data.sources.0: names nothing to read."]),
    "a weight of zero": (changed("files: texts/*.parquet", "files: a.txt\n      weight: 0"), ["8: data.sources.0.weight: is 0; it must be greater than 0"]),
    "weight and epochs": (changed("files: texts/*.parquet", "files: a.txt\n      weight: 1\n      epochs: 2"), ["7: data.sources.0: has a weight and epochs. Keep one."]),
    "an unknown built-in": (changed("files: texts/*.parquet", "id: tandem:quickstart"), ["7: data.sources.0.id: there is no built-in tandem:quickstart."]),
    "an unknown format": (changed("files: texts/*.parquet", "files: a.txt\n      format: plain"), ["8: data.sources.0.format: is 'plain'."]),
    "conversations in pretraining": (changed("files: texts/*.parquet", "files: a.jsonl\n      format: messages"), ["7: data.sources.0: holds conversations, and pretraining reads plain text."]),
    "both half precisions": (GOOD + "  bf16: true\n  fp16: true\n", ["19: train.fp16: and train.bf16 are both given."]),
    "a wrong resume": (changed("stage: pretrain", "stage: pretrain\n  resume: yes"), ["3: run.resume: is the text 'yes'; it must be a whole number or auto | never."]),
    "a tab": (changed("  vocab_size", "\tvocab_size"), ["4: a tab character. YAML indents with spaces"]),
    "an open quote": (GOOD + '  optim: "adam\n', ["18: a quote is opened and never closed."]),
    "a star without quotes": (changed("texts/*.parquet", "*.parquet"), ["7: a value that begins with *. Put it in quotes"]),
    "a list at the top": ("- train\n", ["1: holds a list. A recipe is sections with keys"]),
    "an empty file": ("\n# nothing\n", [" is empty."]),
    "two documents": (GOOD + "---\n" + GOOD, ["18: a second document begins here."]),
    "a Python tag": (GOOD + "  seed: !!python/name:os.system x\n", ["18:", "the tag"]),
    "a circle of extends": ("extends: recipe.yaml\n" + GOOD, ["1: extends: recipe.yaml extends this recipe in turn, in a circle."]),
    # names, addresses and numbers whose form is wrong
    "a name with a slash": (in_run("name: a/b"), ["3: run.name: is 'a/b'; it must be a folder's name"]),
    "a name that is the parent folder": (in_run('name: ".."'), ["3: run.name: is '..'"]),
    "an empty name": (in_run("name: ''"), ["3: run.name: is ''"]),
    "a repository of three parts": (GOOD + "hub:\n  id: some body/x/y\n", ["19: hub.id: is 'some body/x/y'; it must be NAMESPACE/NAME"]),
    "an empty repository": (GOOD + "hub:\n  id: ''\n", ["19: hub.id: is ''"]),
    "a step before the first": (in_run("resume: -3"), ["3: run.resume: is -3; it must be at least 1."]),
    "a fork without a step": (in_run("fork_from: small@last"), ["3: run.fork_from: is 'small@last'; it must be RUN, or RUN@step"]),
    "a fork of itself": (in_run("fork_from: me\n  name: me"), ["3: run.fork_from: names me, which is this run."]),
    "hardware that there is not": (in_run("hardware: 8xH1000"), ["3: run.hardware: "]),
    "a stage that there is not": (changed("stage: pretrain", "stage: pretraining"), ["2: run.stage: is the text 'pretraining'", "Did you mean pretrain?"]),
    "a callback without its module": (in_run("callbacks: [Watch]"), ["3: run.callbacks.0: is 'Watch'; it must be module:attr"]),
    "a callback by its path": (in_run("callbacks: [my/watch.py:Watch]"), ["3: run.callbacks.0: is 'my/watch.py:Watch'; it must be module:attr"]),
    "a task without its module": (GOOD + "evals:\n  tasks: [hellaswag]\n", ["19: evals.tasks.0: is 'hellaswag'; it must be module:attr"]),
    "a source by its address": (changed("texts/*.parquet", "https://host/a.parquet"), ["7: data.sources.0.files: 'https://host/a.parquet' is an address"]),
    "a source in a store that is not read": (changed("texts/*.parquet", "[azure://bucket/a.parquet]"), ["7: data.sources.0.files: 'azure://bucket/a.parquet' is an address"]),
    "a run in a store": (in_run("directory: s3://bucket/runs"), ["3: run.directory: is 's3://bucket/runs', an address, and only files of a source may lie in a store."]),
    "a cache in a store": (in_data("cache_dir: gs://bucket/cache"), ["10: data.cache_dir: is 'gs://bucket/cache', an address"]),
    "a start from a store": (in_model("start_from: s3://bucket/runs/small/model"), ["14: model.start_from: is 's3://bucket/runs/small/model', an address"]),
    "a split of a glob": (changed("texts/*.parquet", "texts/*.parquet\n      split: test"), ["8: data.sources.0.split: is 'test', and files named one by one have no splits"]),
    "a revision of local files": (in_source("revision: main"), ["7: data.sources.0: config and revision belong to a data set of the Hub."]),
    "passes over validation": (
        changed("  row_tokens", "  validation:\n    - files: held.jsonl\n      passes: 4\n  row_tokens"),
        ["10: data.validation.0.passes: counts in data.sources; validation is read once"],
    ),
    "no validation": (changed("  row_tokens", "  validation: []\n  row_tokens"), ["8: data.validation: is an empty list"]),
    "a dropout of more than all": (in_model("options: {resid_pdrop: 2}"), ["14: model.options.resid_pdrop: is 2.0; it is the share that is dropped"]),
    "a dropout of less than nothing": (in_model("options: {attn_pdrop: -0.1}"), ["14: model.options.attn_pdrop: is -0.1"]),
    "a window of nothing": (in_model("options: {sliding_window: 0}"), ["14: model.options.sliding_window: is 0; a token sees itself at least."]),
    "a text for an option": (in_model("options: {resid_pdrop: 'no'}"), ["14: model.options.resid_pdrop: is the text 'no'; it must be a number."]),
    # types
    "a number for files": (changed("texts/*.parquet", "3"), ["7: data.sources.0.files: is 3; it must be text or a list of text or null."]),
    "a text for a source": (changed("- files: texts/*.parquet", "- texts/*.parquet"), ["7: data.sources.0: holds the text 'texts/*.parquet'; it must be keys with values."]),
    "one step to profile": (GOOD + "monitor:\n  profile_steps: [10]\n", ["19: monitor.profile_steps: is [10]; it must be the first and the last step. Write [10, 12]."]),
    "profiled steps backwards": (GOOD + "monitor:\n  profile_steps: [12, 10]\n", ["19: monitor.profile_steps: is [12, 10]; it must be"]),
    "a profiled step after the last": (GOOD + "monitor:\n  profile_steps: [98, 100]\n", ["19: monitor.profile_steps: ends with step 100, and the last step of this run is 99"]),
    "more samples than a hundred a second": (GOOD + "monitor:\n  gpu_hz: 1000\n", ["19: monitor.gpu_hz: is 1000"]),
    "an unknown tracker": (GOOD + "monitor:\n  trackers: [wand]\n", ["19: monitor.trackers.0: is the text 'wand'", "Did you mean wandb?"]),
    "an unknown dtype": (GOOD + "hub:\n  dtype: fp16\n", ["19: hub.dtype: is the text 'fp16'; it must be float32 | bfloat16 | float16."]),
    "an unknown preset": (in_model("preset: moderne"), ["14: model.preset: is the text 'moderne'", "Did you mean modern?"]),
    "an unknown end of a source": (in_source("at_end: loop"), ["8: data.sources.0.at_end: is the text 'loop'; it must be repeat | drop | stop."]),
    "an unknown optim": (trainer("optim: adamw_torchh"), ["18: train.optim: is the text 'adamw_torchh'"]),
    "an unknown save_strategy": (in_train("save_strategy: step"), ["18: train.save_strategy: is the text 'step'; it must be steps | no. Did you mean steps?"]),
    "an unknown decay": (in_schedule("decay: linaer"), ["16: optimizer.schedule.decay: is the text 'linaer'", "Did you mean linear?"]),
    "an unknown group": (changed("type: muon_adamw", "type: muon_adamw\n  groups: {embedding: {learning_rate: 1}}"), ["16: optimizer.groups.embedding: unknown key. Did you mean optimizer.groups.embeddings?"]),
    "an unknown backend": (in_train("ddp_backend: ncl"), ["18: train.ddp_backend: is the text 'ncl'", "Did you mean nccl?"]),
    "a variable of the shell": (in_train("seed: ${SEED}"), ["18: train.seed: is the text '${SEED}'; it must be a whole number."]),
    "a percentage": (trainer("warmup_steps: 10%"), ["18: train.warmup_steps: is the text '10%'; it must be a number."]),
    "thousands with commas": (changed("100", "1,000"), ["17: train.max_steps: is the text '1,000'; it must be a whole number."]),
    "a number with a unit": (changed("  max_steps: 100\n", "  seed: 1\n").replace("stage: pretrain", "stage: pretrain\n  tokens: 2B"), ["3: run.tokens: is the text '2B'; it must be a whole number"]),
    "yes for a boolean": (in_train("bf16: yes"), ["18: train.bf16: is the text 'yes'; it must be true or false or auto."]),
    "a half seed": (in_train("seed: 1.5"), ["18: train.seed: is 1.5; it must be a whole number. Write 2."]),
    "infinity": (in_train("max_grad_norm: .inf"), ["18: train.max_grad_norm: is inf; it must be a number."]),
    # ranges
    "no steps": (changed("100", "0"), ["17: train.max_steps: is 0; it must be at least 1"]),
    "steps below nothing": (changed("100", "-1"), ["17: train.max_steps: is -1; it must be at least 1"]),
    "no epochs": (changed("max_steps: 100", "num_train_epochs: 0"), ["17: train.num_train_epochs: is 0; it must be greater than 0"]),
    "flops below nothing": (changed("  max_steps: 100\n", "  seed: 1\n").replace("stage: pretrain", "stage: pretrain\n  flops: -1"), ["3: run.flops: is -1; it must be at least 1"]),
    "a vocabulary of fewer than bytes": (changed("512\ndata", "100\ndata"), ["4: tokenizer.vocab_size: is 100; it must be at least 272"]),
    "rows of nothing": (changed("row_tokens: 64", "row_tokens: 0"), ["8: data.row_tokens: is 0; it must be at least 8"]),
    "a batch of nothing": (changed("batch_tokens: 512", "batch_tokens: 0"), ["9: data.batch_tokens: is 0; it must be at least 1"]),
    "no checkpoints kept": (in_train("save_total_limit: 0"), ["18: train.save_total_limit: is 0; it must be at least 1"]),
    "eval_steps zero": (in_train("eval_steps: 0"), ["18: train.eval_steps: is 0; it must be at least 1"]),
    "logging_steps zero": (in_train("logging_steps: 0"), ["18: train.logging_steps: is 0; it must be at least 1"]),
    "a seed below nothing": (in_train("seed: -1"), ["18: train.seed: is -1; it must be at least 0"]),
    "a clip below nothing": (in_train("max_grad_norm: -1"), ["18: train.max_grad_norm: is -1; it must be at least 0"]),
    "a weight below nothing": (in_source("weight: -1"), ["8: data.sources.0.weight: is -1; it must be greater than 0"]),
    "a source seen never": (in_source("epochs: 0"), ["8: data.sources.0.epochs: is 0; it must be greater than 0"]),
    "bad rows below nothing": (in_data("max_bad_rows: -1"), ["10: data.max_bad_rows: is -1; it must be at least 0"]),
    "more decay than run": (in_schedule("decay_fraction: 1.5"), ["16: optimizer.schedule.decay_fraction: is 1.5; it must be at least 0 and at most 1."]),
    "more momentum than all": (changed("type: muon_adamw", "type: muon_adamw\n  groups: {matrices: {momentum: 1.5}}"), ["16: optimizer.groups.matrices.momentum: is 1.5"]),
    "a scale of nothing": (changed("type: muon_adamw", "type: muon_adamw\n  rate_scale: 0"), ["16: optimizer.rate_scale: is 0; it must be greater than 0"]),
    "a top_p of more than all": (GOOD + "samples:\n  top_p: 1.5\n", ["19: samples.top_p: is 1.5; it must be at least 0 and at most 1."]),
    "a temperature below nothing": (GOOD + "samples:\n  temperature: -1\n", ["19: samples.temperature: is -1; it must be at least 0"]),
    "an evaluation of nothing": (GOOD + "evals:\n  bpb: {tokens: 0}\n", ["19: evals.bpb.tokens: is 0; it must be at least 1"]),
    # contradictions
    "weights, epochs and neither": (changed("- files: texts/*.parquet", "- {files: a.txt, weight: 1}\n    - {files: b.txt, epochs: 1}\n    - {files: c.txt}"), ["6: data.sources: mixes weights, epochs and sources with neither."]),
    "a preset of another type": (in_model("type: gpt2\n  preset: modern"), ["15: model.preset: modern is a preset of model.type tandem, not of gpt2."]),
    "grouped heads of GPT-2": (in_model("type: gpt2\n  n_kv_head: 2"), ["15: model.n_kv_head: gpt2 has no grouped keys and values."]),
    "checkpointing by both names": (in_train("activation_checkpointing: true\n  gradient_checkpointing: true"), ["19: train.gradient_checkpointing: is the older name of train.activation_checkpointing"]),
    "conversations by their column": (in_source("messages_column: m"), ["7: data.sources.0: holds conversations, and pretraining reads plain text."]),
    "conversations by columns": (in_source("columns: {prompt: q, response: a}"), ["7: data.sources.0: holds conversations, and pretraining reads plain text."]),
    "a column of nothing known": (in_source("columns: {txt: body}"), ["8: data.sources.0.columns: names 'txt', which is none of text, messages, prompt"]),
    "a prompt without a response": (in_source("columns: {prompt: q}"), ["8: data.sources.0.columns: says prompt, from which no document or conversation follows."]),
    "a column that is a list": (in_source("columns: {text: [a, b]}"), ["8: data.sources.0.columns.text: is a list; it must be text."]),
    "columns said twice": (in_source("columns: {text: a}\n      text_column: a"), ["8: data.sources.0.columns: and text_column say the same. Keep columns."]),
    # fields of TrainingArguments that are refused or set elsewhere
    "load_best_model_at_end": (in_train("load_best_model_at_end: true"), ["18: train.load_best_model_at_end: is refused:"]),
    "deepspeed": (in_train("deepspeed: ds.json"), ["18: train.deepspeed: is refused:"]),
    "fsdp": (in_train("fsdp: full_shard"), ["18: train.fsdp: is set by the accelerate config file"]),
    "push_to_hub": (in_train("push_to_hub: true"), ["18: train.push_to_hub: is set by hub.id."]),
    "resume_from_checkpoint": (in_train("resume_from_checkpoint: x"), ["18: train.resume_from_checkpoint: is set by run.resume."]),
    "a section inside another": (GOOD + "  optimizer:\n    type: adamw\n", ["18: train.optimizer: no key of train; optimizer is a section."]),
    # YAML
    "indentation that steps": ("run:\n stage: pretrain\n   name: x\n", ["3: a colon where no key can stand."]),
    "a colon in a text": (in_train("note: a: b"), ["18: a colon where no key can stand."]),
    "no space behind the colon": (in_train("seed:42"), ["19: a key without a colon here or on the line before."]),
    "a merge of a number": (in_train("<<: 1"), ["18: <<: merges keys with values into these."]),
    "an alias without its anchor": (in_train("seed: *seed"), ["18: an alias without its anchor. Write &name before"]),
    "an extends of several": ("extends: [a.yaml]\n" + GOOD, ["1: extends: must be the path of one recipe"]),
    "a key in a note": (in_run("note: key sk-abcdefghijklmnopqrstuvwxyz"), ["3: holds a token or password."]),
    "a password in an address": (changed("texts/*.parquet", "https://user:pass@host/a.parquet"), ["7: holds a token or password."]),
    # bounds
    "a seed of numpy's too large": (in_train("seed: 4294967296"), ["18: train.seed: is 4294967296; it must be at least 0 and at most 4294967295."]),
    "more steps than a year has": (changed("100", str(2**62)), ["17: train.max_steps: is 4611686018427387904; it must be at least 1 and at most 1000000000."]),
    "steps of a horizon beyond all": (changed("  max_steps: 100\n", "  seed: 1\n").replace("stage: pretrain", "stage: pretrain\n  tokens: 1000000000000000"), ["3: run.tokens: comes to 1,953,125,000,000 steps of 512 tokens; 1,000,000,000 are the most."]),
    "a mode of the compiler": (in_train("torch_compile: true\n  torch_compile_mode: fastest"), ["19: train.torch_compile_mode: is the text 'fastest'; it must be default | reduce-overhead"]),
    "a mode without the compiler": (in_train("torch_compile_mode: default"), ["18: train.torch_compile_mode: is given and train.torch_compile is not"]),
    "a mode of another backend": (in_train("torch_compile: true\n  torch_compile_backend: eager\n  torch_compile_mode: default"), ["20: train.torch_compile_mode: is of the backend inductor, and train.torch_compile_backend is eager."]),
    "a backend of the compiler": (in_train("torch_compile: true\n  torch_compile_backend: induktor"), ["19: train.torch_compile_backend: is the text 'induktor'", "Did you mean inductor?"]),
    "a debug option": (in_train("debug: all"), ["18: train.debug: is the text 'all'"]),
    "a beta of one": (trainer("adam_beta1: 1"), ["18: train.adam_beta1: is 1; it must be at least 0 and below 1."]),
    "a timeout beyond all clocks": (in_train("ddp_timeout: 1152921504606846976"), ["18: train.ddp_timeout: is 1152921504606846976; it must be at least 1 and at most 100000000."]),
    "an unknown switch of accelerate": (in_train("accelerator_config: {even: true}"), ["18: train.accelerator_config.even: unknown key. train.accelerator_config has: split_batches"]),
    "a text for a switch of accelerate": (in_train("accelerator_config: {even_batches: maybe}"), ["18: train.accelerator_config.even_batches: is the text 'maybe'; it must be true or false."]),
    "an unknown setting of checkpointing": (in_train("activation_checkpointing_kwargs: {every_n_layer: 2}"), ["18: train.activation_checkpointing_kwargs.every_n_layer: unknown key."]),
    "a list of optimizers": (trainer("optim: [sgd]"), ["18: train.optim: is a list; it must be"]),
    "a strategy of an earlier version": (GOOD + "hub:\n  strategy: every_save\n", ["19: hub.strategy: every_save is refused: this version publishes no revision of every checkpoint. Write checkpoint (the newest one), or end."]),
    "a schedule-free optimizer": (trainer("optim: schedule_free_adamw"), ["18: train.optim: schedule_free_adamw is refused:", "Write optim: adamw_torch_fused with lr_scheduler_type: constant_with_warmup."]),
    "a name longer than a folder's": (in_run(f"name: {'a' * 300}"), ["3: run.name: is 'aaa", "it must be a folder's name of at most 200 letters"]),
    "a NUL in a path": (in_run('directory: "a\\0b"'), ["3: holds the control character U+0000. Remove it."]),
    "a command of a terminal in a note": (in_run('note: "a\\e]0;x\\a"'), ["3: holds the control character U+001B. Remove it."]),
    "half a character": (in_run('note: "\\ud800"'), ["3: holds the control character U+D800. Remove it."]),
    "weights a world apart": (changed("- files: texts/*.parquet", "- {files: a.txt, weight: 1e-9}\n    - {files: b.txt, weight: 10}"), ["6: data.sources: has weights of which one is more than 1e+09 times another"]),
    "an integer of 5,000 digits": (changed("100", "9" * 5000), ["17: train.max_steps: is the text '9999", "it must be a whole number."]),
    "brackets without end": ("run: " + "[" * 20_000, [" is nested too deeply."]),
    "keys below keys": ("".join(" " * depth + "k:\n" for depth in range(1000)), [" is nested too deeply."]),
    "an alias of itself": (in_run("tags: &a [*a]"), [" is nested too deeply."]),
    "an empty section": (GOOD.replace("train:\n  max_steps: 100\n", "train:\n"), [" train: says nothing on how long to train."]),
}  # fmt: skip

# content, and what the message holds
WRONG_BYTES = {
    "Latin-1": (GOOD.encode() + "# caf\u00e9".encode("latin-1"), "recipe.yaml:18: is not UTF-8 text (byte 0xe9)"),
    "UTF-16": (GOOD.encode("utf-16"), "recipe.yaml:1: is not UTF-8 text (byte 0xff)"),
    "UTF-16 without a mark": (GOOD.encode("utf-16-le"), "recipe.yaml:1: holds the control character U+0000"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(40), "recipe.yaml:1: is not UTF-8 text (byte 0x89)"),
    "zeros": (bytes(300), "recipe.yaml:1: holds the control character U+0000"),
}

# an override of GOOD, and what the message holds
OVERRIDES = [
    ("train.max_stepz=1", "command line: train.max_stepz: unknown key. Did you mean train.max_steps?"),
    ("max_steps=1", "command line: max_steps: unknown key here; it belongs to another section. Write it as train.max_steps."),
    ("--learning_rate=1", "command line: --learning_rate is not an override. Write section.key=value, for example train.learning_rate=1."),
    ("--train.max-steps=5", "command line: --train.max-steps is not an override. Write section.key=value, for example train.max_steps=5."),
    ("data.sources.files=a.jsonl", "command line: data.sources: is keys with values; it must be a list. Write it as a list: [{key: value}]."),
    ("train.seed", "command line: train.seed is not an override."),
    ('train.seed="7"', "command line: train.seed: is the text '7'"),
    ("train.max_steps=1000.5", "command line: train.max_steps: is 1000.5; it must be a whole number."),
    ("data.sources=[{file: x}]", "command line: data.sources.0.file: unknown key. Did you mean data.sources.0.files?"),
    ("train.seed.x=1", "command line: train.seed: is keys with values; it must be a whole number."),
    ("hub.id=hf_abcdefghijklmnopqrstuv", "command line: a token or password is given."),
    ("data.sources=[{files: x", "command line: is not valid YAML"),
    ("train.seed=" + "9" * 5000, "command line: train.seed: is the text '9999"),
    ("run.tags=" + "[" * 20_000, "command line: is nested too deeply."),
    ("run.tags=[a, C #3]", "command line: run.tags: a # begins a comment in '[a, C #3]'. Put the text that holds it in quotes."),
    ("train.seed=7 # mine", "command line: train.seed: a # begins a comment"),
    ("run.note=a\0b", "command line: run.note: holds the control character U+0000. Remove it."),
    ("run.directory=a\udcff", "command line: run.directory: holds the control character U+DCFF. Remove it."),
]  # fmt: skip
