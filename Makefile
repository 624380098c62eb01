# make setup | check | test | unit | test-integration | test-peers | soak | demo | bench | gpu | lint | types | docs | clean | distclean
#
# Needs Python 3.11 or newer, gcc/g++ and make. Everything goes into .venv; a second run takes well under a second.
# SGLANG=0.5.12.post1: with this SGLang, from an environment of its own on top of .venv (any target that runs an engine).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_TORCH_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?= --quick
# Tests run in so many processes side by side; engine tests in two at most.
WORKERS ?= 2
STUDIES := policies starts gains coarse_grid tail_batching bias lending leaving rl_step speculation repack

OF_VENV := 0.5.23
# What verl's release pins: test-integration runs with it.
OF_VERL := 0.5.12.post1
OF_INTEGRATION := $(or $(SGLANG),$(OF_VERL))
SGLANG ?= $(OF_VENV)
SGLANGS := $(OF_VENV) $(patsubst requirements/sglang-%.txt,%,$(wildcard requirements/sglang-*.txt))
$(if $(filter $(SGLANG),$(SGLANGS)),,$(error SGLANG=$(SGLANG): must be one of $(SGLANGS)))
OTHER := $(filter-out $(OF_VENV),$(SGLANG))
FOLDER = python/sglang_pat/host/v$(subst .,_,$(OTHER:.post1=))

VENV := .venv
PY := $(VENV)/bin/python
RUN := $(VENV)$(OTHER:%=-%)
RUN_PY := $(RUN)/bin/python
# LONG=1: also the tests marked long, as CI runs `make test` with $(OF_VERL).
WITH_LONG = $(if $(LONG),-m "not soak")
PYTEST = $(RUN_PY) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
INTEGRATION := .venv-integration$(patsubst %,-%,$(filter-out $(OF_VERL),$(OF_INTEGRATION)))
PIP_COMMAND = -m pip --disable-pip-version-check install --quiet --no-input
PIP = $(PY) $(PIP_COMMAND)
SOURCES := requirements/torch.txt requirements/cpu.txt requirements/sglang.txt requirements/tasks.txt
CODE := python profiler studies tests bench examples
EXTENSION := pyproject.toml $(wildcard setup.py) $(shell find csrc -type f 2>/dev/null)

# One thread a rank: the ranks of an engine share the cores. Offline: nothing here is ever to be downloaded by a test.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export PYTHONUNBUFFERED := 1

# No environment is thrown away because another one was made of it.
.SECONDARY:
.PHONY: setup check test unit test-integration test-peers soak soak-fleet demo bench gpu lint types docs clean distclean

setup: $(RUN)/.sglang_pat_setup

$(PY):
	@test -n "$(PYTHON)" || { echo "no python3 found: install Python 3.11 or newer, or give PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python {v[0]}.{v[1]} found, 3.11 or newer needed: give PYTHON=/path/to/python")'
	$(PYTHON) -m venv $(VENV)

# torch first and alone, the rest without dependencies: see the comments in the files.
$(VENV)/.sglang_pat_requirements: $(SOURCES) | $(PY)
	$(PIP) $(PIP_TORCH_ARGS) -r requirements/torch.txt
	$(PIP) --no-deps -r requirements/cpu.txt -r requirements/sglang.txt -r requirements/tasks.txt
	touch $@

$(VENV)/.sglang_pat_setup: $(VENV)/.sglang_pat_requirements $(EXTENSION)
	$(PIP) --no-build-isolation --no-deps -e .
	cp python/sglang_pat/cpu/torchvision_on_cpu.pth "$$($(PY) $(PRINT_PATH))"
	touch $@

test: setup
	$(PYTEST) $(WITH_LONG) $(PYTEST_ARGS)

# No engine, and nothing of SGLang: the loop to work in.
unit: setup
	$(PYTEST) tests/unit $(WITH_LONG) $(PYTEST_ARGS)

# Environments on top of .venv: what they have comes first.
PRINT_PATH = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
BELOW = "$$($(@D)/bin/python $(PRINT_PATH))/below.pth"
# The plain path is for the type checker, which reads no more.
ADD_VENV = $(PY) $(PRINT_PATH); echo "import site; site.addsitedir('$$($(PY) $(PRINT_PATH))')"

.venv-%/.sglang_pat_setup: $(VENV)/.sglang_pat_setup requirements/sglang-%.txt
	$(PYTHON) -m venv $(@D)
	($(ADD_VENV)) > $(BELOW)
	$(@D)/bin/python $(PIP_COMMAND) --no-deps -r requirements/sglang-$*.txt
	touch $@

