# `make demo` and `make test` need a Python from 3.10 on and nothing else; they make .venv themselves.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
  "$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 4

# `make test` leaves out the tests with the mark `nightly`.
ALL_TESTS := -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=10
DAILY_TESTS := $(ALL_TESTS) -m "not nightly"

# More processes compute than there are cores: a thread of theirs that waits must not spin.
export OMP_WAIT_POLICY := passive

# Debian's packages and pip's are fetched at the same time.
MAKEFLAGS += --jobs=2

.PHONY: demo test nightly unit coverage slow-test slow-nightly debian lint imports docs bench clean gpu-test

demo: .venv/.examples
	$(BIN)/python notebooks/demo.py

test: lint debian imports
	$(BIN)/python $(DAILY_TESTS) $(PYTEST_ARGS)

# All tests.
nightly: lint debian imports
	$(BIN)/python $(ALL_TESTS) $(PYTEST_ARGS)

# The tests that start no process.
unit: .venv/.test
	$(BIN)/python -m pytest -q -n auto -m "not process" $(PYTEST_ARGS)

# All tests, and the share of the package's lines that they and the processes that they start run.
coverage: lint debian
	$(BIN)/coverage erase
	$(BIN)/coverage run $(ALL_TESTS) $(PYTEST_ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# The tests of `make test` and of `make nightly` on one core, whatever the machine has.
slow-test: lint debian imports
	tests/rig/slow.sh 100 $(BIN)/python $(DAILY_TESTS) $(PYTEST_ARGS)

slow-nightly: lint debian imports
	tests/rig/slow.sh 100 $(BIN)/python $(ALL_TESTS) $(PYTEST_ARGS)

# The tests of runs on a GPU of this machine.
gpu-test: .venv/.test
	TAAS_TEST_GPUS=1 $(BIN)/python -m pytest -q tests/gpu $(PYTEST_ARGS)

debian:
	@tests/rig/debian.sh

# Each of pytest's workers imports all tests. They find here what pytest makes of the modules' asserts.
imports: .venv/.test
	$(BIN)/python -m compileall -q taas_magic
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q --collect-only > /dev/null || true

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.test
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "the site is build/docs/index.html"

bench: .venv/.examples
	$(BIN)/python benchmarks/launch.py

clean:
	rm -rf .venv

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "no python3 from 3.10 on, with venv and ensurepip, was found; \
	  name one: make PYTHON=/path/to/python3 (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv .venv

# Editable, so that a change of the code needs no new install; a change of the files below does.
# pip compiles on one core, for half of its time. What this Python cannot compile it cannot import either.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
# The named folders are large and (nearly) nothing of them is imported.
COMPILE := $(BIN)/python -m compileall -q -j 0 \
  -x '/(tests?|pip|setuptools|mypy|fontTools)/|/transformers/models/(?!auto/|bert/)' .venv/lib
NEEDED := pyproject.toml constraints.txt $(wildcard kernels/taas/*)

.venv/.examples: $(NEEDED) | .venv/bin/python
	$(PIP_INSTALL) -e '.[examples]'
	@$(COMPILE) > /dev/null || true
	touch $@

.venv/.test: $(NEEDED) | .venv/bin/python
	$(PIP_INSTALL) -e '.[docs,examples,test]'
	@$(COMPILE) > /dev/null || true
	touch .venv/.examples $@
