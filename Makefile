# Every target sets up its own environment: nothing has to be installed first but Python 3.11 and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

# Flags for the recipe: make enwik8 ARGS="--arch llama --seed 1"
ARGS ?=

# Every experiment of recipes/ is a target of the same name: make grokking
EXPERIMENTS := $(filter-out study,$(patsubst recipes/%/experiment.py,%,$(wildcard recipes/*/experiment.py)))

.PHONY: enwik8 faults claims $(EXPERIMENTS) test check format architectures docs bench clean help

help:
	@echo "make enwik8         train a character decoder on enwik8 and watch its geometry"
	@echo "make NAME           an experiment on the claims of papers: $(EXPERIMENTS)"
	@echo "make faults         put faults into trainings: which numbers notice them, and how early (hours; ARGS=--small: minutes)"
	@echo "make claims         docs/claims.md: what papers assert beside what the experiments in runs/ measured"
	@echo "                    flags of any recipe: make enwik8 ARGS='--steps 300'; all of them: ARGS=--help"
	@echo "make test           the whole test suite"
	@echo "make check          lint, format and types"
	@echo "make format         apply lint and format"
	@echo "make docs           build/site/: tutorial, pages, metrics and the reference of every public name"
	@echo "make bench          measure what geomon costs here"
	@echo "make architectures  docs/architectures.md: what geomon sees of each model, beside its own attention"
	@echo "make clean          remove the environment and build outputs; runs/ stays"

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "no '$(PYTHON)' here: install Python 3.11 or later, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed, this is $$($(PYTHON) --version): make PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

enwik8: $(READY)
	@$(BIN)/python -m recipes.enwik8 $(ARGS)

faults: $(READY)
	@$(BIN)/python -m recipes.faults $(ARGS)

claims $(EXPERIMENTS): $(READY)
	@$(BIN)/python -m recipes.study $@ $(ARGS)

# By path: those with the fewest tests are the longest, and would all come last.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

architectures: $(READY)
	@$(BIN)/python tests/test_architectures.py

docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html, or: $(BIN)/python -m http.server --directory build/site"

bench: $(READY)
	@$(BIN)/python -m benchmarks.cost reading
	@$(BIN)/python -m benchmarks.cost idle

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .hypothesis .pytest_cache
