"""The contract runs over every stage and every world size; `--stage my_package` runs it on a package of your own.

Tests stay on the CPU, on every machine; `--gpu` runs those of the stages on GPUs.
"""

import collections
import contextlib
import gc
import importlib.util
import os
import pickle
import secrets
import threading
from multiprocessing.managers import BaseManager

import pytest
import torch

from harness.workers import WorkerError, Workers, start_forkserver
from tests.common import STAGES

# Files of tests about the stages, which pass on GPUs too. The others count and time what a CPU and gloo do.
ON_GPUS = [f"test_{name}.py" for name in ("checkpoint", "contract", "dtensor", "dtypes", "hostile", "ledger", "memory",
                                          "models", "overlap", "rounds", "stages")]


def pytest_addoption(parser):
    parser.addoption("--stage", action="append", metavar="PACKAGE", help="a package with a DistributedOptimizer")
    parser.addoption("--ranks", type=int, action="append", help="a world size; by default 2 and 3, on GPUs 1 and 2")
    parser.addoption("--gpu", action="store_true", help="the tests of the stages, on GPUs: several ranks may share one")


def pytest_configure(config):
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS",  # what a test asks of make is no part of `make test`
                 "FORCE_COLOR"):  # nor are colours of what it compares
        os.environ.pop(name, None)
    # Several files of tests at once, each with up to four ranks: whoever waits for a message would wait for a core.
    os.environ.setdefault("GLOO_PRIORITY", "normal")
    if config.getoption("--gpu"):
        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu: torch finds no GPU here")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # here and in whatever is started: the same on every machine
    if config.getoption("numprocesses", None) and not (hasattr(config, "workerinput") or config.getoption("--gpu")):
        config.pluginmanager.register(RanksForXdist())
    for stage in config.getoption("--stage") or []:
        if importlib.util.find_spec(stage) is None:
            raise pytest.UsageError(f"--stage {stage}: there is no package of that name here; the stages are {STAGES}")


def pytest_generate_tests(metafunc):
    """A test that takes `stage` and `world_size` says by a mark on which it can fail; without one: all stages, 2 and 3.

    any_size: 1 to 4 ranks. shared_guard: the code behind it is one in all stages, so two of them do. Or parametrize.
    On GPUs it is 1 and 2 ranks: NCCL sums the gradients of more in an order of its own, and the last bits differ.
    """
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    sizes = [1, 2] if metafunc.config.getoption("--gpu") else [1, 2, 3, 4] if "any_size" in marks else [2, 3]
    stages = [STAGES[1], STAGES[3]] if "shared_guard" in marks else STAGES
    for name, values in {"stage": metafunc.config.getoption("--stage") or stages,
                         "world_size": metafunc.config.getoption("--ranks") or sizes}.items():
        chosen = any(name in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
        if name in metafunc.fixturenames and not chosen:
            metafunc.parametrize(name, values)


def pytest_collection_modifyitems(config, items):
    """With --stage the contract is run, or, where files are named, what in those is about a stage; the others are about
    the four stages and the harness.

    With --gpu those of few ranks come first: each rank takes a gigabyte of a GPU, and idle ones are ended, see `run`.
    """
    stages, files = config.getoption("--stage"), ON_GPUS if config.getoption("--gpu") else None
    if stages and config.args_source is not pytest.Config.ArgsSource.ARGS:
        files = ["test_contract.py"]

    def is_asked_for(item):
        stage = item.callspec.params.get("stage") if hasattr(item, "callspec") else None
        return (files is None or item.path.name in files) and (
            not stages or stage in stages or item.path.name == "test_contract.py")

    config.hook.pytest_deselected(items=[item for item in items if not is_asked_for(item)])
    items[:] = [item for item in items if is_asked_for(item)]
    if config.getoption("--gpu"):
        items.sort(key=lambda item: item.callspec.params.get("world_size", 0) if hasattr(item, "callspec") else 0)


def pytest_collection_finish():
    """Modules and tests are here for good: a collection of garbage needn't look at them."""
    gc.collect()
    gc.freeze()


RENEWED_AFTER = 100  # calls: each process group that one leaves has threads, which look for messages


class Pools:
    """Workers by world size, each started when it is first asked for: idle ranks cost memory, and nothing else."""

    def __init__(self):
        self.started, self.n_calls = {}, collections.Counter()
        self.locks = collections.defaultdict(threading.Lock)  # a world size runs one call at a time

    def run(self, world_size, function, *args, **kwargs):
        with self.locks[world_size]:
            if world_size not in self.started:
                self.started[world_size] = Workers(world_size, timeout_s=300, limit_s=1200)
            self.n_calls[world_size] += 1
            if self.n_calls[world_size] % RENEWED_AFTER == 0:
                self.started[world_size].kill()
            return self.started[world_size].run(function, *args, **kwargs)

    def answer(self, world_size, call):
        """`run` for another process: bytes -> bytes, since a manager would share the memory of tensors."""
        function, args, kwargs = pickle.loads(call)
        return pickle.dumps(self.run(world_size, function, *args, **kwargs))

    def close(self, but=()):
        """Ends the ranks of all world sizes but these."""
        for world_size in set(self.started) - set(but):
            self.started.pop(world_size).close()


class PoolsElsewhere:
    """The same ranks, from a worker of pytest-xdist. Whoever started them ends them."""

    def __init__(self, address, authkey):
        BaseManager.register("pools")
        manager = BaseManager(address, authkey)
        manager.connect()
        self.pools = manager.pools()

    def run(self, world_size, function, *args, **kwargs):
        return pickle.loads(self.pools.answer(world_size, pickle.dumps((function, args, kwargs))))


class RanksForXdist:
    """In the process that the workers of pytest-xdist answer to, and whose ranks all of them share."""

    def __init__(self):
        start_forkserver()  # here: it sets a signal for a moment, which only the main thread may
        self.pools, self.authkey = Pools(), secrets.token_bytes()
        BaseManager.register("pools", lambda: self.pools)
        server = BaseManager(authkey=self.authkey).get_server()
        self.address = server.address
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def pytest_configure_node(self, node):
        node.workerinput["ranks"] = self.address, self.authkey

    def pytest_unconfigure(self):
        self.pools.close()


@pytest.fixture(scope="session")
def pools(request):
    elsewhere = getattr(request.config, "workerinput", {}).get("ranks")
    with contextlib.nullcontext(PoolsElsewhere(*elsewhere)) if elsewhere else contextlib.closing(Pools()) as pools:
        yield pools


@pytest.fixture
def run(pools, world_size, request):
    """`run(function, *args)` calls `function(rank, *args)` on `world_size` ranks and returns the list of results."""
    if request.config.getoption("--gpu"):
        pools.close(but={world_size})

    def run(function, *args, **kwargs):
        try:
            return pools.run(world_size, function, *args, **kwargs)
        except WorkerError as error:
            pytest.fail(f"{error}\n{error.details}", pytrace=False)

    return run
