# Everything a developer runs. Tools and the package live in .venv, build trees in build/.

PYTHON ?= python3
SANITIZE_CXX ?= clang++
JOBS ?= 2

VENV := .venv
STAMPS := $(VENV)/stamps
PIP := $(VENV)/bin/python -m pip
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
# Directories too: removing a file must count as a change.
SOURCES := $(shell find native src -not -path '*/__pycache__*') CMakeLists.txt pyproject.toml README.md LICENSE
CXX_FILES = $(shell find native tests/native -name '*.cpp' -o -name '*.hpp') src/tailcut/tools/testbed/trim.bpf.c

# ThreadSanitizer of older compilers fails under strong address randomization; not everywhere may it be turned off.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)

export PYTHON SANITIZE_CXX
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DELETE_ON_ERROR:
.PHONY: help setup demo test test-long test-fast test-frameworks test-latest-torch test-aarch64 wheel bench lint sanitize format docs stub clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-18s %s\n", $$1, $$2 }'

setup: $(STAMPS)/dev $(STAMPS)/package ## everything for development, in .venv

# DEMO has its options: make demo DEMO="--scenario bursts --seeds 3"
demo: $(STAMPS)/demo $(STAMPS)/package ## train over Gloo, fp16 and tailcut on a testbed; ends with a report (4 minutes)
	@$(VENV)/bin/tailcut demo $(DEMO)

test: $(STAMPS)/dev $(STAMPS)/package lint ## lint, then run the tests, but not those of test-long and test-frameworks (10 minutes on two cores)
	@echo "==> tests that are marked long are left OUT: make test-long"
	@$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not long"

test-long: $(STAMPS)/dev $(STAMPS)/package ## run what make test leaves OUT because it takes long: more seeds, longer runs (10 minutes on two cores)
	@$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m long

test-fast: $(STAMPS)/dev $(STAMPS)/package ## run the tests that take little time (about five minutes)
	@$(VENV)/bin/python -m pytest --fast

# Lightning, Transformers, Accelerate, Ray and torchft: hundreds of megabytes, so `make test` leaves these tests OUT.
test-frameworks: $(STAMPS)/frameworks $(STAMPS)/package ## install the frameworks and run tests/frameworks, which make test leaves OUT
	@$(VENV)/bin/python -m pytest --frameworks tests/frameworks

# torch 2.14 and later take another adapter than the pinned torch. Gigabytes, so it is not a part of `make test`.
LATEST := .venv-latest
test-latest-torch: ## run the PyTorch tests with the newest torch (downloads gigabytes)
	@test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	@$(LATEST)/bin/python -m pip install -qq --upgrade torch numpy pytest
	@$(LATEST)/bin/python -m pip install -qq --force-reinstall --no-deps .
	@$(LATEST)/bin/python -c "import torch; print('==> torch', torch.__version__)"
	@$(LATEST)/bin/python -m pytest tests/test_attach.py tests/test_backend.py tests/test_staging.py

bench: $(STAMPS)/dev $(STAMPS)/package ## measure allreduce against Gloo
	@$(VENV)/bin/tailcut bench allreduce --against gloo

lint: $(STAMPS)/dev ## check style, types and layers
	@echo "==> lint"
	@$(VENV)/bin/ruff check --quiet
	@$(VENV)/bin/ruff format --check --quiet || { $(VENV)/bin/ruff format --check; echo "run: make format"; exit 1; }
	@$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	@$(VENV)/bin/mypy --no-error-summary
	@out=$$(PYTHONPATH=src $(VENV)/bin/lint-imports 2>&1) || { echo "$$out"; exit 1; }

format: $(STAMPS)/dev ## rewrite the sources in the project's style
	@$(VENV)/bin/ruff check --fix-only --quiet
	@$(VENV)/bin/ruff format --quiet
	@$(VENV)/bin/clang-format -i $(CXX_FILES)

docs: $(STAMPS)/dev ## regenerate docs/configuration.md from the fields of Config
	@PYTHONPATH=src $(VENV)/bin/python scripts/configuration.py

