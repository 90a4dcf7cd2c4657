# make demo      fetch all-MiniLM-L6-v2, optimize it, compare it with the original
# make test      lint, docs, and a sample of the suite: SAMPLE parameter sets of each test (10 minutes on two cores)
# make test-all  every test: the whole suite, sanitizers, Optimum, GenAI, Ray, emulated Arm, the wheel
# make ci        what CI runs: make test, then the other parts of make test-all with few parameter sets
# make extras    the tests of Optimum, GenAI with transformers, and Ray, each in its own environment
# make wheel     build the package, and check that it holds no test code
# make asan      the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
# make aarch64   models on emulated Arm CPUs; make test-aarch64: kernels too, 40 minutes (SAMPLE=4: 4 sets a test)
# make wheels    build and try wheels for Linux on x86-64 and aarch64 with glibc 2.28 or later
# make macos     check that the library compiles for macOS
# make docs      the site, in build/docs
# Each target sets itself up in .venv and build/. PYTHON=python3.12 picks another interpreter (3.11 or later).

PYTHON ?= python3
# Number of pytest processes. .ci/parts.py divides the cores among parts that run at the same time.
WORKERS ?= auto
# Parameter sets of each test; hypothesis tests run ten times as many examples (tests/sampling.py). Empty runs all.
SAMPLE ?=
# A CPU build, as other builds install gigabytes of CUDA. If pip cannot find it, the parts that need it print NOT RUN.
TORCH ?= torch==2.13.0+cpu
export PYTHON WORKERS SAMPLE
# With ccache, a fresh clone reuses what another clone has compiled.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER = ccache
export CCACHE_BASEDIR = $(CURDIR)
export CCACHE_NOHASHDIR = 1
endif
VENV := .venv
BIN := $(VENV)/bin
# Files that the installed package depends on.
SOURCES := $(shell find CMakeLists.txt pyproject.toml ops src graph_passes models benchmarks -type f \
             -not -name '*.pyc' -not -name '*.md' 2>/dev/null)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Wheels for users and for tests share a build folder. Each sets ORTOLAN_TESTING, because CMake caches options. Build
# isolation would empty the folder each time.
BUILD := --no-build-isolation --no-deps --config-settings=cmake.define.ORTOLAN_WERROR=ON
NATIVE := $(BUILD) --config-settings=build-dir=build/native --config-settings=cmake.define.ORTOLAN_TESTING
SETS := $(if $(SAMPLE),--sample $(SAMPLE))
PYTEST := $(CURDIR)/$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: demo test test-all extras ci lint asan amx suite aarch64 test-aarch64 docs optimum genai ray bench wheel wheels macos clean

demo: $(VENV)/.installed
	$(BIN)/ortolan demo

# Each part is a target below. All parts run, even after a failure. The last lines list failures and skipped tests.
test: SAMPLE := $(or $(SAMPLE),2)
test: $(VENV)/.installed
	@$(BIN)/python .ci/parts.py lint docs then suite

test-all: $(VENV)/.installed
	@$(BIN)/python .ci/parts.py lint docs then suite then asan optimum genai ray aarch64 wheel amx

extras: $(VENV)/.installed
	@$(BIN)/python .ci/parts.py genai optimum ray

ci: SAMPLE := $(or $(SAMPLE),2)
ci: $(VENV)/.installed
	@$(BIN)/python .ci/parts.py lint docs then suite then asan optimum genai ray aarch64 wheel

