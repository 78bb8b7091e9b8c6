# The commands of the project. `make help` lists them.
#
#   PYTHON=python3.13 make test     uses another interpreter for .venv (run `make clean` first)
#   make build FAST=1               a build for use while you edit: compiles in seconds, has assertions, runs slowly
#   make test NEWEST=1              uses the newest release of every package instead of the locked ones (run
#                                   `make clean` before and after it)
#
# Only Rust (with rustfmt and clippy), CPython 3.11+ and a C compiler must be installed. The Python packages are
# installed into .venv, in the versions that requirements/*.txt lock. Each installation and the build leave a stamp file
# there, so that they are repeated only if their inputs have changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CARGO  ?= cargo
PYTEST := $(BIN)/python -m pytest
# How many test files run in parallel: one more than there are processors, because tests spend much of their time
# waiting.
JOBS   ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Extra arguments: make test-python ARGS="tests/transports -k half_close". ARGS="-n 0" runs one test at a time, in one
# process.
ARGS   ?=
# The cargo profile of the extension
PROFILE := $(if $(FAST),quick,release)
# How many seconds each fuzzer runs
SECONDS ?= 60

RUST_SOURCES := Cargo.toml Cargo.lock $(wildcard build*.rs) python/grapeshot/_core.pyi $(shell find src core -name '*.rs' -o -name '*.s' -o -name Cargo.toml)
LOADGEN      := benchmarks/loadgen/Cargo.toml
BRIDGE       := examples/tokio_bridge/Cargo.toml
# With the stable ABI one build serves all interpreters, so pyo3 need not ask an interpreter for its version.
BRIDGE_ENV   := PYO3_NO_PYTHON=1 PYO3_BUILD_EXTENSION_MODULE=1 CARGO_TARGET_DIR=target/examples/abi3
RUST_FUZZ    := core/fuzz/Cargo.toml
# The fuzzers are only checked here, so libFuzzer itself need not be compiled.
FUZZ_ENV     := CUSTOM_LIBFUZZER_PATH=/none/libfuzzer.a CARGO_TARGET_DIR=target/fuzz/check
RUST_MODELS  := core/models/Cargo.toml
MODELS_ENV   := CARGO_TARGET_DIR=target/models
# docs/speed.md does not have all rows of these comparisons, so each comparison has a table of its own.
TABLED       := $(addprefix benchmarks/results/,comparison-3.13.json two-loops.json coros-3.14t.json rpc.json files.json lookups.json programs.json pgo.json)
# A newer Rust has new lints, and an older one lacks some. So warnings of clippy and rustdoc are errors only with the
# version that builds the releases.
PINNED_RUST  := $(shell cat .ci/rust-version)
WARNINGS      = $(if $(filter $(PINNED_RUST),$(shell rustc --version | cut -d ' ' -f 2)),-D warnings,--cap-lints warn)
OTHER_RUST   := warnings of clippy and rustdoc are errors only with Rust $(PINNED_RUST), not with the one that is used here
LINTED       := python tests benchmarks examples docs/site

# pyo3 asks this interpreter for its version. All commands use the same one, so that nothing is built twice.
export PYO3_PYTHON := $(abspath $(BIN)/python)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Container images often set this variable. The tests start thousands of interpreters, and without bytecode files each
# would compile its imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv build loadgen demo test rewrite test-rust models test-python conformance soak fuzz fuzz-rust fuzz-python lint format lock bench tables churn callgrind docs pgo wheel audit clean

help: ## list the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---------------------------------------------------------------- set up

venv: $(VENV)/.dev ## make .venv with everything that the targets below need

build: $(VENV)/.native-$(PROFILE) ## build the extension into .venv (FAST=1: in seconds, not for measuring)

loadgen: ## build the load generator of the benchmarks
	$(CARGO) build --quiet --release --manifest-path $(LOADGEN)

# ---------------------------------------------------------------- use

