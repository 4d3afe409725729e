# make bench | test | grade STAGE=my_package | train STAGE=3 | network RATE=1gbit | timeline STAGE=4|all | show STAGE=3
# make faults | cuda | host | plan MODEL=7b | report | docs-check | diff A=2 B=3
# The first command makes an environment in .venv. `make bench PYTHON=python3` uses one that has torch already.

PYTHON ?= .venv/bin/python
STAGE ?= 4
RATE ?= 1gbit
NPROC ?= 2
MODEL ?= 7b
WORLD ?= 1024
DTYPE ?= bf16
ARGS ?=
A ?= 1
B ?= 2
ENV = $(if $(filter .venv/%,$(PYTHON)),.venv/.installed)
# Several files of tests at once, where pytest-xdist is there.
PARALLEL = --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS ?= 1

.PHONY: help bench test grade train network timeline show faults cuda host plan report docs-check diff clean

help:
	@echo 'make bench                  time and memory of all stages beside DDP  (ARGS="--ranks 4 --model small")'
	@echo 'make test                   the contract, over every stage and 1 to 4 ranks  (ARGS="-k clip", on GPUs "--gpu")'
	@echo 'make grade STAGE=my_package an optimizer of your own: what is wrong, and why  (docs/exercise.md)'
	@echo 'make train STAGE=3 NPROC=2  train a small GPT with one stage  (ARGS="--steps 50 --clip 1")'
	@echo 'make network RATE=300mbit   the bench on two hosts, made here, with a line of that rate  (needs root, iproute2)'
	@echo 'make timeline STAGE=4       one step as rank x time: what computes, travels, is held; SVG and Perfetto trace'
	@echo 'make timeline STAGE=all     ddp and the four stages below each other, on rank 0'
	@echo 'make show STAGE=3           one step, line by line, on 4 ranks  (0 to 4, or mine; ARGS="--params 3,13 --ranks 2")'
	@echo 'make show HTML=1            the page that plays all of them, docs/watch.html, and its figures, anew'
	@echo 'make faults                 kill, signal, stop ranks of training runs: is anything lost?  (ARGS="--kills 50")'
	@echo 'make cuda                   stages 3 and 4 on one GPU: step beside plain AdamW, bytes a second, allocations'
	@echo 'make host                   what hooks and wrappers cost the processor  (ARGS="--tensors 340,4000 --ranks 8")'
	@echo 'make plan MODEL=7b          what a rank of 1024 would hold, how long a step would take  (WORLD=64 DTYPE=fp32)'
	@echo 'make report                 tables and pictures of README.md and results/README.md anew, from results/*.json'
	@echo 'make docs-check             every page: links, names, and commands, which are run in a small mode'
	@echo 'make diff A=2 B=3           what one stage changes in the one before: the cores; with FULL=1 everything'
	@echo 'make clean                  remove the environment and caches'

# exec: a signal that ends make reaches the program, and not a shell between them that keeps it to itself.
bench: $(ENV)
	exec $(PYTHON) bench.py --json results/bench.json $(ARGS)

test: $(ENV)
	exec $(PYTHON) -m pytest $(shell $(PYTHON) -c 'import xdist' 2> /dev/null && echo '$(PARALLEL)') $(ARGS)

grade: $(ENV)
	exec $(PYTHON) -m grade $(STAGE) $(ARGS)

train: $(ENV)
	$(if $(wildcard stage$(STAGE)_*),,$(error STAGE=$(STAGE): there are stages 1 to 4))
	$(if $(shell echo '$(NPROC)' | grep -x '[1-9][0-9]*'),,$(error NPROC=$(NPROC): it must be a number from 1 on))
	exec $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) \
		$(wildcard stage$(STAGE)_*)/train.py $(ARGS)

network: $(ENV)
	exec $(PYTHON) -m harness.network --rate $(RATE) --json results/network.json $(ARGS)

timeline: $(ENV)
	exec $(PYTHON) -m harness.timeline --rows "$(if $(filter all,$(STAGE)),all,stage $(STAGE))" $(ARGS)

show: $(ENV)
	exec $(PYTHON) -m show $(STAGE) $(if $(HTML),--pages) $(ARGS)

faults: $(ENV)
	exec $(PYTHON) -m harness.faults --json results/faults.json $(ARGS)

cuda: $(ENV)
	exec $(PYTHON) -m harness.gpu $(ARGS)

host: $(ENV)
	exec $(PYTHON) -m harness.host $(ARGS)

plan: $(ENV)
	exec $(PYTHON) -m harness.plan --model $(MODEL) --world $(WORLD) --dtype $(DTYPE) $(ARGS)

report: $(ENV)
	$(PYTHON) -m harness.report
	$(PYTHON) -m show --pages

.PHONY: docs-check
docs-check: $(ENV)
	exec $(PYTHON) -m harness.docs $(ARGS)

diff:
	$(if $(and $(A),$(B)),,$(error write A=2 B=3))
	$(foreach stage,$(A) $(B),$(if $(wildcard stage$(stage)_*),,$(error there is no stage $(stage): write A=2 B=3)))
	@old=$(wildcard stage$(A)_*) new=$(wildcard stage$(B)_*); \
	diff="git diff --no-index --color=auto"; \
	if [ -n "$(FULL)" ]; then $$diff -- $$old $$new; else \
	for file in optimizer.py buffer.py transport.py; do \
		from=$$old/$$file to=$$new/$$file; \
		[ -e $$from ] || from=/dev/null; [ -e $$to ] || to=/dev/null; \
		[ $$from = $$to ] || $$diff -- $$from $$to; \
	done; fi || true

.venv/.installed: pyproject.toml
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable .[test]
	touch $@

clean:
	rm -rf .venv .pytest_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
