# make demo   fetch all-MiniLM-L6-v2, optimize it, compare it with the original
# make test   build, lint and run every test
# make wheel  build the package, and see that nothing of test builds is in it
# make asan   the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
# make docs   the site, in build/docs
# Each does all of its own set-up in .venv and build/. PYTHON=python3.12 picks another interpreter (3.11 or later).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The set-up stamps hang on what they were made from.
SOURCES := $(shell find CMakeLists.txt pyproject.toml ops src graph_passes models benchmarks -type f \
             -not -name '*.pyc' -not -name '*.md' 2>/dev/null)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Builds that tests run on; a folder of their own, as CMake remembers what it was told in the wheel's.
TESTING := --config-settings=cmake.define.ORTOLAN_TESTING=ON --config-settings=cmake.define.ORTOLAN_WERROR=ON

.PHONY: demo test lint asan suite docs bench wheel clean

demo: $(VENV)/.installed
	$(BIN)/ortolan demo

# All parts run, also behind one that fails; the last lines say which did.
test: $(VENV)/.installed
	@failed=; for part in lint asan suite docs wheel; do $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	  if [ -n "$$failed" ]; then echo "make test: failed:$$failed" >&2; exit 1; fi

suite: $(VENV)/.installed
	cd tests && ../$(BIN)/python -m pytest -n auto

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files -co --exclude-standard '*.cc' '*.h' | xargs $(BIN)/clang-format --dry-run --Werror
	mkdir -p build/typing/ortolan && ln -sfn $(CURDIR)/src/ortolan/* build/typing/ortolan/
	ln -sfn $(CURDIR)/graph_passes $(CURDIR)/models $(CURDIR)/benchmarks build/typing/ortolan/
	$(BIN)/mypy
	cd build/typing && ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache
	$(BIN)/python .ci/native_facts.py

# The tests of formats, kernels and operators, in a build whose every wrong access or undefined operation ends the run.
asan: build/asan-site/.installed
	cd tests && ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  PYTHONPATH=../build/asan-site ../$(BIN)/python -m pytest -q -n auto formats ops amx -p no:cacheprovider \
	  --parameter-sets 6

# Strictly: a link or an anchor that leads nowhere fails. The API is read from the sources, nothing is imported.
docs: $(VENV)/.installed
	mkdir -p build/typing/ortolan && ln -sfn $(CURDIR)/src/ortolan/* build/typing/ortolan/
	ln -sfn $(CURDIR)/graph_passes $(CURDIR)/models $(CURDIR)/benchmarks build/typing/ortolan/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.installed
	$(BIN)/ortolan bench sparse_amx_matmul
	$(BIN)/ortolan bench w4a8_matmul

wheel: $(VENV)/.created
	$(BIN)/python -m pip wheel --quiet --no-deps --config-settings=build-dir=build/wheel -w dist .
	$(BIN)/python .ci/check_wheel.py dist/ortolan-*.whl

clean:
	rm -rf $(VENV) build dist

$(VENV)/.created:
	sh .ci/check-tools $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

$(VENV)/.installed: $(VENV)/.created $(SOURCES)
	$(PIP) --config-settings=build-dir=build/testing $(TESTING) ".[dev]"
	touch $@

build/asan-site/.installed: $(VENV)/.installed
	rm -rf build/asan-site
	$(PIP) --no-deps --target build/asan-site --config-settings=build-dir=build/asan $(TESTING) \
	  --config-settings=cmake.build-type=RelWithDebInfo --config-settings=cmake.define.ORTOLAN_SANITIZE=ON \
	  --config-settings=install.strip=false .
	touch $@
