# Everything a developer does. `make demo` and `make test` work on a fresh machine; each command is safe to repeat.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Another index for torch (a mirror, a CUDA build): TORCH_INDEX_URL=https://… make demo
TORCH_INDEX := $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
PROTOS := $(wildcard protos/forwardplane/v1/*.proto)
SERVICES := protos/forwardplane/v1/worker.proto protos/forwardplane/v1/generate.proto
# Compilers' own thread pools would fight for the cores of a test machine.
export OMP_NUM_THREADS ?= 2

.PHONY: help setup setup-dev model test-models demo serve observe setup-system test check static format format-check lint types contracts gen wheels test-wheels setup-images test-images gpu bench bench-peers sim campaign fuzz mutants clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(BIN)/python:
	@echo "== creating $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.setup: $(BIN)/python pyproject.toml constraints.txt
	@echo "== installing torch (about a minute the first time)"
	$(PIP) $(TORCH_INDEX) torch
	@echo "== installing forwardplane and its libraries"
	$(PIP) -e '.[worker]'
	@echo "== building the native CPU kernels"
	@$(BIN)/python -m kernels.build || echo "== without them torch computes everything, which is several times slower"
	@touch $@

$(VENV)/.setup-dev: $(VENV)/.setup
	@echo "== installing the development tools"
	$(PIP) -e '.[worker,dev]'
	@touch $@

setup: $(VENV)/.setup  ## virtual environment with both services

setup-dev: $(VENV)/.setup-dev  ## the same with test and lint tools

model: setup  ## fetch the default model into the cache
	$(BIN)/forwardplane fetch-model

test-models: model  ## fetch the models that tests use
	$(BIN)/forwardplane fetch-model gemma3-270m

demo: setup  ## everything from nothing: a streamed chat answer, a summary, a clean exit
	$(BIN)/forwardplane demo

serve: setup  ## the same services, staying up until Ctrl-C
	$(BIN)/forwardplane serve

setup-system:  ## Debian packages of what runs beside the services: Prometheus, Alertmanager
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends prometheus prometheus-alertmanager

observe: setup-dev  ## Prometheus and Alertmanager beside `make serve`, until Ctrl-C
	$(BIN)/python -m k8s.observability.observe

test: setup-dev test-models  ## all tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu and not bench and not slow" -n 2 --dist loadfile

static: format-check lint types contracts  ## format, lint, types, import contracts

check: static test  ## what CI runs: static checks and all tests

format: setup-dev  ## format the code
	$(BIN)/ruff format .

format-check: setup-dev
	$(BIN)/ruff format --check .

lint: setup-dev  ## lint
	$(BIN)/ruff check .

types: setup-dev  ## type check
	$(BIN)/mypy

contracts: setup-dev  ## import contracts
	$(BIN)/lint-imports

gen: setup-dev  ## regenerate the protobuf code
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --mypy_out=. \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc -I . --grpc_python_out=. --mypy_grpc_out=. \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc $(SERVICES)

$(VENV)/.setup-wheels: $(VENV)/.setup-dev
	@echo "== installing a compiler for an old glibc (about 100 MB)"
	$(PIP) -e '.[worker,dev,wheels]'
	@touch $@

wheels: $(VENV)/.setup-wheels  ## both distributions, in dist/
	$(BIN)/python -m k8s.wheels dist

test-wheels: $(VENV)/.setup-wheels  ## builds both distributions, installs them into an empty environment, serves from there
	$(BIN)/python -m pytest -m slow tests/deploy/test_wheels.py

setup-images:  ## Debian packages that build and run images without a Docker engine
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends mmdebstrap buildah crun podman runc catatonit

test-images: setup-dev  ## builds the scheduler's and the CPU worker's image on a Debian base made here, runs them (root; see setup-images)
	$(BIN)/python -m pytest -m slow -s tests/deploy/test_built_images.py

gpu: setup-dev  ## tests and figures of a CUDA device (with flashinfer-python); without one each is skipped by name
	$(BIN)/python -m pytest -m gpu -vv -rs -s tests

bench: setup-dev model  ## figures of tests/bench
	$(BIN)/python -m pytest -m bench -s tests/bench

bench-peers: setup-dev model  ## ratios to llama.cpp and vLLM on the same weights (builds them under build/peers)
	$(BIN)/python -m tests.bench.bench_peers $(BENCH_PEERS)

sim: setup-dev  ## deterministic simulation: SEED=7 replays one run, BUDGET=12m runs seeds until then
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED)) --budget $(or $(BUDGET),60s)

campaign: setup-dev  ## simulation and fault cycles for BUDGET (12m): prints what each reached
	$(BIN)/python -m tests.campaign --budget $(or $(BUDGET),12m)

fuzz: setup-dev  ## bytes from callers, schedulers, workers and model files for BUDGET (60s); TARGET=plan: one of them
	$(BIN)/python -m tests.fuzz --budget $(or $(BUDGET),60s) $(if $(TARGET),--target $(TARGET))

mutants: setup-dev  ## switch guards off one at a time: simulation or unit tests must notice
	$(BIN)/python -m tests.simulation.mutants

clean:  ## remove the environment and caches, keep fetched models
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
