# Two commands do everything from a fresh clone: `make demo` and `make test`. Both set up `.venv` first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m
PROMPT ?= What is the capital of France? Answer in one sentence.
READY := $(VENV)/.ready

.PHONY: help setup demo serve test test-all lint types check protos docs audit clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## Install the pinned set into .venv

$(READY): pyproject.toml deploy/constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Raycomb needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade "pip>=25"
	$(BIN)/python -m pip install --constraint deploy/constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --constraint deploy/constraints.txt --editable ".[test]"
	@touch $@

demo: setup  ## Serve a small real model with two CPU workers, ask it a question over HTTP, shut down
	$(BIN)/raycomb serve $(MODEL) --num-workers 2 --device cpu --ask "$(PROMPT)"

serve: setup  ## The same service, but it stays up
	$(BIN)/raycomb serve $(MODEL) --num-workers 2 --device cpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# What computes and what starts services take turns: Ray makes its processes nice, and beside the others they would
# starve. Beside each other services have time to spare, since much of what they do is to wait.
PYTEST := $(BIN)/python -m pytest --durations 15 --numprocesses 2 --dist loadgroup

test: setup lint types  ## ruff, mypy --strict and every test that this machine can run, but for the slow ones
	$(PYTEST) -m "not cluster and not slow"
	$(PYTEST) -m "cluster and not slow"

test-all: setup lint types  ## The same with the slow tests
	$(PYTEST) -m "not cluster"
	$(PYTEST) -m cluster

protos: setup  ## Regenerate the gRPC stubs
	$(BIN)/python -m protos.generate

docs: setup  ## Write the pages that come out of code, and build/docs, the documentation as a site
	$(BIN)/python -m docs.site.write
	$(BIN)/python -m mkdocs build --strict --config-file docs/site/mkdocs.yml

audit:  ## Look for known faults of the pinned dependencies; says so where the data cannot be reached (exit code 3)
	PYTHON=$(PYTHON) .ci/audit

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
