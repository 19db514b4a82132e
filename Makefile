# Every target is idempotent; all of them work from a fresh clone with Python 3.11 and nothing else.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-from-lock

.PHONY: setup demo test check bench experiments lock clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@scripts/setup "$(PYTHON)" "$(VENV)"
	@touch $(STAMP)

demo: setup
	@$(BIN)/bidgate-load demo --out out/demo

test: setup
	@$(BIN)/pytest

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
