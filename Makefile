# `make repro` and `make test` need Python 3.11 or later, git and make; they make .venv themselves.
# Plain rules that GNU make 3.81 (macOS) understands.

VENV := .venv
BIN := $(VENV)/bin
# cpu, or cuda (`make repro BACKEND=cuda`); without a word, what .venv was made with.
BACKEND ?= $(shell cat $(VENV)/.backend 2>/dev/null || echo cpu)
LOCK := requirements$(if $(filter cuda,$(BACKEND)),-cuda).lock
INSTALLED := $(VENV)/.installed-$(BACKEND)-$(shell cksum < $(LOCK) | tr ' ' '-')
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install -q --no-deps \
	--no-build-isolation --require-hashes --no-warn-script-location
GB_NEEDED := $(if $(filter cuda,$(BACKEND)),9,3)

# The stages call `python`: the one of .venv first, whether or not the shell has activated it.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PIP_USER := 0
export PYTHONNOUSERSITE := 1
unexport PYTHONHOME PYTHONPATH

.PHONY: help setup repro test test-slow lint bench bench-gpu doctor chat clean-cache lock

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "make %-12s %s\n", $$1, $$2}'
	@echo
	@echo 'BACKEND=cuda installs for an NVIDIA GPU; ARGS="…" is handed on to dvc, pytest or the command.'

setup: $(INSTALLED)  ## make .venv from the lock (nothing is installed outside it)
	@echo '`source $(BIN)/activate` makes dvc and python those of $(VENV) in this shell'

repro: $(INSTALLED)  ## run what changed, from conf/ to the report
	@$(BIN)/dvc repro $(ARGS)
	@echo 'reports/report.html holds the whole run; `source $(BIN)/activate` for dvc and python by hand'

test: $(INSTALLED)  ## the quick tests, in minutes
	@$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

test-slow: $(INSTALLED)  ## the tests that take longer
	@$(BIN)/python -m pytest -m slow -n 2 --dist loadfile $(ARGS)

lint: $(INSTALLED)  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

bench: $(INSTALLED)  ## time and memory beside mlx-lm's own loop
	@$(BIN)/python -m benchmarks $(ARGS)

bench-gpu: $(INSTALLED)  ## the same on a GPU, at the shapes of Qwen3 0.6B and 4B
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

doctor: $(INSTALLED)  ## versions, device, disk, DVC and git: what is missing and how to mend it
	@$(BIN)/python -m stages doctor $(ARGS)

chat: $(INSTALLED)  ## talk to the tuned model
	@$(BIN)/python -m stages chat $(ARGS)

share: $(INSTALLED)  ## give what was run to the team; the first time with STORE=a/folder or s3://…
	@$(BIN)/python -m stages share $(if $(STORE),--store '$(STORE)') $(ARGS)

join: $(INSTALLED)  ## in a clone: take what the team shared, so that nothing runs again
	@$(BIN)/python -m stages join $(if $(STORE),--store '$(STORE)') $(ARGS)

clean-cache: $(INSTALLED)  ## remove what .cache can rebuild
	@$(BIN)/python -m stages clean-cache $(ARGS)

lock:  ## resolve pyproject.toml anew into both lock files (needs uv)
	@command -v uv >/dev/null || { echo 'error: `make lock` needs uv (`pip install uv`)' >&2; exit 2; }
	uv pip compile -q --universal --generate-hashes --no-header --no-annotate --python-version 3.11 \
		--group corpus --group dev pyproject.toml -o requirements.lock
	@mkdir -p .cache/lock
	@sed 's/mlx\[cpu\]/mlx[cuda13]/' pyproject.toml > .cache/lock/pyproject.toml
	cd .cache/lock && uv pip compile -q --universal --generate-hashes --no-header --no-annotate \
		--python-version 3.11 --group corpus --group dev pyproject.toml -o ../../requirements-cuda.lock

# The name of the mark holds the lock's checksum, so times of files do not matter.
# setuptools comes first: antlr4-python3-runtime is an sdist and is built with it, without isolation.
$(INSTALLED):
	@$(CHECK_MACHINE)
	@if [ -e $(VENV)/.backend ] && [ "$$(cat $(VENV)/.backend)" != "$(BACKEND)" ]; then \
		echo 'making $(VENV) anew for $(BACKEND)'; rm -rf $(VENV); fi
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then $(FIND_PYTHON); \
		"$$python" -m venv --clear $(VENV) || { \
		echo "error: $$python cannot make an environment (Debian: apt install python3-venv)" >&2; \
		exit 2; }; fi
	@echo '$(BACKEND)' > $(VENV)/.backend
	@echo 'installing the packages of $(LOCK) into $(VENV), once (a few minutes)'
	@awk '/^[a-zA-Z0-9]/ {keep = /^setuptools==/} keep' $(LOCK) > $(VENV)/setuptools.lock
	@$(PIP) -r $(VENV)/setuptools.lock
	@$(PIP) -r $(LOCK)
	@rm -f $(VENV)/.installed-*
	@touch $@

PYTHON_FITS = import platform, sys; \
	native = sys.platform != "darwin" or platform.machine() == "arm64"; \
	sys.exit(not (native and (3, 11) <= sys.version_info[:2] <= (3, 14)))

# Sets $$python to an interpreter that the lock knows.
FIND_PYTHON = python=; for name in python3 python3.13 python3.12 python3.11 python3.14; do \
	if "$$name" -c '$(PYTHON_FITS)' 2>/dev/null; then python=$$name; break; fi; done; \
	if [ -z "$$python" ]; then \
		echo "error: no Python that fits" >&2; \
		echo "  found:    $$(python3 --version 2>&1 || echo none)" >&2; \
		echo "  expected: Python 3.11 to 3.14 on PATH, as python3 or python3.11 …" >&2; \
		echo "  to do:    install one and run again" >&2; exit 2; fi

# What pip would otherwise say late and badly.
CHECK_MACHINE = if ! git rev-parse --is-inside-work-tree >/dev/null 2>&1; then \
		echo "error: there is no git repository here" >&2; \
		echo "  expected: a clone, since DVC keeps a run's identity in git" >&2; \
		echo "  to do:    clone the project, or: git init && git add . && git commit -m start" >&2; \
		exit 2; fi; \
	case "$$(uname -s)-$$(uname -m)" in Linux-x86_64|Linux-aarch64|Darwin-arm64) ;; *) \
		echo "error: MLX has no package for this machine" >&2; \
		echo "  found:    $$(uname -s) $$(uname -m)" >&2; \
		echo "  expected: Linux on x86-64 or arm64, or macOS on Apple silicon" >&2; exit 2;; esac; \
	system=$$(getconf GNU_LIBC_VERSION 2>/dev/null || echo "macOS $$(sw_vers -productVersion)"); \
	if ! echo "$$system" | awk '{split($$2, v, "."); \
		exit !($$1 == "macOS" ? v[1] >= 14 : v[1] > 2 || v[2] >= 35)}'; then \
		echo "error: MLX has no package for this system" >&2; \
		echo "  found:    $$system" >&2; \
		echo "  expected: glibc 2.35 or later, or macOS 14 or later" >&2; exit 2; fi; \
	free=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1000000)}'); \
	if [ "$$free" -lt $(GB_NEEDED) ]; then \
		echo "error: too little space for $(VENV)" >&2; \
		echo "  found:    $$free GB free" >&2; \
		echo "  expected: $(GB_NEEDED) GB" >&2; \
		echo "  to do:    free some space and run again" >&2; exit 2; fi
