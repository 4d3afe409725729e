"""The contract runs over every stage and every world size; `--stage my_package` runs it on a package of your own."""

import importlib.util
import os

import pytest

from harness.launch import WorkerError, Workers
from tests.common import STAGES

os.environ.setdefault("SHARE_GPU", "no")  # tests need more ranks than most machines have GPUs


def pytest_addoption(parser):
    parser.addoption("--stage", action="append", metavar="PACKAGE", help="a package with a DistributedOptimizer")
    parser.addoption("--ranks", type=int, action="append", help="a world size; by default 1, 2, 3 and 4")


def pytest_configure(config):
    for stage in config.getoption("--stage") or []:
        if importlib.util.find_spec(stage) is None:
            raise pytest.UsageError(f"--stage {stage}: there is no package of that name here; the stages are {STAGES}")


def pytest_generate_tests(metafunc):
    """Every test that takes a stage runs on each, and likewise for world sizes, unless it says itself on which."""
    for name, values in {
        "stage": metafunc.config.getoption("--stage") or STAGES,
        "world_size": metafunc.config.getoption("--ranks") or [1, 2, 3, 4],
    }.items():
        chosen = any(name in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
        if name in metafunc.fixturenames and not chosen:
            metafunc.parametrize(name, values)


def pytest_collection_modifyitems(config, items):
    """With --stage only the contract is run: the other tests are about the four stages and the harness."""
    if config.getoption("--stage"):
        contract = [item for item in items if item.path.name == "test_contract.py"]
        config.hook.pytest_deselected(items=[item for item in items if item not in contract])
        items[:] = contract


@pytest.fixture(scope="session")
def pools():
    """Workers by world size, started once: idle ranks cost memory, and nothing else."""
    started = {}
    yield started
    for workers in started.values():
        workers.close()


@pytest.fixture
def run(pools, world_size):
    """`run(function, *args)` calls `function(rank, *args)` on `world_size` ranks and returns the list of results."""

    def run(function, *args, **kwargs):
        if world_size not in pools:
            pools[world_size] = Workers(world_size, timeout_s=60)
        try:
            return pools[world_size].run(function, *args, **kwargs)
        except WorkerError as error:
            pytest.fail(f"{error}\n{error.details}", pytrace=False)

    return run