suite: $(VENV)/.installed
	cd tests && ../.ci/pocl $(PYTEST) $(SETS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files -co --exclude-standard '*.c' '*.cc' '*.h' | xargs $(BIN)/clang-format --dry-run --Werror
	mkdir -p build/typing/ortolan && ln -sfn $(CURDIR)/src/ortolan/* build/typing/ortolan/
	ln -sfn $(CURDIR)/graph_passes $(CURDIR)/models $(CURDIR)/benchmarks build/typing/ortolan/
	ln -sfn $(CURDIR)/tools build/typing/
	$(BIN)/mypy
	cd build/typing && ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache
	$(BIN)/python .ci/native_facts.py
	$(BIN)/python .ci/plain_language.py

# The tests of formats, kernels, operators and provider in a build that aborts on an invalid access or undefined
# operation. Only instruction sets that this CPU or its emulator can run are built. A sample (CI) is built for AVX2
# alone, in half the time, and runs kernels, formats and hostile inputs. Each part is one pytest run with a small
# quarantine, since the sanitizer does not return the memory of thousands of sessions.
ASAN_OPTIONS = detect_leaks=0:quarantine_size_mb=16:thread_local_quarantine_size_kb=64
HOSTILE = "formats" "ops/test_*kernels*.py" "ops/test_*safety.py ops/test_*fuzz.py ops/test_*errors.py" "provider"
EVERY_PART = "formats" "ops/test_[a-l]*.py" "ops/test_[m-r]*.py" "ops/test_s*.py" "ops/test_[t-z]*.py" "provider" "amx"
ASAN_PARTS = $(if $(SAMPLE),$(HOSTILE),$(EVERY_PART))
ASAN_BUILT = build/asan-site/.installed$(if $(SAMPLE),-avx2)
asan: $(ASAN_BUILT)
	cd tests && set -e && for part in $(ASAN_PARTS); do ASAN_OPTIONS=$(ASAN_OPTIONS) \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  PYTHONPATH=$(CURDIR)/build/asan-site $(PYTEST) $$part -p no:cacheprovider --sample $(or $(SAMPLE),8); done

# Integer AMX kernels in the emulator of tests/amx on a CPU without AVX-512: in this build they use AVX2 beside tiles.
amx: build/amx-site/.installed
	cd tests && PYTHONPATH=$(CURDIR)/build/amx-site $(PYTEST) -p no:cacheprovider \
	  amx/test_group_matmul.py amx/test_k_quants.py amx/test_sparse_amx_matmul_int8.py

# Emulated Arm CPUs. CI runs models optimized here, on CPUs with neon and dotprod, with the package that users get.
# test-aarch64 adds vectors, formats, kernels and some operators, and a CPU with i8mm.
ANSWERS = $(BIN)/python -m tests.aarch64.answers build/aarch64/answers
KERNELS = simd $(patsubst tests/%,%,$(wildcard tests/ops/test_*_kernels*.py)) ops/test_vnni_spmm_fixed_range.py \
  ops/test_vnni_spmm_op_hidden.py ops/test_bf16_rows.py ops/test_epilogue.py ops/test_layer_norm.py
OPERATORS = $(addprefix ops/,$(addsuffix .py,test_w4a8_matmul_op test_w8a8_matmul_op test_vnni_spmm_op test_lut_post_op_op \
  test_packed_tokens_op test_add_layer_norm_op test_linear_attention_op test_linear_norm test_kernel_tables))
aarch64: $(VENV)/.installed
	$(ANSWERS)
	TESTING=OFF .ci/aarch64 cortex-a53 aarch64/check_models.py
	TESTING=OFF .ci/aarch64 neoverse-n1 aarch64/check_models.py

test-aarch64: $(VENV)/.installed
	$(ANSWERS)
	.ci/aarch64 cortex-a72 $(SETS) formats $(KERNELS) $(OPERATORS) aarch64/check_models.py
	.ci/aarch64 neoverse-n1 $(SETS) $(KERNELS) aarch64/check_models.py -k "not neon and not scalar"
	.ci/aarch64 max $(SETS) $(KERNELS) aarch64/check_models.py -k "not neon and not scalar and not dotprod"

optimum: build/testing-wheel/.built
	TORCH=$(TORCH) .ci/extra optimum test-optimum hooks/test_optimum.py hooks/test_optimum_commands.py \
	  hooks/test_sentence_transformers.py zoo docs/test_hook_pages.py

genai: build/testing-wheel/.built
	TORCH=$(TORCH) .ci/extra genai genai,transformers,train hooks/test_genai.py hooks/test_transformers.py docs/test_hook_pages.py train

# One process, because two Ray clusters slow down each other's start. A sample skips the docs page, which starts another.
ray: build/testing-wheel/.built
	WORKERS=1 .ci/extra ray test-ray serving $(if $(SAMPLE),,docs/test_serving_page.py)

# A broken link or anchor fails the build. The API is read from the sources; only the table of options imports the package.
docs: $(VENV)/.installed
	mkdir -p build/typing/ortolan && ln -sfn $(CURDIR)/src/ortolan/* build/typing/ortolan/
	ln -sfn $(CURDIR)/graph_passes $(CURDIR)/models $(CURDIR)/benchmarks build/typing/ortolan/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would hide and ignore warnings

bench: $(VENV)/.installed
	$(BIN)/ortolan bench sparse_amx_matmul
	$(BIN)/ortolan bench w4a8_matmul
	$(BIN)/ortolan bench w8a8_matmul

wheel: $(VENV)/.created
	@echo "compiling the library: about 5 minutes on two cores, the first time"
	$(PIP) wheel $(NATIVE)=OFF -w dist .
	$(BIN)/python .ci/check_wheel.py dist/ortolan-*.whl

wheels: $(VENV)/.installed .venv-wheels/.installed
	.ci/wheels

# Check that the library compiles and links for macOS on arm64. It cannot run here.
macos: $(VENV)/.created .venv-wheels/.installed
	CMAKE_CXX_COMPILER_LAUNCHER= $(BIN)/cmake -G Ninja -S . -B build/wheels/macos -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DORTOLAN_PYTHON=OFF \
	  -DORTOLAN_WERROR=ON -DCMAKE_TOOLCHAIN_FILE=.ci/zig.cmake -DORTOLAN_ZIG_CPU=aarch64 -DORTOLAN_ZIG_SYSTEM=macos.12.0 \
	  -DORTOLAN_ZIG="$$(.venv-wheels/bin/python -c 'import ziglang; print(ziglang.__path__[0])')/zig"
	$(BIN)/cmake --build build/wheels/macos

clean:
	rm -rf .venv* build dist

$(VENV)/.created:
	sh .ci/check-tools $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install scikit-build-core pybind11 cmake ninja  # pyproject.toml's build-system, and what it runs
	touch $@

build/testing-wheel/.built: $(VENV)/.created $(SOURCES)
	@echo "compiling the library: about 5 minutes on two cores, the first time"
	rm -rf build/testing-wheel
	$(PIP) wheel $(NATIVE)=ON -w build/testing-wheel .
	touch $@

$(VENV)/.installed: build/testing-wheel/.built
	$(PIP) install "$$(ls build/testing-wheel/ortolan-*.whl)[dev]"
	$(PIP) install --no-deps --force-reinstall build/testing-wheel/ortolan-*.whl
	touch $@

.venv-wheels/.installed: $(VENV)/.created
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip --quiet --disable-pip-version-check install ziglang==0.17.1 auditwheel==6.8.2 wheel
	touch $@

build/amx-site/.installed: $(VENV)/.installed
	rm -rf build/amx-site
	$(PIP) install $(BUILD) --target build/amx-site --config-settings=build-dir=build/amx \
	  --config-settings=cmake.define.ORTOLAN_TESTING=ON --config-settings=cmake.define.ORTOLAN_AMX_ON_AVX2=ON \
	  --config-settings=cmake.define.ORTOLAN_ONLY_TARGETS="avx2;amx" .
	touch $@

$(ASAN_BUILT): $(VENV)/.installed
	rm -rf build/asan-site
	$(PIP) install $(BUILD) --target build/asan-site --config-settings=build-dir=build/asan \
	  --config-settings=cmake.define.ORTOLAN_TESTING=ON --config-settings=cmake.build-type=RelWithDebInfo \
	  --config-settings=cmake.define.ORTOLAN_SANITIZE=ON --config-settings=install.strip=false \
	  --config-settings=cmake.define.ORTOLAN_ONLY_TARGETS="$$($(BIN)/python -m tests.instructions $(if $(SAMPLE),avx2))" .
	touch $@
