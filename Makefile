# Two commands need nothing but Python >= 3.11, make and git:  make demo   and   make test
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# The newest supported interpreter on PATH; override with `make PYTHON=/path/to/python`.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.11 python3; do \
	if $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then echo $$p; break; fi; done)
# Most tests wait rather than compute: more of them at once than there are cores.
JOBS ?= 3
# Tests start hundreds of Python processes: without compiled modules an import of Airflow takes 1.4 s instead of 0.3.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help

.PHONY: help demo ui test lint bench test-system lab-build lab-up lab-down lab-test lab-full reliability clean lock

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/uv:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed. Install one, or name it: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed; on Debian: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv

$(VENV)/.installed-%: $(BIN)/uv pyproject.toml constraints.txt
	@echo "installing the environment ($*) ..."
	@$(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python -c constraints.txt -e '.[$*]'
	@touch $@

demo: $(VENV)/.installed-demo  ## the whole round on this machine: pin, train, findings, report
	@$(BIN)/python demo/run.py

ui: $(VENV)/.installed-demo  ## a whole Airflow with the example DAG, on http://localhost:8080
	@$(BIN)/python demo/ui.py

test: $(VENV)/.installed-dev  ## all tests but those that start a real Airflow or the lab
	@$(BIN)/python -m pytest -n $(JOBS) -m 'not system and not lab and not lab_full' $(ARGS)

test-system: $(VENV)/.installed-dev  ## a real scheduler and triggerer, killed half way
	@$(BIN)/python -m pytest -m 'system and not lab and not lab_full' $(ARGS)

# The lab: real servers as plain processes (tests/lab/README.md). Root, and Go for a cache that is empty (24 minutes).
LAB := $(BIN)/python tests/lab/lab.py

lab-build: $(VENV)/.installed-dev  ## build the lab's servers, unless they are cached; needs Go
	@$(LAB) build

lab-up: lab-build  ## a running stack: GPU cluster with Kueue, S3, Iceberg REST catalog, Keycloak
	@$(LAB) up --clusters gpu --kueue --jobset --s3 --keycloak --catalog
	@$(LAB) image gpu-burst python
	@$(LAB) guide

lab-down:  ## take it down, and everything that it left
	@$(LAB) down

lab-test: $(VENV)/.installed-dev  ## the tests that need the lab, in one of their own
	@$(LAB) test -- $(BIN)/python -m pytest -m 'lab and not lab_full' $(ARGS)

lab-full: $(VENV)/.installed-dev  ## these, and those that take minutes each
	@$(LAB) test -- $(BIN)/python -m pytest -m 'lab or lab_full' $(ARGS)

reliability: $(VENV)/.installed-dev  ## print docs/reliability.md from the tests
	@$(BIN)/python -m tests.reliability

lint: $(VENV)/.installed-dev  ## ruff, mypy strict, import layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## make bench NAME=import_time
	@test -n "$(NAME)" || { echo "which one? make bench NAME=x, with x one of:"; ls bench/*.py | sed -E 's#bench/(.*)\.py#  \1#'; exit 2; }
	@$(BIN)/python bench/$(NAME).py

lock: $(BIN)/uv  ## renew constraints.txt
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-header --no-annotate --no-emit-index-url --no-emit-find-links --upgrade pyproject.toml -o constraints.txt
	@$(BIN)/uv --version | awk '{print "uv=="$$2}' >> constraints.txt

clean:  ## remove the environment and what the demo left
	@rm -rf $(VENV) .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
