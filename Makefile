# The interpreter that .venv is made with: Python 3.10, 3.11 or 3.12.
PYTHON ?= python3

.PHONY: demo

# Two processes train on handwritten digits; compared with one process.
demo: .venv/.installed-examples
	.venv/bin/python examples/demo.py

# .venv with the package, editable, and one of its extras. Python files are used as they are; the
# C++ backend is built again when a file of it changes.
.venv/.installed-%: pyproject.toml CMakeLists.txt $(shell find cpp_backend -type f)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
