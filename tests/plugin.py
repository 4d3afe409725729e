"""Adds to pytest what runs tests on ranks, the processes that train together. conftest.py loads this file.

A stage is one of the four optimizers of this repository, and the name of its package. The world size is the number of
ranks. The contract is tests/stages/test_contract.py: what every stage, and a package of your own, must do. It is run
for each stage and world size, or with `--stage my_package` for your package.

Tests use the CPU only, also on a machine with GPUs. With `--gpu`, the tests of the stages are run on GPUs.

pytest calls the functions and methods named pytest_…, and passes the fixtures `run` and `pools` to tests.
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

# Files of tests about the stages, which pass on GPUs, too. All other tests count and time what a CPU does, and what
# gloo, torch's backend for CPUs, sends.
ON_GPUS = [f"test_{name}.py" for name in ("contract", "dtensor", "dtypes", "hostile", "memory", "models", "overlap",
                                          "rounds", "stages")]


def pytest_addoption(parser):
    parser.addoption("--stage", action="append", metavar="PACKAGE", help="a package with a DistributedOptimizer")
    parser.addoption("--ranks", type=int, action="append", help="a world size; by default 2 and 3, on GPUs 1 and 2")
    parser.addoption("--gpu", action="store_true", help="the tests of the stages, on GPUs: several ranks may share one")


def pytest_configure(config):
    # Some tests call make. These variables, which `make test` sets, would turn such a call into a part of `make test`.
    # FORCE_COLOR goes because tests compare text that has no colours.
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "FORCE_COLOR"):
        os.environ.pop(name, None)
    # By default harness/ranks gives gloo's threads a low priority. But here several files of tests run at once, each on
    # up to four ranks, so that all cores are busy, and gloo's threads would hardly get one.
    os.environ.setdefault("GLOO_PRIORITY", "normal")
    if config.getoption("--gpu"):
        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu: torch finds no GPU here")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch then sees no GPU, also in processes that tests start
    # With -n pytest-xdist runs tests in several workers, which are processes that have `workerinput`. Its main process
    # runs no test, so that it can start the ranks for all workers.
    if config.getoption("numprocesses", None) and not (hasattr(config, "workerinput") or config.getoption("--gpu")):
        config.pluginmanager.register(RanksForXdist())
    for stage in config.getoption("--stage") or []:
        if importlib.util.find_spec(stage) is None:
            raise pytest.UsageError(f"--stage {stage}: there is no package of that name here; the stages are {STAGES}")


def pytest_generate_tests(metafunc):
    """Run a test that takes the argument `stage` once for each stage, and one that takes `world_size` on 2 and 3 ranks.

    A test may also be marked or parametrized:
    - with pytest.mark.any_size it runs on 1, 2, 3 and 4 ranks;
    - with pytest.mark.shared_guard it runs for two stages only, because all stages share the code that it tests;
    - if it has pytest.mark.parametrize for `stage` or `world_size`, nothing is chosen here for that argument.

    On GPUs tests run on 1 and 2 ranks, because NCCL adds the gradients of more ranks in another order than the tests
    expect, and so the last bits differ.
    """
    option = metafunc.config.getoption
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    # The first argument of pytest.mark.parametrize: a name, or several names with commas between them, or a list.
    parametrized = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]

    def choose(name, values):
        """Parametrize the argument `name`, if the test takes it and doesn't parametrize it itself."""
        if name in metafunc.fixturenames and not any(name in names for names in parametrized):
            metafunc.parametrize(name, values)

    stages = [STAGE_2, STAGE_4] if "shared_guard" in marks else STAGES
    world_sizes = [1, 2, 3, 4] if "any_size" in marks else [2, 3]
    if option("--gpu"):
        world_sizes = [1, 2]
    choose("stage", option("--stage") or stages)
    choose("world_size", option("--ranks") or world_sizes)


def parameter_of(item, name):
    """Return the value that pytest chose for the argument `name` of a test; None if the test has no such argument."""
    return item.callspec.params.get(name) if hasattr(item, "callspec") else None


