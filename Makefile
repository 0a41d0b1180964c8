# `make` alone lists the targets. PYTHON chooses the interpreter of the environment, ARGS goes to the tool that runs,
# MARKS says which tests `make test` runs.

PYTHON ?= python3
ARGS ?=
MARKS ?= not slow and not extended
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help venv demo check test test-all test-wheel coverage lint docs bench chaos chaos-cut acceptance
.PHONY: acceptance-accelerate clean

help:
	@echo "make venv        set up .venv with the pinned versions (the others do it when it is missing or out of date)"
	@echo "make demo        train, kill and resume a small GPT; the picture and the page go to demo_output/"
	@echo "make check       format, style, types and the tests that start no process: two minutes"
	@echo "make test        each behaviour once, a few cells of long lists: 15 to 25 minutes; ARGS='-k name' picks some"
	@echo "make test MARKS='not slow'  all tests but the slow ones: about twice as long"
	@echo "make test-all    all tests, after installing servers and trackers that they need (root, Debian's packages, npm)"
	@echo "make test-wheel  build the wheel, install it into an empty environment, and test it there without the sources"
	@echo "make coverage    all tests but the slow ones, and which lines of the packages they run, also in other processes"
	@echo "make lint        format, style, types, the examples of README.md and docs/, and the links between the pages"
	@echo "make docs        build the site of the documentation in site/"
	@echo "make bench       measure stalls, time to durable and memory"
	@echo "make chaos       kill trainings with SIGKILL, resume them, and check that nothing is lost; ARGS='--kills 100'"
	@echo "make chaos-cut   the same for asynchronous training: whole clusters of parameter servers and workers"
	@echo "make acceptance  run Lightning's own checkpoint tests: LIGHTNING_TESTS=/path/to/a/checkout/of/Lightning"
	@echo "make acceptance-accelerate  run Accelerate's own tests with our methods: ACCELERATE_TESTS=/path/to/a/checkout"
	@echo "make clean       remove .venv and everything that the targets write"

venv: $(READY)

# torch comes first and alone: where it cannot be had, that is the error to see. pip would compile on one core: what is
# there is compiled while it gets the rest, but for what next to nobody imports. A file for another Python is no error.
COMPILE = $(BIN)/python -m compileall -qq -x '/(tests?|testing|models|_inductor|physics|networkx|sklearn|mypyc?)/'
$(READY): pyproject.toml constraints.txt
	rm -rf *.egg-info
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --quiet --no-compile --constraint constraints.txt torch==2.13.0
	@trap 'kill $$compiler $$pip' INT TERM; $(COMPILE) .venv/lib & compiler=$$!; \
	  $(BIN)/python -m pip install --quiet --quiet --no-compile --constraint constraints.txt --editable '.[test,lint]' & \
	  pip=$$!; wait $$pip; status=$$?; wait $$compiler; exit $$status
	$(COMPILE) -j 0 .venv/lib ckpt_core ckpt_async lightning_ckpt accelerate_ckpt || true
	@touch $@

demo: $(READY)
	$(BIN)/python examples/crash_demo/run.py --output demo_output $(ARGS)

# The tests start several processes at a time: one thread each keeps them from fighting over the cores. Much of their
# time is waiting for processes to start, so three files run at a time, in the order that tests/conftest.py gives them.
PYTEST := $(BIN)/python -m pytest --quiet --numprocesses 3 --dist loadfile --no-loadscope-reorder

# The processes that tests start would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
check test test-all coverage: export OMP_NUM_THREADS = 1
check: $(READY)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(PYTEST) -m 'not process and not server and not slow and not training' $(ARGS)

test: $(READY)
	$(PYTEST) --durations=25 -m '$(MARKS)' $(ARGS)

test-all: $(READY)
	.ci/install_servers || echo "some servers could not be installed: their tests are skipped"
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt wandb mlflow-skinny || echo "no trackers: their tests are skipped"
	$(PYTEST) --durations=25 $(ARGS)

test-wheel: $(READY)
	$(BIN)/python tools/test_wheel.py $(ARGS)

coverage: $(READY)
	$(PYTEST) -m 'not slow' --cov --cov-report=term:skip-covered $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_lines.py
	$(BIN)/mypy
	$(BIN)/python tools/run_docs.py README.md $(sort $(wildcard docs/*.md))
	$(BIN)/python -m pytest -q --doctest-modules ckpt_core ckpt_async lightning_ckpt accelerate_ckpt
	$(MAKE) --no-print-directory docs

# A broken link, or a page without a place in the navigation, is an error. The variable silences a notice of the theme.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(READY)
	$(BIN)/mkdocs build --strict --quiet $(ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/run.py $(ARGS)

# One thread each: two ranks and the campaign share the cores.
chaos: export OMP_NUM_THREADS = 1
chaos: $(READY)
	$(BIN)/python tools/chaos.py $(ARGS)

chaos-cut: export OMP_NUM_THREADS = 1
chaos-cut: $(READY)
	$(BIN)/python tools/chaos_cut.py $(ARGS)

acceptance: $(READY)
	@test -n "$(LIGHTNING_TESTS)" || { echo "LIGHTNING_TESTS is not set: give the path of a checkout of Lightning" >&2; exit 2; }
	$(BIN)/python tools/acceptance.py "$(LIGHTNING_TESTS)" $(ARGS)

acceptance-accelerate: $(READY)
	@test -n "$(ACCELERATE_TESTS)" || { echo "ACCELERATE_TESTS is not set: give the path of a checkout" >&2; exit 2; }
	$(BIN)/python tools/acceptance_accelerate.py "$(ACCELERATE_TESTS)" $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf demo_output benchmark_output lightning_logs .acceptance
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
