# make setup   builds .venv from requirements.txt; does nothing where that is done
# make train   the same, then trains the tiny preset to its report, or goes on where it stopped
# make test    the same with requirements-test.txt, then lints and runs the tests
# make test-long  the tests of kills, restarts and whole meshes that make test leaves out: minutes
# make docs    writes pages of every module, made from its docstrings, to .cache/api/index.html
# make lint    only checks form: lines of 100 columns, sorted imports, unused and undefined names
# make smollm2 fetches SmolLM2-135M-Instruct for the preset of that name and for its tests
# make minilm  fetches all-MiniLM-L6-v2, a small text encoder for dense retrieval, and for its tests
# make sglang  builds .venv-sglang, SGLang's own environment without a GPU, and starts a server of a small random model
# make test-sglang  the same environment, then the tests against real servers
#
# make train CONFIG=configs/search_r1.py:smollm2 WORKDIR=runs/smollm2 ARGS=--config.seed=1
# make test ARGS="-k strata"        make setup PYTHON=/usr/local/bin/python3.12 REQUIREMENTS=requirements-gpu.txt

# The first of these that is Python 3.11 or 3.12.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' 2>/dev/null && echo $$p && break; done)
REQUIREMENTS ?= requirements.txt
CONFIG ?= configs/search_r1.py:tiny
WORKDIR ?= runs/tiny
ARGS ?=
# Processes that the tests are dealt to, file by file.
WORKERS ?= 2
PYTEST = .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP = .venv/bin/python -m pip --disable-pip-version-check

# What was installed for which requirements, with exact versions. An installation cut short leaves no such file.
DONE = .venv/installed-$(REQUIREMENTS)
TEST_DONE = .venv/installed-requirements-test.txt

.PHONY: setup train test test-long docs lint smollm2 minilm sglang test-sglang
.DELETE_ON_ERROR:

setup: $(DONE)

train: $(DONE)
	.venv/bin/python experiments/train.py --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

test: lint
	$(PYTEST) -m "not long" $(ARGS)

test-long: $(TEST_DONE)
	$(PYTEST) -m long $(ARGS)

docs: $(DONE)
	$(PIP) install --quiet "$$(grep -o 'pdoc[^"]*' pyproject.toml)"
	.venv/bin/python -m pdoc --output-directory .cache/api stratified

lint: $(TEST_DONE)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

smollm2: $(DONE)
	$(PIP) install --quiet "$$(grep -o 'gguf[^"]*' pyproject.toml)"
	.venv/bin/python third_party/smollm2/fetch.py

minilm: $(DONE)
	.venv/bin/python third_party/minilm/fetch.py

sglang: $(DONE)
	third_party/sglang/setup.sh cpu
	.venv/bin/python third_party/sglang/small_checkpoint.py .cache/models/small
	third_party/sglang/launch.sh .cache/models/small --cpu

test-sglang: $(TEST_DONE)
	third_party/sglang/setup.sh cpu
	.venv/bin/python -m pytest tests/sglang $(ARGS)

.venv/installed-%: % requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 was not found; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@# Without pip the environment is missing or was cut short; venv then makes or completes it.
	.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(PIP) install -r $<
	$(PIP) freeze --exclude-editable > $@
