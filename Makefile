# make bench WHAT=rows|network|cuda|small | test | check | train STAGE=3 | grade STAGE=my_package
# make show STAGE=3 | faults | plan MODEL=7b | figures | report | diff A=2 B=3
# The first command makes an environment in .venv, with torch as TORCH says. `make bench PYTHON=python3` uses one that
# has torch already, and installs nothing.

PYTHON ?= .venv/bin/python
TORCH ?= torch==2.13.0
STAGE ?= 4
WHAT ?= rows
RATE ?= 1gbit
NPROC ?= 2
MODEL ?= 7b
WORLD ?= 1024
DTYPE ?= bf16
ARGS ?=
A ?= 1
B ?= $(word $(A),$(wordlist 2,$(words $(STAGES)),$(STAGES)))
# Rows of variants/ have files of their own: with few other rows they are no bench.
VARIANTS_FILE = $(if $(findstring --rows variants,$(ARGS)),_variants)
ENV = $(if $(filter .venv/%,$(PYTHON)),.venv/.installed)
TOOLS = $(if $(filter .venv/%,$(PYTHON)),.venv/.tools)
STAGES = $(sort $(foreach folder,$(wildcard stage*_*),$(patsubst stage%,%,$(firstword $(subst _, ,$(folder))))))
# Whether a value is one of these words; a pattern such as * or % is none.
one_of = $(and $(filter 1,$(words $(1))),$(filter $(2),$(1)))
# What is refused of a target's variables, at once: $(ENV) takes minutes to make.
stage_in = $(if $(call one_of,$($(1)),$(STAGES) $(2)),,$(error \
	$(1)=$($(1)): there are stages $(firstword $(sort $(STAGES) $(2))) to $(lastword $(STAGES))$(3)))
stage_or_here = $(if $(wildcard $(STAGE) $(subst .,/,$(STAGE)) $(subst .,/,$(STAGE)).py),,$(call \
	stage_in,STAGE,$(1),$(comma) and no package of that name here))
to_new = $(if $(TO),,$(error write STAGE=$(1) TO=$(2), the folder of the package that is written))
comma = ,
KINDS = rows network cuda small
refuse_bench = $(if $(call one_of,$(WHAT),$(KINDS)),,$(error WHAT=$(WHAT): there are $(KINDS)))
refuse_diff = $(call stage_in,A)$(call stage_in,B)
refuse_exercise = $(call to_new,3,mine)
refuse_grade = $(call stage_or_here)
refuse_show = $(call stage_or_here,0)
refuse_take = $(call to_new,4,path)
refuse_train = $(call stage_in,STAGE)$(if $(call one_of,$(NPROC),$(shell seq 256)),,$(error \
	NPROC=$(NPROC): it must be a number from 1 to 256))
$(foreach goal,$(MAKECMDGOALS),$(refuse_$(goal)))
has = $(shell $(PYTHON) -c 'import $(1)' 2> /dev/null && echo yes)
# Several files of tests at once, where pytest-xdist is there: one more than there are cores, since tests wait too.
N_FILES = $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))')
PARALLEL = $(if $(call has,xdist),--numprocesses $(N_FILES) --dist worksteal)
# What a change breaks first: a minute. `make test` has all.
FAST = tests/house $(addprefix tests/stages/test_,contract.py cores.py drawn.py rounds.py)
export OMP_NUM_THREADS ?= 1

.PHONY: help bench test test-all check lint exercise grade train show take faults plan figures report diff clean

help:
	@echo 'make bench                  time and memory of all stages beside DDP  (ARGS="--ranks 4 --model small")'
	@echo '    WHAT=network RATE=300mbit   on two hosts, made here, with a line of that rate  (needs root, iproute2)'
	@echo '    WHAT=cuda               stages 3 and 4 on one GPU: whole steps beside a link that is played'
	@echo '    WHAT=small              DDP and stages 3 and 4 on models of 1,000 to 10 million parameters'
	@echo 'make test                   all that code decides, on all stages: minutes  (ARGS="-k clip", on GPUs "--gpu")'
	@echo 'make test-all               also what waits: kills, torchrun, two hosts, a browser, other frameworks'
	@echo 'make check                  lint, types, and the tests that a change breaks first: a minute  (CONTRIBUTING.md)'
	@echo 'make grade STAGE=my_package an optimizer of your own: what is wrong, and why  (docs/exercise.md)'
	@echo 'make exercise STAGE=3 TO=mine  its core with bodies to fill in, for make grade  (STAGE=0, drill1)'
	@echo 'make train STAGE=3 NPROC=2  train a small GPT with one stage  (ARGS="--steps 50 --clip 1")'
	@echo 'make take STAGE=4 TO=path   a stage as one package for a project of yours  (CHECKPOINT=1 with checkpoint/)'
	@echo 'make show STAGE=mine        a step of your core, line by line on 4 ranks, as a page  (0 to 4: ours)'
	@echo 'make show HTML=1            the page that plays all of them, docs/watch.html, and its figures, anew'
	@echo 'make faults                 kill, signal, stop ranks of training runs: is anything lost?  (ARGS="--kills 50")'
	@echo 'make plan MODEL=7b          what a rank of 1024 would hold, how long a step would take  (WORLD=64 DTYPE=fp32)'
	@echo 'make figures                all figures of results/ anew, of one commit: an hour, root, iproute2'
	@echo 'make report                 tables and pictures of the pages anew'
	@echo 'make diff A=2 B=3           what a core changes in the core before, as git shows it; FULL=1: in all files'
	@echo 'make clean                  remove the environment and caches'

