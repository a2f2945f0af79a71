# make test       everything CI checks: format, lint, types, tests. Makes $(VENV) first; needs Python >= 3.11 and PyPI
# make check      the same for what needs neither torch nor a search: about two minutes on two cores
# make demo       predicts, measures this machine, trains a small Llama on it, compares (scripts/demo.sh); files in demo/
# make lint       make test without the tests
# make format     rewrite the files as the formatter wants them
# make site       the documentation as a site, in site/
# make drift BECAUSE=changelog.d/X.md   rewrites tests/drift.toml, with the fragment that says why
# make clean      remove what the above made
# --no-compile: of torch and transformers only what is imported is compiled, when it first is.
# The environment is the Makefile's own: it is emptied and filled again whenever pyproject.toml or constraints.txt change.

# A shell that keeps Python from writing byte code would have every process of the tests compile torch again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
# The first of these that is 3.11 or later and can make an environment. The numbered ones come first because the pinned
# numpy has wheels for them. `make test PYTHON=/path/to/python` chooses another.
PYTHON := python3.13 python3.12 python3.11 python3.14 python3 python
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch is by far the largest part of the environment. `make test EXTRAS=dev` does without: its tests are then skipped.
EXTRAS := dev,docs,torch,hf,parquet,serve,graph,triton
# Processes that run tests: half as many again as there are cores, because tests also wait for processes of their own.
# Tests that follow one another share what they predicted or searched, so each process takes a run of them, and one that is
# done takes half of what another still has. `make test WORKERS=0`: one after another, for a debugger.
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS := $(shell echo $$(( ($(CORES) * 3 + 1) / 2 )))
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist worksteal
PYTHON_IS_FIT := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))

.PHONY: test check demo drift lint collected site format install clean

test: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 lint collected
	$(PYTEST)

# Beside mypy, which leaves a core idle for much of its time: what tests import becomes byte code once. Without it each of
# the processes that run tests would compile torch, Gnomon and the tests for itself, all at the same time.
collected: $(STAMP)
	@$(BIN)/python -m pytest -q --collect-only >/dev/null 2>&1 || true

# Rooms whose tests take seconds, and the checks of structure. What searches, runs torch or starts processes is left to
# `make test`.
QUICK := graph hardware plans orders program sharding timeline simulate lowering software models methods prices formats \
    report test_rooms.py test_cases.py test_schema.py test_units.py

check: lint
	$(PYTEST) -m "not torch" $(addprefix tests/,$(QUICK))

demo: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/demo.sh

site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -d site

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

drift: $(STAMP)
	PYTHONPATH=src:tests $(BIN)/python tests/drift.py --because $(BECAUSE)

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python=; for candidate in $(PYTHON); do \
	    if "$$candidate" -c '$(PYTHON_IS_FIT)' >/dev/null 2>&1; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "Gnomon needs Python 3.11 or later with its venv and ensurepip modules; tried: $(PYTHON)." >&2; \
	    echo "Install one (on Debian or Ubuntu: apt install python3 python3-venv) or name it: make test PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --no-input -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf $(VENV) demo site .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
