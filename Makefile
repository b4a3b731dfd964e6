# Each target does the set-up that it needs, in .venv; a second call finds it done.
#
#   make demo     the main job on the virtual engine, and its report
#   make test     everything that is checked: format, lint, types, stale docs, the whole suite
#   make setup    the set-up alone        make check   format, lint, types, stale docs
#   make fix      format, and mend what ruff can mend
#   make nightly  each patch alone and each left out, compared with results/reference/
#   make clean    remove .venv and caches (never results)
#
# PYTHON=/path/to/python3.11   which Python makes .venv
# BUILD=cuda                   the CUDA build of vLLM and torch in place of the CPU one
# ENABLE=qos,mlfq SEEDS=5      what `make demo` and `make nightly` run
# PYTEST_ARGS="-k seam -n 2"   more words for pytest

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
BUILD ?= cpu
ENABLE ?= qos,mlfq,slru
SEEDS ?= 3
# One run more than there are cores: nine runs on two cores would leave one idle while the last one ends.
JOBS ?= $(shell expr $$(nproc) + 1)
BIN := .venv/bin
CODE := patches harness workloads reports scripts tests

.DEFAULT_GOAL := help
.PHONY: help setup demo nightly test test-live check fix clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

setup:
	@$(PYTHON) scripts/setup.py --build $(BUILD)

demo: setup
	$(BIN)/bench run --enable $(ENABLE) --phase all --seeds $(SEEDS) --jobs $(JOBS)
	$(BIN)/bench report results/

nightly: setup
	$(BIN)/bench doctor
	$(BIN)/python -m pytest -m nightly -n auto --maxprocesses 4 tests
	$(BIN)/bench run --enable $(ENABLE) --phase all --seeds $(SEEDS) --each --leave-one-out --out results/nightly
	$(BIN)/bench report results/nightly
	$(BIN)/bench compare results/reference results/nightly --gate results/reference/gate.toml \
	  --markdown results/nightly/compare.md --json results/nightly/compare.json

check: setup
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/python scripts/patch_docs.py --check

test: check
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m smoke tests/live

# Real servers, one at a time; on a machine that does nothing else.
test-live: setup
	$(BIN)/python -m pytest -m live tests/live $(PYTEST_ARGS)

fix: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
