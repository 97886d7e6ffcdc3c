# `make demo` and `make test` need nothing but a Python >= 3.12 somewhere on the
# machine: scripts/bootstrap.sh finds it and makes .venv, once.
VENV := .venv
VENV_JAX012 := .venv-jax012
VENV_CUDA := .venv-cuda
PYTHON_RUN := $(VENV)/bin/python

# More than 4 workers make the suite no faster: every compile is itself parallel.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS ?= $(shell [ $(CORES) -gt 4 ] && echo 4 || echo $(CORES))
PYTEST_OPTIONS := -n $(WORKERS) --maxprocesses 4 --dist worksteal
PYTEST_ARGS ?=

# CI runs the smoke tests on the newest JAX as well, before the main suite.
CI_SMOKE := $(if $(filter true 1,$(CI)),test-jax012)

# Two installs at once would write the same build folder.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help venv venv-jax012 venv-cuda demo test test-all test-compile test-jax012 lint format \
  clean

help:
	@echo "make demo         train a small model under jax.jit and hlo_tools.jit"
	@echo "make test         the fast tests (CI=true: also make test-jax012)"
	@echo "make test-all     the slow tests too"
	@echo "make test-compile every kernel, compiled for every device it is for"
	@echo "make test-jax012  the smoke tests on the newest supported JAX"
	@echo "make lint         ruff and pyright"
	@echo "make format       ruff's fixes and formatter, applied"
	@echo "make clean        remove the environments and all caches"
	@echo "PYTEST_ARGS='-k name' narrows the tests, WORKERS=1 runs them in sequence."

venv:
	@sh scripts/bootstrap.sh $(VENV) constraints.txt -e '.[dev]'

venv-jax012:
	@sh scripts/bootstrap.sh $(VENV_JAX012) constraints-jax012.txt \
	  -e . equinox flax hypothesis optax pytest pytest-xdist setuptools

# JAX's CUDA plugin alone compiles for a GPU; CUDA's own libraries only run there.
venv-cuda:
	@sh scripts/bootstrap.sh $(VENV_CUDA) constraints.txt \
	  -e . hypothesis jax-cuda13-plugin jax-cuda13-pjrt pytest

demo: venv
	$(PYTHON_RUN) examples/01_train_step.py
	$(PYTHON_RUN) examples/02_zero_code.py

test: venv $(CI_SMOKE)
	$(PYTHON_RUN) -m pytest $(PYTEST_OPTIONS) \
	  -m "not slow and not compile_kernels" $(PYTEST_ARGS)

test-all: venv $(CI_SMOKE)
	$(PYTHON_RUN) -m pytest $(PYTEST_OPTIONS) $(PYTEST_ARGS)

# In one process: libtpu is loaded once, and the compiles share its cores anyway.
test-compile: venv venv-cuda
	$(PYTHON_RUN) -m pytest -m compile_kernels tests/test_compile_kernels.py

test-jax012: venv-jax012
	$(VENV_JAX012)/bin/python -m pytest $(PYTEST_OPTIONS) -m "smoke and not slow"

lint: venv
	$(PYTHON_RUN) -m ruff check .
	$(PYTHON_RUN) -m ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PYTHON_RUN) -m pyright

format: venv
	$(PYTHON_RUN) -m ruff check --fix .
	$(PYTHON_RUN) -m ruff format .

clean:
	rm -rf $(VENV) $(VENV_JAX012) build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
