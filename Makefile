# The interpreter that .venv is made with: Python 3.10, 3.11 or 3.12.
PYTHON ?= python3
CPP = $(shell find cpp_backend -name '*.h' -o -name '*.cpp')

# Tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo check test tests engine-main slow lint style types format sanitize chaos bench gpu gpu-rest gpu-wheels docs wheels

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: .venv/.installed-examples ## train on handwritten digits with two processes and with one, and compare
	.venv/bin/python examples/demo.py

SLOW = tests/communicators/network tests/communicators/nccl \
    $(addprefix tests/communicators/test_,shm.py trust.py) \
    $(addprefix tests/compute/test_,blocks.py convolution.py normalization.py pooling.py) \
    $(addprefix tests/project/test_,benchmarks.py docs.py examples.py install.py notebooks.py readme.py) \
    $(addprefix tests/sequential/test_,deaths.py equality.py fashion_mnist.py memory.py nccl.py) \
    tests/chaos tests/clients tests/cluster tests/commands tests/launcher tests/optim tests/parallel tests/sharding \
    tests/strategy/test_lightning.py tests/torch_backend
check: lint ## style, types, and tests of a minute or two: for the inner loop
	.venv/bin/python -m pytest -m "not slow" $(PARALLEL) $(SLOW:%=--ignore=%)

# Five files at a time, as ranks often wait.
PARALLEL = --dist loadfile --no-loadscope-reorder --numprocesses 5
test: style ## style, types, and all tests but the longest (marker slow)
	$(MAKE) --no-print-directory --jobs 2 types tests

