# `make` alone is the check before a commit. PYTHON: one with the dev extra; `bash run_tests.sh` makes .venv with it.
PYTHON ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)/bin/python

.PHONY: check quick lint test bench docs site faults findings conformance ladder

check: lint test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test:
	bash run_tests.sh --all

# While working: one file of most rooms, none of which starts a run.
QUICK = run_dir/test_manifest run_dir/test_rows run_dir/test_run_directory docs/test_links data/test_packing data/test_mixture \
	evals/test_intervals generation/test_tools hardware/test_peaks model/test_gpt2_and_nanochat model/test_loss recipe/test_frozen \
	recipe/test_resolve recipe/test_sizes benchmarks/test_ladder report/test_diagnosis_rules sources/test_recognition test_architecture \
	tokenizer/test_byte_lengths training/test_finite training/test_meters training/test_overrides training/test_schedules
quick:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pytest -q -m "not slow and not full" $(QUICK:%=tests/%.py)

# What needs nothing but this machine, one after another; TEXT='train/*.parquet' adds preparation, VALIDATION=val.parquet with
# PEER=NANOCHAT, a folder, the runs beside nanochat, CHAT='train/*.jsonl' those beside TRL. Sizes of train_steps are chosen by hand; quarter_hour is for a GPU.
BENCHMARKS = batched_answers feeder guards loss_head optimizer_step profile_step save_stall start_up trainer_tax
bench:
	for name in $(BENCHMARKS); do echo "== $$name"; $(PYTHON) benchmarks/$$name.py || exit 1; done
ifneq ($(TEXT),)
	$(PYTHON) benchmarks/preparation.py --text '$(TEXT)'
endif
ifneq ($(and $(PEER),$(TEXT),$(VALIDATION)),)
	$(PYTHON) benchmarks/against_nanochat.py --peer '$(PEER)' --text '$(TEXT)' --validation '$(VALIDATION)'
endif
ifneq ($(CHAT),)
	$(PYTHON) benchmarks/against_trl.py --chat '$(CHAT)'
endif

docs:
	$(PYTHON) docs/recipes_page.py
	$(PYTHON) docs/metrics_page.py
	$(PYTHON) docs/diagnosis_page.py
	$(PYTHON) findings --page
	$(PYTHON) docs/code_page.py

# docs/ as a site, in build/site; `mkdocs serve` shows it while you write.
site:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

# The fault campaigns, N trials each (of the soak: minutes): hours for N=200. Can be stopped and started again. Then the faults
# of services and all wrong inputs, whose figures docs/reliability.md takes from docs/log.md.
N ?= 20
faults:
	$(PYTHON) -m faults all --times $(N) --page
	$(PYTHON) -m faults.services
	$(PYTHON) -m faults.wrong_inputs

# Each script of findings/, one after another: which still hold. Some minutes each; installs released packages from PyPI.
findings:
	$(PYTHON) findings

# Trainers of others and Tandem, killed and started again: docs/conformance.md. Each in an environment of its own; half an hour.
conformance:
	$(PYTHON) -m faults.conformance --install --json docs/conformance.json --page docs/conformance.md

# One family of runs at three depths and the power law through them (benchmarks/ladder.py).
# SET='run.tokens_per_param=0.2' changes all of them.
DEPTHS ?= 4 6 8
LADDER ?= recipes/ladder.yaml
ladder:
	for depth in $(DEPTHS); do bash run_pretrain.sh $(LADDER) model.depth=$$depth run.name=ladder-d$$depth $(SET) || exit 1; done
	$(PYTHON) benchmarks/ladder.py $(addprefix runs/ladder-d,$(DEPTHS))
