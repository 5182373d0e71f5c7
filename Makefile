# Everything below first sets the checkout up (scripts/install.py); when that is done already it costs nothing.

PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

# One thread for each process: tests start several, and threads that wait for cores make them slower, not faster.
# And bytecode is kept, whatever the environment says: each of some thousand processes would compile swarmq anew.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

# Tests of the whole wait for other processes about as long as they work, so there are more of them than cores.
# The longest ones come first in the alphabet and stay first.
WHOLE := -n $$(( 3 * $$(getconf _NPROCESSORS_ONLN) / 2 )) --dist loadfile --no-loadscope-reorder --durations 25

.PHONY: help install test check unit docs demo examples faults faults-matrix track clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

install: ## virtual environment, torch, vLLM, swarmq, RabbitMQ; a second run does nothing
	@$(PYTHON) scripts/install.py

check: install ## formatting, lint, strict types, layer rules
	@echo "== format and lint"; $(BIN)/ruff format --check . && $(BIN)/ruff check .
	@echo "== types"; $(BIN)/mypy
	@echo "== layer rules"; $(BIN)/lint-imports

unit: install ## unit tests, and the contract of the broker on memory and on RabbitMQ; no engine, no HTTP
	@echo "== tests of the parts"
	@$(TEST_ENV) $(BIN)/python scripts/test_parts.py $(ARGS)

test: install ## everything: the checks beside the tests of the parts, then all tests against a real RabbitMQ and a real vLLM
	@$(MAKE) --no-print-directory -j 2 check unit
	@echo "== long tests of the parts"
	@$(TEST_ENV) $(BIN)/python -m pytest -n auto -m slow tests/unit $(ARGS)
	@echo "== tests of the whole (they start their own RabbitMQ and vLLM on free ports)"
	@$(TEST_ENV) $(BIN)/python -m pytest $(WHOLE) tests/e2e tests/integration tests/http tests/gpu $(ARGS)

docs: install ## the site: all pages and the reference from the code, in build/site; needs no network
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --builder html --conf-dir docs/generator . build/site
	@echo "built: build/site/index.html"

demo: install ## train a real agent on this machine in about ten minutes
	@$(BIN)/swarmq demo $(ARGS)

examples: install ## train the tutorials of examples/ and print what they learned (ARGS="NAME" for one)
	@$(BIN)/python -m benchmarks.examples $(ARGS)

faults: install ## break everything a thousand times and count what was lost (half an hour)
	@$(TEST_ENV) $(BIN)/python -m benchmarks.faults $(ARGS)

faults-matrix: install ## a shorter fault run on RabbitMQ 3.10, 4.0 and 4.3 (as root; makes scratch roots once)
	@$(TEST_ENV) $(BIN)/python -m benchmarks.faults_matrix $(ARGS)

track: install ## run the tracked benchmarks and compare them with earlier commits (a quarter of an hour, on an idle machine)
	@$(BIN)/python -m benchmarks.track $(ARGS)

clean: ## remove the virtual environment and all caches; runs/ stays
	rm -rf .venv .cache build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
