# Everything a developer does, from nothing but make and Python 3.10 or newer.
# `make` alone lists the targets. The first one that runs makes the virtual environment .venv.

PYTHON ?= python3
# Another torch, in a virtual environment of its own: make test TORCH=2.11.0
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Options for the program behind a target: make demo ARGS="--text book.txt", make test ARGS="-k layout"
ARGS ?=
# Code of more columns is cut in a laptop's window.
PAGES = README.md $(shell find docs -name '*.md')
# Where this is set, each of the many processes of the tests would compile the package and rewrite the tests anew.
unexport PYTHONDONTWRITEBYTECODE
# Each worker of pytest-xdist has a pool of ranks of its own; one that is done takes over a part of what others have left.
# One more than processors, since ranks often wait for each other.
WORKERS := --numprocesses $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 8))') --dist worksteal

# Types are checked while the tests begin, on one processor of several; both must be right.
BESIDE_TYPES := $(MAKE) --no-print-directory types & types=$$!;
BOTH := tests=$$?; wait $$types && exit $$tests

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-clients test-cuda check lint style types bench docs fix clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

demo: $(STAMP) ## train a GPT on 2 processes, resume it on 3, draw loss, memory and speed (about a minute and a half on two idle cores)
	@$(PY) examples/demo.py $(ARGS)

test: style ## what every change must pass: lint, types, house rules, every feature on real processes (seven to twelve minutes)
	@$(BESIDE_TYPES) $(PY) -m pytest $(WORKERS) $(ARGS); $(BOTH)

test-all: style ## before a release: every case of every test, compilers, demos, the wheel (an hour or two)
	@$(BESIDE_TYPES) $(PY) -m pytest $(WORKERS) --all $(ARGS); $(BOTH)

# A test that is skipped fails here: every library is installed.
test-clients: .venv-clients/.installed ## libraries that call fully_shard, each of them installed (about ten minutes)
	@.venv-clients/bin/python -m pytest $(WORKERS) --clients --all $(ARGS)

# torch's CUDA build (5.5 GB) on a device that computes nothing (tests/nullgpu): no GPU is needed.
test-cuda: .venv-cuda/.installed ## CUDA's and NCCL's own code without a GPU, on a device that computes nothing (about ten minutes)
	@.venv-cuda/bin/python -m tests.nullgpu.device -m pytest tests/nullgpu --all --tb=short --numprocesses 2 --dist worksteal $(ARGS)

check: lint ## lint, types and house rules
	@$(PY) -m pytest -q tests/test_architecture.py

lint: style types

style: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check -q .
	@$(PY) -m ruff format --check -q --line-length 88 $(PAGES)

# The types are those of the torch that constraints.txt names.
types: $(STAMP)
	@$(if $(TORCH),:,$(PY) -m mypy)

bench: $(STAMP) ## every benchmark beside torch's fully_shard, one table (about 6 minutes)
	@$(PY) benchmarks/run.py $(ARGS)

docs: .venv-docs/.installed ## build the documentation site into site/
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

fix: $(STAMP) ## let ruff repair and format the code
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(PY) -m ruff format --line-length 88 $(PAGES)

clean: ## remove the virtual environment and caches, keep runs/
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-docs/.installed: pyproject.toml constraints.txt
	@echo "setting up .venv-docs"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install -qq --disable-pip-version-check -c constraints.txt mkdocs-material "mkdocstrings[python]" ruff
	@touch $@

.venv-cuda/.installed: pyproject.toml constraints.txt constraints-cuda.txt
	@echo "setting up .venv-cuda (5.5 GB when torch has to be downloaded)"
	@$(PYTHON) -m venv .venv-cuda
	@.venv-cuda/bin/pip install -qq --disable-pip-version-check -c constraints-cuda.txt torch
	@grep -v '^torch==' constraints.txt > .venv-cuda/constraints.txt
	@.venv-cuda/bin/pip install -qq --disable-pip-version-check -c .venv-cuda/constraints.txt -e ".[dev]"
	@touch $@

.venv-clients/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "torchtitan needs Python 3.11 or newer; say which one: make PYTHON=python3.12")'
	@echo "setting up .venv-clients (2.5 GB, and more where torch is built for CUDA)"
	@$(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev,clients]"
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; say which one: make PYTHON=python3.12")'
	@echo "setting up $(VENV) (some minutes when torch has to be downloaded)"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -qq --disable-pip-version-check $(if $(TORCH),torch==$(TORCH),-c constraints.txt) -e ".[dev,demo]"
	@touch $@
