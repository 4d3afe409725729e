"""Has what many tests share: a model that is awkward to shard, data, and the decorator `on_ranks`.

A rank is one of the processes that train together. A test of a stage, which is one of the four optimizers of this
repository, runs on several ranks. A function whose docstring says "Collective" must be called on every rank.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.debug
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from harness import STAGES as STAGES
from harness.ranks.meeting import join, rank_0_of
from stage4_overlap import drops

OPTIMIZERS = {  # name -> (class, its settings)
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def optimizer_of(stage):
    """Return the class DistributedOptimizer of the package `stage`, or of the module `optimizer` in the package."""
    package = importlib.import_module(stage)
    if not hasattr(package, "DistributedOptimizer"):
        package = importlib.import_module(f"{stage}.optimizer")
    return package.DistributedOptimizer


class Net(nn.Module):
    """A model with tied, frozen, scalar and odd-sized parameters.

    The trainable parameters have 208 elements. Each of them has 1, 5, 11, 35 or 55.
    """

    def __init__(self, seed, frozen_seed=0):
        super().__init__()
        torch.manual_seed(frozen_seed)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        torch.manual_seed(seed)
        self.embed = nn.Linear(7, 5, bias=False)
        self.up = nn.Linear(5, 11)
        self.down = nn.Linear(11, 5)
        self.scale = nn.Parameter(torch.rand(()))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = nn.Parameter(torch.rand(7, 5))
        self.tied = nn.Linear(5, 11)
        self.tied.weight = self.up.weight

    def forward(self, x):  # (batch, 7) -> (batch, 7)
        x = self.embed(x)
        x = x + self.down(torch.tanh(self.up(x))) * self.scale
        x = x + self.down(torch.tanh(self.tied(x)))
        return self.head(x) + self.frozen(x).sum(dim=1, keepdim=True)


def trainable(model):
    """Return the list of parameters that aren't frozen."""
    return [param for param in model.parameters() if param.requires_grad]


def on_its_device(function):
    """Let `function(rank, ...)` make tensors on the rank's device, unless the function names another device."""
    @functools.wraps(function)
    def wrapper(rank, *args, **kwargs):
        with rank.device if rank.device.type != "cpu" else contextlib.nullcontext():
            return function(rank, *args, **kwargs)
    return wrapper


def of_cpus(rank):
    """Return (rank, group): the same rank with the CPU as its device, and a process group of gloo, torch's backend for
    CPUs. Tests use them that look at an order of events which only a CPU has.
    """
    # None is torch's name for the default group.
    group = None if rank.backend == "gloo" else dist.new_group(backend="gloo")
    return rank._replace(device=torch.device("cpu"), backend="gloo"), group


def batch(step, rank, size=4, device=None):
    """Return [x, y], (size, 7) each. Each step and rank has its own batch, which is the same in every call."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    device = device or torch.get_default_device()
    return [torch.randn(size, 7, generator=generator, device="cpu").to(device) for _ in range(2)]


def loss_of(model, x, y):
    """Return the mean squared error of the model's answer to x."""
    return F.mse_loss(model(x), y)


one_rank_of = rank_0_of  # a context in which this process is rank 0 of d: the real code runs, and nothing is sent


# ------------------------------------------------------------------------------- The decorator of tests that need ranks


def on_ranks(*world_sizes, **situations):
    """Run the decorated test on several ranks. On each of them the test's first argument is the Rank.

        @on_ranks(2, 4, dtype=[torch.float32, torch.bfloat16])
        def test_something(rank, stage, dtype): ...

    Args:
        world_sizes: numbers of ranks; without any, tests/plugin.py chooses them.
        situations: {argument: list of its values}. The test is called with all combinations of values, one after the
            other, within a single test of pytest, because each call takes only a moment. A failure names the
            combination.
    """
    if world_sizes and callable(world_sizes[0]):  # the decorator was written @on_ranks, without brackets
        return on_ranks()(world_sizes[0])

    def decorate(body):
        # pytest reads the signature of `test`, and passes it these arguments: what the body takes, except `rank` and
        # the situations, and `run` and `world_size`, which are for this decorator.
        names = ["run", "world_size", *(name for name in inspect.signature(body).parameters if name not in situations)]
        names.remove("rank")

        @functools.wraps(body)  # also sets test.__wrapped__, which is the body
        def test(run, world_size, **kwargs):  # `run` is a fixture: it calls a function on all ranks
            run(play_situations, body.__module__, body.__name__, kwargs)

        test.situations = situations  # play_situations reads them on each rank, and grade/contract.py looks for them
        test.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                                                for name in names])
        return pytest.mark.parametrize("world_size", world_sizes)(test) if world_sizes else test
    return decorate


