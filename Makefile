# Every target sets up .venv by itself; that takes a moment only when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

.PHONY: setup demo test test-oldest lint bench train clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup ## How well do the methods answer when images are noisy? The embedded model, a table and a report.
	$(BIN)/clustrs eval --config demo --output out/demo

test: setup ## All tests.
	$(BIN)/python -m pytest

test-oldest: ## The tests with models again, with the oldest transformers that is supported, in .venv-oldest.
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' 'transformers==5.18.*'
	.venv-oldest/bin/python -m pytest tests/models tests/test_embedded.py tests/cli/test_ask.py

lint: setup ## Style, formatting, types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## Selection against the matrix product it cannot do without; whole models, end to end.
	$(BIN)/python benchmarks/selection.py
	$(BIN)/python benchmarks/end_to_end.py

train: setup ## The embedded models, from nothing: hours. Stop it when you like, it goes on from its checkpoints.
	for family in llava onevision; do \
		for part in encoder language export; do $(BIN)/python -m recipes.train $$family $$part || exit 1; done; \
		$(BIN)/python -m recipes.measure mini-$$family || exit 1; \
	done
	$(BIN)/python -m recipes.card

clean:
	rm -rf .venv build dist out runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
