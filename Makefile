# make demo   install everything into .venv and run the demo on real data; writes demo/report.html
# make test   install everything into .venv and run the tests
# make lint   ruff (lint and format) and mypy
# make types  pyright: how much of the public interface has a known type
# make docs   the documentation site into build/site; every warning and every broken link is an error
# make bench  every benchmark against its peers; writes bench/out/report.html
# make gpu    on a machine with a GPU: its tests, benchmarks and a profile, into bench/out/gpu (docs/gpu.md)
# make build  sdist and wheel into dist/
# make wheel  a manylinux wheel into dist/repaired, which runs on other Linux machines
# make try-wheel  the same, installed and tried in an environment that has nothing else
# make clean  remove what the above made (the .venv too)
#
# A second run reuses .venv; a changed source of csrc recompiles, a changed pyproject.toml installs again.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
TORCH  ?= torch==2.13.0
# The versions that are installed; /dev/null for the newest of everything (and TORCH=torch).
CONSTRAINTS ?= constraints.txt

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS)
SOURCES := $(shell find csrc -type f \( -name '*.cpp' -o -name '*.h*' -o -name '*.cu*' \) 2>/dev/null)

.PHONY: demo test lint types docs bench gpu build wheel try-wheel clean
.DELETE_ON_ERROR:

demo: $(VENV)/run $(VENV)/ext
	$(BIN)/python -m sigkernels demo $(ARGS)

test: $(VENV)/dev $(VENV)/ext
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

types: $(VENV)/types
	$(BIN)/python .ci/type_completeness.py 0.98

docs: $(VENV)/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env docs build/site
	$(BIN)/python .ci/check_site.py build/site

bench: $(VENV)/dev $(VENV)/ext
	$(BIN)/python -m sigkernels bench --html $(ARGS)

# Every part runs, whatever becomes of the one before. CUDA C++ is compiled where nvcc is.
GPU := bench/out/gpu
gpu: $(VENV)/dev
	mkdir -p $(GPU)
	$(BIN)/python setup.py --quiet build_ext --inplace
	-$(BIN)/python -m sigkernels env | tee $(GPU)/env.txt
	-$(BIN)/python -m pytest -m gpu 2>&1 | tee $(GPU)/tests.txt
	-$(BIN)/python -m sigkernels bench --only gpu --html --output $(GPU) $(ARGS)
	-$(BIN)/python bench/gpu_profile.py --output $(GPU)
	tar czf bench/out/gpu.tar.gz -C bench/out gpu
	@echo "Send back bench/out/gpu.tar.gz"

# The wheel is built from the sdist, so that what is missing from the one is missing from the other.
build: $(VENV)/dev
	rm -rf dist
	SIGKERNELS_REQUIRE_EXT=1 $(BIN)/python -m build --outdir dist

# torch ships the OpenMP runtime and loads it first. A second copy inside the wheel would be a second thread pool.
wheel: build
	SIGKERNELS_NO_EXT=1 $(PIP) --editable '.[wheel]'
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --exclude libgomp.so.1 --wheel-dir dist/repaired dist/*-linux_*.whl

try-wheel: wheel
	$(PYTHON) -m venv --clear build/clean
	build/clean/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) $(TORCH)
	build/clean/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) dist/repaired/*.whl
	cd build/clean && bin/python -I ../../.ci/try_wheel.py
	@du -h dist/*.tar.gz dist/repaired/*.whl

clean:
	rm -rf $(VENV) build dist demo bench/out *.egg-info sigkernels/_C.*.so sigkernels/_cuda.*.so

# --- set-up: each file below .venv marks a finished step ---------------------------------------------

# torch by itself and first: it is most of the download.
$(VENV)/torch: constraints.txt
	@echo "Setting up $(VENV): torch takes a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "Cannot make a virtual environment with $(PYTHON): apt-get install python3-venv, or set PYTHON=" >&2; exit 1; }
	$(PIP) $(TORCH)
	@touch $@

# The package itself, editable and without its extension, which is a step of its own so that a changed
# source compiles only that.
$(VENV)/run: $(VENV)/torch pyproject.toml
	SIGKERNELS_NO_EXT=1 $(PIP) --editable '.[plot]' 'setuptools>=77' 'pybind11>=2.13'
	@touch $@

$(VENV)/dev: $(VENV)/run
	SIGKERNELS_NO_EXT=1 $(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/docs: $(VENV)/run
	SIGKERNELS_NO_EXT=1 $(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/types: $(VENV)/dev
	SIGKERNELS_NO_EXT=1 $(PIP) --editable '.[types]'
	@touch $@

$(VENV)/ext: setup.py $(SOURCES) | $(VENV)/run
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@
