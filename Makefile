# Run `make` for the list of targets.
#
# The wheel of torch is the one that your pip finds: on Linux, PyPI's has CUDA and is large. Without a GPU
# the CPU wheel is enough; set pip up for it (pip config, or PIP_EXTRA_INDEX_URL) before `make setup`.
# With a GPU (CUDA=yes, which nvidia-smi tells) it is the torch that SGLang requires, of constraints-cuda.txt.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.hflow-installed
SGLANG_STAMP := .venv/.sglang-installed
CLUSTER ?=
CUDA ?= $(if $(shell command -v nvidia-smi),yes,no)
PINS := constraints.txt $(if $(filter yes,$(CUDA)),constraints-cuda.txt)
# Of a package that several name, the last counts.
CONSTRAINTS = awk -F '==' '!/^ *\#/ && NF { pins[$$1] = $$0 } END { for (name in pins) print pins[name] }' $(PINS)

.DEFAULT_GOAL := help
.PHONY: help setup setup-sglang demo demo-chat check test acceptance lint site package bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## install hflow and its tools into .venv (instant when nothing changed)

$(STAMP): pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "hflow needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(CONSTRAINTS) > .venv/constraints.txt
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' .venv/constraints.txt)
	@# What hflow was called before: two distributions would share one command.
	@$(BIN)/python -m pip uninstall --quiet --yes hflow 2>/dev/null || true
	$(BIN)/python -m pip install --quiet --constraint .venv/constraints.txt --editable '.[tasks,math,data,tensorboard,wandb,mlflow,dev]'
	@touch $@

setup-sglang: $(SGLANG_STAMP) ## install SGLang into .venv, beside hflow (instant when nothing changed)

$(SGLANG_STAMP): $(STAMP) constraints-sglang-cpu.txt scripts/mend_torchvision.py
ifeq ($(CUDA),yes)
	$(BIN)/python -m pip install --quiet --constraint .venv/constraints.txt --editable '.[sglang]'
else
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || { \
		echo "torch has CUDA here, and SGLang's own wheels fit it: make setup-sglang CUDA=yes" >&2; exit 1; }
	@# What SGLang's wheel asks for is for CUDA, torch included, hence --no-deps.
	$(BIN)/python -m pip install --quiet --no-deps --requirement constraints-sglang-cpu.txt
	$(BIN)/python scripts/mend_torchvision.py
endif
	@touch $@

demo: setup ## train a tiny model to add: supervised, then GRPO (three minutes on two cores; CLUSTER=FILE)
	@PATH="$(CURDIR)/$(BIN):$$PATH" CLUSTER="$(CLUSTER)" scripts/demo.sh

demo-chat: setup ## train a tiny chat model: templates, rewards, evaluations, samples (four minutes on two cores)
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/math_chat/run.sh

# What needs no engine and no processes.
FAST := $(addprefix tests/,graph plan schedule cost compiler ops view report test_walls.py)
BESIDE := -n auto --dist loadfile --no-loadscope-reorder
# Tests that share one Ray use all cores by themselves; the others run side by side.
SHARED := -m one_ray tests/runtime
SLOWEST := --durations=30
RESULTS := runs/acceptance

check: setup ## before a commit: lint, types, walls, and the fast tests (three minutes on two cores)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	@# Types and tests side by side: pyright uses one core.
	@$(BIN)/pyright --project pyproject.toml & types=$$!; \
		$(BIN)/python -m pytest -q $(BESIDE) -m 'not slow' $(FAST); tests=$$?; \
		wait $$types && exit $$tests

test: setup lint ## before a merge: lint, tests on a sample of their cases, notebooks, and README's commands
	$(BIN)/python -m pytest $(BESIDE) $(SLOWEST) -m 'not one_ray'
	$(BIN)/python -m pytest $(SLOWEST) $(SHARED)
	$(BIN)/python -m pytest --nbmake notebooks
	tests/newcomer.sh README.md

acceptance: setup lint ## before a release: every case and the long runs, written to tests/acceptance.md (hours)
	@rm -rf $(RESULTS) && mkdir -p $(RESULTS)
	@# Failures do not end it: the script counts them, and then fails.
	-HFLOW_SAMPLE=all $(BIN)/python -m pytest $(BESIDE) -m 'not one_ray' --junitxml=$(RESULTS)/beside.xml
	-HFLOW_SAMPLE=all $(BIN)/python -m pytest $(SHARED) --junitxml=$(RESULTS)/shared.xml
	-$(BIN)/python -m pytest --nbmake notebooks --junitxml=$(RESULTS)/notebooks.xml
	@tests/newcomer.sh README.md docs/tutorial.md; followed=$$?; \
		$(MAKE) site || followed=1; \
		$(BIN)/python scripts/acceptance.py $(addprefix $(RESULTS)/,beside.xml shared.xml notebooks.xml) && exit $$followed

lint: setup ## ruff, pyright, and the walls between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --project pyproject.toml

site: setup ## the documentation as HTML: build/site/html/index.html (some minutes: it plans every algorithm)
	$(BIN)/python -m scripts.site
	$(BIN)/zensical build --strict

package: setup ## the source distribution, and the wheel that is made from it, in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

bench: setup ## every benchmark but learning.py, which trains for long; each prints one JSON line last
	@set -e; for script in $(filter-out benchmarks/learning.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

clean: ## remove .venv, caches and the demo's runs; other runs stay
	rm -rf .venv .pytest_cache .hypothesis build dist runs/demo
	find . \( -name __pycache__ -o -name .ruff_cache \) -type d -prune -exec rm -rf {} +
