# `make demo` trains a small model, `make test` checks a change. Both make .venv the first time.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# No --name: every demo is a run of its own, however often it is started.
DEMO ?= train digits --processes auto
KILLS ?= 100
# Files of tests run two at a time: ranks of a test wait for one another much of its time.
PYTEST := $(PY) -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := test
.PHONY: demo test test-slow test-long faults soak lint types format bench clean

demo: .venv/.installed
	.venv/bin/samestep $(DEMO)

test: lint
	$(PYTEST) -m "not slow and not long and not gpu"

test-slow: types
	$(PYTEST) -m "slow and not long and not gpu"

# What is much like other tests; some 15 minutes.
test-long: .venv/.installed
	$(PYTEST) -m "long and not gpu"

# Tries every fault and writes what it sees to docs/faults.md.
faults: .venv/.installed
	$(PY) -m pytest tests/faults/test_faults.py --faults-page

# Kills a run at random moments; some four seconds a kill.
soak: .venv/.installed
	PYTHONPATH=tests $(PY) tests/soak.py --kills $(KILLS)

lint: .venv/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: .venv/.installed
	$(PY) -m mypy

format: .venv/.installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: .venv/.installed
	$(PY) benchmarks/startup.py
	$(PY) benchmarks/step_time.py

# Leaves runs/ and .venv alone; remove those by hand.
clean:
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: no '$(PYTHON)' here. Samestep needs Python 3.11 or later: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$(PYTHON)' is $$($(PYTHON) --version 2>&1), Samestep needs 3.11 or later: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv || { rm -f $@; exit 1; }

# On Linux constraints.txt asks for torch's CPU build. Where no index that pip knows has it, the default
# build of the same version is taken, and this says so.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	cp constraints.txt .venv/constraints.txt
	$(PIP) install -q --no-deps -c .venv/constraints.txt torch || { \
	  echo "note: pip found no CPU build of torch; taking the default build, which is larger" >&2; \
	  sed 's/+cpu//' constraints.txt > .venv/constraints.txt; }
	$(PIP) install -q -c .venv/constraints.txt -e '.[dev]'
	@touch $@
