# Every target is idempotent; all of them work from a fresh clone with Python 3.11 and nothing else.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-from-lock

.PHONY: setup demo test test-vllm check bench experiments lock clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@scripts/setup "$(PYTHON)" "$(VENV)"
	@touch $(STAMP)

demo: setup
	@$(BIN)/bidgate-load demo --out out/demo

test: setup
	@$(BIN)/pytest

# Real vLLM on the CPU, or with BIDGATE_VLLM_URLS="http://a:8000 http://b:8000" on workers that run already.
test-vllm: setup
	@[ -n "$$BIDGATE_VLLM_URLS" ] || { scripts/vllm-env "$(PYTHON)" && $(BIN)/python -m tests.vllm.workers --check; }
	@$(BIN)/pytest -m vllm --timeout 300 tests/vllm

check: setup
	@scripts/check

bench: setup
	@$(BIN)/bidgate-load bench all --out out/bench

experiments: setup
	@$(BIN)/bidgate-load experiments --out out/experiments

lock:
	@scripts/lock

clean:
	@rm -rf $(VENV) out
