# make demo       environment, install, train, compress, show the table, write the report
# make test       environment, install, lint, types, import layers, words, documentation, tests
# make pytest     the tests alone; TORCH=2.8.* runs them with that torch (below)
# make properties the property tests with new random examples; ROUNDS=10 looks ten times as long
# make fuzz       mutated files, matrices, recipes and operators for SECONDS, of a new SEED or a given one
# make sanitize   tests of native code, artefacts and runtime with AddressSanitizer and UBSan (g++)
# make emulate    tests of the CPU kernels on an emulated ARM (qemu-user, g++-aarch64-linux-gnu)
# make mutants    whether the tests notice small mistakes in the core; several minutes
# make docs       the documentation site, in build/docs/; warnings are errors
# make dist       source distribution and wheel with kernels, in dist/
#
# Packages have the versions of constraints.txt. With TORCH=2.8.*, say, torch has that version and all
# others are the newest that fit it and the Python in use; TORCH=2.* is the newest torch.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SECONDS ?= 60
ROUNDS ?= 1
VERSIONS := $(if $(TORCH),"torch==$(TORCH)",-c constraints.txt)

.PHONY: demo test pytest properties check format fuzz sanitize emulate mutants docs dist clean

demo: $(VENV)/.installed
	$(BIN)/torchcram demo

test: check pytest

pytest: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

properties: $(VENV)/.installed
	for round in $$(seq $(ROUNDS)); do \
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile random -m "hypothesis and not gpu" || exit 1; \
	done

fuzz: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/prose.py
	$(BIN)/pre-commit validate-config
	$(MAKE) docs

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Into a folder of its own: the library of the package stays as it is. libstdc++ is named because the
# sanitizers look for the functions that they replace when the process starts.
SANITIZED := $(CURDIR)/build/sanitize/libtorchcram.so
sanitize: $(VENV)/.installed
	$(BIN)/python -m torchcram.runtime.build --sanitize $(SANITIZED)
	TORCHCRAM_LIBRARY=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so) \
	$$($(CXX) -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest -q -s tests/kernels/cpu tests/artifact tests/runtime

emulate: $(VENV)/.installed
	$(BIN)/python tests/emulate.py

mutants: $(VENV)/.installed
	$(BIN)/python tests/mutants.py

docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -E -n -W --keep-going -q -b html docs build/docs

dist: $(VENV)/.installed
	TORCHCRAM_KERNELS=require $(BIN)/hatchling build --directory dist

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(VERSIONS) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
