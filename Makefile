# Targets set up what they need: a .venv with fastps installed.
# PYTHON chooses the interpreter of the .venv (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard $(foreach kind,pyx pxd h hpp cu,kernels/*/*.$(kind))) setup.py pyproject.toml constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGE_TREE := build/tree
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# pip is silent for minutes, and verbose with -v. Show the build's own lines only, and the end of the log if it fails.
SHOW_BUILD := 2>&1 | tee build/install.log | sed -un 's/^ *\(fastps: .*\)/\1/p' || { tail -n 50 build/install.log; exit 1; }
# Run the tests in four processes, because many wait. Tests that compare times (marked timing) have three chances.
PARALLEL := -n 4 --dist worksteal
# Let Python keep what it compiles: without, each of many hundred processes would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Folders of which make test runs nothing, or runs it apart. To read them would import the frameworks, if they are installed.
APART := $(addprefix --ignore=tests/,clients integrations crash)

# Link the Python files into a build's folder ($1), beside its compiled modules, so that a changed Python file needs no rebuild.
LINK_PYTHON = find $1/fastps -type l -delete; \
	for entry in fastps/*; do [[ $$entry == */__pycache__ ]] || ln -s "$(CURDIR)/$$entry" $1/fastps/; done; \
	for file in kernels/*.py kernels/*/*.py; do mkdir -p "$1/fastps/$${file%/*}"; ln -s "$(CURDIR)/$$file" "$1/fastps/$$file"; done; \
	ln -sfn ../../tests $1/tests

HOOKS_PYTEST := cd build/hooks && ../../$(BIN)/python -m pytest -q -p no:cacheprovider -c ../../pyproject.toml --rootdir .
# Programs that tests use and that are no Python packages, as Debian calls them.
TEST_PROGRAMS := spin chromium openssh-client openssh-server iproute2

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-slow test-all slow-times test-debug hooks test-hooks test-torch test-sanitizers fuzz lint \
	docs wheels system-packages clean

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

# What failed is named last: a log is often cut to its end.
LOGGED = 2>&1 | tee -ia build/tests.log
NAME_FAILED = grep -E "^(FAILED|ERROR|MISSING) " build/tests.log

# Lint runs beside the tests, because mypy keeps one core busy.
test: $(VENV)/.installed hooks  ## lint, types and the tests (samples of those that are long)
	@$(MAKE) lint > build/lint.log 2>&1 & lint=$$!; failed=0; rm -f build/tests.log; \
		$(MAKE) test-hooks $(LOGGED) || failed=1; \
		$(BIN)/python -m pytest -q -m "not slow" $(PARALLEL) $(APART) $(LOGGED) || failed=1; \
		wait $$lint && echo "lint: passed" || { failed=1; cat build/lint.log; }; \
		$(NAME_FAILED); exit $$failed

test-fast: $(VENV)/.installed  ## unit tests without torch: neither processes, nor times, nor full sizes
	$(BIN)/python -m pytest -q -m "unit and not torch and not exhaustive" $(PARALLEL) $(APART)

# Several hundred MB: other frameworks, MPI, and the tools of wheels. Only slow tests need them.
$(VENV)/.extras: $(VENV)/.installed $(VENV)/.wheels
	$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
		print(*extras["clients"], *extras["peers"])' | xargs $(PIP) install --quiet -c constraints.txt
	$(PIP) install --quiet --no-deps -c constraints.txt timm  # not torchvision, whose binary does not load beside a torch without CUDA
	touch $@

system-packages:  ## install the programs that tests use, with apt-get (as root); without them, their tests are skipped
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(TEST_PROGRAMS) > /dev/null
	mkdir -p /run/sshd  # which sshd needs, and its service would make

