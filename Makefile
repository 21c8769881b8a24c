# Thin: the work is in tools/ and tests/run_mpi.py. See `make help`.

PYTHON ?= python3
VENV ?= .venv
MPI ?= wheel
TORCH_INDEX ?=
KEEP ?=
VERSION ?= dev

IN_VENV := $(VENV)/bin
SETUP = @command -v "$(PYTHON)" >/dev/null || { echo "setup: $(PYTHON) is not on PATH; install Python 3.10 or newer, or name one with PYTHON=" >&2; exit 1; }; \
	"$(PYTHON)" tools/setup_env.py --venv "$(VENV)" --mpi "$(MPI)" --torch-index "$(TORCH_INDEX)"
OLDEST_VENV = $(VENV)-oldest
OLDEST_TORCH = 2.8.*

NEWEST_VENV = $(VENV)-newest

.PHONY: help demo test quick soak matrix oldest newest mpis release-check aarch64 gpu lint build docs clean

help:
	@echo "make demo    train a small model on 2 ranks, save, resume on 3 ranks, draw the loss"
	@echo "make test    unit, property and rule tests, then the MPI tests on 1, 2, 3 and 4 ranks, whole jobs, jobs of SLURM, the package"
	@echo "make quick   after a change: the tests nearest to it, the rules, a training on 2 ranks (some minutes)"
	@echo "make soak    kill jobs a hundred times while they save; what was saved has to stay (about ten minutes)"
	@echo "make matrix  train in every layout of ranks by every schedule; save under every layout, load under every other;"
	@echo "             MPI tests with every combination of their cases and numbers of ranks instead of every pair;"
	@echo "             every pair of features, compared with docs/reference/pairs.md"
	@echo "make oldest  quick tests, a training and the torch.distributed backend with the oldest torch, $(OLDEST_TORCH), in $(OLDEST_VENV)"
	@echo "make newest  quick tests and a training with the newest of everything that pip finds, in $(NEWEST_VENV)"
	@echo "make mpis    collectives, a training and jobs with MPICH, the mpirun on PATH, and Intel MPI"
	@echo "make release-check  what a release has to be: versions, files, licences, archives, formats, docs"
	@echo "make aarch64 the compiled modules by a cross compiler, their loops under qemu-user with numpy alone"
	@echo "make gpu     the tests and benchmarks of kernels on this machine's GPU (needs pycuda: the extra [cuda])"
	@echo "make lint    format, imports, floors, types, spelling, Cython"
	@echo "make build   the compiled modules in $(VENV), sdist and wheel in dist/: built twice alike, installed, run on 2 ranks"
	@echo "make docs    the documentation site in build/docs/\$$VERSION; warnings and broken links are errors, nothing is fetched"
	@echo "make clean   remove what was built; $(VENV) stays"
	@echo ""
	@echo "Each sets up $(VENV) by itself. Settings (with what they are now):"
	@echo "  PYTHON=$(PYTHON)   the interpreter, 3.10 or newer"
	@echo "  VENV=$(VENV)      the folder of the environment"
	@echo "  MPI=$(MPI)       wheel: install an MPI from a wheel; site: use the mpirun on PATH"
	@echo "  TORCH_INDEX=$(TORCH_INDEX)     a package index to take torch from"
	@echo "  KEEP=$(KEEP)      1: \`make test\` keeps what its pieces took as tests/durations.json"
	@echo "  VERSION=$(VERSION)      \`make docs\`: the release that the site is of"
	@echo "pip's own settings (PIP_* variables, pip.conf) hold for everything that is installed."

demo:
	$(SETUP) demo
	@$(IN_VENV)/python docs/examples/demo.py

test:
	$(SETUP) test
	@$(IN_VENV)/python tools/run_tests.py $(if $(KEEP),--keep)

quick:
	$(SETUP) test
	@$(IN_VENV)/python tools/quick.py

soak:
	$(SETUP) test
	@$(IN_VENV)/python tools/soak.py

matrix:
	$(SETUP) test
	@MPISPEED_MATRIX=full $(IN_VENV)/python -m pytest -q -p no:cacheprovider tests/jobs/test_reshard.py tests/jobs/test_expert_reshard.py tests/jobs/test_parallel_matrix.py tests/jobs/test_slot_runs.py tests/jobs/test_torch_jobs.py tests/jobs/test_tune_scripts.py tests/jobs/test_tune_worker.py
	@MPISPEED_MATRIX=full $(IN_VENV)/python -m pytest -q -p no:cacheprovider tests/unit/cuda/test_compile.py
	@MPISPEED_MATRIX=full $(IN_VENV)/python -m pytest -q -p no:cacheprovider tests/unit/engine
	@MPISPEED_MATRIX=full $(IN_VENV)/python tests/run_mpi.py --seconds 14400 --test-seconds 600
	@$(IN_VENV)/python tools/pairs.py --check

oldest:
	@"$(PYTHON)" tools/setup_env.py --venv "$(OLDEST_VENV)" --mpi "$(MPI)" --torch-index "$(TORCH_INDEX)" \
		--torch-version "$(OLDEST_TORCH)" test
	@code=0; $(OLDEST_VENV)/bin/python tools/try_versions.py || code=$$?; \
	$(OLDEST_VENV)/bin/python tests/run_mpi.py -n 2 process_group || code=$$?; exit $$code

newest:
	@"$(PYTHON)" tools/setup_env.py --venv "$(NEWEST_VENV)" --mpi "$(MPI)" --torch-index "$(TORCH_INDEX)" --newest test
	@$(NEWEST_VENV)/bin/python tools/try_versions.py

mpis:
	$(SETUP) test
	@$(IN_VENV)/python tools/try_mpis.py --venv "$(VENV)-intel"

release-check:
	$(SETUP) test
	@$(IN_VENV)/python tools/release_check.py

aarch64:
	$(SETUP) test
	@$(IN_VENV)/python tools/check_aarch64.py

gpu:
	$(SETUP) test
	@$(IN_VENV)/python tools/run_gpu.py

lint:
	$(SETUP) lint
	@$(IN_VENV)/python tools/run_lint.py

build:
	$(SETUP) test
	@$(IN_VENV)/python tools/check_package.py --keep dist

docs:
	$(SETUP) test
	@$(IN_VENV)/python tools/build_docs.py --version "$(VERSION)"

clean:
	rm -rf build dist src/*.egg-info src/mpispeed/_native/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(VENV)/stamp-compiled
