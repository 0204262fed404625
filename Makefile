# make demo and make test do all their own set-up: a .venv, the install, then the job.
# PYTHON picks the interpreter that the .venv is made from (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard kernels/*.pyx kernels/*.pxd kernels/*.h) setup.py pyproject.toml constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGE_TREE := build/tree
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# pip says nothing for minutes, and all too much with -v: of that the build's own lines are shown, and the end of it if it fails.
SHOW_BUILD := 2>&1 | tee build/install.log | sed -un 's/^ *\(fastps: .*\)/\1/p' || { tail -n 50 build/install.log; exit 1; }
# Tests run in two processes: comparisons of times have a few chances, and everything else does not care.
PARALLEL := -n 2 --dist worksteal

HOOKS_TESTS := cd build/hooks && ../../$(BIN)/python -m pytest -q -p no:cacheprovider -c ../../pyproject.toml --rootdir . tests/hooks

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-debug hooks test-hooks test-sanitizers fuzz lint clean

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

$(VENV)/.made:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "fastps needs Python 3.11 or newer, found " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch numpy "setuptools>=77" wheel "Cython>=3.1"
	touch $@

$(VENV)/.installed: $(VENV)/.made $(SOURCES)
	@mkdir -p build
	$(PIP) install -v --no-build-isolation -c constraints.txt -e '.[demo,test,dev]' $(SHOW_BUILD)
	touch $@

demo: $(VENV)/.installed  ## train with 4 workers on real images, then compare the disciplines
	$(BIN)/fastps train --sync bsp --workers 4 --epochs 3
	$(BIN)/fastps compare --sync bsp,asp,ssp:3,dssp:3,15 --workers 4 --epochs 3 --straggler 0:3

test: $(VENV)/.installed lint test-hooks  ## lint, types and the tests
	$(BIN)/python -m pytest -q -m "not slow" $(PARALLEL)

# Several hundred MB of other people's frameworks: only for tests/clients.
$(VENV)/.clients: $(VENV)/.installed
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"])' \
		| xargs $(PIP) install --quiet -c constraints.txt
	touch $@

test-all: $(VENV)/.clients lint test-debug hooks  ## every test, the slow ones, those of other frameworks and the special builds too
	$(BIN)/python -m pytest -q
	$(HOOKS_TESTS)

test-debug: $(VENV)/.installed  ## the core's tests on a build with bounds checks and assertions
	rm -rf build/debug
	FASTPS_DEBUG=1 $(PIP) install -v --no-build-isolation --no-deps --target build/debug . $(SHOW_BUILD)
	cp -r tests build/debug/tests
	cd build/debug && ../../$(BIN)/python -m pytest -q -p no:cacheprovider -c ../../pyproject.toml --rootdir . \
		-m "not slow" tests/kernels tests/test_store.py

# Compiled modules beside links to the Python files: a changed header rebuilds, a changed Python file need not.
hooks: build/hooks/.made  ## build/hooks: the core with test hooks, for fastps chaos and the tests of deaths
	@for file in fastps/*.py fastps/py.typed fastps/reproduce; do ln -sfn "../../../$$file" build/hooks/fastps/; done
	@for file in kernels/*.py; do ln -sf "../../../../$$file" build/hooks/fastps/kernels/; done
	@ln -sfn ../../tests build/hooks/tests

build/hooks/.made: $(VENV)/.installed
	FASTPS_HOOKS=1 $(BIN)/python setup.py -q build_ext --build-lib build/hooks --build-temp build/hooks-objects
	touch $@

test-hooks: hooks  ## deaths at stores to shared memory, and the simulated world, on the build with hooks
	$(HOOKS_TESTS) -m "not slow" $(PARALLEL)

# Compiled modules with a sanitizer beside links to the Python files, as for hooks.
.PHONY: sanitized-thread sanitized-address
sanitized-thread sanitized-address: sanitized-%: $(VENV)/.installed
	mkdir -p build/$*/fastps
	for file in fastps/*.py fastps/py.typed fastps/reproduce; do ln -sfn "../../../$$file" build/$*/fastps/; done
	FASTPS_SANITIZE=$* $(BIN)/python setup.py -q build_ext --build-lib build/$* --build-temp build/$*-objects
	for file in kernels/*.py; do ln -sf "../../../../$$file" build/$*/fastps/kernels/; done
	ln -sfn ../../tests build/$*/tests

# The sanitizer's library must be there before Python; Python itself is not instrumented, and lets go of nothing at its exit.
SANITIZED_PYTEST := ../../$(BIN)/python -m pytest -q -p no:cacheprovider -c ../../pyproject.toml --rootdir .
UNDER_THREAD := cd build/thread && LD_PRELOAD=$$(cc -print-file-name=libtsan.so) TSAN_OPTIONS="halt_on_error=1 exitcode=66"
UNDER_ADDRESS := cd build/address && LD_PRELOAD=$$(cc -print-file-name=libasan.so) ASAN_OPTIONS="detect_leaks=0" \
	UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1"

test-sanitizers: sanitized-thread sanitized-address  ## threads on one arena under ThreadSanitizer, and the core's tests under AddressSanitizer
	$(UNDER_THREAD) $(SANITIZED_PYTEST) -k threads tests/kernels/test_turn.py
	$(UNDER_ADDRESS) $(SANITIZED_PYTEST) -m "not slow" \
		tests/kernels/test_turn.py tests/kernels/test_lane.py tests/kernels/test_scheduler.py

FUZZ_SECONDS ?= 600
fuzz: sanitized-address  ## attach messages, the arena's words and checkpoints for FUZZ_SECONDS (600) under AddressSanitizer
	$(UNDER_ADDRESS) FASTPS_FUZZ_SECONDS=$(FUZZ_SECONDS) $(SANITIZED_PYTEST) --timeout=$$(($(FUZZ_SECONDS) + 600)) tests/fuzz

lint: $(VENV)/.installed  ## ruff, cython-lint and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cython-lint kernels
	@mkdir -p $(PACKAGE_TREE)/fastps
	@ln -sfn ../../../kernels $(PACKAGE_TREE)/fastps/kernels && ln -sfn ../../../bench $(PACKAGE_TREE)/fastps/bench
	@ln -sfn ../../../fastps/reproduce $(PACKAGE_TREE)/fastps/reproduce
	@for file in fastps/*.py fastps/py.typed; do ln -sf "../../../$$file" $(PACKAGE_TREE)/fastps/; done
	$(BIN)/mypy --cache-dir build/mypy $(PACKAGE_TREE)/fastps

clean:  ## remove everything that was built
	rm -rf $(VENV) build dist *.egg-info kernels/*.so
