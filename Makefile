# make help lists the targets. `make demo` and `make test` do all set-up on a fresh machine.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
PYTHON ?= python3
JOBS ?= 2
export PATH := $(CURDIR)/.venv/bin:$(PATH)

BIN := .venv/bin
TREE := build/release
SETUP := .venv/.penstock-setup
BUILD_SETUP := .venv/.penstock-build-setup
INSTALLED := .venv/.penstock-installed
CPP = $$(find src include python/src plugins tests examples benchmarks cmake \
  -name '*.h' -o -name '*.cpp' -o -name '*.cu')
PY := python tests tools examples benchmarks

# torch is not built with the sanitizers: containers that cross its border look overflown.
export ASAN_OPTIONS ?= detect_container_overflow=0
export UBSAN_OPTIONS ?= print_stacktrace=1:halt_on_error=1

.PHONY: help setup build build-tests cuda-plugin package test demo demo-3d picture lint format wheel asan clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## */\1\t/p' Makefile | expand -t 10

$(BUILD_SETUP): requirements-build.txt tools/setup
	@tools/setup --build $(PYTHON)
	@touch $@

$(SETUP): requirements-dev.txt tools/setup | $(BUILD_SETUP)
	@tools/setup $(PYTHON)
	@touch $@

setup: $(SETUP)  ## system packages and .venv with pinned tools, for builds, tests and lint

# The editable install takes what cmake has just built in the same tree; it compiles nothing itself.
# It knows the Python modules by name, so a new one needs it once more.
build: $(BUILD_SETUP)  ## the library and the Python package, editable, in .venv
	@$(MAKE) targets TARGETS="--target penstock _penstock"
	@stamp=$$({ cat pyproject.toml; find python/penstock -name '*.py' | sort; \
	  stat -c %Y $(TREE)/libpenstock.so $(TREE)/python/src/_penstock*.so; } | cksum); \
	if [ "$$stamp" != "$$(cat $(INSTALLED) 2>/dev/null)" ]; then \
	  echo "[build] pip install --editable ."; \
	  pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .; \
	  echo "$$stamp" >$(INSTALLED); \
	fi

build-tests: build  ## also the C++ tests, benchmarks and examples
	@$(MAKE) targets

cuda-plugin: build  ## also libpenstock_cuda.so, the optional fused Adam; needs nvcc or ROCm
	@echo "[cuda-plugin] cmake --preset release -DPENSTOCK_CUDA_PLUGIN=ON"
	@cmake --preset release -DPENSTOCK_CUDA_PLUGIN=ON >$(TREE).log 2>&1 || \
	  { cat $(TREE).log; exit 1; }
	@cmake --build --preset release -j $(JOBS) --target penstock_cuda
	@cmake --install $(TREE) --component cuda \
	  --prefix "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"

.PHONY: targets
targets:
	@echo "[build] cmake --preset release"
	@mkdir -p build
	@cmake --preset release >$(TREE).log 2>&1 || { cat $(TREE).log; exit 1; }
	@cmake --build --preset release -j $(JOBS) $(TARGETS)

# A wheel that `make wheel` left in dist/ saves the build, if it is of these sources, this Python and
# this torch.
package: $(BUILD_SETUP)  ## the Python package in .venv: a wheel of dist/ that fits, else make build
	@wheel=$$(PYTHONPATH=tools/wheel $(BIN)/python tools/wheel/fitting.py); \
	if [ -z "$$wheel" ] || [ -e $(INSTALLED) ]; then $(MAKE) build; else \
	  echo "[package] pip install $$wheel"; \
	  pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$$wheel"; \
	fi

test: $(SETUP) build-tests  ## C++ tests, then Python tests
	@echo "[test] ctest"
	@ctest --preset release -j $(JOBS)
	@echo "[test] pytest"
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile tests/python tests/parity tests/drop_in \
	  tests/device

