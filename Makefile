# AgentENV: everything a person or CI calls. Each target works from a fresh clone.
#
#   make setup      bring what the machine lacks (root), build; seconds when nothing is to do
#   make demo       set-up, then the whole road shown: image, sandbox, SDK, web server, shell, port, WebSocket
#   make test       set-up, checks, the tests of the representative set
#   make test-full  the same with the long ones
#   make check      linters, types, import contract, shape of the tree
#   make bench      the benchmarks, as ratios in one run
#   make build      the Rust programs and the extension again, after a change
#   make lock       new versions of the Python dependencies
#   make clean      what was built and downloaded in this clone (not /opt/agentenv)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# The toolchain that set-up found; read again by make once set-up has written it.
-include .cache/setup.mk

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
CARGO_TARGET_DIR := $(CURDIR)/target
export CARGO_TARGET_DIR

.PHONY: help setup build check check-python check-rust test test-full demo bench lock clean

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@bash tools/setup/setup.sh

build:
	@bash tools/setup/setup.sh rust python extension binaries

$(BIN)/python:
	@echo "no environment yet; run: make setup" >&2; exit 1

check: $(BIN)/python check-python check-rust

check-python:
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python tools/check_tree.py
	$(BIN)/lint-imports --no-cache | tail -n 4
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

# Some distributions' toolchains come without these two: said by name, and an error in CI.
check-rust:
	@for part in fmt clippy; do command -v cargo-$$part >/dev/null || { \
	    echo "not checked: cargo $$part is missing (rustup component add rustfmt clippy)" >&2; \
	    test -z "$${CI:-}"; exit; }; done; \
	set -x; cargo fmt --all --check; \
	cargo clippy --quiet --workspace --all-targets --locked -- -D warnings

# Set-up may just have chosen the toolchain, so the rest runs in a make that has read it.
# pytest comes last: its closing line ends the output, its exit code is make's verdict.
test: setup
	@$(MAKE) check
	@$(MAKE) test-rust
	@$(PYTEST) -m "not full"

test-full: setup
	@$(MAKE) check
	@$(MAKE) test-rust
	@$(PYTEST)

.PHONY: test-rust
test-rust:
	cargo test --quiet --workspace --locked

# All of set-up but what tests alone need.
demo:
	@bash tools/setup/setup.sh packages kernel erofs rust python extension sdks binaries
	@$(BIN)/python -m tools.demo

bench: setup
	@$(BIN)/python -m benchmarks

lock: $(BIN)/python
	@test -x .cache/venvs/lock/bin/uv || { $(BIN)/python -m venv .cache/venvs/lock && .cache/venvs/lock/bin/pip install --quiet uv; }
	@UV=$(CURDIR)/.cache/venvs/lock/bin/uv bash tools/setup/lock.sh

clean:
	rm -rf target .venv .cache .pytest_cache .ruff_cache .hypothesis python/agentenv/_core*.so
