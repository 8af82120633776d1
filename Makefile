# Every target does its own set-up (a virtual environment in .venv, dependencies pinned by constraints.txt), shows
# what it does, and is quick when run again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV_VERSION := 0.13.7

export HF_HUB_OFFLINE := 1
export PYTHONUNBUFFERED := 1
# Where it is set, each process compiles all that it imports: transformers.trainer takes 12 s instead of 5.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo picture lint format test test-fast test-torch test-transformers test-datasets bench soak clean
.PHONY: cluster-build cluster-up cluster-down test-cluster test-cluster-full test-ray test-ray-jobs screenshots install-yaml

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 26

setup: $(READY)  ## Make the environment

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "» making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Reprieve needs Python 3.10 or newer: make PYTHON=python3.11 …"; exit 1; }
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@echo "» installing (PyTorch is large: up to a few minutes the first time)"
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## Preempt a training run, kill another in the middle of a save, start them again, see what happened
	@$(BIN)/python -m examples.demo

picture: $(READY)  ## Run the demo and draw its output: docs/images/demo.svg
	@$(BIN)/python -m examples.picture

lint: $(READY)  ## Style, types, layers, and the chart where helm is built
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/cluster/test_chart.py -k 'nothing_to_remark or install_yaml'

format: $(READY)  ## Put the code into its usual form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One thread in each process: ranks of a test share the cores, as under torchrun, and threads that spin for them are slow.
# More workers than cores: a quarter of the time of the tests is waiting, for saves, signals and timeouts. Two of them
# run the tests that fork trainers (tests/integration/conftest.py).
PYTEST := -m pytest -n 3 --dist loadgroup
test: $(READY)  ## All tests: unit, integration, power cuts (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -n 4 --durations 20

test-fast: $(READY)  ## The unit tests without the slow ones: less than 2 minutes
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m 'not slow' tests/unit

# What goes with a version of torch, or of transformers, is resolved anew.
TORCH = .venv-torch-$(VERSION)
test-torch: $(READY)  ## All but the adapter's tests with another version of torch: VERSION=2.6.0
	@test -n "$(VERSION)" || { echo "which one? make test-torch VERSION=2.6.0"; exit 1; }
	@test -x $(TORCH)/bin/python || $(PYTHON) -m venv $(TORCH)
	@grep -vE '^(torch|triton|sympy|setuptools|nvidia|cuda)[a-z0-9-]*==' constraints.txt > $(TORCH)/constraints.txt
	@echo 'torch==$(VERSION)' >> $(TORCH)/constraints.txt
	@VIRTUAL_ENV=$(TORCH) $(BIN)/uv pip install --constraint $(TORCH)/constraints.txt --editable '.[dev]'
	OMP_NUM_THREADS=1 $(TORCH)/bin/python $(PYTEST) tests --ignore tests/integration/adapters/transformers

OTHER = .venv-transformers-$(VERSION)
test-transformers: $(READY)  ## The adapter's tests with another version of transformers: VERSION=5.17.0
	@test -n "$(VERSION)" || { echo "which one? make test-transformers VERSION=5.17.0"; exit 1; }
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@grep -vE '^(transformers|accelerate|datasets|huggingface[_-]hub|hf-xet|peft|tokenizers|trl|typer)==' constraints.txt > $(OTHER)/constraints.txt
	@echo 'transformers==$(VERSION)' >> $(OTHER)/constraints.txt
	@VIRTUAL_ENV=$(OTHER) $(BIN)/uv pip install --constraint $(OTHER)/constraints.txt --editable '.[dev]'
	OMP_NUM_THREADS=1 $(OTHER)/bin/python $(PYTEST) --dist loadfile tests/integration/adapters/transformers

