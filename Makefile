# Set-up, training and checks. `make help` lists the targets.
#
#   make train                 makes the environment .venv where it is missing, then trains on the embedded corpus
#   make train PYTHON=python3  uses that interpreter as it is and makes no environment; so does every target
#
# An environment has exactly the versions of requirements/: gpu.lock if an NVIDIA driver answers when it is made,
# otherwise cpu.lock. KIND=cpu or KIND=gpu overrides this.

SHELL := /bin/sh
.SHELLFLAGS := -ec
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
# Hundreds of processes import the same modules: byte code is kept even if the shell says otherwise.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
made := $(patsubst $(VENV)/installed-%,%,$(wildcard $(VENV)/installed-*))
KIND := $(or $(KIND),$(made),$(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu))
# Test processes for two cores: many tests wait.
JOBS := 3
# Neighbouring tests share fixtures: each process takes a range of tests, then some of another's range.
SPREAD = -n $(JOBS) --dist worksteal

# May be given on the command line:
TORCH_INDEX =# another package index for torch, for example that of the CPU builds on PyTorch's installation page
PYTHONS = python3 python3.13 python3.12 python3.11 python# interpreters for a new environment; the first one that fits
CONFIG =# name or YAML file for make train; default: the small configuration for this machine
ARGS =# appended to the command of train, accept, bench and the tests
QUICK =# 1: make accept runs the quick leg
LEG =# number of the one leg that make accept runs
COMPILE_LOCK = pip-compile# of pip-tools, under Python 3.11, so that the versions fit 3.11 and newer

ifdef PYTHON
RUN := $(PYTHON)
ENV := check-python
COLLECTED :=
else
RUN := $(VENV)/bin/python
ENV := $(VENV)/installed-$(KIND)
COLLECTED := $(VENV)/collected
endif

# Python compiles the few modules that are imported.
INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile

SOURCES := nsa tests tools examples benchmarks

.PHONY: help train bench accept test pytest pytest-kernels test-compile test-faults test-gpu lint format test-mutants lock wheel dist site device-wheels clean check-python
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

