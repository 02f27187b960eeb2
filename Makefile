# Everything a checkout needs. Each target builds .venv first, once; again only when pyproject.toml or constraints.txt
# change. Nothing outside this folder is written, except pip's cache.

PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt

# The demo needs no development tools; with these installed there is nothing to add for it.
DEV    := .venv/.dev
TRAIN  := $(if $(wildcard $(DEV)),$(DEV),.venv/.train)

# mypy and import-linter do not follow setuptools' package-dir: .typing is the same tree as symlinks.
TYPED  := -p unlost.journal -p unlost.replay -p unlost.engine -p unlost.cli

# Their slow tests use one core each; those of the other folders start Ray, which wants the machine to itself.
WITHOUT_RAY := tests/journal tests/replay tests/simulation

.PHONY: help demo test test-fast check format bench mutants docs clean distclean browser
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(TRAIN)  ## train, kill -9 in the middle, resume, show what was kept (a few minutes)
	$(BIN)/unlost demo --dir runs/demo

test: test-fast  ## every test
	$(BIN)/python -m pytest -m slow -n 2 $(WITHOUT_RAY)
	$(BIN)/python -m pytest -m slow $(WITHOUT_RAY:%=--ignore=%)

test-fast: $(DEV)  ## the tests that need no Ray and take no time, on two cores
	$(BIN)/python -m pytest -m 'not slow' -n 2

check: $(DEV)  ## style, types, layers, generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.typing $(BIN)/mypy $(TYPED)
	PYTHONPATH=.typing $(BIN)/lint-imports --no-cache
	$(BIN)/python docs/generate.py --check

format: $(DEV)  ## rewrite sources in the common style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.bench  ## measure all of docs/benchmarks.md again (a quarter of an hour, on an otherwise idle machine)
	$(BIN)/python -m benchmarks

mutants: $(DEV)  ## break the code on purpose; every mutant must be killed by a named test (one of them: ONLY=name)
	$(BIN)/python -m tests.mutants $(ONLY)

docs: $(DEV)  ## write the generated pages again
	$(BIN)/python docs/generate.py

browser:  ## install Chromium for the tests of the HTML report (Debian or Ubuntu, as root); without it they are skipped
	@command -v chromedriver >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; }

clean:  ## remove what tools and demo left behind (not .venv)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info runs/demo
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## and .venv
	rm -rf .venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "unlost needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.train: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[train]'
	@touch $@

.venv/.bench: $(DEV)
	$(PIP) -e '.[bench]'
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@
