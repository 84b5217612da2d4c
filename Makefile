# All that is needed is Linux, make and Python 3.11 or 3.12; the first target that is made sets up .venv by itself.
#
#   make demo                        serve the embedded model, ask it for a dozen images at once, then for edits, on sheets
#   make test                        ruff, mypy and every test
#   make test TESTS="-k engine -x"   some of the tests
#   make demo PYTHON=python3.12      with this Python
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"    without two gigabytes of CUDA libraries

# nvidia-pytriton, which has the embedded tritonserver, needs numpy 1, and numpy 1 has no wheels above Python 3.12.
USABLE := import sys; (3, 11) <= sys.version_info[:2] <= (3, 12) and print(sys.executable)
PYTHON ?= $(firstword $(foreach name,python3 python3.12 python3.11,$(shell $(name) -c '$(USABLE)' 2>/dev/null)) python3)
PIP_ARGS ?=
TESTS ?=

BIN := .venv/bin
STAMP := .venv/.ditpack-installed

.PHONY: help demo test lint venv libpython clean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

demo: venv
	$(BIN)/ditpack demo

# Two processes share the unit tests; the tests of servers, which watch the clock, have the machine to themselves.
test: export DITPACK_TESTS_REQUIRE_SERVER := 1
test: lint
ifeq ($(strip $(TESTS)),)
	$(BIN)/python -m pytest tests/unit --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest tests/server tests/gpu
else
	$(BIN)/python -m pytest $(TESTS)
endif

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$$($(PYTHON) -c '$(USABLE)')" || \
		{ echo "ditpack's server needs Python 3.11 or 3.12 and '$(PYTHON)' is not: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv || \
		{ echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@$(BIN)/python -W ignore -m ditpack.tritonserver.launch.interpreter >/dev/null 2>&1 || $(MAKE) --no-print-directory libpython
	@touch $@

# Debian and Ubuntu leave the shared libpython, which the embedded tritonserver loads, out of their python3 package.
# Fetched like this it needs no root; where it cannot be, what to do is printed.
libpython:
	-@mkdir -p .venv/libpython && cd .venv/libpython && \
		name=libpython$$(../bin/python -c 'import sys; print("3.%d" % sys.version_info[1])') && \
		apt-get -q download $$name && dpkg -x $$name*.deb . && cp -L usr/lib/*/$$name.so.1.0 ../lib/
	@$(BIN)/python -W ignore -m ditpack.tritonserver.launch.interpreter

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache demo