def play_situations(rank, module, name, kwargs):
    """Be called on each rank: call the body of the test `name` of `module` with each combination of its situations."""
    test = getattr(importlib.import_module(module), name)
    for values in itertools.product(*test.situations.values()):
        played = dict(zip(test.situations, values))
        with situation(played) if played else contextlib.nullcontext():
            test.__wrapped__(rank, **kwargs, **played)


def in_groups_of_its_own(rank, function, *args, **kwargs):
    """Return function(rank, ...), and end all process groups that the function has made. Collective.

    They are ended because even an idle group wakes a core 77 times a second. Caches of torch keep a group alive as long
    as the group of all ranks lives. So that group ends, too, and the ranks meet anew. All ranks do so if any of them
    has made a group.
    """
    result = function(rank, *args, **kwargs)
    n_groups = torch.tensor(len(dist.distributed_c10d._world.pg_map), device=rank.device)  # private: all groups
    dist.all_reduce(n_groups, dist.ReduceOp.MAX)
    if n_groups > 1:
        meet_anew(rank)
    return result


# Making a mesh is collective. So meshes are cached, and meet_anew empties the cache.
@functools.cache
def mesh_of(device_type, shape, names=None):
    """Return a DeviceMesh of all ranks."""
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


# Counts how often the ranks have met. They meet in a store, a table that all ranks read and write. It still has the
# addresses of ended groups, so each time keys get a new prefix.
N_MEETINGS = itertools.count()


def meet_anew(rank):
    """End all process groups of this rank, and join a new group of the same ranks. Collective."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # down to the store that has no prefix
        store = store.underlying_store
    dist.destroy_process_group()
    # A group has threads until the last reference to it is dropped. Two kinds of objects hold references:
    # - A core, which is the optimizer of a stage without checks. It is in a cycle that the garbage collector doesn't
    #   see: the core refers to a parameter, and the parameter has a hook that refers to the core.
    # - A mesh, which torch keeps in its caches.
    for thing in gc.get_objects():
        # Not isinstance(), which runs code of the objects that it looks at.
        if issubclass(type(thing), nn.Parameter):
            (thing._post_accumulate_grad_hooks or {}).clear()
        elif type(thing) is DeviceMesh:
            thing._pg_registry.clear()
    mesh_of.cache_clear()
    # This cache of torch finds an old mesh, whose groups have ended, for a new mesh that is equal to it.
    torch.distributed.tensor.debug._clear_sharding_prop_cache()
    drops.UNDER_WAY.clear()  # stage 4 keeps messages here that were under way when a test dropped its optimizer
    gc.collect()
    gc.freeze()  # the next collection is quick, because it doesn't look at the objects of this moment
    store = dist.PrefixStore(f"meeting {next(N_MEETINGS)}", store)
    # All ranks are on this host, so the rank's number and the world size are also those within the host. 300 seconds.
    join(rank.number, rank.world_size, rank.number, rank.world_size, 300, store)


def no_sync_if(optimizer, condition):
    """Return the context optimizer.no_sync(), in which gradients aren't sent, if `condition`; else an empty context."""
    return optimizer.no_sync() if condition else contextlib.nullcontext()


@contextlib.contextmanager
def situation(name):
    """Let an error that is raised in this context begin with the situation `name`, for a test that has several."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__} {error}") from error


def error_of(function, *exceptions):
    """Call function(), which must raise one of `exceptions` (default: RuntimeError). Returns the error's message.

    The message must be a single line.
    """
    exceptions = exceptions or (RuntimeError,)
    try:
        function()
    except exceptions as error:
        assert str(error) and "\n" not in str(error)
        return str(error)
    raise AssertionError("no error")
