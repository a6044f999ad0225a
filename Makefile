# Two commands do everything: `make demo` runs the main job, `make test` checks the project.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test fuzz faults lint lint-js clean

demo: .venv/.demo
	$(BIN)/curvssl demo

# Two test files at a time, each with one thread: many of the tests start processes of their own.
test: .venv/.dev lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# 100,000 random inputs to the library; `make test` has 500 of them.
fuzz: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py

# Damage, kills, full disks: the campaigns of docs/reliability.md. A quarter of an hour on two busy cores.
faults: .venv/.dev
	$(BIN)/python benchmarks/faults.py --out results/faults.json
	$(BIN)/python results/tables.py

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The page's scripts: linted, and typed by their JSDoc. Needs npm.
lint-js:
	npx --yes --package eslint@10.14.0 eslint curvssl/report/*.js
	npx --yes --package typescript@7.0.2 tsc --noEmit --allowJs --checkJs --strict --target es2022 \
		--lib es2022,dom,dom.iterable curvssl/report/*.js

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