demo: package  ## train a small GPT on two ranks of this machine; kill and resume another
	@echo "[demo] penstock bench --nproc 2 --precision auto --width 448 -o build/machine.json"
	@$(BIN)/python -m penstock bench --nproc 2 --precision auto --width 448 -o build/machine.json
	@echo "[demo] penstock run --nproc 2 examples/train_gpt.py --demo --machine build/machine.json"
	@$(BIN)/python -m penstock run --nproc 2 examples/train_gpt.py --demo --machine build/machine.json
	@echo "[demo] examples/resume.py"
	@$(BIN)/python examples/resume.py

# DEVICE=sim trains on the simulated accelerator of tests/device.
DEVICE ?= cpu
demo-3d: $(SETUP) package  ## train a GPT and a Llama on 8 ranks: data x tensor x pipeline
	@if [ "$(DEVICE)" = sim ]; then $(MAKE) targets TARGETS="--target _sim"; fi
	@echo "[demo-3d] penstock run --nproc 8 examples/train_3d.py --demo --device $(DEVICE)"
	@$(BIN)/python -m penstock run --nproc 8 examples/train_3d.py --demo --device $(DEVICE)

# Of the page: make picture PART="--top 540 --height 900".
PART ?= --height 1180
picture: $(SETUP) package  ## docs/report.png, a part of the report of make demo; needs chromium
	@echo "[picture] tools/report_picture.py build/demo docs/report.png"
	@$(BIN)/python tools/report_picture.py build/demo docs/report.png $(PART)

# mkdocs and its plugins are not wanted in .venv: they come when this is asked for.
DOCS := build/docs-venv
$(DOCS)/.installed: requirements-docs.txt | $(SETUP)
	@echo "[docs] pip install -r requirements-docs.txt"
	@$(BIN)/python -m venv --clear $(DOCS)
	@$(DOCS)/bin/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

.PHONY: docs
docs: $(DOCS)/.installed  ## the documentation with the API reference, a site in build/site
	@$(DOCS)/bin/python tools/docs_site.py
	@echo "[docs] mkdocs build --strict"
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --config-file build/docs/mkdocs.yml \
	  >build/docs.log 2>&1 || { cat build/docs.log; exit 1; }
	@echo "[docs] build/site/index.html"

lint: $(SETUP)  ## format, types, spelling, layers, sizes, names
	@echo "[lint] clang-format"
	@$(BIN)/clang-format --dry-run -Werror $(CPP)
	@echo "[lint] ruff"
	@$(BIN)/ruff check --quiet $(PY)
	@$(BIN)/ruff format --quiet --check $(PY)
	@echo "[lint] mypy"
	@$(BIN)/mypy --strict --no-error-summary python/penstock
	@echo "[lint] codespell"
	@$(BIN)/codespell
	@echo "[lint] layers, sizes, names"
	@for tool in check_layers check_size check_names; do \
	  $(BIN)/python tools/$$tool.py --self-test; $(BIN)/python tools/$$tool.py; \
	done
	@echo "[lint] claims of the pages"
	@$(BIN)/python tools/check_claims.py --strict

format: $(SETUP)  ## rewrite sources as lint wants them
	@$(BIN)/clang-format -i $(CPP)
	@$(BIN)/ruff check --quiet --select I --fix $(PY)
	@$(BIN)/ruff format --quiet $(PY)

wheel: build  ## a wheel and an sdist in dist/, tried in a fresh virtual environment
	@tools/wheel/make

asan: $(SETUP)  ## C++ tests under the address and undefined-behaviour sanitizers
	@echo "[asan] cmake --preset asan"
	@mkdir -p build
	@cmake --preset asan >build/asan.log 2>&1 || { cat build/asan.log; exit 1; }
	@cmake --build --preset asan -j $(JOBS)
	@ctest --preset asan -j $(JOBS)

clean:  ## remove what building made; .venv stays
	rm -rf build dist $(INSTALLED)
