# `make` alone is the check before a commit. PYTHON: one with the dev extra; `bash run_tests.sh` makes .venv with it.
PYTHON ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)/bin/python

.PHONY: check lint test bench docs faults

check: lint test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test:
	bash run_tests.sh

bench:
	for file in benchmarks/*.py; do $(PYTHON) $$file || exit 1; done

docs:
	$(PYTHON) -m pipeline.recipe

# The fault campaigns, N trials each (of the soak: minutes): hours for N=200. Can be stopped and started again. Then the faults
# of services and all wrong inputs, whose figures docs/reliability.md takes from docs/log.md.
N ?= 20
faults:
	$(PYTHON) -m tests.faults all --times $(N) --page
	$(PYTHON) -m tests.faults.services
	$(PYTHON) -m tests.faults.wrong_inputs
