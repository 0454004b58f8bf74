# `make demo` and `make check` are all that a stranger needs; both install what is missing into .venv first.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1

.PHONY: setup demo check lint plain shapes clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/graven demo

check: setup
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint plain shapes

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

plain: setup
	$(BIN)/pytest

shapes: setup                   # the same tests with every annotated shape checked
	$(BIN)/pytest --jaxtyping-packages=graven,beartype.beartype

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