# The real RL frameworks, in an environment on top of the other one.
test-integration: $(INTEGRATION)/.sglang_pat_setup
	$(INTEGRATION)/bin/python -m pytest tests/integration $(WITH_LONG) $(PYTEST_ARGS)

.venv-integration/.sglang_pat_setup: .venv-$(OF_VERL)/.sglang_pat_setup requirements/integration.txt requirements/other_sglang.txt
	$(PYTHON) -m venv $(@D)
	(.venv-$(OF_VERL)/bin/python $(PRINT_PATH); $(ADD_VENV)) > $(BELOW)
	$(@D)/bin/python $(PIP_COMMAND) --no-deps -r requirements/integration.txt
	$(@D)/bin/python $(PIP_COMMAND) --no-deps --upgrade --target $(@D)/other_sglang -r requirements/other_sglang.txt
	touch $@

.venv-integration-$(OF_VENV)/.sglang_pat_setup: .venv-integration/.sglang_pat_setup
	$(PYTHON) -m venv $(@D)
	(.venv-integration/bin/python $(PRINT_PATH); $(ADD_VENV)) > $(BELOW)
	touch $@

# Engines of verl jobs are killed in every step, a hundred of them at drawn moments: an hour and a half.  SHORT=1: what
# CI runs of it, as part of test-integration.
soak-fleet: $(INTEGRATION)/.sglang_pat_setup
	$(INTEGRATION)/bin/python -m pytest tests/integration/test_verl_deaths.py -s \
		$(if $(SHORT),,-m "soak or not soak") $(PYTEST_ARGS)

# SGLang's own tests on an engine that switches, from a checkout of its source at the version in use; half an hour and more.
test-peers: $(INTEGRATION)/.sglang_pat_setup
	SGLANG_SOURCE=$(SGLANG_SOURCE) $(INTEGRATION)/bin/python -m tests.peers $(PEERS_ARGS)

# Hours: inputs that are drawn anew, and all that is marked soak, in both environments.
soak: setup $(INTEGRATION)/.sglang_pat_setup
	HYPOTHESIS_PROFILE=search $(PYTEST) tests/unit -m "not soak"
	HYPOTHESIS_PROFILE=search $(PYTEST) -m soak $(PYTEST_ARGS)
	$(INTEGRATION)/bin/python -m pytest tests/integration -m soak $(PYTEST_ARGS)

demo: setup
	$(RUN_PY) -m sglang_pat.demo $(DEMO_ARGS)

bench: setup
	@set -e; for script in bench/[!_]*.py; do echo "== $$script $(BENCH_ARGS)"; $(RUN_PY) $$script $(BENCH_ARGS); done
	@set -e; for study in $(STUDIES); do echo "== studies.$$study $(BENCH_ARGS)"; $(RUN_PY) -m studies.$$study $(BENCH_ARGS); done

# Does it work on this machine, and what does a switch cost here?  See docs/gpu.md.  Not in .venv, which has no CUDA: in
# the environment in which SGLang for GPUs is installed, and this package.
GPU_PYTHON ?= python3
gpu:
	$(GPU_PYTHON) -m sglang_pat.acceptance $(GPU_ARGS)

# What to run before a commit: all that takes no engine.
check: lint types unit

lint: setup
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)

# With another SGLANG: what is in its folder of host/.
TYPES_OF_OTHER = {"extends": "../pyproject.toml", "venvPath": "..", "venv": "$(RUN)", "include": ["../$(FOLDER)"], "ignore": []}
types: $(VENV)/.sglang_pat_types $(RUN)/.sglang_pat_setup
	$(if $(OTHER),echo '$(TYPES_OF_OTHER)' > $(RUN)/pyright.json)
	$(PY) -m basedpyright $(if $(OTHER),-p $(RUN)/pyright.json)

$(VENV)/.sglang_pat_types: $(VENV)/.sglang_pat_setup requirements/check.txt
	$(PIP) --no-deps -r requirements/check.txt
	touch $@

# The pages as a site, in out/site.  Links are checked by tests/unit/test_docs.py.
docs: $(VENV)/.sglang_pat_docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

$(VENV)/.sglang_pat_docs: $(VENV)/.sglang_pat_setup requirements/docs.txt
	$(PIP) --no-deps -r requirements/docs.txt
	touch $@

clean:
	rm -rf build dist out/site python/*.egg-info .pytest_cache .hypothesis .ruff_cache
	find python profiler studies tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	find python -name '*.so' -delete
	rm -f .venv*/.sglang_pat_setup

distclean: clean
	rm -rf .venv .venv-*