# A slice of the slow tests: k of n, in up to three runs. Processes that have imported other frameworks are large and slow to fork,
# and tests/crash needs the failpoint build. A test without a time limit of its own has more time than in make test, because the
# cores may be busy elsewhere.
SLICE ?= 1/1
SLOW := -q -m slow --complete --timeout 400 -n 2 --dist loadgroup -o junit_family=xunit1 --junitxml $(CURDIR)/build/slow/$(subst /,-of-,$(SLICE))
test-slow: $(VENV)/.extras hooks  ## the slow tests, or a part of them: SLICE=2/6
	@mkdir -p build/slow
	@$(BIN)/python tools/slices.py list $(SLICE) > build/slow/files
	@frameworks='^tests/(clients|integrations)/'; failed=0; rm -f build/tests.log; \
		programs=$$(grep -E "$$frameworks" build/slow/files); crash=$$(grep ^tests/crash/ build/slow/files); \
		$(BIN)/python -m pytest $(SLOW).xml $$(grep -vE "$$frameworks|^tests/crash/" build/slow/files) $(LOGGED) || failed=1; \
		[[ -z "$$programs" ]] || $(BIN)/python -m pytest $(SLOW)-frameworks.xml $$programs $(LOGGED) || failed=1; \
		[[ -z "$$crash" ]] || { $(HOOKS_PYTEST) $(SLOW)-hooks.xml $$crash; } $(LOGGED) || failed=1; \
		$(NAME_FAILED); exit $$failed

