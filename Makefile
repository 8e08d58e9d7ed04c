# The only commands that are needed. Each creates the environment first if it is missing: `make serve` with the
# dependencies of serving, the others also with the development tools.
# The repository's root must not be on sys.path: its folder `kernels` would hide a package of that name.
export PYTHONSAFEPATH = 1

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SERVING = $(VENV)/.serving
STAMP = $(VENV)/.installed
SOURCES = pyproject.toml setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
PIP = $(BIN)/pip --quiet --disable-pip-version-check
# The processors that `make serve` compiles kernels for: native (this machine's), or all, as the other targets do.
CPU_KERNELS ?= native
ARGS ?=
PRINT_DEPENDENCIES = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")

.PHONY: serve test check format docs site sdist wheels sbom demo bench clean install-package install-dependencies

serve: $(SERVING)
	@exec $(BIN)/serve-llm demo $(ARGS)

test: $(STAMP)
	$(BIN)/pytest --numprocesses 2 --dist loadfile $(ARGS)

check: $(STAMP) .typing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=.typing $(BIN)/mypy -p serve_llm.cli -p serve_llm.common -p serve_llm.server -p serve_llm.engine
	cd .typing && PYTHONPATH=. ../$(BIN)/lint-imports --config ../.importlinter
	$(BIN)/python tools/make_docs.py --check
	$(BIN)/python tools/sizes.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python tools/make_docs.py

# The documentation as a site, in build/site. A broken link is an error.
site: $(STAMP)
	$(PIP) install mkdocs-material
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# A source archive, in dist. It builds without torch.
sdist: $(STAMP)
	$(PIP) install build
	$(BIN)/python -m build --sdist

# Wheels with compiled kernels for manylinux, in wheelhouse. It needs Docker.
wheels: $(STAMP)
	$(PIP) install cibuildwheel
	$(BIN)/cibuildwheel --platform linux

# What serving installs and nothing else, as a software bill of materials (CycloneDX), in build/sbom.json. The environment
# is new and has no pip of its own, because .venv may hold development tools.
sbom:
	$(PYTHON) -m venv --clear build/sbom/tool
	$(PYTHON) -m venv --clear --without-pip build/sbom/serving
	build/sbom/tool/bin/pip --quiet --disable-pip-version-check install cyclonedx-bom
	CPU_KERNELS=$(CPU_KERNELS) build/sbom/tool/bin/pip --quiet --disable-pip-version-check \
	  --python build/sbom/serving/bin/python install .
	build/sbom/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file build/sbom.json \
	  build/sbom/serving/bin/python

demo: $(STAMP)
	$(BIN)/python tools/train_demo.py

bench: $(STAMP)
	PYTHONPATH=tests:tools $(BIN)/python -m bench

# What serving needs, and nothing for tests. One pip compiles the kernels while another one installs what they are used with.
# Modules are not byte-compiled here, since Python does that at the first import and most are never imported. pip takes
# PIP_NO_COMPILE=0 to mean "do not compile".
$(SERVING): export PIP_NO_COMPILE = 0
$(SERVING): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(MAKE) --no-print-directory --jobs 2 install-package install-dependencies
	touch $@

install-package:
	CPU_KERNELS=$(CPU_KERNELS) $(PIP) install --no-deps --editable .

install-dependencies:
	$(BIN)/python -c '$(PRINT_DEPENDENCIES)' >$(VENV)/dependencies.txt
	$(PIP) install --requirement $(VENV)/dependencies.txt

$(STAMP): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	$(PIP) install --editable '.[dev]'
	touch $(SERVING) $@

# mypy and import-linter cannot follow the editable mapping of import names to folders; a folder of links can be followed.
.typing:
	mkdir -p .typing/serve_llm
	ln -sfn ../../serve_llm/__init__.py .typing/serve_llm/__init__.py
	ln -sfn ../../serve_llm/__main__.py .typing/serve_llm/__main__.py
	ln -sfn ../../serve_llm/llm.py .typing/serve_llm/llm.py
	ln -sfn ../../serve_llm/py.typed .typing/serve_llm/py.typed
	ln -sfn ../../serve_llm/demo .typing/serve_llm/demo
	ln -sfn ../../cli .typing/serve_llm/cli
	ln -sfn ../../common .typing/serve_llm/common
	ln -sfn ../../server .typing/serve_llm/server
	ln -sfn ../../engine .typing/serve_llm/engine
	ln -sfn ../../kernels .typing/serve_llm/kernels

clean:
	rm -rf $(VENV) .typing build dist kernels/cpu/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
