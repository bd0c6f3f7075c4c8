# `make demo` runs the main job, `make test` every check. Each sets up what it needs in .venv, once.
# Needs Python >= 3.11 (PYTHON=...) and the Rust toolchain of rust-toolchain.toml.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
UV     := $(BIN)/uv pip install --quiet --python $(BIN)/python

DEPS   := $(VENV)/.deps
BUILT  := $(VENV)/.built
CORE   := $(shell find crates -name '*.rs' -path '*/src/*') $(wildcard crates/*/Cargo.toml) Cargo.toml Cargo.lock rust-toolchain.toml pyproject.toml

.PHONY: help demo test lint types rust-test python-test bench clean

help:
	@sed -n 's/^## \([a-z-]*\): /  make \1\t/p' Makefile | expand -t 20

## demo: two processes, real NIXL: tag, negotiate, transfer, convert, verify every byte
demo: $(BUILT)
	@$(BIN)/kvpd demo

## test: formats, lints, types, and all tests
test: lint types rust-test python-test

## lint: rustfmt, clippy, ruff, and who may import what
lint: $(BUILT)
	cargo fmt --all --check
	cargo clippy --quiet --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --quiet --check .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-cache --config pyproject.toml

## types: mypy --strict, and the stub against the compiled module
types: $(BUILT)
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest kvpd._kvpd

## rust-test: the core, without an interpreter
rust-test:
	cargo test --quiet -p kvpd

## python-test: the rest
python-test: $(BUILT)
	$(BIN)/python -m pytest

## bench: descriptor ids and run detection, against numpy
bench: $(BUILT)
	cargo bench --quiet -p kvpd

$(DEPS): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@echo "installing dependencies into $(VENV) (torch is the large one)"
	@$(UV) --constraint constraints.txt --requirements pyproject.toml --extra dev --extra convert --extra nixl
	@touch $@

$(BUILT): $(DEPS) $(CORE)
	@echo "building the core"
	@VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --quiet --release --uv
	@touch $@

clean:
	rm -rf $(VENV) target dist