tests: .venv/.installed-dev ## the tests of make test alone
	.venv/bin/python -m pytest -m "not slow" $(PARALLEL) tests/project tests/communicators tests/commands \
	    $(filter-out %/project/ %/communicators/ %/commands/,$(sort $(dir $(wildcard tests/*/test_*.py)))) \
	    $(wildcard tests/test_*.py)

# An engine of the user's own: built for the CPU from TAGI_DDP_CUTAGI_SOURCE, a checkout of upstream.
engine-main: .venv/.installed-dev ## tests against an engine built from source
	.venv/bin/python -m pip install --quiet --disable-pip-version-check pybind11
	.venv/bin/python tests/support/build_engine.py "$$TAGI_DDP_CUTAGI_SOURCE" build/engine
	PYTHONPATH=$(CURDIR)/build/engine .venv/bin/python -m pytest -m "not slow" $(PARALLEL) \
	    tests/engine tests/compute tests/sequential

# Fewer at a time: jobs of which ranks are killed at random times take long on a crowded machine.
slow: .venv/.installed-dev .venv/.installed-trackers ## the tests that test leaves out: long examples, installations, SLURM
	.venv/bin/python -m pytest -m slow $(PARALLEL) --numprocesses 3

lint: style types ## check style and types

style: .venv/.installed-dev ## check style alone
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/python tests/support/docstrings.py
	.venv/bin/clang-format --dry-run -Werror $(CPP)

# The types of the C++ backend lie where it is installed; mypy looks for them in the package.
types: .venv/.installed-dev ## check types alone
	cp $$(dirname $$(.venv/bin/python -c 'from tagi_ddp import _backend; print(_backend.__file__)'))/_backend.pyi tagi_ddp
	.venv/bin/mypy

format: .venv/.installed-dev ## mend the style
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
	.venv/bin/clang-format -i $(CPP)

# The backend's tests under the address and undefined-behaviour sanitizers: a virtual environment
# with an instrumented build of the package, and all else from .venv.
sanitize: .venv/.installed-dev ## the tests of the C++ backend under sanitizers
	$(PYTHON) -m venv --clear build/sanitize
	.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	    $$(build/sanitize/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	build/sanitize/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    -C cmake.define.TAGI_DDP_SANITIZE=ON .
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
	    UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONSAFEPATH=1 \
	    PATH="$$PWD/.venv/bin:$$PATH" \
	    build/sanitize/bin/python -m pytest -p no:cacheprovider -m "not slow" \
	    tests/update tests/sequential tests/elastic tests/checkpoint tests/communicators/test_shm.py \
	    $(addprefix tests/compute/test_,native.py linear.py lstm.py sequences.py rms_norm.py embedding.py as_pytagi.py) \
	    tests/communicators/test_shm_memory.py tests/communicators/nccl \
	    $(addprefix tests/engine/test_,memory.py layout.py dialect.py)

# Jobs in which one rank does something random at a random time; jobs that outlive their ranks, at
# random times and at each of their calls; signals, storage, data and launchers; checkpoints with a
# flipped bit; runs that resume at random steps; ranks that stop at random times in merges.
chaos: .venv/.installed-dev ## jobs whose ranks fail at random, and damaged checkpoints
	.venv/bin/python tests/chaos/campaign.py --faults 1000 --alone
	.venv/bin/python tests/chaos/elastic.py --events 1000
	.venv/bin/python tests/chaos/every_call.py --jobs 200
	.venv/bin/python tests/chaos/edge.py --faults 400
	.venv/bin/python tests/chaos/flips.py --flips 5000
	.venv/bin/python -m pytest -m slow tests/checkpoint/test_random_numbers.py \
	    tests/parallel/test_resumed_draws.py tests/sequential/test_deaths.py

bench: .venv/.installed-bench ## measure beside what others use; writes build/bench.json
	.venv/bin/python -m benchmarks

# All that needs a GPU, in eight minutes at most: its report, build/gpu.txt and build/gpu.json, grows as
# results come. PYTHON has a torch with CUDA; what else it takes lies in WHEELS, so no network is needed.
WHEELS ?= wheels
gpu: ## all that needs a GPU, in eight minutes at most; writes build/gpu.txt
	$(PYTHON) benchmarks/gpu_report.py --wheels $(WHEELS)

gpu-rest: ## what gpu has not reached, or what failed there
	$(PYTHON) benchmarks/gpu_report.py --wheels $(WHEELS) --rest

# These wheels, for the machine's Python.
FOR ?= 3.12
gpu-wheels: ## the wheels that gpu needs on a machine without a network
	$(PYTHON) benchmarks/gpu_report.py --wheels $(WHEELS) --collect $(FOR)

# Broken links, public names without a docstring and cells of notebooks that
# fail are errors.
docs: .venv/.installed-docs ## the site, in build/site
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build

# Wheels for these interpreters, in dist: repaired by auditwheel, each tried in a fresh environment.
# How old a system they are for follows from this one's compiler; cibuildwheel builds a release's.
PYTHONS ?= $(PYTHON)
wheels: .venv/.installed-wheels ## wheels for PYTHONS, in dist
	mkdir -p dist
	set -e; for python in $(PYTHONS); do \
	    folder=build/wheels/$$($$python -c 'import sys; print(sys.implementation.cache_tag)'); \
	    rm -rf $$folder; \
	    $$python -m venv $$folder/venv; \
	    $$folder/venv/bin/python -m pip --disable-pip-version-check --quiet \
	        wheel --no-deps --wheel-dir $$folder/built .; \
	    PATH="$$PWD/.venv/bin:$$PATH" auditwheel repair --wheel-dir $$folder $$folder/built/*.whl; \
	    $$folder/venv/bin/python -m pip --disable-pip-version-check --quiet install $$folder/*.whl; \
	    $$folder/venv/bin/python tests/support/wheel_works.py; \
	    cp $$folder/*.whl dist; \
	done

# .venv with the package, editable, and one of its extras. Python files are used as they are; the
# C++ backend is built again when a file of it changes, the engine's loader is copied at each build.
.venv/.installed-%: pyproject.toml CMakeLists.txt $(shell find cpp_backend tagi_ddp/engine -type f \
    -not -name '*.pyc')
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]' $(TORCH)
	touch $@

# All targets take the torch that dev pins; else the next one would replace it.
.venv/.installed-examples .venv/.installed-docs .venv/.installed-trackers: \
    TORCH = $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

# Developers mend warnings; users' compilers may be newer and have others.
.venv/.installed-dev: export SKBUILD_CMAKE_DEFINE = TAGI_DDP_WERROR=ON
