# make demo | test | check | bench. Each makes .venv on first use, with the pinned versions of constraints.txt.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip

.PHONY: demo test check bench clean

demo: $(STAMP)
	$(BIN)/foreload demo $(ARGS)

# In two processes; each computes on one thread, or they would wait for each other's.
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# Types are checked on the installed layout: mypy cannot follow the mapping of folders to packages.
check: $(STAMP)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	rm -rf .build/site build
	$(PIP) install -qq --no-deps --no-build-isolation --target .build/site .
	rm -rf build
	cd .build && MYPYPATH=site ../$(BIN)/mypy --config-file ../pyproject.toml --strict -p foreload

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -f backend/native/*.so
	rm -rf $(VENV) .build build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard backend/native/src/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -qq -c constraints.txt -e '.[dev]'
	rm -rf build
	touch $@
