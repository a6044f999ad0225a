# Two commands do everything: `make demo` runs the main job, `make test` checks the project.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint clean

demo: .venv/.demo
	$(BIN)/curvssl demo

test: .venv/.dev lint
	$(BIN)/python -m pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Versions are pinned in constraints.txt; a stamp file remembers that the installation is done.
.venv/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

.venv/.dev: .venv/.demo
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