# What each WHAT of `make bench` calls.
BENCH_rows = bench.py --json measured/bench$(VARIANTS_FILE).json
BENCH_network = -m harness.measuring.two_hosts --rate $(RATE) --json measured/network$(VARIANTS_FILE)_$(RATE).json
BENCH_cuda = -m harness.measuring.gpu_step
BENCH_small = -m harness.measuring.overhead

# exec: a signal that ends make reaches the program, and not a shell between them that keeps it to itself.
bench: $(ENV)
	exec $(PYTHON) $(BENCH_$(WHAT)) $(ARGS)

test: $(ENV)
	exec $(PYTHON) -m pytest $(PARALLEL) -m 'not waits' $(ARGS)

test-all: $(ENV)
	exec $(PYTHON) -m pytest $(PARALLEL) $(ARGS)

check: lint
	exec $(PYTHON) -m pytest $(PARALLEL) --quiet -m 'not waits' --ranks 2 $(FAST) $(ARGS)

lint: $(TOOLS)
	$(if $(call has,ruff),$(PYTHON) -m ruff check .,@echo 'lint: $(PYTHON) has no ruff, left out')
	$(if $(call has,mypy),$(PYTHON) -m mypy,@echo 'lint: $(PYTHON) has no mypy, left out')
	$(if $(call has,importlinter),$(PYTHON) -c 'from importlinter.cli import lint_imports_command as main; main()',\
		@echo 'lint: $(PYTHON) has no import-linter, left out')

exercise:
	@$(or $(wildcard $(PYTHON)),python3) -m grade.exercises '$(STAGE)' '$(TO)'

grade: $(ENV)
	exec $(PYTHON) -m grade $(STAGE) $(ARGS)

train: $(ENV)
	exec $(PYTHON) -m harness.training.launch $(NPROC) $(wildcard stage$(STAGE)_*)/train.py $(ARGS)

take:
	@$(or $(wildcard $(PYTHON)),python3) -m harness.publishing.stages '$(STAGE)' '$(TO)' \
		$(if $(CHECKPOINT),--checkpoint)

show: $(ENV)
	exec $(PYTHON) -m show $(STAGE) $(if $(HTML),--pages) $(ARGS)

faults: $(ENV)
	$(PYTHON) -m pytest -p tests.harness.faults -m faults --faults-json measured/faults.json $(ARGS)

plan: $(ENV)
	exec $(PYTHON) -m harness.planning.plan --model $(MODEL) --world $(WORLD) --dtype $(DTYPE) $(ARGS)

figures: $(ENV)
	exec $(PYTHON) -m harness.publishing.pages --measure $(ARGS)

report: $(ENV)
	$(PYTHON) -m harness.publishing.pages
	$(PYTHON) -m show --pages

# git calls a file new or deleted where the other file is /dev/null. It ends with 1 where files differ.
DIFF = git $(if $(FULL),,--no-pager) diff --no-index --patience --color=$(if $(NO_COLOR),never,auto) --
file_of = $(or $(wildcard stage$(1)_*/$(file)),/dev/null)
diff:
	@$(if $(FULL),$(DIFF) $(wildcard stage$(A)_*) $(wildcard stage$(B)_*);,\
		$(foreach file,optimizer.py buffer.py transport.py,$(DIFF) $(call file_of,$(A)) $(call file_of,$(B));)) true

.venv/.installed: pyproject.toml
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' '.[test,report]'
	touch $@

.venv/.tools: .venv/.installed
	.venv/bin/python -m pip install --quiet --disable-pip-version-check '.[check]'
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
