# Needs make and Python 3.10 or newer; everything else goes into .venv.
#   make run PYTHON=python3.12      another Python
#   make test ARGS="tests/core -x"  further arguments for pytest
#   make test JOBS=1                so many tests at once

PYTHON ?= python3
JOBS ?= 3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

FIRST := outputs/first.mp4
PROMPT := a red circle moves to the right on a blue background

# Tests wait for processes that they start a fifth of their time, so one more runs at once than CI has
# cores. One thread for each: more would only get in each other's way.
# Tests start dozens of processes, and each would compile all of the package again where nobody may
# keep what is compiled.
# Freed memory stays with its process: a seventh of the time of tests is the system's, which
# otherwise zeroes every page of it again, and half of that is saved.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=67108864

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help install run test test-isa test-openai lint types format docs site clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY)  ## set up .venv (once, and again when what it is made of changes)

# torch goes first and by its exact version, so that nothing else has a say in which build comes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$(PYTHON) is missing or older than Python 3.10;" \
			"name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

run: $(READY)  ## make a first video; the last line is its path (everyframe prints it)
	@mkdir -p $(dir $(FIRST))
	@$(BIN)/everyframe generate "$(PROMPT)" -o $(FIRST) --seed 7

test: $(READY)  ## run the tests
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# Each run of the tests is a process of its own, as instructions are chosen once in each.
test-isa: $(READY)  ## run the tests once for each set of instructions that the CPU has (an hour)
	@$(TEST_ENV) $(BIN)/python tests/helpers/instruction_sets.py -n $(JOBS) --dist loadfile $(ARGS)

test-openai: $(READY)  ## run OpenAI's client of several versions against the server (minutes)
	@$(TEST_ENV) $(BIN)/python tests/helpers/openai_versions.py $(ARGS)

lint: $(READY)  ## check style and likely mistakes
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY)  ## check types
	@$(BIN)/mypy

format: $(READY)  ## put the code in form
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

site: $(READY)  ## build the site of docs/ into build/site, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: $(READY)  ## write what is made from the code: reference pages, pictures, signatures for editors
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/picture.py
	@$(BIN)/python docs/report_picture.py

clean:  ## remove what the above has made
	rm -rf $(VENV) outputs build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