train: $(ENV) ## train a small model on the embedded corpus and leave a run folder under runs/ (CONFIG=, ARGS=)
	@config="$(CONFIG)"; \
	if [ -z "$$config" ]; then \
	    config=$$($(RUN) -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")')-small; \
	fi; \
	$(RUN) -m nsa train "$$config" $(ARGS)

test: $(ENV) ## formatting, lint and types, and all CPU tests with three mutants
	@$(MAKE) --no-print-directory --jobs 2 lint $(COLLECTED) pytest-kernels pytest

# One process compiles the imports of the tests before several processes need them.
$(VENV)/collected: $(ENV)
	@TRITON_INTERPRET=1 $(RUN) -m pytest --collect-only --quiet --ignore tests/gpu >/dev/null || true
	@touch $@

pytest: $(ENV) | $(COLLECTED) ## the tests without those of kernels (ARGS=)
	$(RUN) -m pytest $(SPREAD) --ignore tests/gpu -m "not gpu and not faults and not slow and not acceptance" $(ARGS)

pytest-kernels: JOBS = 2# these compute all the time
pytest-kernels: $(ENV) | $(COLLECTED) ## the tests of the Triton kernels, on the CPU in Triton's interpreter
	TRITON_INTERPRET=1 $(RUN) -m pytest $(SPREAD) tests/kernels

test-faults: $(ENV) ## every provoked fault in full count (ARGS=)
	$(RUN) -m pytest $(SPREAD) tests/faults -m "faults or not faults" $(ARGS)
	$(RUN) -m pytest $(SPREAD) tests --ignore tests/faults --ignore tests/kernels -m faults $(ARGS)
	TRITON_INTERPRET=1 $(RUN) -m pytest tests/kernels -m faults $(ARGS)

test-compile: $(ENV) ## compile every kernel for six kinds of GPU, without one: stack and shared memory (JOBS=, ARGS=, TRITON=3.6.0)
	$(if $(TRITON),$(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/triton triton==$(TRITON))
	$(if $(TRITON),PYTHONPATH=$(VENV)/triton) $(RUN) -m tools.compile_only --jobs $(JOBS) $(ARGS)

test-gpu: $(ENV) ## the tests that need a CUDA GPU; those of a million tokens with ARGS="-m slow"
	$(RUN) -m pytest tests/gpu tests/train/test_gpu.py -m "not slow" $(ARGS)

bench: $(ENV) ## on a GPU: every measurement behind the committed rows, into benchmarks/ (ARGS="--list", "--only seed wide", "--shards DATA")
	$(RUN) -m tools.measure $(ARGS)
	$(RUN) -m nsa bench report benchmarks/results/*.jsonl --out benchmarks/report

accept: $(ENV) ## on a GPU: the acceptance run, the product as a user starts it (QUICK=1, LEG=2, ARGS="--collect-only")
	$(RUN) -m pytest tests/acceptance/test_cases.py -s -v -p no:cacheprovider --confcutdir tests/acceptance \
	    -m "acceptance$(if $(QUICK), and quick)$(if $(LEG), and leg$(LEG))" $(ARGS)

lint: $(ENV) ## formatting, lint and types
	$(RUN) -m ruff format --check $(SOURCES)
	$(RUN) -m ruff check $(SOURCES)
	$(RUN) -m mypy

format: $(ENV) ## format the code and apply the safe fixes
	$(RUN) -m ruff format $(SOURCES)
	$(RUN) -m ruff check --fix $(SOURCES)

test-mutants: $(ENV) ## break the code in every listed way, one at a time; the tests must notice each
	$(RUN) -m tools.mutants --jobs $(JOBS) $(ARGS)

# CUDA's packages are in neither file: the CUDA build of torch requires each in one version, the CPU build none.
# dev.lock has only what the checks add.
lock: ## pin the newest versions that fit pyproject.toml (network, pip-tools on Python 3.11)
	@pin() { file=$$1; shift; \
	    $(COMPILE_LOCK) --quiet --upgrade --no-header --no-annotate --no-emit-options --strip-extras --allow-unsafe \
	        "$$@" --output-file $$file.txt pyproject.toml; \
	    sed -e '/^#/d; /^$$/d; /^nsa @/d; /^cuda-/d; /^nvidia-[^m]/d; s/+cpu//' \
	        -e "s/^\(triton==[^ ;]*\).*/\1; sys_platform == 'linux'/" $$file.txt | LC_ALL=C sort -t= -k1,1 >$$file.lock; \
	    rm $$file.txt; }; \
	for kind in cpu gpu; do \
	    pin requirements/$$kind --extra train --extra data --extra bench --extra hf -c requirements/$$kind.in; \
	done; \
	pin requirements/dev --extra dev -c requirements/cpu.lock; \
	grep -vxFf requirements/cpu.lock requirements/dev.lock >requirements/dev.txt; \
	mv requirements/dev.txt requirements/dev.lock; \
	sed -i '1i # Made by `make lock` from pyproject.toml; do not edit.' requirements/*.lock

wheel: $(ENV) ## build the wheel into dist/
	$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

dist: $(ENV) ## build wheel and source archive into dist/ and check them
	$(RUN) -m pip install --quiet --upgrade --target $(VENV)/dist build twine
	PYTHONPATH=$(VENV)/dist $(RUN) -m build --no-isolation --outdir dist .
	PYTHONPATH=$(VENV)/dist $(RUN) -m twine check --strict dist/*

# mkdocs writes no site if a page or an anchor is missing.
site: $(ENV) ## build the documentation into site/: README.md, docs/ and the API
	$(RUN) -m pip install --quiet --upgrade --target $(VENV)/site "mkdocs-material==9.*" mkdocs-same-dir "mkdocstrings[python]"
	PYTHONPATH=$(VENV)/site $(RUN) -m mkdocs build --strict --quiet

device-wheels: $(ENV) ## download the wheels for an offline GPU machine into .wheels/ (tools/device_wheels.txt)
	$(RUN) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest .wheels \
	    --constraint requirements/gpu.lock --constraint requirements/dev.lock --requirement tools/device_wheels.txt
	@ls .wheels

clean: ## remove the environment, built files and caches; runs/ stays
	rm -rf $(VENV) .wheels dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find nsa tests tools -name __pycache__ -type d -exec rm -rf {} +

check-python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("make: PYTHON must be Python 3.11 or newer.")'

# The stamp is written last: an interrupted installation starts again, a complete one is never repeated.
$(VENV)/installed-$(KIND): requirements/$(KIND).lock requirements/dev.lock pyproject.toml
	@fits='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'; \
	for python in $(PYTHONS); do "$$python" -c "$$fits" 2>/dev/null && break; done || { \
	    echo "make: Python 3.11 or newer with its venv module must be installed (Debian and Ubuntu have it in a" \
	        "package of its own, such as python3.12-venv)." >&2; exit 1; }; \
	echo "Making $(VENV) with the packages of requirements/$(KIND).lock: some minutes, once."; \
	"$$python" -m venv --clear $(VENV)
	@$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/$(KIND).lock -r requirements/dev.lock
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@