# The three parts run side by side: each release build spends most of its time in a linker that uses one core, and pip
# waits for the network.
demo: $(VENV)/.build ## serve an aiohttp application, load it, compare with asyncio and uvloop
	@for part in build loadgen $(VENV)/.demo; do $(MAKE) --no-print-directory $$part & parts="$$parts $$!"; done; \
	  for part in $$parts; do wait $$part || failed=1; done; test -z "$$failed"
	$(BIN)/python -m benchmarks.demo $(ARGS)

# ---------------------------------------------------------------- check

# The extension is built while the lint and the Rust tests run. That saves time, because the build's linker uses only
# one core. The lint and the Rust tests use other build directories, so they need not wait for the build.
test: $(VENV)/.dev $(VENV)/.build ## all checks: lint, Rust tests, Python tests, CPython's own tests
	@$(MAKE) --no-print-directory build rewrite & building=$$!; \
	  $(MAKE) --no-print-directory lint test-rust && wait $$building || { kill $$building 2>/dev/null; exit 1; }
	@$(MAKE) --no-print-directory test-python

# pytest rewrites the assertions of a test file when it first imports the file. For all files that takes half a minute.
# This target does it once. Otherwise each of the processes that run tests in parallel would do it.
rewrite: $(VENV)/.dev build ## let pytest rewrite the assertions of all test files (`make test` does so itself)
	@$(PYTEST) --collect-only -qq -p no:cacheprovider >/dev/null 2>&1 || true # test-python reports errors

test-rust: ## the Rust tests: grapeshot-core, which does not need Python, and the load generator
	$(CARGO) test --quiet -p grapeshot-core
	$(CARGO) test --quiet --manifest-path $(LOADGEN)

models: ## use loom to check the models of the protocols between threads (.ci/soak does so, too)
	$(MODELS_ENV) $(CARGO) clippy --quiet --lib --tests --manifest-path $(RUST_MODELS) -- $(WARNINGS)
	$(MODELS_ENV) $(CARGO) test --quiet --manifest-path $(RUST_MODELS)

test-python: $(VENV)/.dev build ## the Python tests, including CPython's own (ARGS= goes to pytest)
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

conformance: $(VENV)/.dev build ## only CPython's own asyncio tests
	$(PYTEST) tests/conformance $(ARGS)

soak: ## the soaks of coros and of threads, ThreadSanitizer, the models, the fuzzers; see .ci/soak (ARGS=asan: only one)
	.ci/soak $(ARGS)

fuzz: fuzz-rust fuzz-python ## every fuzzer for SECONDS (60), with new random numbers

fuzz-rust: ## the fuzzers of grapeshot-core (ARGS=timers: only one)
	core/fuzz/run $(SECONDS) $(ARGS)

fuzz-python: $(VENV)/.dev build ## the fuzzers of the extension (ARGS=arguments: only one)
	$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS) $(ARGS)

