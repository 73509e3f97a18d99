# Every target sets up what it needs: the first run makes .venv (a minute), later ones start at once.
BIN := .venv/bin
# PYTHON=python3.12 chooses the Python of .venv if several are installed.
READY := .venv/.ready$(addprefix -,$(notdir $(PYTHON)))
DOCS_READY := .venv-docs/.ready
CONFIG ?= deploy/laptop.yaml
# Many images set this variable, with which every start would compile its imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup up test pytest null-gpu gpu-kit chaos lint format bench bench-spec table proto docs config-docs patches-docs dashboards clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 20

setup: $(READY) ## Make .venv with everything in it

$(READY): constraints.txt pyproject.toml deploy/setup/venv
	@deploy/setup/venv

up: $(READY) ## Serve the demo model on this machine (ARGS="--prefill 2 --port 8080" for more)
	@exec $(BIN)/baton up --config $(CONFIG) $(ARGS)

test: $(READY) ## Lint and run every test, side by side (ARGS="-k scheduler" for some)
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: $(READY)
	@deploy/setup/test-tools
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

null-gpu: $(READY) ## Check what only GPUs run, on a GPU that computes nothing (downloads 1.1 GB once)
	@deploy/setup/null-gpu
	@.null-gpu/bin/python -m pytest -v -s tests/null_gpu $(ARGS)

gpu-kit: $(READY) ## Make .kit, for a GPU machine without a network (downloads 0.4 GB once)
	@$(BIN)/python -m deploy.gpu_kit

chaos: $(READY) ## Kill, hang and cut off parts under load, by a seeded plan (half an hour; ARGS="--list" shows plans)
	@$(BIN)/python -m harness.chaos $(ARGS)

lint: $(READY) ## Ruff, mypy --strict, layers of imports, words, generated files up to date
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo
	@deploy/setup/words
	@deploy/setup/proto --check
	@$(BIN)/python deploy/setup/config-docs --check
	@$(BIN)/python deploy/setup/patches-docs --check
	@$(BIN)/python -m deploy.boards --check

format: $(READY) ## Let ruff fix what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY) ## Measure, on the 80 M model; writes bench/results/ and docs/benchmarks.md
	@$(BIN)/python -m bench $(ARGS)

bench-spec: $(READY) ## Measure the speculative methods on the demo model, and write the page (half an hour)
	@$(BIN)/python -m bench speculation $(ARGS)
	@$(BIN)/python -m bench report

table: $(READY) ## Measure every speculative method; writes docs/speculative-decoding.md (ARGS="EAGLE" for some)
	@$(BIN)/python -m bench speculation-table $(ARGS)
	@$(BIN)/python -m bench report

proto: $(READY) ## Generate the protocol's Python from protos/*.proto
	@deploy/setup/proto

docs: $(DOCS_READY) ## Build the site of docs/ in site/ (strict: a dead link fails)
	@NO_MKDOCS_2_WARNING=true .venv-docs/bin/mkdocs build --strict

$(DOCS_READY): docs/mkdocs/requirements.txt
	@python3 -m venv .venv-docs
	@.venv-docs/bin/pip install --quiet --disable-pip-version-check -r docs/mkdocs/requirements.txt
	@touch $@

config-docs: $(READY) ## Write docs/configuration.md from the configuration tree
	@$(BIN)/python deploy/setup/config-docs

patches-docs: $(READY) ## Write docs/patches.md from the table of patches and their docstrings
	@$(BIN)/python deploy/setup/patches-docs

dashboards: $(READY) ## Write Grafana's boards from deploy/boards/boards.yaml
	@$(BIN)/python -m deploy.boards

clean: ## Remove what set-up and tests made
	rm -rf .venv .null-gpu .kit .venv-peers .venv-docs site .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
