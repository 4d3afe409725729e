"""Runs tests on ranks: the contract over every stage and world size, with `--stage my_package` over your own package.

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

from harness import STAGE_2, STAGE_4
from harness.ranks.workers import WorkerError, Workers, start_forkserver
from tests.common import STAGES, in_groups_of_its_own

# Files of tests that pass on GPUs, too: those about the stages. All other tests count and time what a CPU and gloo do.
ON_GPUS = [f"test_{name}.py" for name in ("contract", "dtensor", "dtypes", "hostile", "memory", "models", "overlap",
                                          "rounds", "stages")]


def pytest_addoption(parser):
    parser.addoption("--stage", action="append", metavar="PACKAGE", help="a package with a DistributedOptimizer")
    parser.addoption("--ranks", type=int, action="append", help="a world size; by default 2 and 3, on GPUs 1 and 2")
    parser.addoption("--gpu", action="store_true", help="the tests of the stages, on GPUs: several ranks may share one")


def pytest_configure(config):
    # A test that calls make isn't a part of `make test`, and compares text without colours.
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "FORCE_COLOR"):
        os.environ.pop(name, None)
    # Several files of tests run at once, each on up to four ranks: a rank that waits for a message would need a core.
    os.environ.setdefault("GLOO_PRIORITY", "normal")
    if config.getoption("--gpu"):
        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu: torch finds no GPU here")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also for processes that tests start: the same on every machine
    if config.getoption("numprocesses", None) and not (hasattr(config, "workerinput") or config.getoption("--gpu")):
        config.pluginmanager.register(RanksForXdist())
    for stage in config.getoption("--stage") or []:
        if importlib.util.find_spec(stage) is None:
            raise pytest.UsageError(f"--stage {stage}: there is no package of that name here; the stages are {STAGES}")


def pytest_generate_tests(metafunc):
    """Choose for a test that takes `stage` or `world_size`: all stages, and 2 and 3 ranks, unless a mark says more.

    The mark any_size stands for 1 to 4 ranks; shared_guard for two stages, because all stages share the tested code. A
    test may parametrize `stage` and `world_size` itself. On GPUs there are 1 and 2 ranks: NCCL sums the gradients of
    more ranks in another order, and the last bits differ.
    """
    option = metafunc.config.getoption
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    parametrized = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]

    def choose(name, values):
        if name in metafunc.fixturenames and not any(name in names for names in parametrized):
            metafunc.parametrize(name, values)

    stages = [STAGE_2, STAGE_4] if "shared_guard" in marks else STAGES
    world_sizes = [1, 2, 3, 4] if "any_size" in marks else [2, 3]
    if option("--gpu"):
        world_sizes = [1, 2]
    choose("stage", option("--stage") or stages)
    choose("world_size", option("--ranks") or world_sizes)


def parameter_of(item, name):
    """Return what pytest passes a test as the argument `name`; None if it passes no such argument."""
    return item.callspec.params.get(name) if hasattr(item, "callspec") else None


def pytest_collection_modifyitems(config, items):
    """Deselect what --stage and --gpu don't ask for.

    --stage asks for the contract, or, where files are named, for their tests of that stage. With --gpu tests on few
    ranks come first, because each rank takes a gigabyte of a GPU, and `run` ends idle ones.
    """
    stages = config.getoption("--stage")
    files = ON_GPUS if config.getoption("--gpu") else None
    if stages and config.args_source is not pytest.Config.ArgsSource.ARGS:
        files = ["test_contract.py"]

    def is_asked_for(item):
        if files is not None and item.path.name not in files:
            return False
        return not stages or item.path.name == "test_contract.py" or parameter_of(item, "stage") in stages

    config.hook.pytest_deselected(items=[item for item in items if not is_asked_for(item)])
    items[:] = [item for item in items if is_asked_for(item)]
    if config.getoption("--gpu"):
        items.sort(key=lambda item: parameter_of(item, "world_size") or 0)


def pytest_collection_finish():
    """Spare the garbage collector the modules and tests, which stay until the end."""
    gc.collect()
    gc.freeze()


class Pools:
    """Starts Workers for a world size when a test first needs them, and keeps them: idle ranks cost memory alone."""

    def __init__(self):
        self.started = {}  # world size -> Workers
        self.locks = collections.defaultdict(threading.Lock)  # a world size runs one call at a time

    def run(self, world_size, function, *args, **kwargs):
        with self.locks[world_size]:
            if world_size not in self.started:
                self.started[world_size] = Workers(world_size, timeout_s=300, limit_s=1200)
            return self.started[world_size].run(in_groups_of_its_own, function, *args, **kwargs)

    def answer(self, world_size, call):
        """Do what `run` does for another process. `call`, and what is returned, are pickled: a manager that pickles
        tensors itself would share their memory.
        """
        function, args, kwargs = pickle.loads(call)
        return pickle.dumps(self.run(world_size, function, *args, **kwargs))

    def close(self, except_for=()):
        """End the ranks of all world sizes except for these."""
        for world_size in set(self.started) - set(except_for):
            self.started.pop(world_size).close()


class PoolsElsewhere:
    """Runs functions on the ranks of a RanksForXdist, from a worker of pytest-xdist."""

    def __init__(self, address, authkey):
        BaseManager.register("pools")
        manager = BaseManager(address, authkey)
        manager.connect()
        self.pools = manager.pools()

    def run(self, world_size, function, *args, **kwargs):
        return pickle.loads(self.pools.answer(world_size, pickle.dumps((function, args, kwargs))))


class RanksForXdist:
    """Starts ranks in the main process of pytest-xdist, for all its workers."""

    def __init__(self):
        start_forkserver()  # by the main thread: no other thread may set a signal handler, as this call does
        self.pools = Pools()
        self.authkey = secrets.token_bytes()
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
    """Return a Pools, or under pytest-xdist a PoolsElsewhere."""
    if hasattr(request.config, "workerinput") and "ranks" in request.config.workerinput:
        yield PoolsElsewhere(*request.config.workerinput["ranks"])
    else:
        with contextlib.closing(Pools()) as pools:
            yield pools


@pytest.fixture
def run(pools, world_size, request):
    """`run(function, *args)` calls `function(rank, *args)` on `world_size` ranks and returns the list of results."""
    if request.config.getoption("--gpu"):
        pools.close(except_for={world_size})

    def run(function, *args, **kwargs):
        try:
            return pools.run(world_size, function, *args, **kwargs)
        except WorkerError as error:
            pytest.fail(f"{error}\n{error.details}", pytrace=False)

    return run