lint: $(VENV)/.dev ## rustfmt, clippy, rustdoc, ruff, import-linter and mypy; changes nothing
	$(CARGO) fmt --all --check
	$(CARGO) fmt --check --manifest-path $(LOADGEN)
	$(CARGO) fmt --check --manifest-path $(BRIDGE)
	$(CARGO) fmt --check --manifest-path $(RUST_FUZZ)
	$(CARGO) fmt --check --manifest-path $(RUST_MODELS)
	$(CARGO) clippy --quiet --workspace --all-targets -- $(WARNINGS)
	$(CARGO) clippy --quiet --all-targets --manifest-path $(LOADGEN) -- $(WARNINGS)
	$(BRIDGE_ENV) $(CARGO) clippy --quiet --all-targets --manifest-path $(BRIDGE) -- $(WARNINGS)
	$(FUZZ_ENV) $(CARGO) clippy --quiet --manifest-path $(RUST_FUZZ) -- $(WARNINGS)
	$(BIN)/ruff check $(LINTED)
	RUSTDOCFLAGS="$(WARNINGS) -A rustdoc::private_intra_doc_links" $(CARGO) doc --quiet --no-deps --document-private-items --workspace
	$(BIN)/ruff format --check $(LINTED)
	PYTHONPATH=python $(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(if $(findstring cap-lints,$(WARNINGS)),@echo "$(OTHER_RUST)" >&2)

format: $(VENV)/.dev ## rewrite Rust and Python to the project's format
	$(CARGO) fmt --all
	$(CARGO) fmt --manifest-path $(LOADGEN)
	$(CARGO) fmt --manifest-path $(BRIDGE)
	$(CARGO) fmt --manifest-path $(RUST_FUZZ)
	$(CARGO) fmt --manifest-path $(RUST_MODELS)
	$(BIN)/ruff check --quiet --fix --exit-zero $(LINTED)
	$(BIN)/ruff format $(LINTED)

lock: $(VENV)/.build ## lock the newest versions in requirements/*.txt (ARGS=--keep: keep versions that still fit *.in)
	PATH="$(abspath $(BIN)):$$PATH" requirements/lock $(ARGS)

# ---------------------------------------------------------------- measure

bench: $(VENV)/.dev build loadgen ## compare with every loop that can be installed (70 to 110 min; ARGS=--quick: 15 to 20)
	$(BIN)/python -m benchmarks $(ARGS)

tables: $(VENV)/.dev build ## write all tables (README, docs, benchmarks/results) from the committed JSON
	$(BIN)/python tests/project/benchmarks/speed_table.py
	$(BIN)/python -m benchmarks.feature_table
	for json in $(wildcard $(TABLED)); do $(BIN)/python -m benchmarks.tables $$json --write $${json%json}md || exit 1; done

churn: $(VENV)/.dev build loadgen ## open and close connections under load; RSS and the number of fds must not grow
	$(BIN)/python -m benchmarks.churn $(ARGS)

callgrind: $(VENV)/.dev build ## count the instructions of an echo, call_soon and call_later (needs valgrind)
	$(BIN)/python -m benchmarks.callgrind $(ARGS)

# ---------------------------------------------------------------- publish

docs: $(VENV)/.dev build ## build the site in build/docs/html: pages, and the reference from docstrings; warnings are errors
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site -d build/docs/doctrees . build/docs/html

wheel: ## build the sdist, and a wheel for each CPython that is found, in dist/; audit and test them (ARGS=3.13: only one)
	.ci/wheel $(ARGS)

pgo: venv ## build the extension in python/grapeshot, optimized with a profile of the benchmark's cases
	.ci/pgo profile $(BIN)/python
	.ci/pgo build $(BIN)/python python/grapeshot

audit: ## check the licences and advisories of all dependencies, and the workflow files
	.ci/audit

# ---------------------------------------------------------------- clean up

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) target benchmarks/loadgen/target dist build .pytest_cache .mypy_cache .ruff_cache
	rm -f python/grapeshot/_core*.so
	find $(LINTED) -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- files

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "grapeshot needs CPython 3.11 or later, not " + sys.version)'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "this Python cannot make virtual environments (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The packages that a target needs, in the versions that its lock file names. Those for the build come first, because uv,
# which installs the others, is one of them.
$(VENV)/.dev $(VENV)/.demo: $(VENV)/.build
$(VENV)/.%: requirements/%.txt | $(VENV)/pyvenv.cfg
	PATH="$(abspath $(BIN)):$$PATH" requirements/install $(BIN)/python requirements/$*.$(if $(NEWEST),in,txt)
	@touch $@

# Only one build can be installed, so the stamp of the other profile is removed.
$(VENV)/.native-$(PROFILE): $(VENV)/.build $(RUST_SOURCES)
	@rm -f $(VENV)/.native-*
	PIP_QUIET=1 VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --profile $(PROFILE) --quiet
	@touch $@
