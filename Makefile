# Every target sets up what it needs first; `make` alone lists them.
.DEFAULT_GOAL := help
SHELL := bash
BIN := .venv/bin
PACKAGES := operator slurm inference kernels workers
NAME ?= demo
ARGS ?=
INPUT ?=
CACHE := $(if $(SLACKWATER_CACHE),$(SLACKWATER_CACHE),$(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/slackwater)
RECORDINGS := $(CACHE)/recordings

CLUSTER := PYTHONPATH=tests/controlplane $(BIN)/python -m slackwater_controlplane

.PHONY: help demo test test-long check lint fmt bench crds manifests cubins lock test-gpu slurm-up slurm-down cluster-up cluster-images cluster-env cluster-down images clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' Makefile

demo:  ## run the main job on this machine: real requests, real cleaning, real evictions (INPUT=DIR for your own recordings)
	@.setup/setup demo
	@$(if $(INPUT),,.setup/recordings "$(RECORDINGS)")
	@$(BIN)/slackwater demo --input "$(or $(INPUT),$(RECORDINGS))" $(ARGS)

test:  ## run every test that this machine can run
	@.setup/setup dev
	@.setup/sdk-tests "$(CACHE)/sdk-tests"
	@.setup/slurm --if-possible
	@.setup/prometheus --if-possible
	@.setup/controlplane control-plane kwok --if-possible
	$(BIN)/pytest -m "not long" $(ARGS)

test-long:  ## run what takes long: a real Kubernetes with nodes, images, ingress, the crash matrix (as root)
	@.setup/setup dev
	@.setup/slurm --if-possible
	@.setup/prometheus --if-possible
	@.setup/controlplane control-plane kwok nodes gateway
	@.setup/images
	$(BIN)/pytest -m long --record tests/long-results.json $(ARGS)

check: lint test  ## what CI runs: ruff, mypy, import-linter, pytest

lint:
	@.setup/setup dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt:  ## format the code and mend what ruff can mend
	@.setup/setup dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench:  ## measure: make bench NAME=demo writes tests/bench/results/demo.json
	@.setup/setup dev
	@.setup/recordings "$(RECORDINGS)"
	$(BIN)/python tests/bench/run.py $(NAME) $(ARGS)

crds:  ## write the custom resources and schemas that are generated from the pydantic models
	@.setup/setup dev
	$(BIN)/python -m slackwater_operator.schemas

manifests: crds  ## write dashboard, alerts and chart anew from their sources
	PYTHONPATH=manifests/tools $(BIN)/python -m slackwater_manifests

cubins:  ## compile the CUDA kernels anew: make cubins NVCC=PATH (kernels/slackwater_kernels/cuda/build.py says which packages bring it)
	@.setup/setup dev
	$(BIN)/python -m slackwater_kernels.cuda.build $(NVCC)

lock:  ## pin the dependencies anew in .setup/locks
	@.setup/setup dev
	.setup/lock

test-gpu:  ## run the tests that need an NVIDIA GPU
	@.setup/setup dev
	$(BIN)/pytest -m gpu --record tests/gpu-results.json $(ARGS)

slurm-up:  ## start a real Slurm on this machine: four nodes, GPUs that are only counted (as root)
	@.setup/setup demo
	@.setup/slurm
	@$(BIN)/slackwater slurm up $(ARGS)

slurm-down:  ## end it with all its jobs
	@$(BIN)/slackwater slurm down $(ARGS)

cluster-up:  ## start a real Kubernetes on this machine: two nodes, GPUs that are only counted (as root)
	@.setup/setup dev
	@.setup/controlplane control-plane kwok $(if $(findstring --nodes,$(or $(ARGS),--nodes 2)),nodes)
	@$(CLUSTER) up $(or $(ARGS),--nodes 2)

cluster-images:  ## build operator and worker and bring them to that cluster's nodes, with recordings to clean (again after changes)
	@.setup/setup dev
	@.setup/recordings "$(RECORDINGS)"
	@.setup/images --tools
	@PATH=$$PATH:/usr/sbin $(CLUSTER) images

cluster-env:  ## kubectl and slackwater for a shell: eval "$(make cluster-env)"
	@$(CLUSTER) env

cluster-down:  ## end it with all its pods
	@$(CLUSTER) down

images:  ## build the container images into the cache, without a container engine (as root on Debian; ARGS="engine" for the large one)
	@.setup/setup dev
	@.setup/images $(ARGS)

clean:  ## remove what make made here (the cache of recordings stays)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist demo-report.html demo-report.json demo-speech.mp3
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