# The wheel is built from the sdist, so that whoever has no wheel for a machine can build one too.
wheel: CHECKED := build/wheel
wheel: $(STAMPS)/light ## build the sdist and, from it, a wheel in dist/, and check the wheel in an empty environment
	@rm -rf dist $(CHECKED) && mkdir -p $(CHECKED)
	@echo "==> building the sdist, and a wheel from it"
	@$(VENV)/bin/python -c "from scikit_build_core.build import build_sdist; build_sdist('dist')" >/dev/null
	@$(PIP) wheel -qq --no-build-isolation --no-deps -w dist dist/*.tar.gz
	@echo "==> checking $$(echo dist/*.whl)"
	@$(PYTHON) -m venv $(CHECKED)/venv
	@$(CHECKED)/venv/bin/python -m pip install -qq -c constraints-dev.txt dist/*.whl
	@cd $(CHECKED) && venv/bin/python $(CURDIR)/scripts/check-wheel.py

stub: $(STAMPS)/package ## regenerate src/tailcut/_native.pyi from the built extension
	@$(VENV)/bin/python -m nanobind.stubgen -q -m tailcut._native -o src/tailcut/_native.pyi

# A new corpus every time, so that a run depends on nothing but the seed and the committed inputs. An input takes some
# 20 ms, so one that runs for 20 s hangs. The entropic schedule and the search for shorter inputs cost more than the inputs.
sanitize: ASAN := build/sanitize-address
sanitize: TSAN := build/sanitize-thread
sanitize: FUZZ = -seed=1 -timeout=20 -entropic=0 -reduce_inputs=0 -verbosity=0 -print_final_stats=1 -artifact_prefix=$(ASAN)/
sanitize: $(STAMPS)/light ## run the native tests under the address, undefined and thread sanitizers
	@scripts/system-packages sanitize
	@$(call build_native,$(ASAN),address$(comma)undefined,sim_stress udp_stress fuzz_endpoint fuzz_codec,$(SANITIZE_CXX))
	@$(call build_native,$(TSAN),thread,udp_stress,$(SANITIZE_CXX))
	@echo "==> sim_stress (address, undefined)"
	@$(ASAN)/sim_stress 300
	@echo "==> udp_stress (address, undefined)"
	@$(ASAN)/udp_stress
	@echo "==> fuzz_endpoint (address, undefined)"
	@rm -rf $(ASAN)/corpus && mkdir $(ASAN)/corpus
	@$(ASAN)/fuzz_endpoint $(FUZZ) -runs=200000 -max_total_time=60 $(ASAN)/corpus $(wildcard tests/native/corpus)
	@echo "==> fuzz_codec (address, undefined)"
	@$(ASAN)/fuzz_codec $(FUZZ) -runs=100000 -max_total_time=30
	@echo "==> udp_stress (thread)"
	@$(NO_ASLR) $(TSAN)/udp_stress

# Prints hashes of what the kernels compute, here and for 64-bit ARM in an emulator: they are to be the same.
test-aarch64: HERE := build/kernels
test-aarch64: THERE := build/kernels-aarch64
test-aarch64: $(STAMPS)/light ## hold the NEON kernels to their scalar twins and to the results of this machine (a minute)
	@scripts/system-packages aarch64
	@$(call build_native,$(HERE),,kernel_hashes,$(CXX),)
	@$(call build_native,$(THERE),,kernel_hashes,aarch64-linux-gnu-g++,-DCMAKE_SYSTEM_NAME=Linux \
	    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_EXE_LINKER_FLAGS=-static)
	@echo "==> kernel_hashes, here and on 64-bit ARM"
	@$(HERE)/kernel_hashes >$(HERE)/hashes
	@qemu-aarch64-static $(THERE)/kernel_hashes >$(THERE)/hashes
	@diff $(HERE)/hashes $(THERE)/hashes
	@echo "==> the same bits in $$(wc -l <$(HERE)/hashes) cases"

comma := ,
# $(call build_native,DIRECTORY,SANITIZERS,TARGETS,COMPILER,OPTIONS)
define build_native
echo "==> building $(3) with $(4) ($(or $(2),no sanitizer))" && \
$(VENV)/bin/cmake -S . -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
    -DCMAKE_CXX_COMPILER=$(4) -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
    -DTAILCUT_NATIVE_TESTS=ON -DTAILCUT_SANITIZE=$(2) $(5) >/dev/null && \
$(VENV)/bin/cmake --build $(1) --target $(3) -- --quiet
endef

clean: ## remove everything that make made
	@rm -rf $(VENV) $(LATEST) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The light set-up: what building and running tailcut needs.
$(STAMPS)/light: constraints-dev.txt
	@scripts/system-packages build
	@echo "==> setting up $(VENV): numpy and the build tools"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq -c constraints-dev.txt numpy $(BUILD_TOOLS)
	@mkdir -p $(STAMPS) && touch $@

# What the demo trains with.
$(STAMPS)/demo: $(STAMPS)/light
	@scripts/system-packages demo
	@scripts/system-packages testbed || echo "==> without these the demo runs on loopback, without a testbed"
	@echo "==> setting up $(VENV): torch, scikit-learn and matplotlib (about a minute)"
	@$(PIP) install -qq -c constraints-dev.txt torch scikit-learn matplotlib
	@touch $@

# The full one; a file of constraints that pins everything is also the list of what to install.
$(STAMPS)/dev: $(STAMPS)/demo
	@scripts/system-packages test testbed
	@echo "==> setting up $(VENV): the tools"
	@$(PIP) install -qq -r constraints-dev.txt
	@touch $@

$(STAMPS)/frameworks: $(STAMPS)/dev constraints-frameworks.txt
	@echo "==> setting up $(VENV): the frameworks (some minutes)"
	@$(PIP) install -qq -c constraints-dev.txt -r constraints-frameworks.txt
	@touch $@

# Not isolated, so that the build tree in build/ keeps its paths and only what changed is compiled again.
$(STAMPS)/package: $(STAMPS)/light $(SOURCES)
	@echo "==> building and installing tailcut"
	@$(PIP) install -qq --no-build-isolation --no-deps .
	@touch $@
