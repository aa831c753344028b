# Two commands for a newcomer: `make demo` and `make test`. Nothing needs to be installed before.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# The decisions are compiled when their sources have changed, because no manager of a test waits so long.
COMPILED := $(BIN)/python -c 'from orchestrator.live.manager import rehearse; rehearse()'

# Hundreds of processes import the same modules: where a shell forbids it, each compiles them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-aws demo-azure test check nightly bench format clean

demo: $(READY)
	@$(BIN)/orchestrator demo

# The same, bought through boto3 or Azure's SDK from a fake account whose machines are real processes.
# The project comes before its tests, whose folders have the names of its packages.
demo-aws demo-azure: demo-%: $(READY)
	@PYTHONPATH="$(CURDIR):$(CURDIR)/tests" $(BIN)/python -m cloudfake.account.demo $*

# How many run at once is in tests/conftest.py.
test: $(READY)
	@$(COMPILED)
	$(BIN)/python -m pytest -rs -n auto --dist worksteal

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

nightly: $(READY)
	SPOT_FUZZ=1000000 $(BIN)/python -m pytest tests/simulation/test_fuzzed_events.py tests/simulation/test_fuzzed_messages.py
	SPOT_SEEDS=5000 $(BIN)/python -m pytest -n 2 tests/simulation/test_seeds.py tests/simulation/test_unruly_places.py \
		tests/simulation/test_damaged_reports.py tests/planner/test_enumeration.py tests/orchestrator/history/test_where_money_goes.py
	CRASH_CASES=5000 $(BIN)/python -m pytest -n 2 tests/cloud/test_killed_managers.py
	ATTACK_SEEDS=1000:200 $(BIN)/python -m pytest -n 2 tests/cloud/test_both_doors.py
	CHAOS=40 $(BIN)/python -m pytest -n 2 -k test_chaos tests/agent
	$(BIN)/python benchmarks/campaign.py --kills 100

bench: $(READY)
	@for b in benchmarks/[a-z]*.py benchmarks/*/[a-z]*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .orchestrator

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "python3 was not found. Install Python 3.11 or newer, then run make again."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; $(PYTHON) is older. Use: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "Python cannot make virtual environments here. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV) (two minutes or so; torch is large) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(COMPILED)
	@touch $@
