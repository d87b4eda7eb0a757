# One environment, .venv, serves every target; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast test-gpu lint format docs bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## /  make \1|/' | column -t -s '|'

venv: $(STAMP) ## make .venv and install Tenfold into it (about two minutes, once)

$(STAMP): pyproject.toml constraints.txt
	@echo "==> installing Tenfold and what it needs into $(VENV)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Tenfold needs Python 3.11 or newer; this is %d.%d. Try: make PYTHON=python3.12 ..." % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## pretrain a small mixture of experts, Pseudo then Real, on Python's own library (a few minutes)
	@echo "==> training examples/demo.toml into runs/demo (goes on where it stopped, if it was stopped)"
	@$(BIN)/tenfold train examples/demo.toml --out runs/demo --resume

# Hundreds of processes are started: bytecode is kept for them, whatever the environment says.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest

test: $(STAMP) ## run every test
	@echo "==> running all tests"
	@$(PYTEST) -n 2 --dist worksteal -q

test-fast: $(STAMP) ## run the tests that are not marked slow
	@$(PYTEST) -n 2 --dist worksteal -q -m 'not slow'

test-gpu: $(STAMP) ## run the tests that need a CUDA device (in an environment whose PyTorch has CUDA)
	@$(BIN)/pytest -q -m gpu

lint: $(STAMP) ## check format, lint and types
	@echo "==> ruff and mypy"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(STAMP) ## format the code and mend what lint can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(STAMP) ## write docs/run-file.md from the code (and docs/demo.svg from the demo, if it has run)
	@$(BIN)/python -m tenfold.config.reference > docs/run-file.md
	@test ! -f runs/demo/metrics.jsonl || $(BIN)/python docs/picture.py runs/demo docs/demo.svg

bench: $(STAMP) ## measure what docs/results.md reports (hours, and 7 GB of environments for the peers, in build/)
	@echo "==> benchmarks; each prints its own table"
	@failed=; for f in benchmarks/*.py; do echo "==> $$f"; $(BIN)/python $$f || failed="$$failed $$f"; done; \
	test -z "$$failed" || { echo "==> failed:$$failed"; exit 1; }

clean: ## remove the environment, runs and prepared data
	rm -rf $(VENV) runs data