slow-times:  ## measure how long the slow tests take, and write it into tests/slow_times.json, by which they are cut into slices
	rm -rf build/slow
	$(MAKE) test-slow
	$(BIN)/python tools/slices.py renew build/slow/*.xml

# Each runs, also after one that failed.
PARTS := test test-debug test-sanitizers $(foreach k,1 2 3 4 5 6,test-slow,SLICE=$(k)/6)
test-all: $(VENV)/.installed  ## all tests: also the slow ones, in six slices, and those of special builds
	@failed=; for part in $(PARTS); do $(MAKE) $${part/,/ } || failed+=" $$part"; done; \
		[[ -z "$$failed" ]] || { echo "failed:$$failed"; exit 1; }

test-debug: $(VENV)/.installed  ## tests of the core, built with bounds checks and assertions
	rm -rf build/debug
	FASTPS_DEBUG=1 $(PIP) install -v --no-build-isolation --no-deps --target build/debug . $(SHOW_BUILD)
	cp -r tests build/debug/tests
	cd build/debug && ../../$(BIN)/python -m pytest -q -p no:cacheprovider -c ../../pyproject.toml --rootdir . \
		-m "not slow" tests/kernels tests/store/test_store.py

# Another torch, in an environment and a copy of the source of its own: loops over tensors are compiled against it.
TORCH ?=
OTHER := build/torch-$(TORCH)
OTHER_PIP := cd $(OTHER) && venv/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
test-torch:  ## the tests of fastps/torch and of the pages with another torch (several GB): TORCH=2.7.0
	@[[ -n "$(TORCH)" ]] || { echo "expected a version, as in: make test-torch TORCH=2.7.0"; exit 2; }
	rm -rf $(OTHER)
	mkdir -p $(OTHER)/source
	$(PYTHON) -m venv $(OTHER)/venv
	git ls-files -z | xargs -0 cp --parents -t $(OTHER)/source
	grep -Ev '^(torch|nvidia)' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER_PIP) torch==$(TORCH) numpy "setuptools>=77" wheel "Cython>=3.1"
	$(OTHER_PIP) --no-build-isolation -e './source[demo,test]'
	cd $(OTHER)/source && ../venv/bin/python -m pytest -q -m "not slow" $(PARALLEL) tests/torch tests/test_docs.py
	rm -rf $(OTHER)

hooks: build/hooks/.made  ## build/hooks: the core with failpoints, for fastps chaos and tests/crash
	@$(call LINK_PYTHON,build/hooks)

build/hooks/.made: $(VENV)/.installed
	FASTPS_HOOKS=1 $(BIN)/python setup.py -q build_ext --build-lib build/hooks --build-temp build/hooks-objects
	touch $@

test-hooks: hooks  ## deaths at stores to shared memory, and the simulated world, on the failpoint build
	$(HOOKS_PYTEST) -m "not slow" $(PARALLEL) tests/crash

.PHONY: sanitized-thread sanitized-address
sanitized-thread sanitized-address: sanitized-%: $(VENV)/.installed
	FASTPS_SANITIZE=$* $(BIN)/python setup.py -q build_ext --build-lib build/$* --build-temp build/$*-objects
	@$(call LINK_PYTHON,build/$*)

# Preload the sanitizer's library, because Python itself is not instrumented. Leaks are ignored: Python frees little at exit.
SANITIZED_PYTEST := ../../$(BIN)/python -m pytest -q -p no:cacheprovider -c ../../pyproject.toml --rootdir .
UNDER_THREAD := cd build/thread && LD_PRELOAD=$$(cc -print-file-name=libtsan.so) TSAN_OPTIONS="halt_on_error=1 exitcode=66"
UNDER_ADDRESS := cd build/address && LD_PRELOAD=$$(cc -print-file-name=libasan.so) ASAN_OPTIONS="detect_leaks=0" \
	UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1"

test-sanitizers: sanitized-thread sanitized-address  ## an arena's threads under ThreadSanitizer, the core under AddressSanitizer
	$(UNDER_THREAD) $(SANITIZED_PYTEST) -k threads tests/kernels/protocol/test_lane.py tests/kernels/protocol/test_reader_pins.py
	$(UNDER_ADDRESS) $(SANITIZED_PYTEST) -m "not slow" \
		tests/kernels/combining tests/kernels/protocol tests/kernels/rows tests/kernels/scheduling/test_scheduler.py

FUZZ_SECONDS ?= 600
fuzz: sanitized-address  ## fuzz all that others write: messages, arena words, checkpoints, /proc, texts; for FUZZ_SECONDS (600) under AddressSanitizer
	$(UNDER_ADDRESS) FASTPS_FUZZ_SECONDS=$(FUZZ_SECONDS) $(SANITIZED_PYTEST) --timeout=$$(($(FUZZ_SECONDS) + 600)) tests/fuzz

lint: $(VENV)/.installed  ## ruff, cython-lint, mypy, and the imports between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cython-lint kernels
	@mkdir -p $(PACKAGE_TREE)/fastps
	@find $(PACKAGE_TREE) -type l -delete
	@for entry in fastps/* kernels bench; do ln -s "$(CURDIR)/$$entry" $(PACKAGE_TREE)/fastps/; done
	$(BIN)/mypy --cache-dir build/mypy $(PACKAGE_TREE)/fastps
	$(BIN)/python tools/house.py
	@cd $(PACKAGE_TREE) && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/build/importlinter --no-logo 2>&1 | tail -n 20

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' \
		| xargs $(PIP) install --quiet -c constraints.txt
	touch $@

docs: $(VENV)/.docs  ## build the site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -d build/site

$(VENV)/.wheels: $(VENV)/.installed
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["wheels"])' \
		| xargs $(PIP) install --quiet -c constraints.txt
	touch $@

# Interpreters on the PATH or among pyenv's: WHEEL_PYTHONS="python3.12 /opt/python3.14/bin/python3". Empty: 3.11 to 3.14.
WHEEL_PYTHONS ?=
wheels: $(VENV)/.wheels  ## dist: a wheel for each of CPython 3.11 to 3.14 that needs no compiler, and the sdist
	$(BIN)/python tools/wheels.py --out dist $(WHEEL_PYTHONS)

clean:  ## remove all build products
	rm -rf $(VENV) build dist *.egg-info kernels/*.so kernels/*/*.so kernels/tensors/torch_tensors.cpp
