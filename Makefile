# `make demo` trains a small model, `make test` tests a change. Both create .venv first if necessary.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# No --name: every demo is a new run.
DEMO ?= train digits --processes auto
KILLS ?= 100
# Of the soak: parts, pipeline or launcher; recipe, loop or script (tests/helpers/soak.py).
MODE ?= parts
SUBJECT ?= recipe
RESULTS ?= benchmarks/results
PLAIN_LOOP ?=
STARTUP ?= --repeats 5
PLAIN_LOOP_SPEED ?=
# Of `make test-torch`: the tests of the core.
CORE ?= tests/unit tests/own_loops
# Of the checks on GPUs: cuda or cpu, and options of the script, such as --only. Without .venv the Python with torch is used.
DEVICE ?= cuda
GPU ?=
GPU_PY ?= $(if $(wildcard .venv/bin/python),$(PY),$(PYTHON))
# Three test files at a time: the ranks of a test spend much of the time in waits. With caches of bytecode, whatever the
# environment: without, each of the three rewrites the assertions of all files, for half a minute. Threads of torch wait
# without CPU time: with more processes than cores, waits of the default take more time than the tests.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(PY) -m pytest -n 3 --dist loadfile

.DEFAULT_GOAL := test
.PHONY: demo test test-slow test-long faults soak plain-loop scripts package test-torch lint types format bench plain-loop-speed gpu nccl gpus gpu-wheels docs clean

demo: .venv/.installed
	.venv/bin/samestep $(DEMO)

test: lint
	$(PYTEST) -m "not slow and not long and not gpu"

test-slow: types
	$(PYTEST) -m "slow and not long and not gpu"

# Variants of other tests, which CI does not run; an hour.
test-long: .venv/.installed
	$(PYTEST) -m "long and not gpu"

# Runs every fault case and writes the results to docs/reference/faults.md.
faults: .venv/.installed
	$(PY) -m pytest tests/faults/test_faults.py --faults-page

# Kills a run at random moments; about four seconds per kill.
soak: .venv/.installed
	PYTHONPATH=tests $(PY) -m helpers.soak --kills $(KILLS) --mode $(MODE) --subject $(SUBJECT) --result $(RESULTS)/soak.json

# Runs all scripts of tests/plain_loop on 1 to 4 processes, and under exact on up to 8; PLAIN_LOOP="NAME" runs one.
plain-loop: .venv/.installed
	PYTHONPATH=tests:. $(PY) -m plain_loop.runner --result $(RESULTS)/plain_loop_scripts.json $(PLAIN_LOOP)
	PYTHONPATH=tests:. $(PY) -m plain_loop.exact --result $(RESULTS)/plain_loop_scripts.json $(PLAIN_LOOP)

# Unchanged scripts against plain Python, on 1 to 4 processes; an hour on two cores.
scripts: .venv/.installed
	PYTHONPATH=tests:. $(PY) -m unchanged.runner --result $(RESULTS)/unchanged_scripts.json $(SCRIPTS)

# Builds wheel and sdist, checks their metadata, and trains with the wheel in an empty environment.
package: .venv/.installed
	rm -rf dist build/empty
	$(PY) -m build --outdir dist .
	$(PY) -m twine check --strict dist/*
	$(PY) -m venv build/empty
	build/empty/bin/python -m pip install -q --no-compile -c .venv/constraints.txt dist/*.whl
	cd build/empty && bin/samestep --version && bin/samestep run --processes 2 ../../examples/unchanged.py

# Tests of the core with another version of torch, such as VERSION=2.11.0, in an environment of its own.
test-torch:
	@test -n "$(VERSION)" || { echo "error: no version of torch. Name one: make test-torch VERSION=2.11.0" >&2; exit 2; }
	test -d build/torch-$(VERSION) || $(PYTHON) -m venv build/torch-$(VERSION)
	build/torch-$(VERSION)/bin/python -m pip install -q torch==$(VERSION) torchvision -e '.[zoo]' torchmetrics \
	  pytest pytest-timeout pytest-xdist hypothesis
	OMP_WAIT_POLICY=passive build/torch-$(VERSION)/bin/python -m pytest -n 3 --dist loadfile -m "not long and not gpu" $(CORE)

lint: .venv/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: .venv/.installed
	$(PY) -m mypy

format: .venv/.installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Builds the site in build/site; warnings are errors.
docs: .venv/.installed
	$(PY) docs/reference/generate.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

bench: .venv/.installed
	$(PY) benchmarks/startup.py --output $(RESULTS)/startup.json $(STARTUP)

# A plain loop with samestep.parallel, DDP, Accelerate and Fabric; about 20 minutes on two idle cores.
plain-loop-speed: .venv/.installed
	$(PY) benchmarks/plain_loop.py --output $(RESULTS)/plain_loop.json $(PLAIN_LOOP_SPEED)

# Checks on one GPU, at most ten minutes. Installs nothing: docs/guides/gpu.md.
gpu:
	$(GPU_PY) benchmarks/gpu.py --device $(DEVICE) --output $(RESULTS)/gpu $(GPU)

# NCCL with 2 to 4 ranks that share one GPU, at most eight minutes.
nccl:
	$(GPU_PY) benchmarks/gpu_nccl.py nccl --device $(DEVICE) --output $(RESULTS)/gpu $(GPU)

# Checks on 2 to 8 GPUs, at most five minutes: docs/guides/gpu.md says where to send the file.
gpus:
	$(GPU_PY) benchmarks/gpu_nccl.py gpus --device $(DEVICE) --output $(RESULTS)/gpu $(GPU)

# Collects in wheels/ the packages that a machine with torch and without a network lacks.
gpu-wheels: .venv/.installed
	$(PY) benchmarks/gpu_wheels.py

# Keeps runs/ and .venv.
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
# build of the same version is taken, and this says so. The torchvision of the public index is built for CUDA and cannot
# be imported next to the CPU build; the .pth file declares the missing operators in every program of .venv.
# Compiles the sources: each test starts processes, which write no caches where PYTHONDONTWRITEBYTECODE is set.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	cp constraints.txt .venv/constraints.txt
	$(PIP) install -q --no-deps -c .venv/constraints.txt torch || { \
	  echo "note: pip found no CPU build of torch; taking the default build, which is larger" >&2; \
	  sed 's/+cpu//' constraints.txt > .venv/constraints.txt; }
	$(PIP) install -q -c .venv/constraints.txt -e '.[dev]'
	echo 'import samestep.torchvision_import as fix; fix.install_import_hook()' \
	  > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/samestep-torchvision.pth"
	$(PY) -m compileall -q src
	@touch $@
