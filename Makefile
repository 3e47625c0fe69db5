# Everything a fresh machine needs is Python >= 3.11, make and a C compiler (torch.compile uses it).
PYTHON ?= python3
PY := .venv/bin/python
OLDEST := .venv-oldest/bin/python

.PHONY: demo test setup lint types test-long test-oldest docs lock

demo: .venv/.ready  ## what this library does, on your CPU
	$(PY) examples/first.py

test: lint types .venv/.ready  ## what CI runs
	$(PY) -m pytest -q

setup: .venv/.ready

lint: .venv/.ready
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	.venv/bin/lint-imports --no-logo

types: .venv/.ready
	$(PY) -m mypy

test-long: .venv/.ready  ## the tests that are too slow for every run
	$(PY) -m pytest -q -m long
	$(PY) -m pytest -q --hypothesis-profile=long tests/projection tests/nn

test-oldest: .venv-oldest/.ready  ## the tests on the oldest torch that is supported
	$(OLDEST) -m pytest -q

docs: .venv/.ready  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict

lock: .venv/.ready  ## resolve the pinned set again
	.venv/bin/uv pip compile -q --universal --python-version 3.11 --all-extras --group dev --no-header --upgrade \
		--no-emit-index-url --no-emit-find-links -o requirements.lock pyproject.toml

.venv/.ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "subcaps needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv .venv
	test -x .venv/bin/uv || $(PY) -m pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=.venv .venv/bin/uv pip install --quiet -r requirements.lock
	VIRTUAL_ENV=.venv .venv/bin/uv pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

.venv-oldest/.ready: .venv/.ready
	.venv/bin/uv venv --quiet --allow-existing --python $(PY) .venv-oldest
	grep -vE '^(torch|torchvision|triton|nvidia-|cuda-|setuptools|sympy)' requirements.lock > .venv-oldest/rest.txt
	VIRTUAL_ENV=.venv-oldest .venv/bin/uv pip install --quiet torch==2.11.0 torchvision -r .venv-oldest/rest.txt
	VIRTUAL_ENV=.venv-oldest .venv/bin/uv pip install --quiet --no-deps --no-build-isolation -e .
	touch $@
