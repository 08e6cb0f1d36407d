# Everything that a clone needs, from nothing but Python (3.11 or newer) and make.
#   make demo   train, record, clone          make test   lint and tests
#   make wheel   build a wheel, and try it in a fresh environment
#   make lint   make bench   make results   make gallery   make docs   make clean   make traces BASE=<commit>   make mutations

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt

# Tests start many processes, which then need not compile Etude again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint format bench results gallery docs wheel serve-docs traces mutations clean
.DELETE_ON_ERROR:

# One process more than there are cores, as tests also wait for processes; at most four.
workers = $$($(BIN)/python -c "import os; print(min(4, 1 + (os.cpu_count() or 1)))")
# Runs a suite, and what failed in it once more, one test at a time: a busy machine must not decide. Both runs are printed.
suite = $(BIN)/python -m pytest -n $(workers) --dist worksteal $(1) || { [ $$? = 1 ] && \
	echo "make: the tests that failed run once more, alone" && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(1); }

demo: $(VENV)/installed
	$(BIN)/etude demo

test: lint
	@$(call suite,-m "not mistake and not cluster")
	@$(call suite,-m cluster)

# What Etude needs is taken from $(VENV); Etude itself from the wheel alone.
wheel: $(VENV)/installed
	rm -rf dist build/fresh
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BIN)/python -m venv build/fresh
	build/fresh/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$(build/fresh/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/needs.pth"
	cd build && fresh/bin/python ../tests/wheel.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks

mutations: $(VENV)/installed-dev
	$(BIN)/python tests/mutations.py
	@$(call suite,-m mistake)

traces: $(VENV)/installed-dev
	$(BIN)/python tests/traces.py $(BASE)

results: $(VENV)/installed-bench
	$(BIN)/python -m results

# The pictures of docs/gallery.md: each example writes its own into the folder that it runs in.
gallery: $(VENV)/installed-dev
	mkdir -p build/gallery
	cd build/gallery && for picture in $(notdir $(wildcard docs/assets/gallery/*)); do \
		example=$${picture%.*}; echo "$$example"; \
		case $$example in served_page) how=picture;; imitate_a_human) how=script;; *) how=;; esac; \
		$(CURDIR)/$(BIN)/python ../../examples/$$example.py $$how && cp $$picture ../../docs/assets/gallery/ || exit 1; \
	done

docs: $(VENV)/installed-dev
	$(BIN)/mkdocs build --strict

serve-docs: $(VENV)/installed-dev
	$(BIN)/mkdocs serve

$(VENV)/python: 
	@test -n "$(PYTHON)" || { echo "Etude needs Python 3.11 or newer with venv; none was found. Set PYTHON=/path/to/python."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@ln -sf bin/python $(VENV)/python

# torch first and by itself: a plain name could take a build of several GB where none is wanted.
$(VENV)/torch: constraints.txt | $(VENV)/python
	$(PIP_INSTALL) $$(grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/installed: $(SOURCES) $(VENV)/torch
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/installed-dev: $(SOURCES) $(VENV)/torch
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/installed

$(VENV)/installed-bench: $(SOURCES) $(VENV)/torch
	$(PIP_INSTALL) -e ".[bench]"
	@touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
