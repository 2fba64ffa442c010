# Set-up, training and checks. `make help` lists the targets.
#
#   make train                 makes the environment .venv where it is missing, then trains on the embedded corpus
#   make train PYTHON=python3  uses that interpreter as it is and makes no environment; so does every target
#
# An environment holds exactly the versions of requirements/: gpu.lock where an NVIDIA driver answers when it is made,
# otherwise cpu.lock. KIND=cpu or KIND=gpu decides it by hand.

SHELL := /bin/sh
.SHELLFLAGS := -ec
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
# Hundreds of processes import the same modules: byte code is kept, also where the shell says not to.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
made := $(patsubst $(VENV)/installed-%,%,$(wildcard $(VENV)/installed-*))
KIND := $(or $(KIND),$(made),$(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu))
# Processes of the tests, for two cores: many tests wait for what they have provoked.
JOBS := 3
# Neighbours share fixtures: each process takes a stretch of the tests, then of another's what is left.
SPREAD = -n $(JOBS) --dist worksteal

# May be given on the command line:
TORCH_INDEX =# a further package index for torch, for example that of the CPU builds named on PyTorch's installation page
CONFIG =# what make train trains, a name or a YAML file; without it the small configuration for this machine
ARGS =# appended to the command of train, accept, pytest and test-mutants
QUICK =# 1: make accept runs the quick leg
LEG =# number of the one leg that make accept runs

ifdef PYTHON
RUN := $(PYTHON)
ENV := check-python
COLLECTED :=
else
RUN := $(VENV)/bin/python
ENV := $(VENV)/installed-$(KIND)
COLLECTED := $(VENV)/collected
endif

SOURCES := nsa tests tools

.PHONY: help train bench accept test pytest pytest-kernels test-compile test-faults test-gpu lint format test-mutants lock wheel device-wheels clean check-python
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1: \2/p' $(MAKEFILE_LIST) | awk -F': ' '{ printf "%-14s %s\n", $$1, $$2 }'

train: $(ENV) ## train a small model on the embedded corpus and leave a run folder under runs/ (CONFIG=, ARGS=)
	@test -z "$(PYTHON)" || $(RUN) tools/setup_env.py --check train
	@config="$(CONFIG)"; \
	if [ -z "$$config" ]; then \
	    config=$$($(RUN) -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")')-small; \
	fi; \
	$(RUN) -m nsa train "$$config" $(ARGS)

test: $(ENV) ## formatting, lint and types, and all tests with five mutants among them, two of these at a time
	@$(MAKE) --no-print-directory --jobs 2 lint $(COLLECTED) pytest-kernels pytest

# One process compiles what the tests import, rather than all five at the same time.
$(VENV)/collected: $(ENV)
	@TRITON_INTERPRET=1 $(RUN) -m pytest --collect-only --quiet --ignore tests/gpu >/dev/null || true
	@touch $@

pytest: $(ENV) | $(COLLECTED) ## the tests alone, without the kernels' (ARGS=)
	@test -z "$(PYTHON)" || $(RUN) tools/setup_env.py --check test
	$(RUN) -m pytest $(SPREAD) --ignore tests/gpu -m "not gpu and not faults and not slow and not acceptance" $(ARGS)

pytest-kernels: JOBS = 2# which compute all the time
pytest-kernels: $(ENV) | $(COLLECTED) ## the Triton kernels alone, on the CPU in Triton's interpreter, which is chosen for a whole process
	@test -z "$(PYTHON)" || $(RUN) tools/setup_env.py --check test
	TRITON_INTERPRET=1 $(RUN) -m pytest $(SPREAD) tests/kernels

test-faults: $(ENV) ## every provoked fault in its full count, one line a kind at the end (ARGS=)
	@test -z "$(PYTHON)" || $(RUN) tools/setup_env.py --check test
	$(RUN) -m pytest $(SPREAD) tests/faults -m "faults or not faults" $(ARGS)
	$(RUN) -m pytest $(SPREAD) tests --ignore tests/faults --ignore tests/kernels -m faults $(ARGS)
	TRITON_INTERPRET=1 $(RUN) -m pytest tests/kernels -m faults $(ARGS)

test-compile: $(ENV) ## compile every kernel for GPUs of six kinds that are not there: stack and shared memory (JOBS=, ARGS=)
	@test -z "$(PYTHON)" || $(RUN) tools/setup_env.py --check test
	$(RUN) -m tools.compile_only --jobs $(JOBS) $(ARGS)

test-gpu: $(ENV) ## what only a CUDA GPU can show; of a million tokens with ARGS="-m slow"
	@test -z "$(PYTHON)" || $(RUN) tools/setup_env.py --check test-gpu
	$(RUN) -m pytest tests/gpu tests/train/test_gpu.py -m "not slow" $(ARGS)

bench: $(ENV) ## on a GPU: every measurement behind the committed rows, into benchmarks/ (ARGS="--list", "--only seed wide", "--shards DATA")
	@test -z "$(PYTHON)" || $(RUN) tools/setup_env.py --check train
	$(RUN) -m tools.measure $(ARGS)
	$(RUN) -m nsa bench report benchmarks/results/*.jsonl --out benchmarks/report

accept: $(ENV) ## on a GPU: the acceptance run, the product as a user starts it (QUICK=1, LEG=2, ARGS="--collect-only")
	$(RUN) -m pytest tests/acceptance -m acceptance -s -v -p no:cacheprovider --confcutdir tests/acceptance \
	    $(if $(QUICK),--quick) $(if $(LEG),--leg $(LEG)) $(ARGS)

lint: $(ENV) ## formatting, lint and types
	@test -z "$(PYTHON)" || $(RUN) tools/setup_env.py --check lint
	$(RUN) -m ruff format --check $(SOURCES)
	$(RUN) -m ruff check $(SOURCES)
	$(RUN) -m mypy

format: $(ENV) ## format the code and apply the safe fixes
	@test -z "$(PYTHON)" || $(RUN) tools/setup_env.py --check lint
	$(RUN) -m ruff format $(SOURCES)
	$(RUN) -m ruff check --fix $(SOURCES)

test-mutants: $(ENV) ## break the code in every listed way, one at a time; the tests must notice each
	@test -z "$(PYTHON)" || $(RUN) tools/setup_env.py --check test
	$(RUN) -m tools.mutants --jobs $(JOBS) $(ARGS)

lock: $(ENV) ## pin the newest versions that fit pyproject.toml (network, Python 3.11)
	$(RUN) tools/lock.py

wheel: $(ENV) ## build the wheel into dist/
	$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

device-wheels: $(ENV) ## download into .wheels/ what an offline GPU machine lacks (tools/device_wheels.txt)
	$(RUN) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest .wheels \
	    --constraint requirements/gpu.lock --constraint requirements/dev.lock --requirement tools/device_wheels.txt
	@ls .wheels

clean: ## remove the environment, built files and caches; runs/ stays
	rm -rf $(VENV) .wheels dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find nsa tests tools -name __pycache__ -type d -exec rm -rf {} +

check-python:
	@sh tools/find_python.sh "$(PYTHON)" >/dev/null

# The stamp is written last: an installation that broke off is taken up again, a complete one never repeated.
$(VENV)/installed-$(KIND): requirements/$(KIND).lock requirements/dev.lock pyproject.toml
	@python=$$(sh tools/find_python.sh); \
	"$$python" tools/setup_env.py --make $(VENV) --kind $(KIND) --torch-index "$(TORCH_INDEX)"; \
	rm -f $(VENV)/installed-*; touch $@