def pytest_collection_modifyitems(config, items):
    """Deselect the tests that the options --stage and --gpu don't ask for.

    --stage asks for the contract. If the command line also names files, it asks for the tests of that stage in these
    files. With --gpu, tests on few ranks come first: each rank takes a gigabyte of a GPU, and `run` ends ranks that
    later tests don't need.
    """
    stages = config.getoption("--stage")
    files = ON_GPUS if config.getoption("--gpu") else None  # names of files of tests to run; None: all files
    if stages and config.args_source is not pytest.Config.ArgsSource.ARGS:  # the command line names no files
        files = ["test_contract.py"]

    def is_asked_for(item):
        """Return whether to run a test. `item` is pytest's object for the test with one choice of arguments."""
        if files is not None and item.path.name not in files:
            return False
        return not stages or item.path.name == "test_contract.py" or parameter_of(item, "stage") in stages

    config.hook.pytest_deselected(items=[item for item in items if not is_asked_for(item)])
    items[:] = [item for item in items if is_asked_for(item)]
    if config.getoption("--gpu"):
        items.sort(key=lambda item: parameter_of(item, "world_size") or 0)


def pytest_collection_finish():
    """Make garbage collections quicker: they needn't look at modules and tests any more, which stay until the end."""
    gc.collect()
    gc.freeze()


class Pools:
    """Keeps the ranks of each world size, which are a Workers. It starts them when a test first needs them.

    Ranks without work are kept until the end, because all they cost is memory.
    """

    def __init__(self):
        self.started = {}  # world size -> Workers
        self.locks = collections.defaultdict(threading.Lock)  # world size -> lock: these ranks run one call at a time

    def run(self, world_size, function, *args, **kwargs):
        """Call function(rank, *args, **kwargs) on `world_size` ranks. Returns the list of results, one for each rank.

        Process groups that the function makes are ended afterwards.
        """
        with self.locks[world_size]:
            if world_size not in self.started:
                self.started[world_size] = Workers(world_size, timeout_s=300, limit_s=1200)
            return self.started[world_size].run(in_groups_of_its_own, function, *args, **kwargs)

    def answer(self, world_size, call):
        """Do what `run` does, for another process. `call` is the pickle of (function, args, kwargs).

        The list of results is returned as a pickle, too. If the manager between the processes pickled tensors itself,
        it would share their memory.
        """
        function, args, kwargs = pickle.loads(call)
        return pickle.dumps(self.run(world_size, function, *args, **kwargs))

    def close(self, except_for=()):
        """End the ranks of all world sizes, except those of the world sizes `except_for`."""
        for world_size in set(self.started) - set(except_for):
            self.started.pop(world_size).close()


class PoolsElsewhere:
    """Has the method `run` of a Pools, for a worker of pytest-xdist. The Pools itself is in xdist's main process.

    The two processes talk by a BaseManager of Python's multiprocessing, whose server RanksForXdist has started.
    """

    def __init__(self, address, authkey):
        BaseManager.register("pools")  # the manager then has a method pools(), which returns a proxy of the Pools
        manager = BaseManager(address, authkey)
        manager.connect()
        self.pools = manager.pools()

    def run(self, world_size, function, *args, **kwargs):
        """Do what Pools.run does."""
        return pickle.loads(self.pools.answer(world_size, pickle.dumps((function, args, kwargs))))


class RanksForXdist:
    """Starts ranks in the main process of pytest-xdist, for all its workers, which are the processes that run tests."""

    def __init__(self):
        # Called here, in the main thread, because it sets a signal's handler, which no other thread may do.
        start_forkserver()
        self.pools = Pools()
        self.authkey = secrets.token_bytes()
        BaseManager.register("pools", lambda: self.pools)
        server = BaseManager(authkey=self.authkey).get_server()
        self.address = server.address
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def pytest_configure_node(self, node):  # for each worker, before it starts: `workerinput` is sent to it
        node.workerinput["ranks"] = self.address, self.authkey

    def pytest_unconfigure(self):
        self.pools.close()


@pytest.fixture(scope="session")
def pools(request):
    """Yield a Pools, or in a worker of pytest-xdist a PoolsElsewhere."""
    if hasattr(request.config, "workerinput") and "ranks" in request.config.workerinput:
        yield PoolsElsewhere(*request.config.workerinput["ranks"])
    else:
        with contextlib.closing(Pools()) as pools:
            yield pools


@pytest.fixture
def run(pools, world_size, request):
    """Return a function run(function, *args): it calls function(rank, *args) on `world_size` ranks.

    It returns the list of results, one for each rank. If a rank fails, the test fails with the tracebacks of the ranks.
    """
    if request.config.getoption("--gpu"):
        pools.close(except_for={world_size})

    def run(function, *args, **kwargs):
        try:
            return pools.run(world_size, function, *args, **kwargs)
        except WorkerError as error:
            pytest.fail(f"{error}\n{error.details}", pytrace=False)

    return run
