# make demo   environment, install, train, compress, show the table, write the report
# make test   environment, install, lint, types, import layers, tests (ten seconds of fuzzing too)
# make fuzz   mutated files, matrices, recipes and operators for SECONDS, of a new SEED or a given one
# make mutants   whether the tests notice small mistakes in the core

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SECONDS ?= 60

.PHONY: demo test fuzz check format mutants clean

demo: $(VENV)/.installed
	$(BIN)/torchcram demo

test: $(VENV)/.installed check
	$(BIN)/python -m pytest -n 2 --dist worksteal

fuzz: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pre-commit validate-config

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

mutants: $(VENV)/.installed  # mistakes in the core that the tests must notice; several minutes
	$(BIN)/python tests/mutants.py

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
