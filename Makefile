# All that a fresh machine needs is Python >= 3.11 with pip, and make. PYTHON=python3.12 chooses another one.
PYTHON ?= python3
VENV ?= .venv
# Two processes, each with whole files of tests: what a file compiles it compiles once.
SHARED = --numprocesses 2 --dist loadfile

.PHONY: train test slow lint

train: $(VENV)/installed
	$(VENV)/bin/purejaxppo train configs/cartpole.toml

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest $(SHARED)

slow: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m slow $(SHARED)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "purejaxppo needs Python >= 3.11; say make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@
