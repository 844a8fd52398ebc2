# Everything a developer does, from nothing but make and Python 3.10 or newer.
# `make` alone lists the targets. The first one that runs makes the virtual environment .venv.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Options for the program behind a target: make demo ARGS="--text book.txt", make test ARGS="-k layout"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test check bench fix clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-6s %s\n' "$$name" "$$text"; done

demo: $(STAMP) ## train a GPT on 2 processes, resume it on 3, draw the loss (2 to 5 minutes)
	@$(PY) examples/demo.py $(ARGS)

test: check ## check, then every test
	@$(PY) -m pytest $(ARGS)

check: $(STAMP) ## lint, types and house rules
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) -m pytest -q tests/test_architecture.py

bench: $(STAMP) ## every benchmark beside torch's fully_shard, one table (about 6 minutes)
	@$(PY) benchmarks/run.py $(ARGS)

fix: $(STAMP) ## let ruff repair and format the code
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean: ## remove the virtual environment and caches, keep runs/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; say which one: make PYTHON=python3.12")'
	@echo "setting up $(VENV) (some minutes when torch has to be downloaded)"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev,demo]"
	@touch $@