DATASETS = .venv-datasets-$(VERSION)
test-datasets: $(READY)  ## The tests of streams with another version of datasets: VERSION=4.0.0
	@test -n "$(VERSION)" || { echo "which one? make test-datasets VERSION=4.0.0"; exit 1; }
	@test -x $(DATASETS)/bin/python || $(PYTHON) -m venv $(DATASETS)
	@grep -vE '^(datasets|dill|multiprocess|fsspec|huggingface[_-]hub|hf-xet|pyarrow)==' constraints.txt > $(DATASETS)/constraints.txt
	@echo 'datasets==$(VERSION)' >> $(DATASETS)/constraints.txt
	@VIRTUAL_ENV=$(DATASETS) $(BIN)/uv pip install --constraint $(DATASETS)/constraints.txt --editable '.[torch]' datasets torchdata pytest pytest-timeout hypothesis numpy
	OMP_NUM_THREADS=1 $(DATASETS)/bin/python -m pytest tests/unit/data/test_hf_streams.py

# The rig needs the standard library only, so it can build while the environment is still being installed.
RIG := $(PYTHON) -m tests.cluster.rig
cluster-build:  ## Compile the test cluster into ~/.cache/reprieve (Linux, root; minutes the first time)
	@$(RIG) build

cluster-up:  ## Start the test cluster, until `make cluster-down`
	@$(RIG) up

cluster-down:  ## Remove the test cluster, whatever state it is in
	@$(RIG) down

test-cluster: $(READY)  ## The tests on a real Kubernetes, in the test cluster or the one of REPRIEVE_TEST_KUBECONFIG
	@test -n "$$REPRIEVE_TEST_KUBECONFIG" || $(RIG) build
	$(BIN)/python -m pytest tests/cluster -m 'not kueue and not full'

test-cluster-full: $(READY)  ## The same, those that need Kueue, and those that take minutes
	@test -n "$$REPRIEVE_TEST_KUBECONFIG" || $(RIG) build --full
	$(BIN)/python -m pytest tests/cluster

screenshots: $(READY)  ## Run a job on the test cluster and draw what kubectl says of it: docs/images/kubectl-*.svg
	@$(RIG) build
	$(BIN)/python -m tests.cluster.screenshots

# A test compares the file with what the chart renders, and writes it anew where it may.
install-yaml: $(READY)  ## Render deploy/install.yaml from the chart
	@$(RIG) build
	REPRIEVE_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/cluster/test_chart.py -k install_yaml

# Four tests at a time, also on two cores: half of the time of a run on Ray is waiting for its processes.
RAY_VENV = .venv-ray-$(VERSION)
test-ray: $(READY)  ## The tests on a real Ray; with another version of it: VERSION=2.58.0
	@test -z "$(VERSION)" || test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	@test -z "$(VERSION)" || grep -vE '^ray==' constraints.txt > $(RAY_VENV)/constraints.txt
	@test -z "$(VERSION)" || VIRTUAL_ENV=$(RAY_VENV) $(BIN)/uv pip install --constraint $(RAY_VENV)/constraints.txt --editable '.[dev]' 'ray[train]==$(VERSION)'
	$(if $(VERSION),$(RAY_VENV),$(VENV))/bin/python -m pytest -n 4 --dist worksteal -m 'not soak' tests/ray_train

RAY_JOBS = .venv-ray-jobs
test-ray-jobs: $(READY)  ## The tests of `ray job stop`, which needs more of Ray: its dashboard
	@test -x $(RAY_JOBS)/bin/python || $(PYTHON) -m venv $(RAY_JOBS)
	@VIRTUAL_ENV=$(RAY_JOBS) $(BIN)/uv pip install --constraint constraints.txt --editable '.[dev]' 'ray[default]'
	REPRIEVE_TEST_RAY_JOBS=1 $(RAY_JOBS)/bin/python -m pytest tests/ray_train/test_jobs.py

bench: $(READY)  ## The figures of the README, as a table and in benchmarks/results.json
	$(BIN)/python -m benchmarks

soak: $(READY)  ## The long versions of the randomised tests (hours)
	OMP_NUM_THREADS=1 REPRIEVE_SOAK=1 $(BIN)/python $(PYTEST) --timeout 86400 -m soak
	REPRIEVE_SOAK=1 $(BIN)/python -m pytest -n 4 --dist worksteal -m soak tests/ray_train
	$(MAKE) test-ray-jobs

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .venv-torch-* .venv-transformers-* .venv-datasets-* .venv-ray-* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
