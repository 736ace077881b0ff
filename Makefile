# Two commands do everything: `make chat` to talk to a model, `make test` to check the engine. `make help` lists the rest.
# The environment is .venv; tools/environment.py makes it and knows when there is nothing to do.

PYTHON ?= python3
MODEL ?=
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := all
.PHONY: all install chat test lint docs fuzz soak sanitize bench bench-server clean help environment-test

all: install ## the same as install

install: ## create .venv and install Octavo with its native kernels and a small model
	@$(PYTHON) tools/environment.py base

chat: install ## talk to the model; with piped input, answer it and exit (MODEL=... for another one)
	@$(BIN)/octavo chat $(MODEL)

environment-test:
	@$(PYTHON) tools/environment.py test

test: environment-test ## run the whole test suite (ARGS="-k scheduler" for a part)
	@$(BIN)/python -m pytest $(ARGS)

lint: environment-test ## ruff (rules and format) and mypy --strict on the core
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: environment-test ## check the documents: links, anchors, Python blocks
	@$(BIN)/python tools/check_docs.py
	@$(BIN)/python tools/figures.py

fuzz: environment-test ## run the randomised tests with new seeds, ARGS="--minutes 10"; or ARGS="--operations 1000000" on the scheduler
	@$(BIN)/python tools/fuzz.py $(ARGS)

soak: environment-test ## 2,000 random requests at full load, each compared bit for bit with its run alone (ARGS="--requests 500")
	@$(BIN)/python tools/soak.py $(ARGS)

sanitize: environment-test ## build the native kernels with ASan and UBSan and run their tests
	@PYTHON=$(BIN)/python tools/sanitize.sh $(ARGS)

bench: environment-test ## measure start, speed and quality; results go to results/*.json
	@$(BIN)/python -m benchmarks.cold_start
	@$(BIN)/python -m benchmarks.speed
	@$(BIN)/python -m benchmarks.linear
	@$(BIN)/python -m benchmarks.python_share
	@$(BIN)/python -m benchmarks.sampling
	@$(BIN)/python -m benchmarks.attention
	@$(BIN)/python -m benchmarks.kv_waste
	@$(BIN)/python -m benchmarks.quality
	@$(BIN)/python -m benchmarks.activation_bits
	@$(BIN)/python tools/figures.py --write

bench-server: environment-test ## measure the server: batch sizes, load, the client itself; results go to results/*.json
	@$(BIN)/python -m benchmarks.batch_sizes
	@$(BIN)/python -m benchmarks.load
	@$(BIN)/python -m benchmarks.client_overhead
	@$(BIN)/python tools/figures.py --write

clean: ## remove .venv and everything built
	rm -rf .venv build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
