# Every target is idempotent and works from a fresh clone with Python 3.11 and nothing else.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-from-lock

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-vllm bench-vllm soak fuzz lint check bench experiments reference lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv from the lock file (every other target does it when needed)

$(STAMP): requirements.lock pyproject.toml
	@scripts/setup "$(PYTHON)" "$(VENV)"
	@touch $(STAMP)

demo: setup ## three policies on four mock workers over real HTTP, one comparison (2 minutes)
	@$(BIN)/bidgate-load demo --out out/demo

# Of two processes one has whatever uses sockets, the other what only computes (tests/conftest.py); JOBS=1 for one after
# the other.
JOBS ?= $(shell [ "$$(getconf _NPROCESSORS_ONLN)" -ge 2 ] && echo 2 || echo 1)
test: setup ## the test suite (6 minutes on two idle processors)
	@$(BIN)/pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadgroup)

# Or, on workers that run already: make test-vllm BIDGATE_VLLM_URLS="http://a:8000 http://b:8000"
test-vllm: setup ## the tests against real vLLM on the CPU (installs it: 2.5 GB, 4 GiB of memory)
	@[ -n "$$BIDGATE_VLLM_URLS" ] || { scripts/vllm-env "$(PYTHON)" && scripts/nixl-env && $(BIN)/python -m tests.vllm.workers --check; }
	@$(BIN)/pytest -m vllm tests/vllm

soak: setup ## chaos: workers that fail in every way, clients that leave; whole and in pairs; fails if anything is lost (SECONDS=120 SEED=0)
	@$(BIN)/bidgate-load soak --duration-s $(or $(SECONDS),120) --seed $(or $(SEED),0) --out out/soak

fuzz: setup ## fuzz both sockets, bodies, headers and metrics pages; prints what was seen (EXAMPLES=2000)
	@FUZZ_EXAMPLES=$(or $(EXAMPLES),2000) $(BIN)/pytest --timeout 3600 tests/fuzz

lint: setup ## format, lint, types, layers
	@scripts/lint

check: lint test ## everything that must pass before a commit

bench: setup ## benchmarks into out/bench
	@$(BIN)/bidgate-load bench all --out out/bench

# Each load is a measurement of its own, on fresh engines; only a machine with nothing else to do tells the truth.
# SHARED=1 lets engines and routers share all processors, which makes the engines slower for routers than for none.
LOADS ?= 1.1 1.3 1.5
DURATION ?= 60
VLLM_ENGINES := tests.vllm.workers --count 2 --batch-limit 8 --kv-blocks 100 $(if $(SHARED),,--apart)
bench-vllm: setup ## bidgate, vllm-router and plain round robin before two real vLLM engines (25 minutes for each of LOADS)
	@scripts/vllm-env "$(PYTHON)" && scripts/vllm-router-env "$(PYTHON)"
	@set -e; for load in $(LOADS); do \
	  $(BIN)/python -m $(VLLM_ENGINES) -- $(BIN)/bidgate-load bench vllm --max-num-seqs 8 --vocabulary-tokens 2048 \
	    --load $$load --duration-s $(DURATION) --out out/bench/vllm-$$load \
	    --docs docs/results/vllm-side-by-side.md --part "load $$load$(if $(SHARED), on shared processors)" --workers; done

experiments: setup ## the paper's experiments and more, reduced; docs/results anew (DATA=folder of recorded traces)
	@$(BIN)/bidgate-load experiments --out out/experiments --docs docs/results $(if $(DATA),--data $(DATA))

reference: setup ## write deploy/settings.yaml and the tables of settings and metrics again
	@$(BIN)/python -m scripts.reference

lock: ## pin the dependencies again (needs uv)
	@scripts/lock

clean: ## remove .venv, out and caches (not .vllm)
	@rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
